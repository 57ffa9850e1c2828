"""Qwen 2 and 2.5 (biases on q, k, v) and Qwen 3 (norms on q and k), each with optional windows in its upper layers."""

from __future__ import annotations

from slipstream.model.families.base import ConfigReader, Family, GGUFFamily
from slipstream.model.families.llama import ROTARY_BUFFERS, names
from slipstream.model.families.metadata import llama_gguf_config
from slipstream.model.families.names import gguf_table
from slipstream.model.families.pieces import attention, before, gated, heads, kinds_of_layers, model, rms, rope
from slipstream.model.spec import LayerSpec, ModelSpec, QKNormSpec


def read_qwen2(c: ConfigReader) -> ModelSpec:
    return _read(c, "qwen2", qkv_bias=True, out_bias=False, qk_norm=False)


def read_qwen3(c: ConfigReader) -> ModelSpec:
    bias = c.take("attention_bias", bool, False)
    return _read(c, "qwen3", qkv_bias=bias, out_bias=bias, qk_norm=True)


def _read(c: ConfigReader, family: str, *, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> ModelSpec:
    h = heads(c)
    max_position = c.size("max_position_embeddings", 32768)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    window = c.maybe("sliding_window", int)
    first_window = c.take("max_window_layers", int, c.size("num_hidden_layers"))
    if not c.take("use_sliding_window", bool, False):
        window = None
    kinds = kinds_of_layers(c, lambda i: "sliding_attention" if window and i >= first_window else "full_attention")
    if "sliding_attention" in kinds and window is None:
        raise c.unsupported("layer_types", "has sliding_attention, but use_sliding_window is off")
    position, mlp = rope(c, h.head_dim, max_position=max_position), gated(c)

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            position,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            window=window if kinds[i] == "sliding_attention" else None,
            qk_norm=QKNormSpec(over="head", eps=eps) if qk_norm else None,
        )
        return LayerSpec(attention=of, mlp=mlp, block=before(norm))

    c.require("use_mrope", False)
    return model(c, family, layer, norm, max_position)


FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read,
        names=names,
        ignored=ROTARY_BUFFERS,
        gguf=GGUFFamily(architecture=name, config=llama_gguf_config, names=gguf_table()),
    )
    for name, architecture, read in (
        ("qwen2", "Qwen2ForCausalLM", read_qwen2),
        ("qwen3", "Qwen3ForCausalLM", read_qwen3),
    )
)
