"""LongCat Flash: latent attention whose latents are scaled, and two layers a block. A block's mixture of experts reads what the
first MLP reads, and its output is added after the second one. Some experts return their input.

Each of the config's layers is two here, so `layers.{i}` of a checkpoint has our layers 2i and 2i + 1."""

from __future__ import annotations

import dataclasses
import re

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import before, gated, model, rms, rope
from slipstream.spec.families.deepseek import NAMES as LATENT_NAMES
from slipstream.spec.families.deepseek import scale_of
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import (
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    SharedExpertSpec,
    ShortcutSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    c.alias({"intermediate_size": "ffn_hidden_size", "num_experts_per_tok": "moe_topk"})
    c.alias({"moe_intermediate_size": "expert_ffn_hidden_size"})
    c.assume_missing(
        **dict(
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=2048
        ),
        **dict(
            intermediate_size=12288, num_experts_per_tok=12, n_routed_experts=512, rope_theta=1e7
        ),
        **dict(q_lora_rank=1536, kv_lora_rank=512),
    )
    hidden, num_heads = c.size("hidden_size"), c.size("num_attention_heads")
    nope, rotary, rank = (
        c.size("qk_nope_head_dim"),
        c.size("qk_rope_head_dim"),
        c.size("q_lora_rank"),
    )
    count = c.size("num_layers", 28)
    c.require_all(
        **dict(num_hidden_layers=2 * count, num_key_value_heads=num_heads, head_dim=rotary),
        **dict(qk_head_dim=nope + rotary, mla_scale_q_lora=True, mla_scale_kv_lora=True),
        **dict(attention_method="MLA", zero_expert_type="identity", router_bias=False),
    )
    c.ignore("output_router_logits", "router_aux_loss_coef")
    max_position = c.size("max_position_embeddings", 131072)
    position = rope(c, rotary, max_position=max_position, style="interleaved")
    attention = LatentAttentionSpec(
        num_heads=num_heads,
        nope_dim=nope,
        value_dim=c.size("v_head_dim"),
        kv_rank=c.size("kv_lora_rank"),
        q_rank=rank,
        scale=scale_of(nope + rotary, position) * (hidden / rank) ** 0.5,
        position=position,
        eps=1e-6,  # the latents' norms do not use rms_norm_eps
        bias=c.take("attention_bias", bool, False),
        latent_gain=(hidden / c.size("kv_lora_rank")) ** 0.5,
    )
    identity = c.take("zero_expert_num", int, 256)
    if identity < 0:
        raise c.unsupported("zero_expert_num", "must be at least 0")
    mlp = gated(c)
    moe = MoESpec(
        num_experts=c.size("n_routed_experts"),
        num_experts_per_token=c.size("num_experts_per_tok"),
        expert=dataclasses.replace(mlp, intermediate_size=c.size("moe_intermediate_size")),
        normalize=False,
        correction=True,
        weight_scale=c.take("routed_scaling_factor", float, 6.0),
        shared=SharedExpertSpec(mlp=mlp),
        identity=identity,
    )
    norm = rms(hidden, c.take("rms_norm_eps", float, 1e-5))

    def layer(i: int) -> LayerSpec:
        opens = i % 2 == 0
        return LayerSpec(
            attention=attention,
            mlp=moe if opens else mlp,
            block=before(norm),
            streams=ShortcutSpec(opens=opens),
        )

    return model(c, "longcat_flash", layer, norm, max_position, count=2 * count)


PART = "%"
"""Stands in a name for the index of a part of the checkpoint's layer: 0 or 1."""

NAMES: dict[str, Theirs] = {
    stem: re.sub(r"^(self_attn)\.", rf"\1.{PART}.", name) if isinstance(name, str) else name
    for stem, name in LATENT_NAMES.items()
} | {
    "pre_attention": f"input_layernorm.{PART}",
    "pre_mlp": f"post_attention_layernorm.{PART}",
    **{
        f"{mlp}.up": (f"mlps.{PART}.gate_proj", f"mlps.{PART}.up_proj") for mlp in ("mlp", "shared")
    },
    **{f"{mlp}.down": f"mlps.{PART}.down_proj" for mlp in ("mlp", "shared")},
    "attention.q": f"self_attn.{PART}.q_b_proj",
    "router": "mlp.router.classifier",
    "correction": {"weight": "mlp.router.e_score_correction_bias"},
}


def names(spec: ModelSpec) -> Names:
    def theirs(name: str) -> str:
        i, _, rest = name.partition("|")
        if not rest:
            return name
        return f"model.layers.{int(i) // 2}.{rest.replace(PART, str(int(i) % 2))}"

    return {theirs(name): at for name, at in table(NAMES, layer="{i}|")(spec).items()}


def unread(spec: ModelSpec) -> tuple[str, ...]:
    """Weights of experts that return their input, which transformers saves although it computes nothing with them."""
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoESpec)
    numbers = "|".join(map(str, range(moe.num_experts, moe.num_choices)))
    return (
        (rf"(model\.)?layers\.\d+\.mlp\.experts\.({numbers})\.(gate|up)_proj\.weight",)
        if numbers
        else ()
    )


FAMILIES = (
    Family(
        model_type="longcat_flash",
        architectures=("LongcatFlashForCausalLM",),
        read=read,
        names=names,
        ignored=(r"model\.mtp\..*",),
        unread=unread,
    ),
)
