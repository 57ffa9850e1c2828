"""Qwen3-Next and Qwen3.5: three of four layers are gated delta rules, the others have gated attention. Qwen3.5 takes
pictures (`pictures/qwen3_vl.py`). No torch.

Mixtures and dense models only differ in the MLP. Qwen3-Next stores the input projections of the delta rule grouped by key
head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    Sections,
    attention,
    before,
    gated,
    heads,
    kinds,
    model,
    rms,
    rope,
)
from slipstream.spec.families.hybrids.mamba import GGUF as GGUF_SSM
from slipstream.spec.families.hybrids.mamba import GGUF_CHANGES
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.mtp import LLAMA_CPP, Config, MTPFormat
from slipstream.spec.families.names import LLAMA, Change, Theirs, gguf_table, of_conv, table
from slipstream.spec.families.pictures import qwen3_vl
from slipstream.spec.families.pictures.qwen_vl import read_processing
from slipstream.spec.model import (
    DenseSpec,
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNormSpec,
    SharedExpertSpec,
)
from slipstream.spec.parameters import MinusOne, Regroup, Transform, TransformChain, Untile


def delta(c: ConfigReader) -> GatedDeltaSpec:
    """The gated delta rule, by the keys that Qwen, OLMo Hybrid and others share."""
    return GatedDeltaSpec(
        num_key_heads=c.size("linear_num_key_heads", 16),
        num_heads=c.size("linear_num_value_heads", 32),
        key_dim=c.size("linear_key_head_dim", 128),
        value_dim=c.size("linear_value_head_dim", 128),
        conv_width=c.size("linear_conv_kernel_dim", 4),
        eps=c.take("rms_norm_eps", float, 1e-6),
    )


def kinds_of_mixers(c: ConfigReader) -> list[bool]:
    """Whether each layer is recurrent, from `layer_types` or `full_attention_interval` (every n-th layer has full
    attention)."""
    every = c.size("full_attention_interval", 4)
    found = kinds(
        c,
        ("full_attention", "linear_attention"),
        lambda i: "linear_attention" if (i + 1) % every else "full_attention",
    )
    return [kind == "linear_attention" for kind in found]


def _mixture(c: ConfigReader, num_experts: int, per_token: int, *, normalize: bool) -> MoESpec:
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    size = c.size("moe_intermediate_size", 512)
    expert = DenseSpec(intermediate_size=size, activation="silu")
    always = dataclasses.replace(
        expert, intermediate_size=c.size("shared_expert_intermediate_size", 512)
    )
    c.require("hidden_act", "silu")
    return MoESpec(
        num_experts=c.size("num_experts", num_experts),
        num_experts_per_token=c.size("num_experts_per_tok", per_token),
        expert=expert,
        normalize=normalize,
        shared=SharedExpertSpec(mlp=always, weighed=True),
    )


def read_next(c: ConfigReader) -> ModelSpec:
    moe = _mixture(c, 512, 10, normalize=c.take("norm_topk_prob", bool, True))
    return _read(c, "qwen3_next", moe)


def read_3_5(c: ConfigReader, *, sees: bool = False) -> ModelSpec:
    return _read(c, "qwen3_5", None, sees)


def read_3_5_moe(c: ConfigReader, *, sees: bool = False) -> ModelSpec:
    c.ignore("intermediate_size")
    return _read(c, "qwen3_5_moe", _mixture(c, 256, 8, normalize=True), sees)


def _read(c: ConfigReader, family: str, moe: MoESpec | None, sees: bool = False) -> ModelSpec:
    """Reads a Qwen3-Next or Qwen 3.5. `sees`: the model accepts images, whose tokens have three
    positions."""
    c.assume(head_dim=256)
    h, eps = heads(c), c.take("rms_norm_eps", float, 1e-6)
    max_position = c.size("max_position_embeddings", 32768)
    norm = rms(c.size("hidden_size"), eps, weight_offset=1.0)
    bias = c.take("attention_bias", bool, False)
    axes: dict[str, Any] = {"without": ("mrope_section", "mrope_interleaved")}
    if sees:
        axes = {"sections": Sections((11, 11, 10), alternate=True)}
    position = rope(c, h.head_dim, max_position=max_position, partial=0.25, **axes)
    of = attention(
        h,
        position,
        qkv_bias=bias,
        out_bias=bias,
        gated=True,
        qk_norm=QKNormSpec(over="head", eps=eps, weight_offset=1.0),
    )
    recurrent, is_recurrent = delta(c), kinds_of_mixers(c)
    dense = gated(c) if moe is None or "intermediate_size" in c else None
    step = c.size("decoder_sparse_step", 1)
    only_dense = c.take("mlp_only_layers", list, [])

    def layer(i: int) -> LayerSpec:
        is_dense = moe is None or i in only_dense or (i + 1) % step
        mixer: dict[str, Any] = {"recurrent": recurrent} if is_recurrent[i] else {"attention": of}
        return LayerSpec(**mixer, mlp=dense if is_dense else moe, block=before(norm))

    c.ignore("mtp_num_hidden_layers")
    c.require("mtp_use_dedicated_embeddings", False)
    c.require("attn_output_gate", True)
    c.ignore("mamba_ssm_dtype")  # states are float32
    return model(c, family, layer, norm, max_position)


def gate_first(layer: LayerSpec, part: int) -> Transform | None:
    """Reorders stored rows, where query and gate alternate by head, to all gates, then all
    queries."""
    a = layer.self_attention
    return None if part else Regroup(a.num_heads, (a.head_dim, a.head_dim), (1, 0))


def _by_key_head(layer: LayerSpec, part: int) -> Transform:
    r = layer.recurrent
    assert isinstance(r, GatedDeltaSpec)
    values = r.v_size // r.num_key_heads
    return Regroup(r.num_key_heads, (r.key_dim, r.key_dim, values, values), (0, 1, 2, 3))


def _gates_by_key_head(layer: LayerSpec, part: int) -> Transform:
    r = layer.recurrent
    assert isinstance(r, GatedDeltaSpec)
    each = r.num_heads // r.num_key_heads
    return Regroup(r.num_key_heads, (each, each), (0, 1))


DELTA: dict[str, Theirs] = {
    "recurrent.in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "recurrent.gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "recurrent.conv": "linear_attn.conv1d",
    "recurrent.decay": {"weight": "linear_attn.A_log"},
    "recurrent.time": {"weight": "linear_attn.dt_bias"},
    "recurrent.norm": "linear_attn.norm",
    "recurrent.out": "linear_attn.out_proj",
}
NEXT: dict[str, Theirs] = {
    "recurrent.in": "linear_attn.in_proj_qkvz",
    "recurrent.gates": "linear_attn.in_proj_ba",
}

NAMES_3_5 = table(
    {**LLAMA, **DELTA, **qwen3_vl.VISION},
    media_layer=qwen3_vl.VISION_LAYER,
    changes={"recurrent.conv": of_conv, "attention.qkv": gate_first},
)
NAMES_NEXT = table(
    {**LLAMA, **DELTA, **NEXT},
    changes={
        "recurrent.conv": of_conv,
        "attention.qkv": gate_first,
        "recurrent.in": _by_key_head,
        "recurrent.gates": _gates_by_key_head,
    },
)


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads the config of a GGUF file of Qwen3-Next or Qwen 3.5. The layer count includes a last
    MTP layer, which is not read.

    Rotary sections are ignored: they concern images, which these files don't support.
    """
    if "expert_feed_forward_length" in m:
        m.assume(feed_forward_length=m.size("expert_feed_forward_length"))
    num_heads = m.size("ssm.time_step_rank")
    config = llama_gguf_config(m, partial=True, experts=True)
    m.ignore("rope.dimension_sections")
    config |= {
        "num_hidden_layers": config["num_hidden_layers"] - m.take("nextn_predict_layers", int, 0),
        "full_attention_interval": m.size("full_attention_interval", 4),
        "linear_num_value_heads": num_heads,
        "linear_num_key_heads": m.size("ssm.group_count"),
        "linear_key_head_dim": m.size("ssm.state_size"),
        "linear_value_head_dim": m.size("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": m.size("ssm.conv_kernel"),
    }
    if not m.take("expert_count", int, 0):
        m.ignore("expert_used_count")
        return config
    m.require("expert_gating_func", 1)
    m.require("expert_weights_scale", 1.0)
    m.require("expert_weights_norm", True)
    return config | {
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length"),
    }


def _untiled(at: Callable[[GatedDeltaSpec, int], dict[str, Any]], *first: Change) -> Change:
    """Undoes llama.cpp's order of value heads, which are sorted first by their index within a key
    head. `at`: rows of the value heads."""

    def change(layer: LayerSpec, part: int) -> Transform | None:
        r = layer.recurrent
        assert isinstance(r, GatedDeltaSpec)
        before = tuple(made for f in first if callable(f) and (made := f(layer, part)))
        tiled = () if r.num_heads == r.num_key_heads else (Untile(r.num_key_heads, **at(r, part)),)
        steps = (*before, *tiled)
        return steps[0] if len(steps) == 1 else TransformChain(steps) if steps else None

    return change


GGUF: dict[str, Theirs] = {
    **GGUF_SSM,
    "pre_mlp": "post_attention_norm",
    "recurrent.in": ("attn_qkv", "attn_gate"),
    "recurrent.gates": ("ssm_beta", "ssm_alpha"),
}
_ONE_MORE: dict[str, Change] = dict.fromkeys(
    ("pre_attention", "pre_mlp", "final_norm", "attention.q_norm", "attention.k_norm"), "minus_one"
)
_BY_HEAD: dict[str, Change] = {"attention.qkv": gate_first, "recurrent.conv": of_conv}
_DECAY = GGUF_CHANGES["recurrent.decay"]
GGUF_NEXT = gguf_table(
    {**GGUF, "recurrent.gates": "ssm_ba"},
    changes={
        **_ONE_MORE,
        **_BY_HEAD,
        "recurrent.decay": _DECAY,
        "recurrent.gates": _gates_by_key_head,
    },
)
GGUF_3_5 = gguf_table(
    GGUF,
    changes={
        **_ONE_MORE,
        **_BY_HEAD,
        "recurrent.in": _untiled(
            lambda r, part: {"size": r.value_dim, "start": 0 if part else 2 * r.q_size}
        ),
        "recurrent.gates": _untiled(lambda r, part: {"size": 1}),
        "recurrent.conv": _untiled(
            lambda r, part: {"size": r.value_dim, "start": 2 * r.q_size}, of_conv
        ),
        "recurrent.decay": _untiled(lambda r, part: {"size": 1}, _DECAY),
        "recurrent.time": _untiled(lambda r, part: {"size": 1}),
        "recurrent.out": _untiled(lambda r, part: {"size": r.value_dim, "columns": True}),
    },
)


def mtp_layers(spec: ModelSpec, config: Config) -> tuple[LayerSpec, ...]:
    """One attention layer, with experts if any of the model's layers has them."""
    of = next(layer.attention for layer in spec.layers if layer.attention is not None)
    mlps = sorted((x.mlp for x in spec.layers), key=lambda mlp: not isinstance(mlp, MoESpec))
    return (dataclasses.replace(spec.layers[0], recurrent=None, attention=of, mlp=mlps[0]),)


MTP = MTPFormat(
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    default=1,
    layers=mtp_layers,
    renamed=("model.layers.0.", "mtp.layers.0."),
    around={
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "join": "mtp.fc",
        "final_norm": "mtp.norm",
    },
)
GGUF_MTP = dataclasses.replace(LLAMA_CPP, layers=mtp_layers, norm_output=True, norms=MinusOne())
GGUFS = {
    name: GGUFFamily(architecture=architecture, config=gguf_config, names=names, mtp=GGUF_MTP)
    for name, architecture, names in (
        ("qwen3_next", "qwen3next", GGUF_NEXT),
        ("qwen3_5_text", "qwen35", GGUF_3_5),
        ("qwen3_5_moe_text", "qwen35moe", GGUF_3_5),
    )
}


IGNORED = (r"(model\.)?mtp\..*", *qwen3_vl.VISUAL)
"""MTP layers, which `MTP` describes, and the image encoder, which `max_images=0` skips."""

SEEING, SEEING_MOE = partial(read_3_5, sees=True), partial(read_3_5_moe, sees=True)

FAMILIES = (
    Family(
        model_type="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        read=read_next,
        names=NAMES_NEXT,
        ignored=IGNORED,
        mtp=MTP,
        gguf=GGUFS["qwen3_next"],
    ),
    *(
        Family(
            model_type=name,
            architectures=(architecture,),
            read=read,
            names=NAMES_3_5,
            ignored=IGNORED,
            mtp=MTP,
            gguf=GGUFS.get(name),
            nested_config=nested,
            prefixes=("model.", "language_model.", "model.language_model.") if nested else ("",),
            media=qwen3_vl.read_vision_3_5 if nested else None,
            processing=read_processing if nested else None,
        )
        for name, architecture, read, nested in (
            ("qwen3_5_text", "Qwen3_5ForCausalLM", read_3_5, None),
            ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", read_3_5_moe, None),
            ("qwen3_5", "Qwen3_5ForConditionalGeneration", SEEING, "text_config"),
            ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", SEEING_MOE, "text_config"),
        )
    ),
)
