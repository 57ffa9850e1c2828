"""Phi-1, 1.5 and 2 (parallel attention and MLP with one norm, rotary embedding of a part of each head), and Phi-3, 3.5 and 4
(Llama's layers with fused weights; LongRoPE for long contexts)."""

from __future__ import annotations

import dataclasses
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
from slipstream.spec.families.llama import MIXTRAL
from slipstream.spec.families.metadata import layer_norm_gguf_config, llama_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import (
    LayerSpec,
    LongRopeScaling,
    ModelSpec,
    MoESpec,
    ParallelBlock,
    QKNormSpec,
)


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
    c.require("full_attn_mod", 1)  # this and the next key: from Phi-4-mini
    c.require("interpolate_factor", 1)
    c.require("lm_head_bias", False)
    c.require("mlp_bias", False)
    return model(c, "phi3", layer, norm, max_position)


MSCALES = ("short_mscale", "long_mscale")


def read_phimoe(c: ConfigReader) -> ModelSpec:
    """Phi 3.5 MoE: layer norms with biases. An expert's weight is a softmax over only the logits close to its own."""
    c.assume_missing(num_key_value_heads=8)
    h = heads(c)
    max_position = c.size("max_position_embeddings", 131072)
    norm = layer_norm(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-5))
    bias, window = c.take("attention_bias", bool, False), c.maybe("sliding_window", int)
    position = rope(
        c,
        h.head_dim,
        theta=1e6,
        max_position=max_position,
        renamed={"su": "longrope"},
        rope_types=("default", "longrope"),
        without=MSCALES,
    )
    if isinstance(position.scaling, LongRopeScaling):
        key = "rope_scaling" if c.value("rope_scaling") else "rope_parameters"
        short, long = (c.value(key).get(name) for name in MSCALES)
        if not isinstance(short, int | float) or short != long:
            raise c.unsupported(key, f"{' and '.join(MSCALES)} must be the same number")
        scaling = dataclasses.replace(position.scaling, attention_factor=float(short))
        position = dataclasses.replace(position, scaling=scaling)
    c.require("num_experts_per_tok", 2)  # transformers always chooses two
    jitter = c.take("router_jitter_noise", float, 0.01)
    if jitter <= 0:
        raise c.unsupported("router_jitter_noise", "must be above 0")
    c.ignore("input_jitter_noise", "output_router_logits", "router_aux_loss_coef")
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 16),
        num_experts_per_token=2,
        expert=gated(c),
        normalize=False,
        nearness=2 * jitter,
    )
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=bias, out_bias=bias, window=window),
        mlp=moe,
        block=before(norm),
    )
    head_bias = c.take("lm_head_bias", bool, False)
    return model(c, "phimoe", layer, norm, max_position, head_bias=head_bias)


def read_persimmon(c: ConfigReader) -> ModelSpec:
    """Persimmon: norms of each head of q and k, half of a head rotated, and a squared ReLU."""
    h = heads(c, num_kv_heads=None)
    max_position = c.size("max_position_embeddings", 16384)
    norm = layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-5))
    position = rope(c, h.head_dim, partial=0.5, max_position=max_position)
    normed = c.take("qk_layernorm", bool, True)
    qk_norm = QKNormSpec(over="layer", eps=norm.eps) if normed else None
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=True, out_bias=True, qk_norm=qk_norm),
        mlp=plain(c.size("intermediate_size", 16384), activation(c, "hidden_act", "relu2")),
        block=before(norm),
    )
    return model(c, "persimmon", layer, norm, max_position)


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


PERSIMMON = {
    **PHI,
    "attention.qkv": "self_attn.query_key_value",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

FAMILIES = (
    Family(
        model_type="phimoe",
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        read=read_phimoe,
        names=table(MIXTRAL),
    ),
    Family(
        model_type="persimmon",
        architectures=("PersimmonForCausalLM",),
        read=read_persimmon,
        names=table(PERSIMMON, changes={"attention.qkv": "ungroup"}),
    ),
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
