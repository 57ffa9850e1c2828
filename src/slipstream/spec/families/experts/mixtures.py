"""Mixtures of experts by sigmoid scores, most with windows: Trinity (AFMoE), Hunyuan 3, Mellum 2, Flint, MiMo V2."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    HeadCounts,
    around,
    attention,
    before,
    called,
    decoder,
    gated,
    heads,
    kinds,
    model,
    rms,
    rope_of_kind,
    windows,
)
from slipstream.spec.families.deepseek import SHARED
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    QKNormSpec,
    SharedExpertSpec,
)
from slipstream.spec.parameters import Scale

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
    """A mixture of experts with sigmoid scores. `num_experts`, `per_token`, `size`: defaults.
    `shared`: size of the shared expert."""
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
    """Trinity: gated attention, norms before and after, position embeddings only in layers with a window."""
    c.assume_missing(head_dim=128)
    every, num_dense = c.size("global_attn_every_n_layers", 4), c.take("num_dense_layers", int, 1)
    shared = c.take("num_shared_experts", int, 2) * c.size("moe_intermediate_size", 1408)
    scale = c.take("route_scale", float, 1.0)
    sizes: dict[str, Any] = dict(num_experts=64, per_token=6, size=1408)
    dense, moe = gated(c), mixture(c, **sizes, shared=shared, weight_scale=scale)
    c.require_all(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    c.require_all(num_expert_groups=1, num_limited_groups=1)
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


def read_kolibri(c: ConfigReader) -> ModelSpec:
    """Kolibri: EXAONE 4's attention with norms before and after, and experts whose correction is added to the logits."""
    c.assume_missing(head_dim=128, num_key_value_heads=4)
    c.put(intermediate_size=c.size("moe_intermediate_size", 512))
    sizes: dict[str, Any] = dict(num_experts=384, per_token=6, size=512)
    moe = mixture(c, **sizes, shared=c.size("shared_expert_intermediate_size", 512))
    moe = dataclasses.replace(
        moe, correction="logits", normalize=c.take("norm_topk_prob", bool, False)
    )
    seen = windows(c, lambda i: WINDOW if (i + 1) % 5 else FULL, 513)
    return decoder(
        c,
        "kolibri1",
        max_position=262144,
        block=around,
        mlp=moe,
        over="head",
        rotated=lambda i: seen["window"] is None or seen["kinds"][i] == WINDOW,
        **seen,
    )


def read_laguna(c: ConfigReader) -> ModelSpec:
    """Laguna: softplus gates on attention; each kind of layer has its own number of query heads and rotary embedding."""
    c.assume_missing(
        **dict(head_dim=128, num_attention_heads=48, num_key_value_heads=8, hidden_size=2048),
        **dict(num_hidden_layers=40, intermediate_size=8192),
    )
    c.require("attention_bias", False)
    c.require("moe_apply_router_weight_on_input", False)
    c.require("moe_router_logit_softcapping", 0, 0.0)
    gating = c.value("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise c.unsupported("gating", "must be true, per-head or per-element")
    sizes: dict[str, Any] = dict(num_experts=256, per_token=8, size=512)
    scale = c.take("moe_routed_scaling_factor", float, 1.0)
    shared = c.size("shared_expert_intermediate_size", 512)
    moe = mixture(c, **sizes, shared=shared, weight_scale=scale)
    mlps, seen = by_kind(c, gated(c), moe, 1), windows(c, FULL, 512)
    count, usual = c.size("num_hidden_layers"), c.size("num_attention_heads")
    num_heads = c.take("num_attention_heads_per_layer", list, [usual] * count)
    if len(num_heads) != count or not all(type(n) is int and n > 0 for n in num_heads):
        raise c.unsupported("num_attention_heads_per_layer", f"must be {count} whole numbers")
    longest, size = c.size("max_position_embeddings", 131072), c.size("head_dim")
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    default = {
        FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
    }
    rotary = {
        kind: rope_of_kind(
            c, kind, size, max_position=longest, theta=1e4, default=default, partial=1.0
        )
        for kind in {*seen["kinds"]}
    }

    def layer(i: int) -> LayerSpec:
        kind = seen["kinds"][i]
        of = attention(
            HeadCounts(num_heads[i], c.size("num_key_value_heads"), size),
            rotary[kind],
            window=seen["window"] if kind == WINDOW else None,
            qk_norm=QKNormSpec(over="head", eps=eps),
            gated=True if gating == "per-element" else "head",
            gate="softplus",
        )
        return LayerSpec(attention=of, mlp=mlps[i], block=before(norm))

    return model(c, "laguna", layer, norm, longest)


def read_hy_v3(c: ConfigReader) -> ModelSpec:
    """Hunyuan 3: Qwen 3's attention, DeepSeek V3's experts without groups. Its MTP layer is not run."""
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    shared = c.take("num_shared_experts", int, 1) * c.size("moe_intermediate_size", 1536)
    scale = c.take("router_scaling_factor", float, 2.826)
    sizes: dict[str, Any] = dict(num_experts=192, per_token=8, size=1536)
    moe = mixture(c, **sizes, shared=shared, weight_scale=scale)
    c.ignore("enable_moe_fp32_combine")  # expert outputs are always summed in float32
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
    """Mellum 2: Qwen 3's mixture, with windows, and a rotary embedding for each kind of layer."""
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
    """Flint: norms of q and k, attention sinks, and position embeddings only in layers with a window."""
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


def read_mimo_v2(c: ConfigReader) -> ModelSpec:
    """MiMo V2 Flash: windows with sinks and twice as many kv heads, values narrower than keys, a part of each head rotated."""
    c.alias({"rms_norm_eps": "layernorm_epsilon", "num_experts": "n_routed_experts"})
    c.assume_missing(head_dim=192, num_key_value_heads=4, rope_theta=5e6, swa_rope_theta=1e4)
    h, count, value_dim = heads(c), c.size("num_hidden_layers"), c.size("v_head_dim", 128)
    if value_dim > h.head_dim:
        raise c.unsupported("v_head_dim", f"must be at most head_dim ({h.head_dim})")
    for key, names in (("hybrid_layer_pattern", (FULL, WINDOW)), ("moe_layer_freq", DENSE_SPARSE)):
        listed = c.maybe(key, list)
        if listed is not None:
            ours = "layer_types" if key[0] == "h" else "mlp_layer_types"
            c.assume(**{ours: [names[bool(x)] for x in listed]})
    c.require_all(swa_num_attention_heads=h.num_heads, swa_head_dim=h.head_dim)
    c.require_all(swa_num_key_value_heads=2 * h.num_kv_heads, swa_v_head_dim=value_dim)
    c.require_all(add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True)
    c.require_all(n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc")
    c.require("norm_topk_prob", True)
    c.require("n_shared_experts")
    c.ignore("attention_chunk_size", "hybrid_block_size")
    before_it = c.maybe("sliding_window_size", int)
    if before_it is not None:
        c.put(sliding_window=before_it + 1)
    seen = windows(c, lambda i: FULL if i == 0 or (i + 1) % 6 == 0 else WINDOW, 129)
    part, bases = c.take("partial_rotary_factor", float, 0.334), ("rope_theta", "swa_rope_theta")
    default = {
        kind: {
            "rope_type": "default",
            "rope_theta": c.take(key, float),
            "partial_rotary_factor": part,
        }
        for kind, key in zip((FULL, WINDOW), bases, strict=True)
    }
    longest = c.size("max_position_embeddings", 131072)
    rotary = {
        kind: rope_of_kind(
            c, kind, h.head_dim, max_position=longest, theta=1e4, default=default, partial=part
        )
        for kind in {*seen["kinds"]}
    }
    scale = c.take("routed_scaling_factor", float, 1.0)
    moe = mixture(c, **dict[str, Any](num_experts=256, per_token=8, size=2048), weight_scale=scale)
    mlps, bias = by_kind(c, gated(c), moe, 1), c.take("attention_bias", bool, False)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-5))
    value_scale = c.take("attention_value_scale", float, 0.707)
    if c.says("attention_value_scale") and "attention_value_scale" not in c:
        value_scale = 1.0

    def layer(i: int) -> LayerSpec:
        kind = seen["kinds"][i]
        is_window = kind == WINDOW
        of = attention(
            h._replace(num_kv_heads=h.num_kv_heads * (1 + is_window)),
            rotary[kind],
            qkv_bias=bias,
            window=seen["window"] if is_window else None,
            sinks=is_window,
            value_dim=value_dim if value_dim < h.head_dim else None,
            value_scale=value_scale,
        )
        return LayerSpec(attention=of, mlp=mlps[i], block=before(norm))

    assert count == len(mlps)
    return model(c, "mimo_v2_flash", layer, norm, longest)


DENSE_SPARSE = ("dense", "sparse")


def _scaled(layer: LayerSpec, part: int) -> Scale | None:
    """Multiplies the output product's weight by the factor of the values, if the model has one."""
    a, rows = layer.attention, layer.norms["pre_attention"].size
    assert isinstance(a, AttentionSpec)
    return None if a.value_scale == 1.0 else Scale(((rows, a.value_scale),))


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
    "mimo_v2_flash": {**SHARED, "attention.sinks": {"weight": "self_attn.attention_sink_bias"}},
    "mellum": LLAMA,
    "kolibri1": {
        **SHARED,
        "post_attention": "post_attn_norm",
        "post_mlp": "post_ffn_norm",
        "correction": {"weight": "moe.router.expert_bias"},
    },
    "laguna": {
        **LLAMA,
        "attention.qkv": tuple(f"self_attn.{x}_proj" for x in "gqkv"),
        "correction": {"weight": "mlp.experts.e_score_correction_bias"},
    },
    "flint": {**LLAMA, "attention.sinks": {"weight": "self_attn.softmax_offset"}},
}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture,),
        read=reader,
        names=table(
            NAMES[name], changes={"attention.out": _scaled} if reader is read_mimo_v2 else None
        ),
        ignored=ignored,
    )
    for name, architecture, reader, ignored in (
        ("afmoe", "AfmoeForCausalLM", read_afmoe, ()),
        # MTP layers
        ("hy_v3", "HYV3ForCausalLM", read_hy_v3, (r"model\.layers\.80\..*",)),
        ("mellum", "MellumForCausalLM", read_mellum, (r"mtp\..*",)),
        ("flint", "FlintForCausalLM", read_flint, ()),
        ("kolibri1", "Kolibri1ForCausalLM", read_kolibri, ()),
        ("laguna", "LagunaForCausalLM", read_laguna, ()),
        ("mimo_v2_flash", "MiMoV2FlashForCausalLM", read_mimo_v2, (r"model\.mtp\..*",)),
    )
)
