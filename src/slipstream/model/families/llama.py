"""Llama 2 and 3, SmolLM2, and whatever else writes `model_type: llama`; Mistral, which adds a window."""

from __future__ import annotations

from slipstream.model.families.base import (
    LLAMA_GGUF_NAMES,
    ConfigReader,
    Family,
    GGUFFamily,
    Names,
    activation,
    heads,
    layers,
    llama_gguf_config,
    llama_names,
    rms,
    rope,
)
from slipstream.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, SequentialBlock

NORMS = {"pre_attention": "input_layernorm", "pre_mlp": "post_attention_layernorm"}


def read(c: ConfigReader) -> ModelSpec:
    return _read(c, "llama", window=None)


def read_mistral(c: ConfigReader) -> ModelSpec:
    return _read(c, "mistral", window=c.maybe("sliding_window", int))


def _read(c: ConfigReader, family: str, window: int | None) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = heads(c)
    max_position = c.size("max_position_embeddings", 2048)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6))
    bias = c.take("attention_bias", bool, False)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rope(c, head_dim, max_position=max_position),
            qkv_bias=bias,
            out_bias=bias,
            window=window,
        ),
        mlp=DenseSpec(
            intermediate_size=c.size("intermediate_size"),
            activation=activation(c, "hidden_act", "silu"),
            bias=c.take("mlp_bias", bool, False),
        ),
        block=SequentialBlock(pre_attention=norm, pre_mlp=norm),
    )
    spec = ModelSpec(
        family=family,
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("hidden_size"),
        max_position=max_position,
        layers=layers(c.size("num_hidden_layers"), lambda i: layer),
        final_norm=norm,
        tied_embeddings=c.take("tie_word_embeddings", bool, False),
    )
    c.finish()
    return spec


def names(spec: ModelSpec) -> Names:
    return llama_names(spec, NORMS)


ROTARY_BUFFERS = (r".*rotary_emb\.inv_freq",)

FAMILIES = (
    Family(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        read=read,
        names=names,
        ignored=ROTARY_BUFFERS,
        gguf=GGUFFamily(architecture="llama", config=llama_gguf_config, names=LLAMA_GGUF_NAMES, unpermute=True),
    ),
    Family(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        read=read_mistral,
        names=names,
        ignored=ROTARY_BUFFERS,
    ),
)
