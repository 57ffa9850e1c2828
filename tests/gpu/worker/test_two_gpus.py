"""Adapters, draft heads and pictures over two GPUs answer as on one.

Run on a machine with two: pytest -m gpu tests/gpu/worker/test_two_gpus.py. Models are tiny and in float32, so that sums in
another order leave the tokens as they are.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.worker.experts import balance as expert_balance
from tests.support import adapters, draft_heads, tiny_models, vision_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
SPLITS = ["tensor_parallel_size", "pipeline_parallel_size"]
SIZES = dict(dtype="float32", max_model_len=128, max_num_seqs=16, kv_cache_bytes=2**26)
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": [(7 * i + s) % 250 + 3 for i in range(5 + 3 * s)]} for s in range(12)
]


def answers(llm, sampling=GREEDY, prompts=PROMPTS, **more):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, sampling, progress=False, **more)]


def of_one_and_two(path, split, answer, **settings):
    """Results of `answer` on one GPU and on two."""
    found = []
    for how in ({}, {split: 2}):
        with LLM(str(path), **SIZES, **settings, **how) as llm:
            found.append(answer(llm))
    return found


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    hf = tiny_models.build_with_tokenizer(folder / "base", intermediate_size=128, **SHAPE)
    for n in (1, 2, 3):
        hf = adapters.write(hf, folder / f"lora{n}", seed=n).unload()
    return folder


@pytest.mark.parametrize("split", SPLITS)
def test_adapters_answer_alike_on_two_gpus(with_adapters, split):
    wanted = [
        LoRARequest(f"a{s % 4}", s % 4, str(with_adapters / f"lora{s % 4}")) if s % 4 else None
        for s in range(12)
    ]

    def answer(llm):
        return [
            answers(llm, lora_request=wanted) for _ in range(3)
        ]  # later rounds have their graphs

    one, two = of_one_and_two(
        with_adapters / "base", split, answer, enable_lora=True, max_loras=3, max_lora_rank=8
    )
    assert two == one
    assert len({str(tokens) for tokens in one[0]}) == 12


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "peagle", "dflash", "smaller"])
def test_drafts_answer_alike_on_two_gpus(tmp_path, kind):
    """Each GPU has the whole head. As many drafts are right as on one."""
    method, write = draft_heads.BY_KIND.get(kind, ("draft", None))
    model, head = tmp_path / "model", tmp_path / "head"
    tiny_models.write(model, "llama", num_hidden_layers=6, initializer_range=0.1, **SHAPE)
    if write is None:
        tiny_models.build_near(
            head, num_hidden_layers=6, initializer_range=0.1, noise=0.05, **SHAPE
        )
    else:
        write(head, sizes=SHAPE)

    def answer(llm):
        found, stats = [answers(llm, sampling) for sampling in (GREEDY, DRAWN)], llm.stats()
        return found, stats.spec_draft_tokens, stats.spec_accepted_tokens

    config = {
        "method": method,
        "num_speculative_tokens": 3,
        "model": str(head),
        "quantization": "none",
    }
    if write is None:
        del config["quantization"]
    settings = {"speculative_config": config, "skip_tokenizer_init": True}
    one, two = of_one_and_two(model, "tensor_parallel_size", answer, **settings)
    assert two == one
    assert one[1] > 0


@pytest.mark.parametrize(
    ("kv_heads", "tensor"), [(2, 1), (1, 1), ("latent", 1), (1, 2), ("latent", 2)]
)
def test_keys_shared_out_by_tokens_answer_alike_on_two_gpus(tmp_path, kv_heads, tensor):
    """Prompts of a few tokens and of several steps, cached ones, and 12 sequences at once."""
    heads = {} if kv_heads == "latent" else {**SHAPE, "num_key_value_heads": kv_heads}
    family = "deepseek_v3" if kv_heads == "latent" else "llama"
    tiny_models.write(tmp_path, family, max_position_embeddings=1024, **heads)
    long = {"prompt_token_ids": [(11 * i) % 250 + 3 for i in range(700)]}
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "skip_tokenizer_init": True}
    found = []
    for how in ({}, {"enforce_eager": True}, {}):
        split = {"context_parallel_size": 2, "tensor_parallel_size": tensor} if found else {}
        with LLM(str(tmp_path), **{**SIZES, **sizes}, **split, **how) as llm:
            found.append([answers(llm, s, [*PROMPTS, long]) for s in (GREEDY, DRAWN, GREEDY)])
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_pictures_answer_alike_on_two_gpus(tmp_path, family, split):
    vision_models.build_vision(tmp_path, family, seed=3)
    pictures = [vision_models.picture(4), vision_models.picture(5, 64, 64)]
    text = " and ".join(vision_models.PLACEHOLDER[family] for _ in pictures)
    prompts = [
        {"prompt": f"ab {text} cd?", "multi_modal_data": {"image": pictures}},
        {"prompt": "just words, some of them"},
    ]
    sizes = {"max_model_len": None, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    found = []
    for how in ({}, {split: 2}):
        with LLM(str(tmp_path), **{**SIZES, **sizes}, **how) as llm:
            found.append([answers(llm, prompts=[*prompts, prompts[0]]) for _ in range(2)])
    assert found[1] == found[0]
    assert found[0][0][0] == found[0][0][2]


@pytest.mark.parametrize("split", [{}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),  # groups, corrections and a shared expert
        ("gpt_oss", {}),  # biases
        ("qwen3_moe", {"enforce_eager": True}),
    ],
)
def test_experts_move_between_steps(tmp_path, monkeypatch, family, settings, split):
    """Whenever it gains anything, while graphs that were captured before are replayed: graphs read the weights that came."""
    for name, value in (("LOOK_EVERY", 2), ("MIN_CHOICES", 1), ("UNEVEN", 1.0), ("GAIN", 0.0)):
        monkeypatch.setattr(expert_balance, name, value)
    tiny_models.write(tmp_path, family, **SHAPE_OF_EXPERTS[family])
    found = []
    for how in ({}, {"expert_parallel_size": 2, **split}):
        with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES, **settings, **how) as llm:
            found.append([answers(llm) for _ in range(4)])
            balance = llm.stats().expert_balance
    assert found[1] == found[0]
    assert balance is not None
    assert balance.moved_total >= 4


SHAPE_OF_EXPERTS = {
    "qwen3_moe": {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32,
        "moe_intermediate_size": 128},
    "deepseek_v3": {},
    "gpt_oss": {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32,
        "intermediate_size": 128},
}  # fmt: skip


MIXTURES = {
    "qwen3_moe": dict(SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    "deepseek_v3": dict(hidden_size=256, moe_intermediate_size=128),
}


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("eager", [True, False])
def test_requests_dealt_out_beside_experts(tmp_path, family, eager):
    """Each GPU has its own requests and experts. A second round has its graphs and cached prefixes; a request alone leaves one
    GPU with padding; drawn tokens, choices and log-probabilities come back in order."""
    tiny_models.write(tmp_path, family, num_hidden_layers=4, **MIXTURES[family])
    choices = SamplingParams(
        temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, n=3, logprobs=2
    )

    def answer(llm):
        found = [answers(llm, sampling) for sampling in (GREEDY, DRAWN) for _ in range(2)]
        found.append(answers(llm, prompts=PROMPTS[:1]))
        found.append(
            [
                [c.token_ids for c in o.outputs]
                for o in llm.generate(PROMPTS, choices, progress=False)
            ]
        )
        while llm.core.executor.capture_next():
            pass
        return [*found, answers(llm), answers(llm, DRAWN)]

    settings = dict(enforce_eager=eager, max_num_batched_tokens=64, skip_tokenizer_init=True)
    one, two = of_one_and_two(tmp_path, "expert_parallel_size", answer, **settings)
    assert two == one
    assert len({str(tokens) for tokens in one[0]}) == 12


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("split", SPLITS)
def test_deterministic_answers_are_the_same_bits_alone_among_others_and_in_chunks(
    tmp_path, monkeypatch, split, family
):
    """Refused until this has passed on two GPUs, so the refusal is left out here."""
    monkeypatch.setattr("slipstream.config.parallel._check_ranks", lambda args, device: None)
    shape = {} if family == "deepseek_v2" else SHAPE
    tiny_models.write(tmp_path, family, initializer_range=0.1, **shape)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    sizes = {**SIZES, "dtype": "bfloat16", "skip_tokenizer_init": True, "deterministic": True}

    def bits(llm, prompts):
        made = llm.generate(prompts, sampling, progress=False)
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in o.outputs[0].logprobs] for o in made
        ]

    with LLM(str(tmp_path), **sizes, **{split: 2}) as llm:
        whole = bits(llm, PROMPTS)
        assert bits(llm, PROMPTS) == whole  # hits
        assert [bits(llm, [p])[0] for p in PROMPTS] == whole
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    more = {"max_num_batched_tokens": 19, "max_num_seqs": 3, "speculative_config": drafts}
    with LLM(str(tmp_path), **(sizes | more), **{split: 2}) as llm:
        assert bits(llm, PROMPTS[::-1]) == whole[::-1]
