"""Granite 3, dense and as mixtures of experts, with or without a shared expert: Llama's layers, with multipliers for
embeddings, attention scores, residual additions, and logits. Also Granite models with windows and attention sinks, and
HyperCLOVA X."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import around, before, decoder, gated, heads, rope, windows
from slipstream.spec.families.llama import UNPERMUTED, names
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import ModelSpec, MoESpec, SharedExpertSpec


def read(c: ConfigReader) -> ModelSpec:
    return _read(c, "granite")


def read_moe(c: ConfigReader) -> ModelSpec:
    return _read(c, "granitemoe", _mixture(c))


def read_moe_shared(c: ConfigReader) -> ModelSpec:
    return _read(c, "granitemoeshared", _shared(c))


def _shared(c: ConfigReader) -> MoESpec:
    moe, size = _mixture(c), c.take("shared_intermediate_size", int, 0)
    if size:
        shared = dataclasses.replace(moe.expert, intermediate_size=size)
        moe = dataclasses.replace(moe, shared=SharedExpertSpec(mlp=shared))
    return moe


def _mixture(c: ConfigReader) -> MoESpec:
    c.ignore("output_router_logits", "router_aux_loss_coef")
    return MoESpec(
        num_experts=c.size("num_local_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=gated(c),
        normalize=True,  # the softmax is over the chosen experts
    )


def read_swa(c: ConfigReader) -> ModelSpec:
    c.assume_missing(num_key_value_heads=4)
    return _read_windows(c, "granite_swa", None, max_position=8192, eps=1e-5, tied=True)


def read_moe_swa(c: ConfigReader) -> ModelSpec:
    return _read_windows(c, "granitemoe_swa", _shared(c), max_position=2048, eps=1e-6)


def read_hyperclovax(c: ConfigReader) -> ModelSpec:
    """HyperCLOVA X SEED: norms after attention and MLP too, and logits that are multiplied, not divided."""
    c.assume(attention_multiplier=heads(c).head_dim ** -0.5)
    block = around if c.take("use_post_norm", bool, True) else before
    scale = c.take("logits_scaling", float, 1.0)
    return _read(c, "hyperclovax", block=block, logit_scale=scale)


def _read_windows(c: ConfigReader, family: str, mlp: MoESpec | None, **more: Any) -> ModelSpec:
    """Reads layers with attention sinks. Three of four have a window. Each layer has its own rotary
    base, or no rotation."""
    head_dim, count = heads(c).head_dim, c.size("num_hidden_layers")
    longest = c.size("max_position_embeddings", more["max_position"])
    of_all = rope(c, head_dim, max_position=longest)
    bases = c.take("layer_rope_theta", list, [of_all.theta] * count)
    if len(bases) != count or not all(type(x) in (int, float) and x >= 0 for x in bases):
        raise c.unsupported("layer_rope_theta", f"must be {count} numbers, 0 for no rotation")
    return _read(
        c,
        family,
        mlp,
        sinks=True,
        position=lambda i: dataclasses.replace(of_all, theta=bases[i]) if bases[i] else None,
        **windows(c, lambda i: "sliding_attention" if i % 4 else "full_attention", 128),
        **more,
    )


def _read(
    c: ConfigReader,
    family: str,
    mlp: MoESpec | None = None,
    *,
    sinks: bool = False,
    logit_scale: float | None = None,
    **more: Any,
) -> ModelSpec:
    return decoder(
        c,
        family,
        mlp=mlp,
        more={"scale": c.take("attention_multiplier", float, 1.0), "sinks": sinks},
        residual_scale=c.take("residual_multiplier", float, 1.0),
        embed_scale=c.take("embedding_multiplier", float, 1.0),
        logit_scale=logit_scale or 1.0 / c.take("logits_scaling", float, 1.0),
        **more,
    )


def gguf_config(m: ConfigReader, *, experts: bool = False) -> dict[str, Any]:
    scales = {
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
    }
    m.require("rope.scaling.finetuned", True)  # llama.cpp's switch for rotation in this family
    return {
        **llama_gguf_config(m, experts=experts),
        **{ours: m.take(theirs, float) for ours, theirs in scales.items()},
    }


def gguf_moe_config(m: ConfigReader) -> dict[str, Any]:
    return {
        **gguf_config(m, experts=True),
        "num_local_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "shared_intermediate_size": m.take("expert_shared_feed_forward_length", int, 0),
    }


MOE: dict[str, Theirs] = {
    **LLAMA,
    "router": "block_sparse_moe.router.layer",
    "experts.up": "block_sparse_moe.input_linear",
    "experts.down": "block_sparse_moe.output_linear",
    "shared.up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
}
SINKS: dict[str, Theirs] = {"attention.sinks": {"weight": "self_attn.sinks"}}
MOE_SWA: dict[str, Theirs] = {
    **MOE,
    **SINKS,
    "router": "block_sparse_moe.router",
    "experts.up": {"weight": "block_sparse_moe.experts.gate_up_proj"},
    "experts.down": {"weight": "block_sparse_moe.experts.down_proj"},
}
HYPERCLOVAX = table({**LLAMA, "post_attention": "post_norm1", "post_mlp": "post_norm2"})
MOE_GGUF = GGUFFamily(architecture="granitemoe", config=gguf_moe_config, names=UNPERMUTED)

FAMILIES = tuple(
    Family(model_type=name, architectures=(architecture,), read=reader, names=theirs, gguf=gguf)
    for name, architecture, reader, theirs, gguf in (
        (
            "granite",
            "GraniteForCausalLM",
            read,
            names,
            GGUFFamily(architecture="granite", config=gguf_config, names=UNPERMUTED),
        ),
        ("granitemoe", "GraniteMoeForCausalLM", read_moe, table(MOE), None),
        ("granitemoeshared", "GraniteMoeSharedForCausalLM", read_moe_shared, table(MOE), MOE_GGUF),
        ("granite_swa", "GraniteSWAForCausalLM", read_swa, table({**LLAMA, **SINKS}), None),
        ("granitemoe_swa", "GraniteMoeSWAForCausalLM", read_moe_swa, table(MOE_SWA), None),
        ("hyperclovax", "HyperCLOVAXForCausalLM", read_hyperclovax, HYPERCLOVAX, None),
    )
)
