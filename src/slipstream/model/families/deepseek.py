"""DeepSeek V2, V2-Lite and V3: latent attention, mixtures of experts with shared ones, routers that choose groups of experts
first (V2) or by corrected logistic scores (V3), YaRN that scales the scores as well."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from slipstream.model.families.base import ConfigReader, Family, Names
from slipstream.model.families.llama import ROTARY_BUFFERS
from slipstream.model.families.names import LLAMA, Theirs, table
from slipstream.model.families.pieces import before, gated, model, rms, rope
from slipstream.model.spec import (
    GroupLimit,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    SharedExpertSpec,
    YarnScaling,
)


def read_v2(c: ConfigReader) -> ModelSpec:
    c.require("norm_topk_prob", False)
    c.require("scoring_func", "softmax")
    method = c.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.unsupported("topk_method", "only 'greedy' or 'group_limited_greedy' is supported")
    groups = _groups(c, "best") if method == "group_limited_greedy" else None
    c.ignore("n_group", "topk_group")
    moe = _moe(c, normalize=False, groups=groups, weight_scale=c.take("routed_scaling_factor", float, 1.0))
    return _read(c, "deepseek_v2", moe, interleaved=True, dense=c.take("first_k_dense_replace", int, 0))


def read_v3(c: ConfigReader) -> ModelSpec:
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    moe = _moe(
        c,
        normalize=c.take("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=True,
        groups=_groups(c, "best_two"),
        weight_scale=c.take("routed_scaling_factor", float, 2.5),
    )
    c.ignore("num_nextn_predict_layers", "num_mtp_layers")  # layers that draft a second token
    interleaved = c.take("rope_interleave", bool, True)
    return _read(c, "deepseek_v3", moe, interleaved=interleaved, dense=c.take("first_k_dense_replace", int, 3))


def _groups(c: ConfigReader, by: Literal["best", "best_two"]) -> GroupLimit | None:
    limit = GroupLimit(num_groups=c.size("n_group"), num_chosen=c.size("topk_group"), by=by)
    return None if limit.num_groups == 1 else limit


def _moe(
    c: ConfigReader,
    *,
    normalize: bool,
    groups: GroupLimit | None,
    weight_scale: float,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    correction: bool = False,
) -> MoESpec:
    c.require("moe_layer_freq", 1)
    c.ignore("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")
    expert = dataclasses.replace(gated(c), intermediate_size=c.size("moe_intermediate_size"))
    num_shared = c.maybe("n_shared_experts", int)
    together = dataclasses.replace(expert, intermediate_size=expert.intermediate_size * (num_shared or 0))
    return MoESpec(
        num_experts=c.size("n_routed_experts"),
        num_experts_per_token=c.size("num_experts_per_tok"),
        expert=expert,
        normalize=normalize,
        scores=scores,
        correction=correction,
        groups=groups,
        weight_scale=weight_scale,
        shared=SharedExpertSpec(mlp=together) if num_shared else None,
    )


def _read(c: ConfigReader, family: str, moe: MoESpec, *, interleaved: bool, dense: int) -> ModelSpec:
    """The first `dense` layers have no experts."""
    num_heads, plain, rotary = c.size("num_attention_heads"), c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    c.require("num_key_value_heads", num_heads)
    c.require("head_dim", rotary)
    c.require("qk_head_dim", plain + rotary)
    c.require("mlp_bias", False)
    max_position = c.size("max_position_embeddings", 4096)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    position = rope(c, rotary, max_position=max_position, style="interleaved" if interleaved else "half")
    scale, scaling = (plain + rotary) ** -0.5, position.scaling
    if isinstance(scaling, YarnScaling) and scaling.factor > 1.0:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
    attention = LatentAttentionSpec(
        num_heads=num_heads,
        plain_dim=plain,
        value_dim=c.size("v_head_dim"),
        kv_rank=c.size("kv_lora_rank"),
        q_rank=c.maybe("q_lora_rank", int),
        scale=scale,
        position=position,
        eps=1e-6,  # of the latents' norms, whatever rms_norm_eps
        bias=c.take("attention_bias", bool, False),
    )
    mlp = gated(c)

    def layer(i: int) -> LayerSpec:
        return LayerSpec(attention=attention, mlp=mlp if i < dense else moe, block=before(norm))

    return model(c, family, layer, norm, max_position)


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "attention.q_latent": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.latent": "self_attn.kv_a_proj_with_mqa",
    "attention.k_norm": "self_attn.kv_a_layernorm",
    "attention.expand": "self_attn.kv_b_proj",
    "correction": {"weight": "mlp.gate.e_score_correction_bias"},
    "shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.down": "mlp.shared_experts.down_proj",
}


def names(spec: ModelSpec) -> Names:
    a = spec.layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    q = "self_attn.q_proj" if a.q_rank is None else "self_attn.q_b_proj"
    return table({**NAMES, "attention.q": q})(spec)


FAMILIES = (
    Family(
        model_type="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        read=read_v2,
        names=names,
        ignored=ROTARY_BUFFERS,
    ),
    Family(
        model_type="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        read=read_v3,
        names=names,
        ignored=(*ROTARY_BUFFERS, r"model\.layers\.61\..*"),  # V3's last layer drafts a second token
    ),
)
