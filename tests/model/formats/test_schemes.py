"""Every quantisation scheme on every family: decoders, mixtures of experts, encoders and encoder-decoders; on the reference,
which has all schemes, and on the CPU's kernels."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.costs.memory import weights_bytes
from slipstream.errors import ConfigError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.model.layers.attention import CompressedAttention, LatentAttention
from slipstream.model.load.loader import load_model
from slipstream.model.recurrent import Mamba, Mamba2
from slipstream.spec.description import read_spec
from slipstream.spec.model import GatedDeltaSpec, LightningSpec, MoESpec, SinusoidSpec
from slipstream.spec.parameters import keeps_float32, parameters
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.native_formats import is_product
from tests.model.harness import CPU, run, states, written
from tests.support import tiny_models

TOKENS = list(range(5, 25))
STD = 0.06  # small enough that scores stay apart from one-hot, where rounding would tip them
WIDE = {
    "init_std": STD,
    "initializer_range": STD,
    "hidden_size": 128,
    "intermediate_size": 128,
    "n_embd": 128,
    "d_model": 128,
}
WIDE |= {
    "ffn_dim": 128,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
WIDE |= {"global_head_dim": 64, "hidden_size_per_layer_input": 128}
WIDE |= {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32, "qk_rope_head_dim": 16}
WIDE |= {"dim": 128, "hidden_dim": 128, "embedding_size": 128, "d_ff": 128, "d_kv": 32}
WIDE |= {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "linear_head_dim": 32}
WIDE |= {"mamba_d_ssm": 256, "mamba_d_head": 32, "mamba_head_dim": 16, "block_multiple_of": 128}
WIDE |= {"o_lora_rank": 64, "intermediate_size_mlp": 128, "prefix_dense_intermediate_size": 128}
WIDE |= {"dense_intermediate_size": 128}
WIDE |= {"shared_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128}
SPECIAL = {
    "gpt_bigcode-mha": {"multi_query": False},
    "opt-350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 64},
    "gemma4_text-moe": {**tiny_models.GEMMA4_MOE, "moe_intermediate_size": 128},
    "falcon-40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
# Rounding may choose another expert, which says nothing of the products: all are chosen. (And two layers, as elsewhere.)
WINDOWED = ["sliding_attention", "full_attention", "full_attention"]
ALL_EXPERTS = {
    "gemma4_text": dict(num_hidden_layers=3, layer_types=WINDOWED, num_kv_shared_layers=1),
    "gemma4_text-moe": dict(num_hidden_layers=2, layer_types=WINDOWED[:2], top_k_experts=6),
    **{name: {"num_experts_per_tok": 6} for name in ("qwen3_next", "qwen3_5_moe_text", "lfm2_moe")},
    "granitemoehybrid": {"num_experts_per_tok": 6},
    **{name: {"num_experts_per_tok": 4} for name in ("jamba", "minimax")},
    "bailing_hybrid": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "kimi_linear": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "nemotron_h": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 8, "num_hidden_layers": 2},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    # Nor does another choice of keys.
    "deepseek_v32": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "index_topk": 256},
    "axk2": {"num_experts_per_tok": 8, "index_topk": 256},
    "deepseek_v4": {"num_experts_per_tok": 6, "index_topk": 256},
    "glm_moe_dsa": {"num_experts_per_tok": 8, "index_topk": 256},
    "minimax_m3_vl_text": {"num_experts_per_tok": 8, "index_topk_blocks": 64},
    "dbrx": {
        **dict(d_model=128, attn_config={"kv_n_heads": 2, "rope_theta": 1e4}),
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 6, "moe_top_k": 6},
    },
    "glm4_moe": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"num_experts_per_tok": 8},
    "longcat_flash": {
        **dict(moe_topk=12, head_dim=16, ffn_hidden_size=128, expert_ffn_hidden_size=128)
    },
    "mistral4": {"num_experts_per_tok": 8, "head_dim": None},
    "dots1": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    **{
        name: {"num_experts_per_tok": 6}
        for name in ("flex_olmo", "hy_v3", "kolibri1", "laguna", "mellum")
    },
    # The weight of a choice jumps where a logit ceases to be near.
    "phimoe": {"num_local_experts": 2, "router_jitter_noise": 50.0},
}
DECODERS = [*tiny_models.FAMILIES, *SPECIAL]
EVERY = [*DECODERS, *tiny_models.ENCODERS, *tiny_models.T5S, "bart", "m2m_100"]


def build(folder, family):
    name = family if family in (*tiny_models.ENCODERS, *tiny_models.T5S) else family.split("-")[0]
    kinds = {**tiny_models.FAMILIES, **tiny_models.ENCODERS, **tiny_models.T5S}
    if family in tiny_models.BARTS:
        sizes = dict(d_model=128, encoder_ffn_dim=128, decoder_ffn_dim=128, init_std=STD)
        tiny_models.build_bart(folder, family, **sizes, noise=0.01)
        return
    sizes = {key: value for key, value in WIDE.items() if kinds[name].get(key) is not None}
    sizes |= {**SPECIAL.get(family, {}), **ALL_EXPERTS.get(family, {})}
    if name in tiny_models.T5S:
        tiny_models.build_t5(folder, name, **sizes, num_heads=4, initializer_factor=0.3, noise=0.01)
    elif name in tiny_models.ENCODERS:
        if name in tiny_models.T5_ENCODERS:  # their scores are not scaled
            sizes |= dict(num_heads=4, initializer_factor=0.3, noise=0.01)
        tiny_models.build_encoder(folder, name, **sizes)
    else:
        tiny_models.write(folder, name, **sizes)


@pytest.fixture(scope="module", params=EVERY)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build(path, request.param)
    return path


def load(path, ops, scheme, dtype):
    return load_model(
        path, ops=ops, device=CPU, dtype=dtype, scheme=SCHEMES[scheme] if scheme else None
    )


def outputs(model):
    """Logits, or an encoder's states."""
    spec = model.spec
    if spec.encoder is not None:
        return torch.cat(written(model, [TOKENS], [[0, *TOKENS[:9]]])).float()
    return (
        torch.cat(states(model, [TOKENS])).float()
        if spec.is_encoder
        else run(model, TOKENS).float()
    )


def near(ours, dense, scheme, spec):
    """Others would be √2 away. A delta rule's state collects the errors of all tokens."""
    error = ((ours - dense).norm() / dense.norm()).item()
    coarse = scheme.startswith(("int4", "mxfp4", "nvfp4"))
    if any(isinstance(layer.recurrent, GatedDeltaSpec) for layer in spec.layers):
        return 0 < error < (0.9 if coarse else 0.5)
    if scheme == "mxfp4-all":  # scales are powers of two
        return 0 < error < 0.8
    return 0 < error < (0.5 if coarse else 0.2)


def is_mixture(spec):
    return any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)


@pytest.fixture(scope="module")
def unrounded(folder):
    """The spec of the model in bfloat16, and what it gives."""
    dense = load(folder, ReferenceOps(), None, torch.bfloat16)
    return dense.spec, outputs(dense)


WHOLE = ("llama", "gpt2", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "t5")
"""One family of each kind of layer, tried with all schemes. Each other family has three schemes,
by turns, and the rest in the slow tests."""


def pairs():
    """Every family with every scheme."""
    for i, family in enumerate(EVERY):
        quick = {(i + step) % len(SCHEMES) for step in (0, 3, 6)}
        for j, scheme in enumerate(SCHEMES):
            marks = () if j in quick or family in WHOLE else pytest.mark.slow
            yield pytest.param(family, scheme, marks=marks)


@pytest.mark.parametrize(("folder", "scheme"), pairs(), indirect=["folder"])
def test_every_scheme_loads_on_every_family(folder, unrounded, scheme):
    """Logits are near those of the unrounded model, and the bytes held equal the ledger's."""
    spec, dense = unrounded
    if SCHEMES[scheme].experts_only and not is_mixture(spec):
        with pytest.raises(ConfigError, match="experts"):
            load(folder, ReferenceOps(), scheme, torch.bfloat16)
        return
    if SCHEMES[scheme].head and spec.is_encoder:
        with pytest.raises(ConfigError, match="head"):
            load(folder, ReferenceOps(), scheme, torch.bfloat16)
        return
    rounded = load(folder, ReferenceOps(), scheme, torch.bfloat16)
    assert near(outputs(rounded), dense, scheme, spec)
    layers = [
        *rounded.decoder.layers,
        *(rounded.decoder.encoder.layers if rounded.decoder.encoder else ()),
    ]
    kept: list[torch.Tensor | None] = []
    for a in (x.attention for x in layers if x.attention is not None):
        latent = isinstance(a, LatentAttention | CompressedAttention)
        kept += (
            [a.params.cos_sin]
            if latent
            else [a.heads.cos_sin, a.params.alibi_slopes, a.params.distance_bias]
        )
        if not isinstance(a, CompressedAttention):
            kept.append(a.query_scale)
        if (spread := getattr(a, "spread", None)) is not None:
            kept.append(spread.weight)  # zeros and ones
        if not latent and (terms := a.disentangled) is not None:
            kept += [terms.buckets, terms.keys, terms.queries]
        if not latent and a.spec.qk_norm is not None and not a.spec.qk_norm.learned:
            kept.append(a.heads.q_norm)  # ones
    for r in (x.recurrent for x in layers if isinstance(x.recurrent, Mamba)):
        kept += [norm.weight for norm in r.norms or () if r.spec.normed == "plain"]  # ones
    for r in (x.recurrent for x in layers if isinstance(x.recurrent, Mamba2)):
        if isinstance(r.spec, LightningSpec):  # made from the config
            kept += [r.params.conv.weight, r.params.decay, r.params.time]
    if isinstance(spec.learned_positions, SinusoidSpec):
        kept.append(rounded.decoder.positions)
    kept += [
        built.weight  # ones
        for x in rounded.decoder.layers
        for name, built in x.norms.items()
        if not x.spec.norms[name].learned
    ]
    tables_bytes = sum({t.data_ptr(): t.nbytes for t in kept if t is not None}.values())
    made = sum(
        math.prod(shape)
        for name, shape in parameters(spec).items()
        if "distances" in name
        or ".position_" in name
        or name.endswith((".positive.weight", ".negative.weight"))
    )  # into such tables, and into numbers
    planned = sum(weights_bytes(spec, 2, SCHEMES[scheme]).values())
    # Of 4-bit floats what a GPU holds: `reference` has scales of two bytes, and fills nothing up.
    held = (
        load(folder, TritonOps(), scheme, torch.bfloat16)
        if SCHEMES[scheme].name in ("mxfp4", "nvfp4")
        else rounded
    )
    assert planned + tables_bytes - 2 * made == held.weights_bytes
    exact = sum(math.prod(shape) for name, shape in parameters(spec).items() if keeps_float32(name))
    assert sum(weights_bytes(spec, 2).values()) == spec.num_parameters * 2 + exact * 2


@pytest.fixture(scope="module")
def unrounded_on_cpu(folder):
    dense = load(folder, NativeOps(1), None, torch.float32)
    return dense.spec, outputs(dense)


@pytest.mark.skipif(native.library_path() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-g32", "mxfp4"])
def test_what_a_cpu_has_loads_on_every_family(folder, unrounded_on_cpu, scheme):
    """Experts as well; MXFP4 is for experts alone."""
    spec, dense = unrounded_on_cpu
    if SCHEMES[scheme].experts_only and not is_mixture(spec):
        with pytest.raises(ConfigError, match="experts"):
            load(folder, NativeOps(1), scheme, torch.float32)
        return
    ours = outputs(load(folder, NativeOps(1), scheme, torch.float32))
    assert near(ours, dense, scheme, spec)


def test_gates_of_heads_that_no_kernel_takes_are_refused_by_name(tmp_path):
    tiny_models.write(tmp_path, "laguna", num_attention_heads_per_layer=[4, 8, 8], head_dim=32)
    with pytest.raises(ConfigError, match="num_attention_heads is 4") as refused:
        load(tmp_path, TritonOps(), "nvfp4", torch.bfloat16)
    assert refused.value.field == "quantization"


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "jamba", "falcon_h1", "gemma4_text"])
def test_a_load_rounds_the_products_that_a_layer_says(family, tmp_path):
    """The ledger counts these products as rounded, and a file's blocks of them are held as they
    are."""
    tiny_models.write(tmp_path, family)
    spec = read_spec(tmp_path).spec
    for layer in spec.layers:
        names = [n for n in layer.shapes(spec.hidden_size) if is_product(f"layers.0.{n}")]
        assert len(names) == len(layer.weight_shapes(spec.hidden_size)), names
