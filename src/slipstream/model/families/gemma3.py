"""Gemma 3: norms before and after each half of a layer, q/k norms, five layers with a window to one without, each kind with
a rotary base of its own, embeddings scaled by √hidden. Of the multimodal checkpoints the language model is run."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.base import (
    LLAMA_GGUF_NAMES,
    ConfigReader,
    Family,
    GGUFFamily,
    Names,
    activation,
    heads,
    kinds_of_layers,
    layers,
    llama_gguf_config,
    llama_names,
    rms,
    rope,
)
from slipstream.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec, SequentialBlock

NORMS = {
    "pre_attention": "input_layernorm",
    "post_attention": "post_attention_layernorm",
    "pre_mlp": "pre_feedforward_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}


def read(c: ConfigReader) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = heads(c)
    count, hidden = c.size("num_hidden_layers"), c.size("hidden_size")
    max_position = c.size("max_position_embeddings", 131072)
    eps = c.take("rms_norm_eps", float, 1e-6)
    window = c.size("sliding_window", 4096)
    pattern = c.maybe("sliding_window_pattern", int) or c.take("_sliding_window_pattern", int, 6)
    c.maybe("_sliding_window_pattern", int)
    by_rule = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    kinds = kinds_of_layers(c, count, by_rule)
    positions = {kind: _rope(c, kind, head_dim, max_position) for kind in ("full_attention", "sliding_attention")}
    scale = c.take("query_pre_attn_scalar", float, 256.0) ** -0.5
    softcap = c.maybe("attn_logit_softcapping", float)
    bias = c.take("attention_bias", bool, False)

    def norm(size: int) -> NormSpec:
        return rms(size, eps, weight_offset=1.0)

    mlp = DenseSpec(
        intermediate_size=c.size("intermediate_size"),
        activation=activation(c, "hidden_activation", "gelu_pytorch_tanh"),
    )
    block = SequentialBlock(
        pre_attention=norm(hidden), post_attention=norm(hidden), pre_mlp=norm(hidden), post_mlp=norm(hidden)
    )

    def layer(i: int) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            position=positions[kinds[i]],
            qkv_bias=bias,
            out_bias=bias,
            window=window if kinds[i] == "sliding_attention" else None,
            softcap=softcap,
            qk_norm=norm(head_dim),
        )
        return LayerSpec(attention=attention, mlp=mlp, block=block)

    spec = ModelSpec(
        family="gemma3",
        vocab_size=c.size("vocab_size", 262208),
        hidden_size=hidden,
        max_position=max_position,
        layers=layers(count, layer),
        final_norm=norm(hidden),
        embed_scale=hidden**0.5,
        tied_embeddings=c.take("tie_word_embeddings", bool, True),
        logit_softcap=c.maybe("final_logit_softcapping", float),
    )
    c.require("use_bidirectional_attention", False)
    c.finish("cache_implementation")
    return spec


def _rope(c: ConfigReader, kind: str, head_dim: int, max_position: int) -> RopeSpec:
    """Before transformers 5, `rope_theta` and `rope_scaling` were the full layers', `rope_local_base_freq` the others'."""
    local = c.take("rope_local_base_freq", float, 10000.0)
    if kind == "sliding_attention" and "rope_parameters" not in c:
        return RopeSpec(theta=local, rotary_dim=head_dim)
    return rope(c, head_dim, theta=1_000_000.0, max_position=max_position, kind=kind)


def names(spec: ModelSpec) -> Names:
    return llama_names(spec, NORMS)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = llama_gguf_config(m)
    del config["hidden_act"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = m.size("attention.sliding_window", 1024)
    config["sliding_window_pattern"] = m.maybe("attention.sliding_window_pattern", int)
    config["rope_local_base_freq"] = m.maybe("rope.freq_base_swa", float)
    config["final_logit_softcapping"] = m.maybe("final_logit_softcapping", float)
    # The scale is not in the file: it is √head_dim, save for the 27B (62 layers), whose heads share √(hidden / heads).
    if config["num_hidden_layers"] == 62:
        config["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = m.size("attention.key_length")
    return config


FAMILIES = (
    Family(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        read=read,
        names=names,
        gguf=GGUFFamily(
            architecture="gemma3",
            config=gguf_config,
            names={
                **LLAMA_GGUF_NAMES,
                "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
                "blk.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
                "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
            },
            norms_plus_one=True,
        ),
    ),
    Family(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        read=read,
        names=names,
        nested_config="text_config",
        prefixes=("language_model.", "model.language_model."),
        ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    ),
)
