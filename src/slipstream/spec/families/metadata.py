"""Makes Hugging Face configs from GGUF metadata as llama.cpp writes it. No torch."""

from __future__ import annotations

import math
from typing import Any

from slipstream.spec.families.base import ConfigReader


def gguf_config(
    m: ConfigReader,
    *,
    partial: bool = False,
    experts: bool = False,
    causal: bool = True,
    by_layer: bool = False,
) -> dict[str, Any]:
    """Reads the keys that all architectures share, as a config. A value is None if the file lacks it.
    Features of llama.cpp that these models lack raise an error.

    `partial`: only a part of each head may be rotated. `experts`: the caller reads the keys of experts.
    `by_layer`: the number of kv heads is given for each layer, 0 for layers without attention (`kv_heads`).
    """
    config: dict[str, Any] = {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": (
            max(kv_heads(m)) if by_layer else m.maybe("attention.head_count_kv", int)
        ),
        "head_dim": m.maybe("attention.key_length", int),
        "max_position_embeddings": m.size("context_length"),
        "rope_theta": m.take(
            "rope.freq_base", float, 10000.0
        ),  # llama.cpp's default for all families
    }
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    m.require("attention.value_length", head_dim)
    m.require("attention.causal", causal)
    if partial:
        config["partial_rotary_factor"] = m.size("rope.dimension_count", head_dim) / head_dim
    rotary_dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
    m.require("rope.dimension_count", rotary_dim)
    config |= scaling_gguf_config(m, rotary_dim)
    if not experts:
        m.require("expert_count", 0)
        m.require("expert_used_count", 0)
    return config


def kv_heads(m: ConfigReader) -> list[int]:
    """Number of kv heads of each layer; 0 for layers without attention. A single number in the file applies to all
    layers."""
    return numbers_by_layer(m, "attention.head_count_kv")


def numbers_by_layer(m: ConfigReader, key: str) -> list[int]:
    count, given = m.size("block_count"), m.value(key)
    found = given if isinstance(given, list) else [given] * count
    if len(found) != count or not all(type(n) is int and n >= 0 for n in found):
        raise m.unsupported(key, f"must be a number, or {count} of them")
    return found


def encoder_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads the config of BERT and similar encoders. `spec.pooling` reads how texts are pooled."""
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
        # ggml drops a dimension of size 1, so the single row of XLM-R is a vector in quantized files.
        "type_vocab_size": 0 if types is None else types[0] if len(types) > 1 else 1,
    }


def llama_gguf_config(
    m: ConfigReader,
    *,
    partial: bool = False,
    experts: bool = False,
    causal: bool = True,
    by_layer: bool = False,
) -> dict[str, Any]:
    """Reads the config of a model with Llama's RMS norms and gated MLPs."""
    # llama.cpp's row order, which `unpermute` undoes
    m.require("tensor_data_layout", "Meta AI original pth")
    eps = m.take("attention.layer_norm_rms_epsilon", float)
    config = gguf_config(m, partial=partial, experts=experts, causal=causal, by_layer=by_layer)
    num_heads = config["num_attention_heads"]  # llama.cpp's defaults, not the family's
    config["num_key_value_heads"] = config["num_key_value_heads"] or num_heads
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // num_heads
    return _present({**config, "rms_norm_eps": eps, "hidden_act": "silu"})


SCALINGS = ("none", "linear", "yarn", "longrope")


def scaling_gguf_config(m: ConfigReader, rotary_dim: int) -> dict[str, Any]:
    """`rope_scaling` as llama.cpp derives it; empty without scaling.

    1. A factor without a type is linear, and so is one under the key of older files, `rope.scale_linear`. 0 stands for none.
    2. Tensors additionally divide each frequency: `rope_freqs` (Llama 3.1's) for all lengths, or LongRoPE's two sets.
    3. `attn_factor` multiplies sines and cosines. YaRN has its own additional factor.
    4. `yarn_attn_factor` is ignored, as in llama.cpp, because converters write other values there
       (DeepSeek-R1-0528-Qwen3-8B). The two betas are applied; llama.cpp ignores them in most architectures.
    """
    kind = m.take("rope.scaling.type", str, "linear")
    if kind not in SCALINGS:
        raise m.unsupported("rope.scaling.type", f"only {', '.join(SCALINGS)} are supported")
    key = "rope.scaling.factor" if "rope.scaling.factor" in m else "rope.scale_linear"
    factor = m.take(key, float, 0.0) or 1.0
    if factor < 0:
        raise m.unsupported(key, "must not be negative")
    m.ignore("rope.scale_linear", "rope.scaling.yarn_attn_factor")
    m.require("rope.scaling.alpha", 0.0)
    m.require("rope.scaling.yarn_ext_factor", -1.0, 1.0)  # below 0: unset
    beta_fast = m.take("rope.scaling.yarn_beta_fast", float, 32.0)
    beta_slow = m.take("rope.scaling.yarn_beta_slow", float, 1.0)
    attention = m.take("rope.scaling.attn_factor", float, 1.0)
    original = m.take("rope.scaling.original_context_length", int, 0) or m.size("context_length")
    freqs, long = (m.maybe(f"rope_{n}.weight", list) for n in ("freqs", "factors_long"))
    short = long if long is None else m.take("rope_factors_short.weight", list)
    short, long = (short, long) if freqs is None else (freqs, freqs)
    if kind == "yarn":
        if long is not None:
            raise m.unsupported(
                "rope.scaling.type", "is not supported with frequencies that tensors divide"
            )
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        scaling |= {"beta_fast": beta_fast, "beta_slow": beta_slow}
        if attention != 1.0:
            scaling["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    elif long is not None or attention != 1.0:
        divided = 1.0 if kind == "none" else factor
        ones = [1.0] * (rotary_dim // 2)
        scaling = {"rope_type": "longrope", "attention_factor": attention}
        scaling["short_factor"] = [divided * x for x in (ones if short is None else short)]
        scaling["long_factor"] = [divided * x for x in (ones if long is None else long)]
    elif kind == "none" or factor == 1.0:
        return {}
    else:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": original}}


def layer_norm_gguf_config(m: ConfigReader, eps: str, *, partial: bool = False) -> dict[str, Any]:
    """Reads the config of a model with layer norms. `eps` is the config's key of their epsilon."""
    return _present(
        {**gguf_config(m, partial=partial), eps: m.take("attention.layer_norm_epsilon", float)}
    )


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}
