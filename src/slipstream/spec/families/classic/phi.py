"""Phi-1, 1.5 and 2 (parallel attention and MLP with one norm, rotary embedding of a part of each head), and Phi-3, 3.5 and 4
(Llama's layers with fused weights; LongRoPE for long contexts)."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    gated,
    heads,
    layer_norm,
    model,
    plain,
    rms,
    rope,
)
from slipstream.spec.families.metadata import (
    layer_norm_gguf_config,
    llama_gguf_config,
)
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import LayerSpec, ModelSpec, ParallelBlock, QKNormSpec


def read_phi(c: ConfigReader) -> ModelSpec:
    h = heads(c)
    max_position = c.size("max_position_embeddings", 2048)
    norm = layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-5))
    position = rope(c, h.head_dim, partial=0.5, max_position=max_position)
    normed = c.take("qk_layernorm", bool, False)
    qk_norm = QKNormSpec(over="layer", eps=norm.eps) if normed else None
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=True, out_bias=True, qk_norm=qk_norm),
        mlp=plain(c.size("intermediate_size"), activation(c, "hidden_act", "gelu_new")),
        block=ParallelBlock(norm=norm),
    )
    return model(c, "phi", layer, norm, max_position, head_bias=True)


def read_phi3(c: ConfigReader) -> ModelSpec:
    h = heads(c)
    max_position = c.size("max_position_embeddings", 4096)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-5))
    bias, window = c.take("attention_bias", bool, False), c.maybe("sliding_window", int)
    c.assume(original_max_position_embeddings=4096)
    position = rope(
        c,
        h.head_dim,
        partial=1.0,
        max_position=max_position,
        renamed={"su": "longrope", "yarn": "longrope"},
        rope_types=("default", "longrope"),
    )
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=bias, out_bias=bias, window=window),
        mlp=gated(c),
        block=before(norm),
    )
    c.require("full_attn_mod", 1)  # this key and the next: Phi-4-mini
    c.require("interpolate_factor", 1)
    c.require("lm_head_bias", False)
    c.require("mlp_bias", False)
    return model(c, "phi3", layer, norm, max_position)


PHI = {
    **LLAMA,
    "final_norm": "model.final_layernorm",
    "norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "attention.out": "self_attn.dense",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}


def gguf_phi_config(m: ConfigReader) -> dict[str, Any]:
    return {**layer_norm_gguf_config(m, "layer_norm_eps", partial=True), "hidden_act": "gelu_new"}


def gguf_phi3_config(m: ConfigReader) -> dict[str, Any]:
    window = m.maybe("attention.sliding_window", int)  # 0 for none
    found = llama_gguf_config(m, partial=True)
    original = "original_max_position_embeddings"
    if original in (scaling := found.get("rope_scaling") or {}):
        found[original] = scaling[original]
    return {**found, **({"sliding_window": window} if window else {})}


FAMILIES = (
    Family(
        model_type="phi",
        architectures=("PhiForCausalLM",),
        read=read_phi,
        names=table(PHI),
        gguf=GGUFFamily(architecture="phi2", config=gguf_phi_config, names=gguf_table(gated=False)),
    ),
    Family(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        read=read_phi3,
        names=table({**LLAMA, "attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"}),
        gguf=GGUFFamily(architecture="phi3", config=gguf_phi3_config, names=gguf_table(fused=True)),
    ),
)
