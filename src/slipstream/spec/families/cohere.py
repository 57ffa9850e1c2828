"""Cohere's Command R, R+ and R7B: parallel attention and MLP after one layer norm without a bias, interleaved rotary embedding,
and scaled logits. R+ norms q and k. In the second generation (`cohere2`, R7B) three layers of four have a window, and the
fourth has no position embedding."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    gated,
    heads,
    kinds_of_layers,
    layer_norm,
    model,
    rope,
)
from slipstream.spec.families.metadata import layer_norm_gguf_config
from slipstream.spec.families.names import LLAMA, gguf_table, table
from slipstream.spec.model import LayerSpec, ModelSpec, ParallelBlock, QKNormSpec

PATTERN = 4


def read_cohere(c: ConfigReader) -> ModelSpec:
    return _read(
        c, "cohere", theta=500000.0, windows=False, qk_norm=c.take("use_qk_norm", bool, False)
    )


def read_cohere2(c: ConfigReader) -> ModelSpec:
    c.require("rotary_pct", 1.0)
    c.require("use_embedding_sharing", True)
    c.require("use_gated_activation", True)
    c.require("use_parallel_block", True)
    c.require("use_qk_norm", False)
    c.require("position_embedding_type", "rope_gptj")
    c.ignore("cache_implementation", "order_of_interleaved_layers")
    c.ignore("use_parallel_embedding")  # how the table is distributed over devices
    return _read(c, "cohere2", theta=10000.0, windows=True)


def _read(
    c: ConfigReader, family: str, *, theta: float, windows: bool, qk_norm: bool = False
) -> ModelSpec:
    h = heads(c)
    max_position = c.size("model_max_length", c.size("max_position_embeddings", 8192))
    eps = c.take("layer_norm_eps", float, 1e-5)
    norm = layer_norm(c.size("hidden_size"), eps, bias=False)
    trained = c.size("max_position_embeddings", 8192)
    position = rope(c, h.head_dim, theta=theta, max_position=trained, style="interleaved")
    bias, mlp = c.take("attention_bias", bool, False), gated(c)
    window, kinds = None, [""] * c.size("num_hidden_layers")
    if windows:
        window, pattern = c.size("sliding_window", 4096), c.size("sliding_window_pattern", PATTERN)
        c.require("layer_switch", pattern)  # another key for the same number
        kinds = kinds_of_layers(
            c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention"
        )

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            None if kinds[i] == "full_attention" else position,
            qkv_bias=bias,
            out_bias=bias,
            window=window if kinds[i] == "sliding_attention" else None,
            qk_norm=QKNormSpec(over="each", eps=eps) if qk_norm else None,
        )
        return LayerSpec(attention=of, mlp=mlp, block=ParallelBlock(norm=norm))

    scale = c.take("logit_scale", float, 0.0625)
    return model(c, family, layer, norm, max_position, logit_scale=scale, tied=True)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = layer_norm_gguf_config(m, "layer_norm_eps")
    return {**config, "hidden_act": "silu", "logit_scale": m.take("logit_scale", float)}


def gguf_config2(m: ConfigReader) -> dict[str, Any]:
    m.require("attention.sliding_window_pattern", PATTERN)
    return {**gguf_config(m), "sliding_window": m.size("attention.sliding_window")}


FAMILIES = tuple(
    Family(
        model_type=model_type,
        architectures=(architecture,),
        read=read,
        names=table({**LLAMA, "norm": "input_layernorm"}),
        gguf=GGUFFamily(architecture=gguf, config=config, names=gguf_table()),
    )
    for model_type, architecture, read, gguf, config in (
        ("cohere", "CohereForCausalLM", read_cohere, "command-r", gguf_config),
        ("cohere2", "Cohere2ForCausalLM", read_cohere2, "cohere2", gguf_config2),
    )
)
