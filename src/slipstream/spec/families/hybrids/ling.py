"""Ling and Ring (Bailing).

1. `bailing_moe` (Ling 2) has GLM-4.5's layers with Sarvam's names.
2. `bailing_hybrid` (Ling 3) has delta rules with bounded per-channel decay, and in the last layer of each group latent
   attention with a gate per head. Its experts are DeepSeek V3's, clamped in some layers. transformers lacks these
   clamps. They follow SGLang and llama.cpp; without them answers are worse. No torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families import glm
from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    before,
    clamped,
    gated,
    kinds,
    limits,
    model,
    rms,
    rope,
)
from slipstream.spec.families.deepseek import SARVAM_KEYS, scale_of
from slipstream.spec.families.hybrids.kimi_linear import NAMES as KIMI
from slipstream.spec.families.hybrids.kimi_linear import latent_attention, mixture
from slipstream.spec.families.mtp import LING
from slipstream.spec.families.names import Theirs, gguf_table, of_conv, table
from slipstream.spec.model import (
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    SharedExpertSpec,
)

FULL, LINEAR = "full_attention", "linear_attention"
KEYS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "num_shared_experts": "n_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
SAID = {
    **dict(
        no_kda_lora=True, use_kda_lora=False, linear_attention="kda", kda_allow_neg_eigval=False
    ),
    **dict(gated_attention_proj_granularity_type="head_wise", use_mla_nope=False, use_bias=False),
    **dict(use_qkv_bias=False, rope_interleave=True, value_norm=False, up_proj_norm=False),
    **dict(
        score_function="sigmoid", scoring_func="sigmoid", topk_method="noaux_tc", use_nGPT=False
    ),
    **dict(moe_router_enable_expert_bias=True, scale_router_input=False, pregate_inference=False),
}
"""Further keys of the authors' config, with the only supported values."""
UNUSED = (
    *("use_qk_norm", "linear_silu", "max_window_layers", "seq_aux", "router_dtype", "mtp_use_kda"),
    *("group_norm_size", "num_kv_heads_for_linear_attn", "mtp_loss_scaling_factor"),
    *("output_dropout", "partial_rotary_factor", "num_nextn_predict_layers", "num_mtp_layers"),
    *("first_k_dense_replace", "layer_group_size", "head_dim"),
    *(f"pregate_{x}" for x in ("cross_token", "enabled", "hidden", "init_router", "start_layer")),
    *(f"pregate_{x}" for x in ("use_prev_token", "use_prev_topk", "shallow_hidden")),
    *(f"pregate_{x}" for x in ("shallow_layers", "shallow_loss_weight", "opd_ce_weight")),
    *(f"pregate_opd_{x}" for x in ("strategy", "temperature", "topk", "weight", "weight_mode")),
)
"""Keys without effect: q and k of delta rules are always normed, and `qk_rope_head_dim` gives the rotated size."""


def read_ling2(c: ConfigReader) -> ModelSpec:
    """Ling 2 and Ring (Bailing): Sarvam's layers, whose heads are rotated by half."""
    c.require_all(score_function="sigmoid", moe_router_enable_expert_bias=True, use_bias=False)
    c.require_all(use_rmsnorm=True, norm_head=False, norm_softmax=False, use_sliding_window=False)
    c.alias({**SARVAM_KEYS, "attention_bias": "use_qkv_bias"})
    c.assume_missing(
        **dict(head_dim=128, num_key_value_heads=4, n_group=8, topk_group=4, use_qk_norm=True),
        **dict(routed_scaling_factor=2.5, rms_norm_eps=1e-6, rope_theta=6e5),
    )
    shared = c.size("moe_intermediate_size") * c.take("n_shared_experts", int)
    c.require("moe_shared_expert_intermediate_size", shared)
    c.ignore("router_dtype", "output_dropout", "max_window_layers", "mtp_loss_scaling_factor")
    return glm.read_glm4_moe(c, "bailing_moe")


def ling2_gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.ignore("expert_shared_feed_forward_length")
    groups = m.size("expert_group_count", 1), m.size("expert_group_used_count", 1)
    m.assume(**{"blk.0.attn_q_norm.weight": True})
    return {
        **glm.glm4_moe_gguf_config(m),
        **dict(zip(("n_group", "topk_group"), groups, strict=True)),
    }


def read(c: ConfigReader) -> ModelSpec:
    c.require_all(**SAID)
    c.alias(KEYS)
    c.assume(
        **dict(vocab_size=157184, hidden_size=2560, intermediate_size=6144, num_hidden_layers=42),
        **dict(num_experts=512, n_group=8, topk_group=4, routed_scaling_factor=2.5),
        moe_intermediate_size=768,
    )
    c.require("moe_shared_expert_intermediate_size", c.size("moe_intermediate_size"))
    c.require("tie_word_embeddings", False)  # transformers never ties them
    longest, eps = c.size("max_position_embeddings", 262144), c.take("rms_norm_eps", float, 1e-6)
    mixers: dict[str, dict[str, Any]] = {
        FULL: {"attention": _attention(c, longest)},
        LINEAR: {"recurrent": _delta(c, eps)},
    }
    count, every = c.size("num_hidden_layers"), c.size("layer_group_size", 6)
    if count % every and "layer_types" not in c:  # transformers and the authors' code disagree here
        raise c.unsupported("layer_group_size", f"must divide {count} layers, or give layer_types")
    of = kinds(c, mixers, lambda i: LINEAR if (i + 1) % every else FULL)
    dense = gated(c)
    moe, first = mixture(c, dense), c.take("first_k_dense_replace", int, 2)
    fed = kinds(
        c, ("dense", "sparse"), lambda i: "dense" if i < first else "sparse", "mlp_layer_types"
    )
    of_experts, of_shared = (
        limits(c, f"{x}_swiglu_limit_list") for x in ("expert", "share_expert")
    )
    norm = rms(c.size("hidden_size"), eps)

    def layer(i: int) -> LayerSpec:
        mlp: MLPSpec = dense
        if fed[i] == "sparse":
            assert moe.shared is not None
            always = SharedExpertSpec(mlp=clamped(moe.shared.mlp, of_shared[i]))
            expert = clamped(moe.expert, of_experts[i])
            mlp = dataclasses.replace(moe, expert=expert, shared=always)
        return LayerSpec(**mixers[of[i]], mlp=mlp, block=before(norm))

    c.ignore(*UNUSED)
    return model(c, "bailing_hybrid", layer, norm, longest)


def _attention(c: ConfigReader, longest: int) -> LatentAttentionSpec:
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(own := c.value(key), dict):
            c.put(**{key: {k: v for k, v in own.items() if k != "partial_rotary_factor"}})
    c.put(partial_rotary_factor=None)
    a = latent_attention(c)
    position = rope(c, a.rotary_dim, max_position=longest, theta=6e6, style="interleaved")
    c.require("rotary_dim", a.rotary_dim)
    scale = scale_of(a.nope_dim + a.rotary_dim, position)
    return dataclasses.replace(a, position=position, scale=scale, gated=True)


def _delta(c: ConfigReader, eps: float) -> GatedDeltaSpec:
    """Reads the recurrent layers' sizes. transformers writes keys `linear_…` next to the authors',
    and changes the value of `head_dim`."""
    num_heads = c.size("linear_num_heads", c.size("num_attention_heads"))
    dim = c.size("linear_head_dim", c.size("head_dim", 128))
    c.require("hidden_act", "silu")  # the convolution's activation, too
    bound = c.take("kda_lower_bound", float, -5.0)
    if bound >= 0:
        raise c.unsupported("kda_lower_bound", "must be below 0")
    return GatedDeltaSpec(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=c.size("linear_conv_kernel_dim", c.size("short_conv_kernel_size", 4)),
        eps=eps,
        decay="channel",
        gate="sigmoid",
        bound=bound if c.take("kda_safe_gate", bool, True) else None,
    )


def _theirs(name: Theirs) -> Theirs:
    """Converts a tensor's name in Kimi Linear to that in Ling."""
    if isinstance(name, str):
        return name.replace("self_attn", "attention").replace("block_sparse_moe", "mlp")
    if isinstance(name, tuple):
        return tuple(str(_theirs(x)) for x in name)
    return {key: str(_theirs(x)) for key, x in name.items()}


NAMES: dict[str, Theirs] = {
    **{key: _theirs(name) for key, name in KIMI.items()},
    "embed": "model.word_embeddings",
    "attention.gate": "attention.g_proj",
    "attention.out": "attention.dense",
    "recurrent.in": tuple(f"attention.{x}_proj" for x in "qkvg"),
    "recurrent.gates": ("attention.b_proj", "attention.f_proj"),
    "correction": {"weight": "mlp.gate.expert_bias"},
    "experts.up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": "mlp.experts.{e}.down_proj",
}


def names(spec: ModelSpec) -> Names:
    latent = next((a for a in spec.attentions if isinstance(a, LatentAttentionSpec)), None)
    q = "attention.q_b_proj" if latent and latent.q_rank else "attention.q_proj"
    return table({**NAMES, "attention.q": q}, changes={"recurrent.conv": of_conv})(spec)


FAMILIES = (
    Family(
        model_type="bailing_moe",
        architectures=("BailingMoeV2ForCausalLM",),
        read=read_ling2,
        names=table(glm.SARVAM),
        mtp=LING,
        gguf=GGUFFamily(
            architecture="bailingmoe2",
            config=ling2_gguf_config,
            names=gguf_table(
                {**glm.GLM4_MOE_GGUF, "pre_mlp": "ffn_norm", "attention.qkv": "attn_qkv"}
            ),
        ),
    ),
    Family(
        model_type="bailing_hybrid",
        architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
        read=read,
        names=names,
        mtp=LING,
    ),
)
