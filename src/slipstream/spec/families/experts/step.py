"""Step 3.5 and 3.7, text only: windows whose layers have more query heads, a gate for each head, and positions of each kind of
layer. DeepSeek V3's experts, whose activations are clamped in some layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    HeadCounts,
    attention,
    before,
    clamped,
    gated,
    kinds,
    limits,
    model,
    rms,
    rope_of_kind,
    windows,
)
from slipstream.spec.families.experts.mixtures import mixture
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import LayerSpec, MLPSpec, ModelSpec, QKNormSpec, SharedExpertSpec

FULL, WINDOW = "full_attention", "sliding_attention"
KEYS = {
    "num_key_value_heads": "num_attention_groups",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
    "num_nextn_predict_layers": "num_mtp_layers",
}
PADDED = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta")
SAID = {
    **dict(use_head_wise_attn_gate=True, use_moe_router_bias=True, norm_expert_weight=True),
    **dict(moe_router_activation="sigmoid", zero_centered=True, att_impl_type="GQA", use_mfa=False),
    **dict(sink=False, moe_every_n_layer=1, use_bidirectional_attention=False, gating=True),
    **dict(attention_bias=False, mlp_bias=False, yarn_only_types=[FULL], hidden_act="silu"),
}
"""Further keys of the authors' config, with the only supported values."""


def read(c: ConfigReader) -> ModelSpec:
    c.require_all(**SAID)
    c.alias({**KEYS, "n_routed_experts": "moe_num_experts"})
    c.alias({"num_experts": "n_routed_experts"})
    c.assume_missing(
        num_key_value_heads=8, head_dim=128, hidden_act="silu", moe_intermediate_size=1280
    )
    c.ignore("need_fp32_gate", "max_seq_len", "mtp_layer_types", "mtp_mlp_layer_types")
    count, drafts = c.size("num_hidden_layers"), c.take("num_nextn_predict_layers", int, 0)
    for key in (*PADDED, "partial_rotary_factors"):  # the lists' ends belong to MTP layers
        listed = c.value(key)
        if isinstance(listed, list) and len(listed) == count + drafts:
            c.put(**{key: listed[:count]})
    seen, hidden = windows(c, FULL), c.size("hidden_size")
    eps, longest = c.take("rms_norm_eps", float, 1e-5), c.size("max_position_embeddings", 128000)
    norm, heads, size = (
        rms(hidden, eps, weight_offset=1.0),
        _heads(c, seen["kinds"]),
        c.size("head_dim"),
    )
    _describe_positions(c, seen["kinds"])
    rotary = {
        kind: rope_of_kind(c, kind, size, max_position=longest, theta=1e4, partial=1.0)
        for kind in {*seen["kinds"]}
    }
    scale, mlps = c.take("query_pre_attn_scalar", float, float(size)) ** -0.5, _mlps(c, count)

    def layer(i: int) -> LayerSpec:
        kind = seen["kinds"][i]
        of = attention(
            HeadCounts(heads[i], c.size("num_key_value_heads"), size),
            rotary[kind],
            scale=scale,
            window=seen["window"] if kind == WINDOW else None,
            qk_norm=QKNormSpec(over="head", eps=eps, weight_offset=1.0),
            gated="head",
        )
        return LayerSpec(attention=of, mlp=mlps[i], block=before(norm))

    return model(c, "step3p5", layer, norm, longest)


def _heads(c: ConfigReader, found: list[str]) -> list[int]:
    """Number of query heads in each layer. Layers with a window may have another number."""
    usual, other = c.size("num_attention_heads"), c.maybe("attention_other_setting", dict) or {}
    for key, of in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if other.get(key, c.value(of)) != c.value(of):
            raise c.unsupported("attention_other_setting", f"{key} must be {of}")
    own = c.size("num_sliding_attention_heads", other.get("num_attention_heads", usual))
    by_layer = c.maybe("per_layer_config", dict)
    if by_layer is None:
        return [own if kind == WINDOW else usual for kind in found]
    said = [by_layer.get(str(i), {}) for i in range(len(found))]
    if any(not isinstance(x, dict) or x.keys() - {"num_attention_heads"} for x in said):
        raise c.unsupported("per_layer_config", "only num_attention_heads can differ")
    return [ConfigReader(x).size("num_attention_heads", usual) for x in said]


def _describe_positions(c: ConfigReader, found: list[str]) -> None:
    """Converts the authors' lists, with a base and a rotated fraction for each layer, to `rope_parameters`. As in
    transformers, each kind of layer has the values of its first layer, and scaling only applies to layers without a
    window."""
    own, parts = c.maybe("rope_parameters", dict) or {}, c.maybe("partial_rotary_factors", list)
    bases, scaling = c.value("rope_theta"), c.maybe("rope_scaling", dict) or {}
    if not all(isinstance(own.get(kind), dict) for kind in {*found}):
        own = {}
        for kind in {*found}:
            i = found.index(kind)
            base = bases[i] if isinstance(bases, list) and i < len(bases) else bases
            own[kind] = {"rope_type": "default", "rope_theta": 1e4 if base is None else base}
            if parts:
                own[kind]["partial_rotary_factor"] = parts[i]
            if kind == FULL:
                own[kind] |= scaling
    c.put(rope_parameters=own, rope_theta=None, rope_scaling=None)


def _mlps(c: ConfigReader, count: int) -> list[MLPSpec]:
    named, dense = c.value("moe_layers_enum"), gated(c)
    listed = named.split(",") if isinstance(named, str) else named
    sparse = range(3, count) if listed is None else {int(i) for i in listed if str(i).strip()}
    made = kinds(
        c, ("dense", "sparse"), lambda i: "sparse" if i in sparse else "dense", "mlp_layer_types"
    )
    moe = mixture(
        c,
        **dict[str, Any](num_experts=288, per_token=8, size=1280),
        shared=c.size("share_expert_dim", 1280),
        weight_scale=c.take("moe_router_scaling_factor", float, 1.0),
    )
    of_experts, of_shared = (limits(c, key) for key in ("swiglu_limits", "swiglu_limits_shared"))

    def of(i: int) -> MLPSpec:
        if made[i] == "dense":
            return clamped(dense, of_shared[i])
        assert moe.shared is not None
        shared = SharedExpertSpec(mlp=clamped(moe.shared.mlp, of_shared[i]))
        return dataclasses.replace(moe, expert=clamped(moe.expert, of_experts[i]), shared=shared)

    return [of(i) for i in range(count)]


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "attention.qkv": tuple(f"self_attn.{x}_proj" for x in "gqkv"),
    "router": "moe.gate",
    "correction": {"weight": "moe.router_bias"},
    "experts.up": ("moe.gate_proj", "moe.up_proj"),
    "experts.down": "moe.down_proj",
    "shared.up": ("share_expert.gate_proj", "share_expert.up_proj"),
    "shared.down": "share_expert.down_proj",
}
UNREAD = (r"(vision_model|vit_large_projector)\..*", r"model\.layers\.4[5-9]\..*")
"""The image encoder, and the MTP layers, which follow the 45 layers of the published models."""

FAMILIES = (
    Family(
        model_type="step3p5",
        architectures=("Step3p5ForCausalLM",),
        read=read,
        names=table(NAMES),
        ignored=UNREAD,
    ),
    Family(
        model_type="step3p7",
        architectures=("Step3p7ForConditionalGeneration",),
        read=read,
        names=table(NAMES),
        nested_config="text_config",
        ignored=UNREAD,
    ),
)
