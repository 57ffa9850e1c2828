"""MiniMax M2: mixtures of experts by sigmoid scores with a correction, norms of q and of k over all heads, rotary embedding of
a part of each head."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import decoder, gated
from slipstream.spec.families.llama import MIXTRAL
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import ModelSpec, MoESpec


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    rotated = c.maybe("rotary_dim", int)
    if rotated is not None:
        c.assume(partial_rotary_factor=rotated / c.size("head_dim"))
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 256),
        num_experts_per_token=c.size("num_experts_per_tok", 8),
        expert=gated(c),
        normalize=True,
        scores="sigmoid",
        correction=True,
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    # What the authors' config says besides. Multi-token prediction is not run.
    for key, value in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        c.require(key, value)
    for key in ("use_qk_norm", "use_routing_bias"):
        c.require(key, True)
    c.require("shared_intermediate_size", 0)
    c.require("sliding_window")
    c.require("attn_type_list", [1] * c.size("num_hidden_layers"))
    c.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    c.ignore("shared_moe_mode", "mlp_intermediate_size")  # of shared experts and dense layers
    for key in ("full_attention", "linear_attention", "mlp"):
        c.require(f"layernorm_{key}_beta", 1.0)
    return decoder(
        c,
        "minimax_m2",
        max_position=196608,
        bias=(False, False),
        mlp=moe,
        over="row",
        positions={"theta": 5e6, "partial": 1.0},
    )


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.require("expert_gating_func", 2)
    config = llama_gguf_config(m, partial=True, experts=True)
    return {
        **config,
        "intermediate_size": m.size("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
    }


NAMES: dict[str, Theirs] = {
    **MIXTRAL,
    "correction": {"weight": "block_sparse_moe.e_score_correction_bias"},
}
GGUF_NAMES: dict[str, Theirs] = {"correction": {"weight": "exp_probs_b.bias"}}

FAMILIES = (
    Family(
        model_type="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        read=read,
        names=table(NAMES),
        gguf=GGUFFamily(
            architecture="minimax-m2", config=gguf_config, names=gguf_table(GGUF_NAMES)
        ),
    ),
)
