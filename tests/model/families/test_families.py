"""Every family against Hugging Face transformers in float32, on tiny random models.

The measure is max |ours − theirs| / max |theirs| over all logits; 1e-4 leaves room for another order of float32 sums.
"""

from __future__ import annotations

import json
import random

import pytest
import torch

from slipstream.config import DTYPE_BYTES
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import read_spec
from slipstream.spec.families import FAMILIES
from slipstream.spec.families.refused import REFUSED
from slipstream.spec.model import (
    BlockIndexSpec,
    CompressedAttentionSpec,
    IndexSpec,
    LatentAttentionSpec,
)
from slipstream.spec.parameters import parameters
from tests.model.harness import Paged, greedy, load, run
from tests.support import tiny_models

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 30.0],
    "original_max_position_embeddings": 4,
}
PARTIAL = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5], "long_factor": [1.0, 30.0]}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
CASES = {
    **{name: (name, {}) for name in tiny_models.FAMILIES},
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "rope_theta": None, "head_dim": 16}),
    "llama-linear": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            "rope_theta": None,
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "rope_theta": None,
        },
    ),
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "mistral-open": ("mistral", {"sliding_window": None}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 4.0}),
    "gemma4-31b": (  # keys as values in layers without a window
        "gemma4_text",
        {
            **dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True),
            **dict(num_global_key_value_heads=1, final_logit_softcapping=4.0),
        },
    ),
    "gemma4-26b-a4b": ("gemma4_text", tiny_models.GEMMA4_MOE),
    "gptj-whole": ("gptj", {"rotary_dim": 8}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "bigcode-mha": ("gpt_bigcode", {"multi_query": False}),
    "ministral-mixed": ("ministral", {"layer_types": ["full_attention", "sliding_attention"]}),
    "qwen2-moe-mixed": ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3-moe-sparse": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "decoder_sparse_step": 2, "num_experts_per_tok": 6},
    ),
    "mixtral-of-one": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 7}),
    "neox-in-turn": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bloom-6-heads": ("bloom", {"hidden_size": 48, "n_head": 6}),
    "mpt-clip": (
        "mpt",
        {"d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}},
    ),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon2-11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": (
        "falcon",
        {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "starcoder2-open": (
        "starcoder2",
        {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False},
    ),
    "phi3-long": (
        "phi3",
        {"rope_theta": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 4},
    ),
    "phi4-mini": (
        "phi3",
        {
            "rope_theta": None,
            "rope_parameters": {**LONGROPE, **PARTIAL},
            "original_max_position_embeddings": 4,
            "tie_word_embeddings": True,
        },
    ),
    "phi-normed": ("phi", {"qk_layernorm": True}),
    "mistral-nemo": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "attention_factor": 1.2079441541679836,
                    "original_max_position_embeddings": 32,
                },
            }
        },
    ),
    "gemma2-capped": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}),
    "olmo2-gqa": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "command-r-plus": ("cohere", {"use_qk_norm": True}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": DEEPSEEK_YARN,
            "attention_bias": True,
        },
    ),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": DEEPSEEK_YARN,
            "rope_interleave": False,
        },
    ),
    "axk2-groups": (
        "axk2",
        {
            **dict(n_group=4, topk_group=2, attention_bias=True, norm_topk_prob=False),
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "gpt-oss-mha": (
        "gpt_oss",
        {
            "num_key_value_heads": 4,
            "swiglu_alpha": 1.0,
            "swiglu_limit": 50.0,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "glm4-moe-air": (
        "glm4_moe",
        {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    "exaone4-open": (
        "exaone4",
        {
            "sliding_window": None,
            "nulls": ["sliding_window"],
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "ernie-dense-biased": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie-moe-some": (
        "ernie4_5_moe",
        {"moe_layer_interval": 2, "moe_layer_end_index": 1, "moe_num_shared_experts": 0},
    ),
    "minimax-whole": ("minimax_m2", {"rotary_dim": None, "num_experts_per_tok": 1}),
    "glm-flash-all": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse"] * 3, "n_group": 4, "topk_group": 2, "q_lora_rank": None},
    ),
    "dots1-open": ("dots1", {"nulls": ["sliding_window"], "sliding_window": None}),
    "olmoe-normalised": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "hunyuan-stretched": (
        "hunyuan_v1_dense",
        {
            "rope_theta": None,
            "rope_parameters": {
                **dict(type="dynamic", alpha=50.0, factor=1.0, rope_theta=10000.0),
                **dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
            },
            "attention_bias": True,
        },
    ),
    "ministral3-windows": ("ministral3", {"sliding_window": 7}),
    "mistral4-groups": (
        "mistral4",
        {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
    ),
    "stablelm-12b": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False},
    ),
    "nemotron-biased": (
        "nemotron",
        {
            "mlp_bias": True,
            "attention_bias": True,
            "rope_theta": None,
            "partial_rotary_factor": 1.0,
        },
    ),
    "seed-oss-bare": ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
    "arcee-biased": ("arcee", {"mlp_bias": True, "hidden_act": "gelu"}),
    "nemotron-h-dense": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            **dict(use_bias=True, mlp_bias=True, use_conv_bias=False, n_groups=4),
        },
    ),
    "jamba-dense": ("jamba", {"num_experts": 1, "mamba_proj_bias": True, "attn_layer_offset": 0}),
    "zamba2-plain": (
        "zamba2",
        {
            **dict(num_mem_blocks=1, use_shared_attention_adapter=False, use_mem_rope=False),
            **dict(num_key_value_heads=2, mamba_ngroups=1, mamba_d_conv=3),
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
        },
    ),
    "mamba-biased": ("mamba", {"use_bias": True, "use_conv_bias": False, "time_step_rank": None}),
    "mamba2-tied": ("mamba2", {"use_bias": True, "tie_word_embeddings": True, "n_groups": 1}),
    "olmo-hybrid-positive": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "falcon-h1-normed": (
        "falcon_h1",
        {
            **dict(mamba_rms_norm=True, mamba_proj_bias=True, projectors_bias=True),
            **dict(attention_bias=True, mlp_bias=True, mamba_d_ssm=64, mamba_d_head="auto"),
        },
    ),
    "falcon-h1-gated-first": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "kimi-linear-hub": (
        "kimi_linear",
        {
            "layer_types": None,
            "linear_attn_config": {
                **dict(full_attn_layers=[2], kda_layers=[1, 3], head_dim=12, num_heads=2),
                "short_conv_kernel_size": 3,
            },
            **dict(q_lora_rank=16, n_group=1, topk_group=1, first_k_dense_replace=2),
        },
    ),
    "nemotron-3-latent": ("nemotron_h", {"moe_latent_size": 12}),
    "granite-4-h-dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    "llama4-scout": (
        "llama4_text",
        {
            "rope_theta": None,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
            **dict(interleave_moe_layer_step=1, num_experts_per_tok=2),
        },
    ),
    "llama4-maverick": ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "gemma3n-of-two": (
        "gemma3n_text",
        dict(
            altup_active_idx=1,
            altup_num_inputs=2,
            altup_correct_scale=False,
            num_kv_shared_layers=0,
        ),
    ),
    "phimoe-long": (
        "phimoe",
        {
            "rope_theta": None,
            # transformers takes the short factors for all lengths, the authors' code and we do not
            "rope_parameters": {
                **LONGROPE,
                **dict(short_mscale=1.2, long_mscale=1.2, short_factor=LONGROPE["long_factor"]),
            },
            "original_max_position_embeddings": 4,
            **dict(attention_bias=True, lm_head_bias=True, sliding_window=None),
        },
    ),
    "apertus-silu": ("apertus", {"hidden_act": "silu", "attention_bias": True}),
    "olmo-open": ("olmo", {"clip_qkv": None, "tie_word_embeddings": True}),
    "persimmon-bare": ("persimmon", {"qk_layernorm": False}),
    "cohere2-moe-summed": (
        "cohere2_moe",
        {
            **dict(shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid"),
            **dict(norm_topk_prob=False, rms_norm_eps=1e-5, prefix_dense_sliding_window_pattern=2),
        },
    ),
    "exaone-moe-open": (
        "exaone_moe",
        {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse", "dense"] * 2},
    ),
    "minicpm3-plain": (
        "minicpm3",
        {"q_lora_rank": None, "attention_bias": True, "scale_depth": 1.0},
    ),
    "diffllama-biased": ("diffllama", {"num_key_value_heads": 8, "attention_bias": True}),
    "granite-tied": (
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
}
_rng = random.Random(1)
TOKENS = [_rng.randrange(4, tiny_models.VOCAB) for _ in range(53)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request, tmp_path_factory):
    family, overrides = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.build(path, family, **overrides)
    with torch.no_grad():
        logits = theirs(torch.tensor([TOKENS])).logits[0]
    return path, theirs, logits


def error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_logits_equal_transformers(case, kernels):
    """The text runs in chunks, and its beginning also token by token. The beginning is longer than
    every window and than five blocks."""
    path, _, logits = case
    model = load(path, kernels=kernels)
    for chunks, block_size in [
        ((), 4),
        ((), 16),
        ((3, 1, 4, 5, 7, 16), 4),
        ((15, 17, 16), 16),
        ((1,), 4),
        ((20, 1, 1, 31), 8),
    ]:
        num = 22 if chunks == (1,) else len(TOKENS)
        found = error(run(model, TOKENS[:num], chunks, block_size), logits[:num])
        assert found <= 1e-4, (chunks, block_size)


def test_greedy_tokens_equal_transformers(case):
    path, theirs, _ = case
    prompt = torch.tensor([TOKENS[:9]])
    with torch.no_grad():
        expected = theirs.generate(
            prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 9:]
    assert greedy(load(path, kernels="cpu"), TOKENS[:9], 20) == expected.tolist()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_mixed_batch_equals_each_alone(case, kernels):
    path, _, logits = case
    model = load(path, kernels=kernels)
    cache = Paged(model, 4, len(TOKENS))
    parts = [
        [(0, TOKENS[:5]), (1, TOKENS[:1])],
        [(1, TOKENS[1:2]), (0, TOKENS[5:30]), (2, TOKENS[:40])],
    ]
    parts += [[(2, TOKENS[40:41]), (0, TOKENS[30:31]), (3, TOKENS[:17]), (1, TOKENS[2:3])]]
    done = [0] * 4
    for step in parts:
        for (seq, tokens), ours in zip(step, cache.step(step), strict=True):
            assert error(ours, logits[done[seq] : done[seq] + len(tokens)]) <= 1e-4
            done[seq] += len(tokens)


def test_the_spec_counts_what_is_there(case):
    path, theirs, _ = case
    description = read_spec(path)
    spec = description.spec
    buffers = tiny_models.correction_buffers(theirs) + tiny_models.scalar_buffers(theirs)
    buffers += tiny_models.expert_tables(theirs)
    theirs_all = (*theirs.parameters(), *buffers)
    if not spec.shared:  # each layer has its own sum of what it shares and an adapter
        assert spec.num_parameters == sum(p.numel() for p in theirs_all)
    count = 0
    for shape in parameters(spec).values():
        size = 1
        for n in shape:
            size *= n
        count += size
    assert count == spec.num_parameters
    numbers = 0
    for a in (a for a in spec.attentions if a.kv_from is None):
        latent = isinstance(a, LatentAttentionSpec)
        numbers += a.kv_rank + a.rotary_dim if latent else 2 * a.num_kv_heads * a.head_dim
        if isinstance(a, CompressedAttentionSpec) and a.rate:  # values, gates, compressed keys
            of_index = a.index_spec.head_dim if a.index_spec else 0
            series = 2 if a.index_spec else 1
            numbers += (2 * series * 4 + 1) * (a.head_dim + of_index) // 4
        elif isinstance(a.index, BlockIndexSpec | IndexSpec):
            numbers += a.index.head_dim
    assert spec.kv_bytes_per_token(DTYPE_BYTES["float32"]) == 4 * numbers


# --- What must be refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    tiny_models.write(tmp_path)
    return tmp_path


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = value
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "rwkv"}, "model_type"),
        ({"model_type": "zaya"}, "model_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"some_new_switch": True}, "some_new_switch"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "twist": 2}},
            "rope_parameters",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"quantization_config": {"quant_method": "fp_quant"}}, "quantization_config.quant_method"),
    ],
    ids=str,
)
def test_an_unknown_config_is_refused_by_name(tiny, changes, field):
    edit(tiny, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tiny)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("inkling_text", "pass a short convolution"),
        ("mistral_large4", "learned"),
        ("qwen4_exp", "n-grams"),
        ("glm5_next", "pooled"),
    ],
)
def test_a_family_that_is_refused_says_why(tiny, model_type, reason):
    edit(tiny, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match=reason):
        read_spec(tiny)
    assert not REFUSED.keys() & FAMILIES.keys()


def resave(path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("problem", ["missing", "extra", "misshapen"])
def test_a_checkpoint_that_does_not_fit_names_the_tensor(tiny, problem):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors):
        if problem == "missing":
            del tensors[name]
        elif problem == "extra":
            tensors[name + "_scale"] = torch.ones(1)
        else:
            tensors[name] = torch.ones(3, 5)

    resave(tiny, change)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tiny)


def test_a_damaged_or_pickled_checkpoint_is_refused(tiny):
    data = (tiny / "model.safetensors").read_bytes()
    (tiny / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tiny)
    (tiny / "model.safetensors").unlink()
    (tiny / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle"):
        load(tiny)


def test_a_sharded_checkpoint_is_the_same(tmp_path):
    whole = tiny_models.build(tmp_path / "whole")
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(
        run(load(tmp_path / "sharded"), TOKENS), run(load(tmp_path / "whole"), TOKENS)
    )


def test_dummy_weights_need_only_a_config(tiny):
    from slipstream.kernels.select import select_ops
    from slipstream.model.load.loader import load_model

    (tiny / "model.safetensors").unlink()
    cpu = torch.device("cpu")
    models = [
        load_model(
            tiny,
            ops=select_ops(cpu, "torch"),
            device=cpu,
            dtype=torch.bfloat16,
            load_format="dummy",
            seed=s,
        )
        for s in (1, 1, 2)
    ]
    a, b, c = (run(m, TOKENS) for m in models)
    assert a.dtype == torch.bfloat16
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_tokens_tell_attention_apart(tmp_path):
    """Were they alike, every attention over them would give the same."""
    assert len(set(TOKENS)) > 40
    theirs = tiny_models.build(tmp_path)
    with torch.no_grad():
        a, b = (
            theirs(torch.tensor([t])).logits[0, -1]
            for t in (TOKENS, [TOKENS[1], TOKENS[0], *TOKENS[2:]])
        )
    assert error(a, b) > 1e-3
