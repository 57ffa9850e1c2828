"""Qwen 2 and 2.5 (biases on q, k, v) and Qwen 3 (norms on q and k), each with optional windows in its upper layers."""

from __future__ import annotations

from slipstream.model.families.base import (
    LLAMA_GGUF_NAMES,
    ConfigReader,
    Family,
    GGUFFamily,
    activation,
    heads,
    kinds_of_layers,
    layers,
    llama_gguf_config,
    rms,
    rope,
)
from slipstream.model.families.llama import ROTARY_BUFFERS, names
from slipstream.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, SequentialBlock


def read_qwen2(c: ConfigReader) -> ModelSpec:
    return _read(c, "qwen2", qkv_bias=True, out_bias=False, qk_norm=False)


def read_qwen3(c: ConfigReader) -> ModelSpec:
    bias = c.take("attention_bias", bool, False)
    return _read(c, "qwen3", qkv_bias=bias, out_bias=bias, qk_norm=True)


def _read(c: ConfigReader, family: str, *, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = heads(c)
    count = c.size("num_hidden_layers")
    max_position = c.size("max_position_embeddings", 32768)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    window = c.maybe("sliding_window", int)
    first_window = c.take("max_window_layers", int, count)
    if not c.take("use_sliding_window", bool, False):
        window = None
    by_rule = ["sliding_attention" if window and i >= first_window else "full_attention" for i in range(count)]
    kinds = kinds_of_layers(c, count, by_rule)
    if "sliding_attention" in kinds and window is None:
        raise c.unsupported("layer_types", "has sliding_attention, but use_sliding_window is off")
    position = rope(c, head_dim, max_position=max_position)
    mlp = DenseSpec(intermediate_size=c.size("intermediate_size"), activation=activation(c, "hidden_act", "silu"))

    def layer(i: int) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=position,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            window=window if kinds[i] == "sliding_attention" else None,
            qk_norm=rms(head_dim, eps) if qk_norm else None,
        )
        return LayerSpec(attention=attention, mlp=mlp, block=SequentialBlock(pre_attention=norm, pre_mlp=norm))

    spec = ModelSpec(
        family=family,
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("hidden_size"),
        max_position=max_position,
        layers=layers(count, layer),
        final_norm=norm,
        tied_embeddings=c.take("tie_word_embeddings", bool, False),
    )
    c.require("use_mrope", False)
    c.finish()
    return spec


FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=read,
        names=names,
        ignored=ROTARY_BUFFERS,
        gguf=GGUFFamily(architecture=name, config=llama_gguf_config, names=LLAMA_GGUF_NAMES),
    )
    for name, architecture, read in (
        ("qwen2", "Qwen2ForCausalLM", read_qwen2),
        ("qwen3", "Qwen3ForCausalLM", read_qwen3),
    )
)
