"""Granite 3: Llama's layers, with multipliers of embeddings, scores, additions to the residual, and logits."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import attention, before, gated, heads, model, rms, rope
from slipstream.spec.families.llama import UNPERMUTED, names
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.model import LayerSpec, ModelSpec


def read(c: ConfigReader) -> ModelSpec:
    h = heads(c)
    max_position = c.size("max_position_embeddings", 2048)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6))
    bias, scale = c.take("attention_bias", bool, False), c.take("attention_multiplier", float, 1.0)
    position = rope(c, h.head_dim, max_position=max_position)
    layer = LayerSpec(
        attention=attention(h, position, scale=scale, qkv_bias=bias, out_bias=bias),
        mlp=gated(c, bias=c.take("mlp_bias", bool, False)),
        block=before(norm),
        residual_scale=c.take("residual_multiplier", float, 1.0),
    )
    return model(
        c,
        "granite",
        layer,
        norm,
        max_position,
        embed_scale=c.take("embedding_multiplier", float, 1.0),
        logit_scale=1.0 / c.take("logits_scaling", float, 1.0),
    )


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    scales = {
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
    }
    m.require("rope.scaling.finetuned", True)  # llama.cpp's switch for positions of this family
    return {
        **llama_gguf_config(m),
        **{ours: m.take(theirs, float) for ours, theirs in scales.items()},
    }


FAMILIES = (
    Family(
        model_type="granite",
        architectures=("GraniteForCausalLM",),
        read=read,
        names=names,
        gguf=GGUFFamily(architecture="granite", config=gguf_config, names=UNPERMUTED),
    ),
)
