"""Mixtures of experts whose attention has windows in most layers: Trinity (AFMoE), Hunyuan 3, Mellum 2, Flint."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    around,
    called,
    decoder,
    gated,
    kinds,
    rope_of_kind,
    windows,
)
from slipstream.spec.families.deepseek import SHARED
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import DenseSpec, MLPSpec, ModelSpec, MoESpec, SharedExpertSpec

FULL, WINDOW = "full_attention", "sliding_attention"


def mixture(
    c: ConfigReader,
    *,
    num_experts: int,
    per_token: int,
    size: int,
    shared: int | None = None,
    corrected: bool = True,
    weight_scale: float = 1.0,
) -> MoESpec:
    """Experts by sigmoid scores. `num_experts`, `per_token`, `size`: defaults. `shared`: the size of the shared expert."""
    c.ignore("output_router_logits", "router_aux_loss_coef")
    expert = dataclasses.replace(gated(c), intermediate_size=c.size("moe_intermediate_size", size))
    always = None if not shared else dataclasses.replace(expert, intermediate_size=shared)
    return MoESpec(
        num_experts=c.size(called(c, "num_experts", "num_local_experts"), num_experts),
        num_experts_per_token=c.size("num_experts_per_tok", per_token),
        expert=expert,
        normalize=True,
        scores="sigmoid",
        correction=corrected,
        weight_scale=weight_scale,
        shared=None if always is None else SharedExpertSpec(mlp=always),
    )


def by_kind(c: ConfigReader, dense: DenseSpec, moe: MoESpec, first: int) -> list[MLPSpec]:
    """The MLP of each layer by `mlp_layer_types`. Without it the first layers are dense."""
    made = kinds(
        c, ("dense", "sparse"), lambda i: "dense" if i < first else "sparse", "mlp_layer_types"
    )
    return [dense if kind == "dense" else moe for kind in made]


def read_afmoe(c: ConfigReader) -> ModelSpec:
    """Trinity: gated attention, norms before and after, positions in layers with a window alone."""
    c.assume_missing(head_dim=128)
    every, num_dense = c.size("global_attn_every_n_layers", 4), c.take("num_dense_layers", int, 1)
    shared = c.take("num_shared_experts", int, 2) * c.size("moe_intermediate_size", 1408)
    scale = c.take("route_scale", float, 1.0)
    sizes: dict[str, Any] = dict(num_experts=64, per_token=6, size=1408)
    dense, moe = gated(c), mixture(c, **sizes, shared=shared, weight_scale=scale)
    for key, value in (("score_func", "sigmoid"), ("route_norm", True)):
        c.require(key, value)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        c.require(key, 1)
    c.ignore("load_balance_coeff", "use_grouped_mm")
    seen = windows(c, lambda i: WINDOW if (i + 1) % every else FULL, 1024)
    return decoder(
        c,
        "afmoe",
        max_position=16384,
        eps=1e-5,
        block=around,
        bias=(c.take("attention_bias", bool, False),) * 2,
        mlp=lambda i: dense if i < num_dense else moe,
        over="head",
        rotated=lambda i: seen["kinds"][i] == WINDOW,
        more={"gated": True},
        embed_scale=c.size("hidden_size") ** 0.5 if c.take("mup_enabled", bool, False) else 1.0,
        **seen,
    )


def read_hy_v3(c: ConfigReader) -> ModelSpec:
    """Hunyuan 3: Qwen 3's attention, DeepSeek V3's experts without groups. Its layer that drafts tokens is not run."""
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    shared = c.take("num_shared_experts", int, 1) * c.size("moe_intermediate_size", 1536)
    scale = c.take("router_scaling_factor", float, 2.826)
    sizes: dict[str, Any] = dict(num_experts=192, per_token=8, size=1536)
    moe = mixture(c, **sizes, shared=shared, weight_scale=scale)
    c.ignore("enable_moe_fp32_combine")  # sums of experts are float32
    mlps = by_kind(c, gated(c, bias=c.take("mlp_bias", bool, False)), moe, 1)
    positions = {"theta": 11158840.0}
    return decoder(
        c,
        "hy_v3",
        max_position=131072,
        eps=1e-5,
        mlp=lambda i: mlps[i],
        over="head",
        positions=positions,
    )


def read_mellum(c: ConfigReader) -> ModelSpec:
    """Mellum 2: Qwen 3's mixture, with windows, and positions of each kind of layer."""
    c.assume_missing(head_dim=128, num_key_value_heads=4)
    longest, head_dim = c.size("max_position_embeddings", 131072), c.size("head_dim")
    moe = mixture(c, num_experts=64, per_token=8, size=896, corrected=False)
    normal = c.take("norm_topk_prob", bool, True)
    moe = dataclasses.replace(moe, scores="softmax", normalize=normal)
    mlps, seen = by_kind(c, gated(c), moe, 0), windows(c, FULL, 1024)
    rotary = {
        kind: rope_of_kind(
            c, kind, head_dim, max_position=longest, theta=1e4, default=MELLUM_ROPES, partial=1.0
        )
        for kind in {*seen["kinds"]}
    }
    c.ignore(
        *("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    )
    return decoder(
        c,
        "mellum",
        max_position=longest,
        mlp=lambda i: mlps[i],
        over="head",
        position=lambda i: rotary[seen["kinds"][i]],
        **seen,
    )


MELLUM_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
}


def read_flint(c: ConfigReader) -> ModelSpec:
    """Flint: norms of q and k, sinks, and positions in layers with a window alone."""
    c.assume_missing(head_dim=128, num_key_value_heads=4)
    count = c.size("num_hidden_layers")
    dense = gated(c)
    moe = mixture(
        c,
        **dict(num_experts=256, per_token=6, size=512),
        shared=c.size("shared_expert_intermediate_size", 1024),
        corrected=False,
    )
    moe = dataclasses.replace(moe, normalize=c.take("norm_topk_prob", bool, True))
    step, plain = c.size("decoder_sparse_step", 1), c.take("mlp_only_layers", list, [0, 1])
    seen = windows(c, lambda i: FULL if i < 2 or i % 4 == 1 or i == count - 1 else WINDOW, 513)
    return decoder(
        c,
        "flint",
        max_position=262144,
        mlp=lambda i: dense if i in plain or (i + 1) % step else moe,
        over="head",
        rotated=lambda i: seen["kinds"][i] == WINDOW,
        more={"sinks": True},
        **seen,
    )


NAMES: dict[str, dict[str, Theirs]] = {
    "afmoe": {
        **SHARED,
        "attention.qkv": tuple(f"self_attn.{x}_proj" for x in ("gate", "q", "k", "v")),
        "post_attention": "post_attention_layernorm",
        "pre_mlp": "pre_mlp_layernorm",
        "post_mlp": "post_mlp_layernorm",
        "router": "mlp.router.gate",
        "correction": {"weight": "mlp.expert_bias"},
    },
    "hy_v3": {
        **LLAMA,
        "router": "mlp.router.gate",
        "correction": {"weight": "mlp.expert_bias"},
        "shared.up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "shared.down": "mlp.shared_mlp.down_proj",
    },
    "mellum": LLAMA,
    "flint": {**LLAMA, "attention.sinks": {"weight": "self_attn.softmax_offset"}},
}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=reader,
        names=table(NAMES[name]),
        ignored=ignored,
    )
    for name, architecture, reader, ignored in (
        ("afmoe", "AfmoeForCausalLM", read_afmoe, ()),
        # layers that draft tokens
        ("hy_v3", "HYV3ForCausalLM", read_hy_v3, (r"model\.layers\.80\..*",)),
        ("mellum", "MellumForCausalLM", read_mellum, (r"mtp\..*",)),
        ("flint", "FlintForCausalLM", read_flint, ()),
    )
)
