"""Granite 3, dense and as mixtures of experts, with a shared expert or without: Llama's layers, with multipliers of embeddings,
scores, additions to the residual, and logits."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import decoder, gated
from slipstream.spec.families.llama import UNPERMUTED, names
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import ModelSpec, MoESpec, SharedExpertSpec


def read(c: ConfigReader) -> ModelSpec:
    return _read(c, "granite")


def read_moe(c: ConfigReader) -> ModelSpec:
    return _read(c, "granitemoe", _mixture(c))


def read_moe_shared(c: ConfigReader) -> ModelSpec:
    moe, size = _mixture(c), c.take("shared_intermediate_size", int, 0)
    if size:
        shared = dataclasses.replace(moe.expert, intermediate_size=size)
        moe = dataclasses.replace(moe, shared=SharedExpertSpec(mlp=shared))
    return _read(c, "granitemoeshared", moe)


def _mixture(c: ConfigReader) -> MoESpec:
    c.ignore("output_router_logits", "router_aux_loss_coef")
    return MoESpec(
        num_experts=c.size("num_local_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=gated(c),
        normalize=True,  # the softmax is over the chosen experts
    )


def _read(c: ConfigReader, family: str, mlp: MoESpec | None = None) -> ModelSpec:
    return decoder(
        c,
        family,
        mlp=mlp,
        more={"scale": c.take("attention_multiplier", float, 1.0)},
        residual_scale=c.take("residual_multiplier", float, 1.0),
        embed_scale=c.take("embedding_multiplier", float, 1.0),
        logit_scale=1.0 / c.take("logits_scaling", float, 1.0),
    )


def gguf_config(m: ConfigReader, *, experts: bool = False) -> dict[str, Any]:
    scales = {
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
    }
    m.require("rope.scaling.finetuned", True)  # llama.cpp's switch for positions of this family
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
        (
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            read_moe_shared,
            table(MOE),
            MOE_GGUF,
        ),
    )
)
