"""gpt-oss: mixtures of experts with biases and a clamped activation, attention with learned sinks, windows in every other
layer, and YaRN. Checkpoints store the experts in MXFP4 (`model.stored.mxfp4`)."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    before,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope,
)
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import ClampedSwiglu, DenseSpec, LayerSpec, ModelSpec, MoESpec

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary embedding for configs that lack one."""


def read(c: ConfigReader) -> ModelSpec:
    c.assume(head_dim=64, num_key_value_heads=8)
    h = heads(c)
    max_position = c.size("max_position_embeddings", 131072)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-5))
    position = rope(c, h.head_dim, theta=150000.0, max_position=max_position, default=YARN)
    bias, window = c.take("attention_bias", bool, True), c.size("sliding_window", 128)
    kinds = kinds_of_layers(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    c.require("hidden_act", "silu")
    swiglu = ClampedSwiglu(
        alpha=c.take("swiglu_alpha", float, 1.702), limit=c.take("swiglu_limit", float, 7.0)
    )
    per_token = c.size("num_experts_per_tok", 4)
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 128),
        num_experts_per_token=per_token,
        expert=DenseSpec(
            intermediate_size=c.size("intermediate_size"), activation=swiglu, bias=True
        ),
        normalize=True,  # the softmax is over the chosen experts
        router_bias=True,
    )
    c.require("experts_per_token", per_token)
    c.ignore("output_router_logits", "router_aux_loss_coef", "initial_context_length")

    def layer(i: int) -> LayerSpec:
        seen = window if kinds[i] == "sliding_attention" else None
        of = attention(h, position, qkv_bias=bias, out_bias=bias, window=seen, sinks=True)
        return LayerSpec(attention=of, mlp=moe, block=before(norm))

    return model(c, "gpt_oss", layer, norm, max_position)


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "attention.sinks": {"weight": "self_attn.sinks"},
    "router": "mlp.router",
    "experts.up": {"weight": "mlp.experts.gate_up_proj", "bias": "mlp.experts.gate_up_proj_bias"},
    "experts.down": {"weight": "mlp.experts.down_proj", "bias": "mlp.experts.down_proj_bias"},
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. llama.cpp knows the pattern of windows, the activation and the
    kind of softmax from the architecture."""
    config = llama_gguf_config(m, experts=True)
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False
    return {
        **config,
        "sliding_window": m.size("attention.sliding_window"),
        "num_local_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "intermediate_size": m.size("expert_feed_forward_length"),
    }


FAMILIES = (
    Family(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        read=read,
        names=table(
            NAMES, changes={"experts.up": "untwine_transpose", "experts.down": "transpose"}
        ),
        gguf=GGUFFamily(
            architecture="gpt-oss",
            config=gguf_config,
            names=gguf_table({"pre_mlp": "post_attention_norm"}),
        ),
    ),
)
