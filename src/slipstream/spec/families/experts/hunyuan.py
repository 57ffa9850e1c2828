"""Hunyuan, dense and as mixtures with a shared expert: Llama's layers with norms of q and k after
the rotation. A fixed factor (`alpha`) scales the rotary base."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import decoder, gated, heads
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import ModelSpec, MoESpec, SharedExpertSpec


def read_dense(c: ConfigReader) -> ModelSpec:
    return _read(c, "hunyuan_v1_dense")


def read_moe(c: ConfigReader) -> ModelSpec:
    expert = gated(c)
    per_token, key = _each(c, "moe_topk", 1), "num_experts"
    moe = MoESpec(
        num_experts=_each(c, key, 1),
        num_experts_per_token=per_token,
        expert=expert,
        normalize=True,
        shared=SharedExpertSpec(mlp=expert),
    )
    c.ignore("output_router_logits", "moe_drop_tokens", "moe_random_routing_dropped_token")
    # Further keys of the authors' config, with the only values that transformers implements.
    c.require("num_experts_per_tok", per_token)
    for name, only in (
        ("moe_intermediate_size", expert.intermediate_size),
        ("num_shared_expert", 1),
    ):
        if _each(c, name, only) != only:
            raise c.unsupported(name, f"only {only} is supported")
    for name, needed in (("use_mixed_mlp_moe", True), ("norm_topk_prob", True)):
        c.require(name, needed)
    c.require("group_limited_greedy", False)
    c.require("moe_layer_num_skipped", 0)
    return _read(c, "hunyuan_v1_moe", moe)


def _each(c: ConfigReader, key: str, default: int) -> int:
    """Reads a number, or a list that has the same number for every layer."""
    given = c.value(key)
    if isinstance(given, list) and given and given == [given[0]] * len(given):
        given = given[0]
    if given is None:
        return default
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise c.unsupported(key, "must be a number above 0, the same for every layer")
    return given


def _read(c: ConfigReader, family: str, mlp: MoESpec | None = None) -> ModelSpec:
    h = heads(c)
    c.require_all(mlp_bias=False, attention_head_dim=h.head_dim, norm_type="rms")
    c.require_all(use_qk_norm=True, use_rotary_pos_emb=True, use_cla=False, use_mla=False)
    c.require_all(position_embedding_xdrope=False, add_classification_head=False)
    for name in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ):
        c.require(name)
    c.ignore("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id")
    c.ignore("text_end_id", "image_token_id", "video_start_id", "video_end_id", "mask_init_id")
    # features that are off
    c.ignore("cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pool_type")
    c.ignore("num_media_embeds", "anyres_pooling_size", "anyres_vit_two_views", "skip_cls_token")
    c.ignore(*(f"vit_{x}" for x in ("add_patchemb_bias", "input_resolution", "mapping_type")))
    c.ignore(
        *(f"vit_{x}" for x in ("norm_type", "patch", "remove_prenorm", "token", "used_rms_norm"))
    )
    return decoder(
        c,
        family,
        h=h,
        eps=1e-5,
        mlp=mlp or gated(c),
        over="head",
        after_rotation=True,
        positions={"alpha": True},
    )


def gguf_moe_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config, in which the base of the rotary embedding is scaled already."""
    config = llama_gguf_config(m, experts=True)
    size = m.size("expert_feed_forward_length", config["intermediate_size"])
    m.require("expert_shared_feed_forward_length", size)
    m.require("expert_shared_count", 1)
    return {
        **config,
        "intermediate_size": size,
        "num_experts": m.size("expert_count"),
        "moe_topk": m.size("expert_used_count"),
    }


NAMES: dict[str, Theirs] = {
    **LLAMA,
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
    "router": "mlp.gate.wg",
    "shared.up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    "shared.down": "mlp.shared_mlp.down_proj",
}

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture, architecture.replace("CausalLM", "SequenceClassification")),
        read=read,
        names=table(NAMES),
        gguf=GGUFFamily(architecture=gguf, config=config, names=gguf_table()),
    )
    for name, architecture, read, gguf, config in (
        (
            *("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read_dense),
            *("hunyuan-dense", llama_gguf_config),
        ),
        (
            *("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_moe),
            *("hunyuan-moe", gguf_moe_config),
        ),
    )
)
