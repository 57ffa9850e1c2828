"""Kimi Linear: three of four layers are delta rules with per-channel decay (KDA), the others latent attention
without position embeddings. All but the first have experts like DeepSeek V3's. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import before, called, gated, kinds, model, rms
from slipstream.spec.families.deepseek import GGUF_NAMES as GGUF_LATENTS
from slipstream.spec.families.deepseek import NAMES as DEEPSEEK
from slipstream.spec.families.deepseek import gguf_experts, gguf_latent_names, gguf_latents
from slipstream.spec.families.metadata import kv_heads
from slipstream.spec.families.names import Change, Theirs, of_conv, table
from slipstream.spec.model import (
    DenseSpec,
    GatedDeltaSpec,
    GroupLimit,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ProportionalScaling,
    RopeSpec,
    SharedExpertSpec,
)
from slipstream.spec.parameters import NegatedExp, Reshape, Transform, TransformChain


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, vocab_size=163840)
    count, eps = c.size("num_hidden_layers"), c.take("rms_norm_eps", float, 1e-5)
    norm, dense = rms(c.size("hidden_size"), eps), gated(c)
    mixers: dict[str, dict[str, Any]] = {
        "full_attention": {"attention": latent_attention(c)},
        "linear_attention": {"recurrent": _delta(c, eps)},
    }
    moe = mixture(c, dense)
    own = c.part("linear_attn_config") if "linear_attn_config" in c else ConfigReader({})
    full, delta = own.take("full_attn_layers", list, []), own.take("kda_layers", list, [])
    own.ignore("head_dim", "num_heads", "short_conv_kernel_size")
    own.finish()
    if (full or delta) and sorted([*full, *delta]) != list(range(1, count + 1)):
        raise c.unsupported(
            "linear_attn_config", f"its two lists must have each layer from 1 to {count} once"
        )

    def kind(i: int) -> str:
        is_full = i + 1 in full if full or delta else i and i % 4 == 0
        return "full_attention" if is_full else "linear_attention"

    which = kinds(c, mixers, kind)
    first = c.take("first_k_dense_replace", int, 1)
    mlps: dict[str, MLPSpec] = {"dense": dense, "sparse": moe}
    fed = kinds(c, mlps, lambda i: "dense" if i < first else "sparse", "mlp_layer_types")

    def layer(i: int) -> LayerSpec:
        return LayerSpec(**mixers[which[i]], mlp=mlps[fed[i]], block=before(norm))

    c.require("mla_use_nope", True)
    c.ignore("rope_theta", "rope_scaling", "rope_parameters", "head_dim")
    c.ignore("num_nextn_predict_layers")  # MTP layers, which are not run
    key = called(c, "model_max_length", "max_position_embeddings")
    c.ignore("model_max_length", "max_position_embeddings")
    return model(c, "kimi_linear", layer, norm, c.size(key, 1048576))


def latent_attention(c: ConfigReader) -> LatentAttentionSpec:
    num_heads, rotary = c.size("num_attention_heads", 32), c.size("qk_rope_head_dim", 64)
    nope = c.size("qk_nope_head_dim", 128)
    c.require("num_key_value_heads", num_heads)
    c.require("qk_head_dim", nope + rotary)
    return LatentAttentionSpec(
        num_heads=num_heads,
        nope_dim=nope,
        value_dim=c.size("v_head_dim", 128),
        kv_rank=c.size("kv_lora_rank", 512),
        q_rank=c.maybe("q_lora_rank", int),
        scale=(nope + rotary) ** -0.5,
        # The part of a key that other models rotate is kept, unrotated.
        position=RopeSpec(theta=1e4, rotary_dim=rotary, scaling=ProportionalScaling(num_turned=0)),
        eps=1e-6,  # the latents' norms do not use rms_norm_eps
        bias=c.take("attention_bias", bool, False),
    )


def _delta(c: ConfigReader, eps: float) -> GatedDeltaSpec:
    """Reads the recurrent layers' sizes, from `linear_attn_config` or else from the top level."""
    own = c.take("linear_attn_config", dict, {})
    sizes = (
        ("num_heads", "linear_num_heads", 32),
        ("head_dim", "linear_head_dim", 128),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )
    reader = c.part("linear_attn_config") if own else c
    c.require("hidden_act", "silu")  # the convolution's activation, too
    num_heads, dim, width = (
        reader.size(inner, c.size(key, default)) if own else c.size(key, default)
        for inner, key, default in sizes
    )
    return GatedDeltaSpec(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=width,
        eps=eps,
        decay="channel",
        gate="sigmoid",
        latent=dim,
    )


def mixture(c: ConfigReader, dense: DenseSpec) -> MoESpec:
    def size(default: int, *keys: str) -> int:
        found = c.size(called(c, *keys), default)
        c.ignore(*keys)
        return found

    expert = dataclasses.replace(dense, intermediate_size=c.size("moe_intermediate_size", 1024))
    num_shared = size(1, "num_shared_experts", "n_shared_experts")
    always = dataclasses.replace(dense, intermediate_size=expert.intermediate_size * num_shared)
    groups = GroupLimit(
        num_groups=size(1, "num_expert_group", "n_group"),
        num_chosen=c.size("topk_group", 1),
        by="best_two",
    )
    c.require("moe_router_activation_func", "sigmoid")
    c.require("use_grouped_topk", True)
    c.require("moe_layer_freq", 1)
    c.ignore("output_router_logits")
    normalize = c.take(called(c, "moe_renormalize", "norm_topk_prob"), bool, True)
    c.ignore("moe_renormalize", "norm_topk_prob")
    return MoESpec(
        num_experts=size(256, "num_experts", "num_local_experts"),
        num_experts_per_token=size(8, "num_experts_per_token", "num_experts_per_tok"),
        expert=expert,
        normalize=normalize,
        scores="sigmoid",
        correction=True,
        groups=None if groups.num_groups == 1 else groups,
        weight_scale=c.take("routed_scaling_factor", float, 2.446),
        shared=SharedExpertSpec(mlp=always),
    )


def _of_decay(layer: LayerSpec, part: int) -> Transform:
    assert isinstance(layer.recurrent, GatedDeltaSpec)
    return Reshape((1, 1, layer.recurrent.num_heads, 1))


MOE = "block_sparse_moe"
NAMES: dict[str, Theirs] = {
    **DEEPSEEK,
    "router": f"{MOE}.gate",
    "correction": {"weight": f"{MOE}.gate.e_score_correction_bias"},
    "experts.up": (f"{MOE}.experts.{{e}}.w1", f"{MOE}.experts.{{e}}.w3"),
    "experts.down": f"{MOE}.experts.{{e}}.w2",
    "shared.up": (f"{MOE}.shared_experts.gate_proj", f"{MOE}.shared_experts.up_proj"),
    "shared.down": f"{MOE}.shared_experts.down_proj",
    "recurrent.in": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "recurrent.gates": "self_attn.b_proj",
    "recurrent.decay_latent": "self_attn.f_a_proj",
    "recurrent.decay_up": "self_attn.f_b_proj",
    "recurrent.gate_latent": "self_attn.g_a_proj",
    "recurrent.gate_up": "self_attn.g_b_proj",
    "recurrent.conv": tuple(f"self_attn.{x}_conv1d" for x in "qkv"),
    "recurrent.decay": {"weight": "self_attn.A_log"},
    "recurrent.time": {"weight": "self_attn.dt_bias"},
    "recurrent.norm": "self_attn.o_norm",
    "recurrent.out": "self_attn.o_proj",
}


def names(spec: ModelSpec) -> Names:
    latent = next((a for a in spec.attentions if isinstance(a, LatentAttentionSpec)), None)
    q = "self_attn.q_b_proj" if latent and latent.q_rank else "self_attn.q_proj"
    changes = {"recurrent.conv": of_conv, "recurrent.decay": _of_decay}
    return table({**NAMES, "attention.q": q}, changes=changes)(spec)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. Layers with kv heads have latent attention, the others delta
    rules. The experts' weights are normalized although the file doesn't say so."""
    counts, width = kv_heads(m), m.size("ssm.conv_kernel")
    config = gguf_latents(m)
    linear = {
        "full_attn_layers": [i for i, kv in enumerate(counts, 1) if kv],
        "kda_layers": [i for i, kv in enumerate(counts, 1) if not kv],
        "num_heads": config["num_attention_heads"],
        "head_dim": m.size("kda.head_dim"),
        "short_conv_kernel_size": width,
    }
    m.require("expert_gating_func", 2)
    m.require("expert_weights_norm", True)
    experts = gguf_experts(m)
    experts["num_experts"] = experts.pop("n_routed_experts")
    return {
        **config,
        **experts,
        "norm_topk_prob": True,
        "linear_attn_config": linear,
        "n_group": m.size("expert_group_count", 1),
        "topk_group": m.size("expert_group_used_count", 1),
    }


def _of_gguf_decay(layer: LayerSpec, part: int) -> Transform:
    return TransformChain((NegatedExp(), _of_decay(layer, part)))


GGUF: dict[str, Theirs] = {
    **GGUF_LATENTS,
    "recurrent.in": ("attn_q", "attn_k", "attn_v"),
    "recurrent.gates": "ssm_beta",
    "recurrent.decay_latent": "ssm_f_a",
    "recurrent.decay_up": "ssm_f_b",
    "recurrent.gate_latent": "ssm_g_a",
    "recurrent.gate_up": "ssm_g_b",
    "recurrent.conv": ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
    "recurrent.decay": {"weight": "ssm_a"},
    "recurrent.time": {"weight": "ssm_dt.bias"},
    "recurrent.norm": "ssm_norm",
    "recurrent.out": "attn_output",
}


def gguf_names(spec: ModelSpec) -> Names:
    changes: dict[str, Change] = {"recurrent.conv": of_conv, "recurrent.decay": _of_gguf_decay}
    return gguf_latent_names(spec, GGUF, changes)


FAMILIES = (
    Family(
        model_type="kimi_linear",
        architectures=("KimiLinearForCausalLM",),
        read=read,
        names=names,
        gguf=GGUFFamily(architecture="kimi-linear", config=gguf_config, names=gguf_names),
    ),
)
