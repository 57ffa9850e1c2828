"""MiniMax M3: grouped-query attention to the blocks of keys that an index chooses (`BlockIndexSpec`), mixtures of experts by
sigmoid scores with a correction and a shared expert, gpt-oss's activation, Gemma's norms. Pictures and videos are not
supported."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import attention, before, heads, kinds, model, rms, rope
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.model import (
    BlockIndexSpec,
    ClampedSwiglu,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNormSpec,
    SharedExpertSpec,
)

FULL, SPARSE = "full_attention", "minimax_m3_sparse"

TEXT: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
"""Defaults of the decoder's config."""

INDEX = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' names of the index's keys, and the authors' in `sparse_attention_config`."""


def read(c: ConfigReader) -> ModelSpec:
    c.assume(**TEXT)
    found = _layers_with_index(c)
    h, norm = (
        heads(c),
        rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6), weight_offset=1.0),
    )
    longest = c.size("max_position_embeddings")
    position = rope(c, h.head_dim, max_position=longest, theta=5e6, partial=1.0)
    if position.rotary_dim < h.head_dim:
        c.ignore("rotary_dim")  # transformers reads partial_rotary_factor alone
    else:
        c.require("rotary_dim", h.head_dim)
    index = BlockIndexSpec(
        num_heads=c.size("index_n_heads", 4),
        head_dim=c.size("index_head_dim", 128),
        block=c.size("index_block_size", 128),
        top_k=c.size("index_topk_blocks", 16),
        local=c.take("index_local_blocks", int, 1),
        position=position,
        eps=norm.eps,
        weight_offset=1.0,
    )
    if not 0 <= index.local <= index.top_k:
        raise c.unsupported("index_local_blocks", f"must be 0 to index_topk_blocks, {index.top_k}")
    if index.num_heads != h.num_kv_heads:
        raise c.unsupported("index_n_heads", f"must be num_key_value_heads, {h.num_kv_heads}")
    if index.head_dim < position.rotary_dim:
        raise c.unsupported(
            "index_head_dim", f"must be at least {position.rotary_dim}, the rotated part"
        )
    dense, moe = _mlps(c)
    fed = kinds(c, ("dense", "sparse"), "sparse", "mlp_layer_types")
    c.require_all(use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head")
    c.require("attention_output_gate", False)
    c.ignore(
        "num_mtp_modules", "num_nextn_predict_layers"
    )  # multi-token prediction, which is not run

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            position,
            qk_norm=QKNormSpec(over="head", eps=norm.eps, weight_offset=1.0),
            index=index if found[i] == SPARSE else None,
        )
        return LayerSpec(attention=of, mlp=dense if fed[i] == "dense" else moe, block=before(norm))

    return model(c, "minimax_m3", layer, norm, longest)


def _layers_with_index(c: ConfigReader) -> list[str]:
    """Kind of each layer. Reads the authors' keys, too, and puts transformers' in their place."""
    for key, listed, names in (
        ("mlp_layer_types", c.maybe("moe_layer_freq", list), ("dense", "sparse")),
        ("layer_types", _authors_index(c), (FULL, SPARSE)),
    ):
        if listed is not None:
            c.assume(**{key: [names[bool(x)] for x in listed]})
    return kinds(c, (FULL, SPARSE), FULL)


def _authors_index(c: ConfigReader) -> list[int] | None:
    """Reads `sparse_attention_config`, whose numbers have precedence: which layers have an index, by 0 and 1."""
    if "sparse_attention_config" not in c:
        return None
    own = c.part("sparse_attention_config")
    own.require_all(use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0)
    for ours, theirs in INDEX.items():
        if theirs in own:
            c.put(**{ours: own.take(theirs, int)})
    listed = own.maybe("sparse_attention_freq", list)
    own.require("sparse_disable_index_value", listed)  # the index has no values of its own
    own.finish()
    return listed


def _mlps(c: ConfigReader) -> tuple[DenseSpec, MoESpec]:
    """The MLP of dense layers, and the mixture of the others."""
    c.require(
        "hidden_act", "silu", "swigluoai"
    )  # transformers computes the latter, whatever is said
    activation = ClampedSwiglu(
        alpha=c.take("swiglu_alpha", float, 1.702), limit=c.take("swiglu_limit", float, 7.0)
    )
    expert, dense, shared = (
        DenseSpec(intermediate_size=c.size(f"{x}intermediate_size"), activation=activation)
        for x in ("", "dense_", "shared_")
    )
    c.require_all(scoring_func="sigmoid", use_routing_bias=True, n_shared_experts=1)
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    return dense, MoESpec(
        num_experts=c.size("num_local_experts"),
        num_experts_per_token=c.size("num_experts_per_tok"),
        expert=expert,
        normalize=True,
        scores="sigmoid",
        correction=True,
        weight_scale=c.take("routed_scaling_factor", float, 2.0),
        shared=SharedExpertSpec(mlp=shared),
    )


def _names(mixture: str, index: str) -> dict[str, Theirs]:
    of_index = f"self_attn.{index}"
    return {
        **LLAMA,
        "attention.index": (f"{of_index}q_proj", f"{of_index}k_proj"),
        "attention.index_q_norm": f"{of_index}q_norm",
        "attention.index_k_norm": f"{of_index}k_norm",
        "router": f"{mixture}.gate",
        "shared.down": f"{mixture}.shared_experts.down_proj",
    }


NAMES: dict[str, Theirs] = {
    **_names("mlp", "indexer."),
    "mlp.up": "mlp.gate_up_proj",
    "correction": {"weight": "mlp.gate.e_score_correction_bias"},
    "experts.up": {"weight": "mlp.experts.gate_up_proj"},
    "experts.down": {"weight": "mlp.experts.down_proj"},
    "shared.up": "mlp.shared_experts.gate_up_proj",
}
"""Names of a decoder that transformers saves alone."""

_EXPERTS = "block_sparse_moe.experts.{e}."
AUTHORS: dict[str, Theirs] = {
    **_names("block_sparse_moe", "index_"),
    "correction": {"weight": "block_sparse_moe.e_score_correction_bias"},
    "experts.up": (f"{_EXPERTS}w1", f"{_EXPERTS}w3"),
    "experts.down": f"{_EXPERTS}w2",
    "shared.up": tuple(f"block_sparse_moe.shared_experts.{x}_proj" for x in ("gate", "up")),
}
"""The authors' names, which transformers writes for the whole model, too."""

FAMILIES = (
    Family(
        model_type="minimax_m3_vl_text",
        architectures=("MiniMaxM3VLForCausalLM",),
        read=read,
        names=table(NAMES),
    ),
    Family(
        model_type="minimax_m3_vl",
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        read=read,
        names=table(AUTHORS),
        nested_config="text_config",
        prefixes=("language_model.", "model.language_model.", "model."),
        # Pictures and multi-token prediction are not run.
        ignored=(r"(vision_tower|multi_modal_projector|patch_merge_mlp)\..*", r"(.*\.)?mtp\..*"),
    ),
)
