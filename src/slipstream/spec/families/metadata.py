"""Makes Hugging Face configs from GGUF metadata as llama.cpp writes it. No torch."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader


def gguf_config(
    m: ConfigReader,
    *,
    partial: bool = False,
    experts: bool = False,
    scaled: bool = False,
    causal: bool = True,
) -> dict[str, Any]:
    """The keys that all architectures share. A value is None if the file lacks it. Features of llama.cpp that these models
    don't have raise an error.

    `partial`: a part of each head may be rotated. `experts`: the caller reads the keys of experts. `scaled`: the caller reads
    the keys of rope scaling.
    """
    config: dict[str, Any] = {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": m.maybe("attention.head_count_kv", int),
        "head_dim": m.maybe("attention.key_length", int),
        "max_position_embeddings": m.size("context_length"),
        "rope_theta": m.take(
            "rope.freq_base", float, 10000.0
        ),  # llama.cpp's default, whatever the family's
    }
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    m.require("attention.value_length", head_dim)
    m.require("attention.causal", causal)
    if partial:
        config["partial_rotary_factor"] = m.size("rope.dimension_count", head_dim) / head_dim
    m.require("rope.dimension_count", int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if not scaled:
        m.require("rope.scaling.type", "none")
        m.require("rope.scaling.factor", 0.0, 1.0)  # llama.cpp takes 0 for none
    m.require("rope.scale_linear", 0.0, 1.0)  # its name in older files
    if not experts:
        m.require("expert_count", 0)
        m.require("expert_used_count", 0)
    return config


def encoder_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """BERT and similar encoders. `spec.pooling` reads how texts are pooled."""
    m.require("attention.causal", False)
    types, num_heads = m.maybe("token_types.weight", list), m.size("attention.head_count")
    m.require("attention.head_count_kv", num_heads)
    return {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": num_heads,
        "max_position_embeddings": m.size("context_length"),
        "layer_norm_eps": m.take("attention.layer_norm_epsilon", float),
        # ggml drops a dimension of 1: in llama.cpp's quantised files the single row of XLM-R is a vector.
        "type_vocab_size": 0 if types is None else types[0] if len(types) > 1 else 1,
    }


def llama_gguf_config(
    m: ConfigReader,
    *,
    partial: bool = False,
    experts: bool = False,
    scaled: bool = False,
    causal: bool = True,
) -> dict[str, Any]:
    """Models with Llama's RMS norms and gated MLPs."""
    m.require(
        "tensor_data_layout", "Meta AI original pth"
    )  # the order of rows that `unpermute` undoes
    eps = m.take("attention.layer_norm_rms_epsilon", float)
    config = gguf_config(m, partial=partial, experts=experts, scaled=scaled, causal=causal)
    num_heads = config["num_attention_heads"]  # llama.cpp's defaults, not the family's
    config["num_key_value_heads"] = config["num_key_value_heads"] or num_heads
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // num_heads
    return _present({**config, "rms_norm_eps": eps, "hidden_act": "silu"})


def yarn_gguf_config(m: ConfigReader, **more: Any) -> dict[str, Any]:
    """YaRN, if the file has it. `more`: what llama.cpp knows from the architecture."""
    if m.take("rope.scaling.type", str, "none") == "none":
        return {}
    m.require("rope.scaling.type", "yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": m.take("rope.scaling.factor", float),
        "original_max_position_embeddings": m.size("rope.scaling.original_context_length"),
        "beta_fast": m.take("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": m.take("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    return {"rope_scaling": {**scaling, **more}}


def factors_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Divisors of each rotary frequency, if the file has such tensors: Llama 3.1's for all lengths, or LongRoPE's two sets."""
    long = m.maybe("rope_factors_long.weight", list)
    if long is not None:
        short, factor = (
            m.take("rope_factors_short.weight", list),
            m.take("rope.scaling.attn_factor", float),
        )
        original = m.size("rope.scaling.original_context_length")
    elif (long := m.maybe("rope_freqs.weight", list)) is not None:
        short, factor, original = long, 1.0, m.size("context_length")
    else:
        return {}
    factors = {"short_factor": short, "long_factor": long, "attention_factor": factor}
    return {
        "rope_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            **factors,
        }
    }


def layer_norm_gguf_config(m: ConfigReader, eps: str, *, partial: bool = False) -> dict[str, Any]:
    """Models with layer norms. `eps` is the config's key of their epsilon."""
    return _present(
        {**gguf_config(m, partial=partial), eps: m.take("attention.layer_norm_epsilon", float)}
    )


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}
