"""Qwen 2 and 2.5 (biases of q, k and v), MiMo, which is a Qwen 2, and Qwen 3 (norms of q and k), dense and as mixtures of
experts. The upper layers may have a window."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    Sections,
    attention,
    before,
    called,
    gated,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope,
)
from slipstream.spec.families.llama import names
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.mtp import MTPFormat
from slipstream.spec.families.names import LLAMA, gguf_table
from slipstream.spec.model import LayerSpec, ModelSpec, MoESpec, QKNormSpec, SharedExpertSpec


def read_qwen2(c: ConfigReader) -> ModelSpec:
    return _read(c, "qwen2", qkv_bias=True, out_bias=False, qk_norm=False)


def read_mimo(c: ConfigReader) -> ModelSpec:
    """Reads MiMo 7B, which is a Qwen 2 with MTP layers."""
    c.require("attention_bias", True)
    c.ignore("num_nextn_predict_layers")
    return _read(c, "mimo", qkv_bias=True, out_bias=False, qk_norm=False)


def read_qwen3(c: ConfigReader) -> ModelSpec:
    c.assume(head_dim=128)
    bias = c.take("attention_bias", bool, False)
    return _read(c, "qwen3", qkv_bias=bias, out_bias=bias, qk_norm=True)


def read_qwen2_moe(c: ConfigReader) -> ModelSpec:
    moe = _moe(c, 60, 4, 1408)
    shared = dataclasses.replace(
        moe.expert, intermediate_size=c.size("shared_expert_intermediate_size", 5632)
    )
    moe = dataclasses.replace(moe, shared=SharedExpertSpec(mlp=shared, weighed=True))
    bias = c.take("qkv_bias", bool, True)
    return _read(c, "qwen2_moe", qkv_bias=bias, out_bias=False, qk_norm=False, moe=moe)


def read_qwen3_moe(c: ConfigReader) -> ModelSpec:
    bias = c.take("attention_bias", bool, False)
    c.require("qkv_bias", bias)  # which Qwen3-Coder also writes
    c.require("use_qk_norm", True)
    c.require("shared_expert_intermediate_size", 0)
    return _read(
        c, "qwen3_moe", qkv_bias=bias, out_bias=bias, qk_norm=True, moe=_moe(c, 128, 8, 768)
    )


THREE_POSITIONS = Sections((24, 20, 20), alternate=True)
"""How Qwen 3 VL's rotary frequencies are distributed over a token's three positions. For text tokens the three are equal."""


def read_qwen3_vl(c: ConfigReader) -> ModelSpec:
    """The language model of Qwen 3 VL; without images it equals a Qwen 3."""
    c.require("model_type", "qwen3_vl_text")
    c.assume(head_dim=128)
    bias = c.take("attention_bias", bool, False)
    how: dict[str, Any] = dict(qkv_bias=bias, out_bias=bias, qk_norm=True)
    return _read(c, "qwen3_vl", sections=THREE_POSITIONS, **how)


def read_qwen3_vl_moe(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "qwen3_vl_moe_text")
    c.require("norm_topk_prob", True)  # transformers always normalizes, whatever the config says
    c.assume(norm_topk_prob=True)
    bias = c.take("attention_bias", bool, False)
    how: dict[str, Any] = dict(qkv_bias=bias, out_bias=bias, qk_norm=True)
    moe = _moe(c, 60, 4, 1408)
    return _read(c, "qwen3_vl_moe", sections=THREE_POSITIONS, moe=moe, **how)


def _moe(c: ConfigReader, num_experts: int, per_token: int, size: int) -> MoESpec:
    """Reads the mixture of experts. The numbers given are defaults for missing keys."""
    c.ignore("output_router_logits", "router_aux_loss_coef")
    return MoESpec(
        num_experts=c.size(called(c, "num_experts", "num_local_experts"), num_experts),
        num_experts_per_token=c.size("num_experts_per_tok", per_token),
        expert=dataclasses.replace(
            gated(c), intermediate_size=c.size("moe_intermediate_size", size)
        ),
        normalize=c.take("norm_topk_prob", bool, False),
    )


def _read(
    c: ConfigReader,
    family: str,
    *,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool,
    moe: MoESpec | None = None,
    sections: Sections | None = None,
) -> ModelSpec:
    """Reads a Qwen. With `moe`, every `decoder_sparse_step`-th layer is this mixture, except the
    layers in `mlp_only_layers`."""
    h = heads(c)
    max_position = c.size("max_position_embeddings", 32768)
    eps = c.take("rms_norm_eps", float, 1e-6)
    norm = rms(c.size("hidden_size"), eps)
    window = c.maybe("sliding_window", int)
    first_window = c.take("max_window_layers", int, c.size("num_hidden_layers"))
    if not c.take("use_sliding_window", bool, False):
        window = None
    kinds = kinds_of_layers(
        c, lambda i: "sliding_attention" if window and i >= first_window else "full_attention"
    )
    if "sliding_attention" in kinds and window is None:
        raise c.unsupported("layer_types", "has sliding_attention, but use_sliding_window is off")
    position, dense = rope(c, h.head_dim, max_position=max_position, sections=sections), gated(c)
    step, only_dense = 1, []
    if moe is not None:
        step, only_dense = c.size("decoder_sparse_step", 1), c.take("mlp_only_layers", list, [])

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            position,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            window=window if kinds[i] == "sliding_attention" else None,
            qk_norm=QKNormSpec(over="head", eps=eps) if qk_norm else None,
        )
        mlp = dense if moe is None or i in only_dense or (i + 1) % step else moe
        return LayerSpec(attention=of, mlp=mlp, block=before(norm))

    c.require("use_mrope", False)
    return model(c, family, layer, norm, max_position)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    return llama_gguf_config(_without_media(m))


def _without_media(m: ConfigReader) -> ConfigReader:
    """The metadata of a Qwen VL's GGUF file, which holds only the language model. Without images
    its rotary embedding is the plain one."""
    m.ignore("rope.dimension_sections", "n_deepstack_layers")
    return m


def gguf_qwen2_moe(m: ConfigReader) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length")}
    return {**_moe_gguf_config(m), **shared, "norm_topk_prob": False}


def gguf_qwen3_moe(m: ConfigReader) -> dict[str, Any]:
    return {**_moe_gguf_config(m), "norm_topk_prob": True}


def _moe_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a mixture's config from a GGUF file. The file doesn't say whether the experts' weights
    are normalized; llama.cpp does so for Qwen 3, not for Qwen 2."""
    return {
        **llama_gguf_config(_without_media(m), experts=True),
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
    }


QWEN3_VL = {
    **LLAMA,
    "experts.up": {"weight": "mlp.experts.gate_up_proj"},
    "experts.down": {"weight": "mlp.experts.down_proj"},
}

MTP = "model.mtp_layers.0."
MIMO = MTPFormat(
    counts=("num_nextn_predict_layers",),
    renamed=("model.layers.0.", MTP),
    around={
        "embed_norm": f"{MTP}token_layernorm",
        "hidden_norm": f"{MTP}hidden_layernorm",
        "join": f"{MTP}input_proj",
        "final_norm": f"{MTP}final_layernorm",
    },
    state_first=True,
)

SEEING = {"qwen2": ("qwen2vl",), "qwen3": ("qwen3vl",), "qwen3_moe": ("qwen3vlmoe",)}
"""llama.cpp's architecture names of Qwen VL language models, by family."""

FAMILIES = tuple(
    Family(
        model_type=name,
        architectures=(architecture, architecture.replace("CausalLM", "SequenceClassification")),
        read=read,
        names=names,
        ignored=(r"model\.mtp_layers\..*",) if read is read_mimo else (),
        mtp=MIMO if read is read_mimo else None,
        gguf=config
        and GGUFFamily(
            architecture=name.replace("_", ""),
            also=SEEING.get(name, ()),
            config=config,
            names=gguf_table(),
        ),
    )
    for name, architecture, read, config in (
        ("qwen2", "Qwen2ForCausalLM", read_qwen2, gguf_config),
        ("qwen3", "Qwen3ForCausalLM", read_qwen3, gguf_config),
        ("qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe, gguf_qwen2_moe),
        ("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, gguf_qwen3_moe),
        ("mimo", "MiMoForCausalLM", read_mimo, None),
    )
)
