"""The whole engine on a GPU with tiny random models: every family, graphs, prefix hits, preemption, sampling.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.optimize.folder import build_folder
from tests.support import gguf_mixture, tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = [
    {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]}
    for n in (1, 5, 16, 45, 100, 17, 33, 64)
]
SHAPES = {
    "llama": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {"hidden_size": 256, "num_attention_heads": 4},
    "qwen2": {"hidden_size": 256, "num_attention_heads": 4},
    "qwen3": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64, "hidden_size": 64},
    "gptj": {"n_embd": 128, "n_head": 2, "rotary_dim": 16},
    "gpt2": {"n_embd": 128, "n_head": 2},
}


def make(path, **settings):
    defaults = dict(
        max_model_len=192, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_bytes=2**26
    )
    return LLM(str(path), skip_tokenizer_init=True, **{**defaults, **settings})


def first_logprobs(llm):
    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=5, prompt_logprobs=0
    )
    found = []
    for output in llm.generate(PROMPTS, sampling):
        found += [p.chosen.logprob for p in output.prompt_logprobs[1:]]
        found += [t.logprob for t in output.outputs[0].logprobs[0].top]
    return torch.tensor(found)


def test_an_engine_that_ended_leaves_its_memory_to_the_next(tmp_path):
    """The memory is free even while a variable names the engine, and if the engine was dropped
    without shutdown."""
    tiny_models.write(tmp_path, "llama", **SHAPES["llama"])
    with make(tmp_path, kv_cache_bytes=None, gpu_memory_utilization=0.6) as first:
        pass
    second = make(tmp_path, kv_cache_bytes=None, gpu_memory_utilization=0.6)
    del second
    with make(tmp_path, kv_cache_bytes=None, gpu_memory_utilization=0.6):
        pass
    del first


def test_a_folder_that_was_built_leaves_the_memory_to_who_measures_it(tmp_path):
    tiny_models.write(tmp_path / "model", "llama", **SHAPES["llama"])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    args = EngineArgs(
        model=str(tmp_path / "model"),
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.9,
        device="cuda",
    )
    built = build_folder(args, tmp_path / "folder")
    assert built.folder.graph_sizes
    assert torch.cuda.memory_reserved() <= before + 2**28


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_greedy_steps_end_in_graphs(drafts, tmp_path):
    """Answers equal those of steps that end op by op, which a list of allowed tokens forces."""
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SHAPES["llama"])
    found = []
    for allowed in (None, list(range(tiny_models.VOCAB))):
        sampling = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed
        )
        with make(tmp_path, speculative_config=drafts) as llm:
            ends, ran = llm.core.executor.runner.graphs._ends, []
            run = ends.run

            def noted(*args, run=run, ran=ran):
                ran.append(tokens := run(*args))
                return tokens

            ends.run = noted
            found.append(
                [o.outputs[0].token_ids for _ in range(2) for o in llm.generate(PROMPTS, sampling)]
            )
            ended_op_by_op = sum(tokens is None for tokens in ran)
            if allowed is None:
                assert ran
                assert ended_op_by_op < len(ran) / 2
            else:
                assert ended_op_by_op == len(ran)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", SHAPES)
def test_log_probabilities_equal_the_reference(family, tmp_path):
    tiny_models.write(tmp_path, family, initializer_range=0.1, **SHAPES[family])
    ours = first_logprobs(make(tmp_path))
    theirs = first_logprobs(make(tmp_path, kernels="reference", enforce_eager=True))
    exact = first_logprobs(make(tmp_path, kernels="reference", dtype="float32", device="cpu"))
    # As near to float32 as the reference is in bfloat16, up to a factor of two.
    assert (ours - exact).abs().mean() < 2 * (theirs - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma3_text"])
@pytest.mark.parametrize(
    "settings",
    [{"quantization": q} for q in ("fp8", "int8", "int4-g32")]
    + [{"kv_cache_dtype": k} for k in ("fp8", "int8")]
    + [{"quantization": "fp8", "kv_cache_dtype": "fp8"}],
    ids=lambda s: "+".join(s.values()),
)
def test_quantised_models_equal_the_reference_of_the_same_rounding(family, settings, tmp_path):
    tiny_models.write(tmp_path, family, initializer_range=0.1, **SHAPES[family])
    ours = first_logprobs(make(tmp_path, **settings))
    theirs = first_logprobs(make(tmp_path, kernels="reference", enforce_eager=True, **settings))
    exact = first_logprobs(make(tmp_path, kernels="reference", dtype="float32", device="cpu"))
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean() + 1e-3
    assert (ours - theirs).abs().mean() < (theirs - exact).abs().mean() + 5e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_mixtures_with_many_sequences(family, tmp_path):
    """Answers through graphs are those without, and mostly the reference's: a near tie may part them."""
    tiny_models.write(tmp_path, family, initializer_range=0.2)
    prompts = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(16)]} for n in range(200)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for more in ({}, {"enforce_eager": True}, {"enforce_eager": True, "kernels": "reference"}):
        with make(
            tmp_path, max_model_len=64, max_num_seqs=256, max_num_batched_tokens=4096, **more
        ) as llm:
            found.append(
                torch.tensor(
                    [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)]
                )
            )
    graphs, eager, reference = found
    assert (graphs == eager).float().mean() > 0.95
    assert (graphs[:, 0] == reference[:, 0]).float().mean() > 0.9


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write(folder, initializer_range=0.1, **SHAPES["llama"])  # few near ties
    return folder


def test_graphs_prefixes_preemption_and_choices(path):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = make(path)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)]
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    for settings in (
        {"enforce_eager": True},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
        {"kv_cache_bytes": llm.ledger.block_bytes * 14, "max_model_len": 160},
    ):
        other = make(path, **settings)
        got = [o.outputs[0].token_ids for o in other.generate(PROMPTS, greedy)]
        same = sum(
            a == b for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert same >= 0.9 * 40 * len(PROMPTS), (
            settings
        )  # a near tie may fall the other way and change what follows
        if "kv_cache_bytes" in settings:
            assert other.stats().num_preemptions > 0
    again = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)]
    assert sum(a == b for a, b in zip(expected, again, strict=True)) >= len(PROMPTS) - 1
    sampling = SamplingParams(
        n=3,
        temperature=0.9,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        seed=5,
        max_tokens=20,
        ignore_eos=True,
    )
    a, b = (llm.generate([PROMPTS[4]], sampling)[0] for _ in range(2))
    assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
    assert len({tuple(c.token_ids) for c in a.outputs}) > 1
    penalised = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=0.5,
        min_tokens=5, stop_token_ids=(9,), logit_bias={77: 3.0},
    )  # fmt: skip
    (o,) = llm.generate([PROMPTS[0]], penalised)
    assert len(o.outputs[0].token_ids) >= 6
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(("llama", scheme) for scheme in (None, "fp8", "int8", "int4-g32")),
        *(("qwen3", None), ("qwen3_moe", None), ("qwen3_moe", "fp8")),
    ],
)
def test_log_probabilities_are_the_same_bit_for_bit(tmp_path, family, quantization):
    """The same log-probabilities, bit for bit, alone and among others, in chunks, after preemption, from the prefix cache, and
    with drafts."""
    shape = SHAPES.get(family, SHAPES["qwen3"])
    tiny_models.write(tmp_path, family, initializer_range=0.1, **shape)
    kv = "auto" if quantization is None else "fp8"
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)

    def answers(prompts, **settings):
        llm = make(
            tmp_path,
            deterministic=True,
            dtype="bfloat16",
            quantization=quantization,
            kv_cache_dtype=kv,
            **settings,
        )
        twice = [
            llm.generate(prompts, sampling) for _ in range(2)
        ]  # the second time from the prefix cache
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in o.outputs[0].logprobs]
            for run in twice
            for o in run
        ]

    together = answers(PROMPTS)
    assert together[: len(PROMPTS)] == together[len(PROMPTS) :]
    alone = [answers([p], max_num_batched_tokens=512)[0] for p in PROMPTS]
    assert together[: len(PROMPTS)] == alone
    chunks = answers(PROMPTS[::-1], max_num_batched_tokens=19, max_num_seqs=3)
    assert chunks[: len(PROMPTS)] == alone[::-1]
    tight = answers(PROMPTS, kv_cache_bytes=2**19)
    assert tight[: len(PROMPTS)] == alone
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    assert answers(PROMPTS, speculative_config=drafts)[: len(PROMPTS)] == alone


# Of published models, with few layers
_WIDE = dict(vocab_size=32000, max_position_embeddings=8192, num_key_value_heads=8)
REAL_SHAPES = {
    "lfm2": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32),
        **dict(num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]),
    },
    "lfm2_moe": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=7168, num_attention_heads=32),
        **dict(num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]),
        **dict(moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4),
    },
    "kimi_linear": {
        **dict(vocab_size=32000, hidden_size=2304, num_attention_heads=32, intermediate_size=9216),
        **dict(num_key_value_heads=32, max_position_embeddings=8192, kv_lora_rank=512),
        **dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=64),
        **dict(moe_intermediate_size=1024, num_experts_per_tok=8, n_group=1, topk_group=1),
        **dict(linear_num_heads=32, linear_head_dim=128),
    },
    "nemotron_h": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, head_dim=64),
        **dict(layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"]),
        **dict(mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8),
    },
    "falcon_h1": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16, head_dim=128),
        **dict(num_hidden_layers=3, mamba_d_ssm=2048, mamba_n_heads=32, mamba_d_head=64),
        **dict(mamba_d_state=256, mamba_n_groups=1),
    },
    "mamba2": {
        **dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=3, num_heads=64, head_dim=64),
        **dict(state_size=128, n_groups=1),
    },
    "jamba": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16),
        **dict(mamba_d_state=16, mamba_dt_rank=128, num_experts=8),
    },
    "falcon_mamba": {
        **dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=3),
        **dict(state_size=16, time_step_rank=128),
    },
    "minimax": {
        **_WIDE,
        **dict(hidden_size=2048, intermediate_size=2048, num_attention_heads=16, head_dim=128),
        **dict(num_local_experts=8, block_size=256),
    },
}


def write_config(path, config, layers):
    """Writes a published config.json with its first `layers` layers, one of `REAL_SHAPES`, or a GGUF file. Returns the
    model's path."""
    folder = Path(__file__).parents[3] / "benchmarks" / "configs" / config
    if config == "gguf":
        gguf_mixture.write(path / "model.gguf", layers)
        return path / "model.gguf"
    if config in REAL_SHAPES:
        settings = {**tiny_models.settings_of(config), **REAL_SHAPES[config]}
        settings = {k: v for k, v in settings.items() if v is not None or k == "q_lora_rank"}
        made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        made.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(made)].__name__]
        made.save_pretrained(path)
        return path
    given = json.loads((folder / "config.json").read_text())
    of_text = given.get("text_config", given)
    of_text["num_hidden_layers"] = layers
    if "layer_types" in of_text:
        of_text["layer_types"] = of_text["layer_types"][:layers]
    given.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(given))
    return path


@pytest.mark.parametrize(
    ("config", "layers", "settings"),
    [
        ("llama-3-8b", 3, {}),
        ("llama-3-8b", 3, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ("deepseek-v2-lite", 3, {}),
        ("qwen3.5-35b-a3b", 4, {"kv_cache_bytes": 2**34}),
        ("gpt-oss-20b", 4, {}),
        ("gpt-oss-20b", 4, {"quantization": "mxfp4"}),
        ("qwen3-30b-a3b", 4, {"quantization": "mxfp4"}),
        ("qwen3-30b-a3b", 4, {"quantization": "nvfp4"}),
        ("gguf", 2, {}),
        *((config, 0, {"kv_cache_bytes": 2**34}) for config in REAL_SHAPES),
    ],
    ids=str,
)
def test_512_deterministic_answers_of_real_shapes_are_the_same_bits(
    tmp_path, config, layers, settings
):
    """Bits in one batch, from the prefix cache, in 64, alone, and in chunks with drafts."""
    model = write_config(tmp_path, config, layers)
    draw, prompts = random.Random(0), []
    for i in range(512):
        ids = [draw.randrange(1000, 30000) for _ in range(draw.choice((3, 30, 97, 260, 300, 530)))]
        prompts.append({"prompt_token_ids": (ids[:40] * 14)[: len(ids)] if i % 2 else ids})
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
    sizes = dict(max_model_len=1024, max_num_seqs=256, kv_cache_bytes=2**33)
    sizes |= dict(load_format="dummy", deterministic=True, max_num_batched_tokens=None)

    def bits(llm, prompts):
        made = llm.generate(prompts, sampling, progress=False)
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in o.outputs[0].logprobs] for o in made
        ]

    with make(model, **(sizes | settings)) as llm:
        whole = bits(llm, prompts)
        assert bits(llm, prompts) == whole  # hits
        assert bits(llm, prompts[:64]) == whole[:64]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    more = dict(enable_prefix_caching=False, max_num_batched_tokens=520, speculative_config=drafts)
    with make(model, **(sizes | settings | more)) as llm:
        assert bits(llm, prompts) == whole
        assert [bits(llm, [p])[0] for p in prompts[::37]] == whole[::37]
