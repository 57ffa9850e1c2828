"""EXAONE 4: norms of the results of attention and MLP, and of q and k. In a model with windows,
three layers of four have one, and the fourth has no position embedding."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import after, decoder, gated, kinds, kinds_of_layers
from slipstream.spec.families.deepseek import SHARED, corrected_mixture
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import ModelSpec


def read(c: ConfigReader) -> ModelSpec:
    return _read(c, "exaone4", block=after)


def read_moe(c: ConfigReader) -> ModelSpec:
    """K-EXAONE: norms before attention and MLP, and DeepSeek V3's experts."""
    experts, shared = c.size("num_experts", 64), c.size("num_shared_experts", 1)
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    c.require("n_routed_experts", experts)
    c.require("n_shared_experts", shared)
    c.assume(n_routed_experts=experts, n_shared_experts=shared, moe_intermediate_size=1024)
    c.assume_missing(n_group=1, topk_group=1, num_experts_per_tok=8)
    first, moe, dense = (
        c.take("first_k_dense_replace", int, 1),
        corrected_mixture(c, weight_scale=2.5),
        gated(c),
    )
    made = kinds(
        c, ("dense", "sparse"), lambda i: "dense" if i < first else "sparse", "mlp_layer_types"
    )
    return _read(c, "exaone_moe", mlp=lambda i: dense if made[i] == "dense" else moe)


def _read(c: ConfigReader, family: str, **more: Any) -> ModelSpec:
    c.assume_missing(num_key_value_heads=32)
    window = c.take("sliding_window", int, 4096)
    if c.says("sliding_window") and "sliding_window" not in c:
        window = 0
    pattern = c.value("sliding_window_pattern") or 4
    if not isinstance(pattern, int):  # "LLLG" in EXAONE 4 32B
        if "layer_types" not in c and window:
            raise c.unsupported(
                "sliding_window_pattern", "must be a number, or layer_types must be there"
            )
        pattern = 4  # layer_types says which layers have a window
    found = kinds_of_layers(
        c, lambda i: "sliding_attention" if window and (i + 1) % pattern else "full_attention"
    )
    if not window and "sliding_attention" in found:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")
    return decoder(
        c,
        family,
        eps=1e-5,
        bias=(False, False),
        over="head",
        kinds=found,
        window=window or None,
        rotated=lambda i: not window or found[i] == "sliding_attention",
        **more,
    )


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. In models with windows the file flags each layer; llama.cpp
    itself assumes that every fourth has none."""
    config = llama_gguf_config(m)
    window, count = m.maybe("attention.sliding_window", int), config["num_hidden_layers"]
    every = [(i + 1) % 4 != 0 for i in range(count)]
    seen = m.take("attention.sliding_window_pattern", list, every) if window else [False] * count
    kinds = ["sliding_attention" if is_seen else "full_attention" for is_seen in seen]
    return {**config, "sliding_window": window or None, "layer_types": kinds}


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "post_attention": "post_attention_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}

FAMILIES = (
    Family(
        model_type="exaone4",
        architectures=("Exaone4ForCausalLM", "Exaone4ForSequenceClassification"),
        read=read,
        names=table(NAMES),
        gguf=GGUFFamily(architecture="exaone4", config=gguf_config, names=gguf_table()),
    ),
    Family(
        model_type="exaone_moe",
        architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        read=read_moe,
        names=table({**SHARED, "correction": {"weight": "mlp.e_score_correction_bias"}}),
        ignored=(r"mtp\..*",),  # MTP layers, which are not run
    ),
)
