"""ERNIE 4.5: Llama's layers with interleaved rotary embedding; dense, and as mixtures of experts. A
correction bias on the softmax scores affects only which experts are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import decoder, gated
from slipstream.spec.families.llama import names
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.mtp import Config, MTPFormat
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import (
    DenseSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SharedExpertSpec,
)

POSITIONS = {"style": "interleaved", "theta": 500000.0}


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=2)
    bias = c.take("use_bias", bool, False)
    return _read(c, "ernie4_5", bias, gated(c, bias=bias))


def read_moe(c: ConfigReader) -> ModelSpec:
    """Reads an Ernie mixture. Every `moe_layer_interval`th layer from `moe_layer_start_index` to `moe_layer_end_index`
    has experts."""
    c.assume_missing(num_key_value_heads=4)
    c.require("use_bias", False)  # transformers' experts have none
    c.require("moe_use_aux_free", True)
    c.require("moe_gate", "topk")
    c.ignore("moe_norm_min")  # a minimum of the sum of scores, which chosen ones exceed
    c.ignore(
        "moe_capacity", "num_nextn_predict_layers", "output_router_logits", "router_aux_loss_coef"
    )
    count, every = c.size("num_hidden_layers"), c.size("moe_layer_interval", 1)
    first, last = c.take("moe_layer_start_index", int, 1), c.take("moe_layer_end_index", int, -1)
    dense, size = gated(c), c.size("moe_intermediate_size", 1536)
    num_shared = c.take("moe_num_shared_experts", int, 2)
    shared = dataclasses.replace(dense, intermediate_size=max(1, size * num_shared))
    moe = MoESpec(
        num_experts=c.size("moe_num_experts", 64),
        num_experts_per_token=c.size("moe_k", 6),
        expert=dataclasses.replace(dense, intermediate_size=size),
        normalize=True,
        correction=True,
        shared=SharedExpertSpec(mlp=shared) if num_shared > 0 else None,
    )
    chosen = range(first, (count - 1 if last == -1 else last) + 1)

    def mlp(i: int) -> MLPSpec:
        return moe if i in chosen and (i + 1) % every == 0 else dense

    return _read(c, "ernie4_5_moe", False, mlp)


def _read(c: ConfigReader, family: str, bias: bool, mlp: Any) -> ModelSpec:
    return decoder(
        c,
        family,
        max_position=131072,
        eps=1e-5,
        bias=(bias, bias),
        mlp=mlp,
        positions=POSITIONS,
        tied=True,
    )


def gguf_moe_config(m: ConfigReader) -> dict[str, Any]:
    config = llama_gguf_config(m, experts=True)
    m.ignore("expert_shared_feed_forward_length")  # the converter guesses this value
    return {
        **config,
        "moe_num_experts": m.size("expert_count"),
        "moe_k": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "moe_num_shared_experts": m.take("expert_shared_count", int, 0),
        "moe_layer_start_index": m.take("leading_dense_block_count", int, 1),
        "moe_layer_interval": m.take("interleave_moe_layer_step", int, 1),
    }


MOE: dict[str, Theirs] = {
    **LLAMA,
    "correction": {"weight": "mlp.moe_statics.e_score_correction_bias"},
    "shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.down": "mlp.shared_experts.down_proj",
}
CORRECTION: dict[str, Theirs] = {"correction": {"weight": "exp_probs_b.bias"}}


def mtp_layers(spec: ModelSpec, config: Config) -> tuple[LayerSpec, ...]:
    """One dense layer, even if the model's last layer has experts."""
    last, size = spec.layers[-1], config["intermediate_size"]
    mlp = last.mlp.expert if isinstance(last.mlp, MoESpec) else last.mlp
    assert isinstance(mlp, DenseSpec)
    return (dataclasses.replace(last, mlp=dataclasses.replace(mlp, intermediate_size=size)),)


MTP = MTPFormat(
    counts=("num_nextn_predict_layers",),
    layers=mtp_layers,
    renamed=("model.layers.0.", "model.mtp_block.0."),
    around={
        "embed_norm": "model.mtp_emb_norm.0",
        "hidden_norm": "model.mtp_hidden_norm.0",
        "join": "model.mtp_linear_proj.0",
        "final_norm": "model.norm",
    },
)
"""Format of the MTP layers in a checkpoint. They use the model's own final norm."""

FAMILIES = (
    Family(
        model_type="ernie4_5",
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        read=read,
        names=names,
        gguf=GGUFFamily(architecture="ernie4_5", config=llama_gguf_config, names=gguf_table()),
    ),
    Family(
        model_type="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        read=read_moe,
        names=table(MOE, changes={"correction": "one_row"}),
        ignored=(r"model\.mtp_.*",),
        mtp=MTP,
        gguf=GGUFFamily(
            architecture="ernie4_5-moe", config=gguf_moe_config, names=gguf_table(CORRECTION)
        ),
    ),
)
