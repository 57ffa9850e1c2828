"""Llama 2 and 3, SmolLM 2 and 3, and any other `llama`; Mistral (all layers have a window), Ministral (some have), and Mixtral
(mixtures of experts)."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    attention,
    before,
    gated,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope,
)
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import LayerSpec, MLPSpec, ModelSpec, MoESpec


def read(c: ConfigReader) -> ModelSpec:
    """llama.cpp writes Mixtral as a `llama` with experts."""
    return read_mixtral(c) if "num_local_experts" in c else _read(c, "llama", windows=False)


def read_mistral(c: ConfigReader) -> ModelSpec:
    if not c.says("sliding_window"):
        c.assume(sliding_window=4096)
    return _read(c, "mistral", windows=True)


def read_ministral(c: ConfigReader) -> ModelSpec:
    return _read(c, "ministral", windows=True)


def read_smollm3(c: ConfigReader) -> ModelSpec:
    """Every fourth layer has no position embedding."""
    count, every = c.size("num_hidden_layers"), c.size("no_rope_layer_interval", 4)
    rotated = c.take("no_rope_layers", list, [int((i + 1) % every != 0) for i in range(count)])
    c.require("use_sliding_window", False)
    c.ignore("max_window_layers")  # of windows that are off
    if len(rotated) != count or not set(rotated) <= {0, 1}:
        raise c.unsupported("no_rope_layers", f"must be {count} of 0 or 1")
    return _read(c, "smollm3", windows=False, rotated=rotated, tied=True, theta=2e6)


def read_mixtral(c: ConfigReader) -> ModelSpec:
    expert = gated(c)
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=expert,
        normalize=True,
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    return _read(c, "mixtral", windows=True, mlp=moe, eps=1e-5, theta=1e6)


def _read(
    c: ConfigReader,
    family: str,
    *,
    windows: bool,
    mlp: MLPSpec | None = None,
    rotated: list[int] | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    theta: float = 1e4,
) -> ModelSpec:
    """`rotated`: 1 for layers with rotary embedding, 0 for others; None: all have it. `tied`, `eps` and `theta` are
    defaults."""
    h = heads(c)
    max_position = c.size("max_position_embeddings", 2048)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, eps))
    position = rope(c, h.head_dim, theta=theta, max_position=max_position)
    bias = c.take("attention_bias", bool, False)
    mlp = mlp or gated(c, bias=c.take("mlp_bias", bool, False))
    window = c.maybe("sliding_window", int) if windows else None
    kinds = kinds_of_layers(c, "full_attention" if window is None else "sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")

    def layer(i: int) -> LayerSpec:
        seen = window if kinds[i] == "sliding_attention" else None
        at = position if rotated is None or rotated[i] else None
        return LayerSpec(
            attention=attention(h, at, qkv_bias=bias, out_bias=bias, window=seen),
            mlp=mlp,
            block=before(norm),
        )

    return model(c, family, layer, norm, max_position, tied=tied)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = llama_gguf_config(m, experts=True)
    if m.take("expert_count", int, 0):
        return {
            **config,
            "num_local_experts": m.size("expert_count"),
            "num_experts_per_tok": m.size("expert_used_count"),
        }
    m.require("expert_used_count", 0)
    return config


names = table(LLAMA)
MIXTRAL: dict[str, Theirs] = {
    **LLAMA,
    "router": "block_sparse_moe.gate",
    "experts.up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "experts.down": "block_sparse_moe.experts.{e}.w2",
}
UNPERMUTED = gguf_table(changes={"attention.qkv": "unpermute"})
# The default of smollm3, not its file, says that every fourth layer has no position embedding.
GGUFS = {  # llama.cpp writes Mistral, without its window, and Mixtral as llama
    read: GGUFFamily(architecture="llama", config=gguf_config, names=UNPERMUTED),
    read_smollm3: GGUFFamily(architecture="smollm3", config=llama_gguf_config, names=UNPERMUTED),
}

FAMILIES = tuple(
    Family(
        model_type=model_type,
        architectures=(architecture, architecture.replace("CausalLM", "SequenceClassification")),
        read=reader,
        names=table(MIXTRAL) if reader is read_mixtral else names,
        gguf=GGUFS.get(reader),
    )
    for model_type, architecture, reader in (
        ("llama", "LlamaForCausalLM", read),
        ("mistral", "MistralForCausalLM", read_mistral),
        ("ministral", "MinistralForCausalLM", read_ministral),
        ("mixtral", "MixtralForCausalLM", read_mixtral),
        ("smollm3", "SmolLM3ForCausalLM", read_smollm3),
    )
)
