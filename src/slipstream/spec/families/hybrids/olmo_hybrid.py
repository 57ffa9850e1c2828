"""OLMo Hybrid: three of four layers are gated delta rules with negative eigenvalues and norms before, the others attention with
norms after them. No torch."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    attention,
    before,
    gated,
    heads,
    kinds,
    model,
    rms,
    rope,
)
from slipstream.spec.families.names import LLAMA, Theirs, of_conv, table
from slipstream.spec.model import GatedDeltaSpec, LayerSpec, ModelSpec, QKNormSpec, SequentialBlock


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=3840, num_attention_heads=30, intermediate_size=11008)
    c.assume(num_hidden_layers=32, vocab_size=100352)
    h, max_position = heads(c), c.size("max_position_embeddings", 65536)
    c.require("head_dim", c.size("hidden_size") // h.num_heads)
    eps, bias = c.take("rms_norm_eps", float, 1e-6), c.take("attention_bias", bool, False)
    norm, mlp = rms(c.size("hidden_size"), eps), gated(c)
    of = attention(
        h,
        _position(c, h.head_dim, max_position),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNormSpec(over="row", eps=eps),
    )
    behind = SequentialBlock(post_attention=norm, post_mlp=norm)
    count, recurrent = c.size("num_hidden_layers"), _delta(c, h.num_heads)

    def kind(i: int) -> str:
        is_attention = i % 4 == 3 or (count < 4 and i == count - 1)
        return "full_attention" if is_attention else "linear_attention"

    which = kinds(c, ("full_attention", "linear_attention"), kind)
    if "full_attention" not in which:
        raise c.unsupported("layer_types", "has no layer with attention, and needs one")

    def layer(i: int) -> LayerSpec:
        if which[i] == "full_attention":
            return LayerSpec(attention=of, mlp=mlp, block=behind)
        return LayerSpec(recurrent=recurrent, mlp=mlp, block=before(norm))

    return model(c, "olmo_hybrid", layer, norm, max_position)


def _position(c: ConfigReader, head_dim: int, max_position: int) -> object:
    """Rotary embedding, or None for the long-context models, whose `rope_parameters` are null or
    lack a base."""
    own = c.value("rope_parameters")
    unrotated = (c.says("rope_parameters") and own is None) or (
        isinstance(own, dict) and own.get("rope_theta") is None
    )
    if unrotated and "rope_theta" not in c and "rope_scaling" not in c:
        return None
    return rope(c, head_dim, max_position=max_position)


def _delta(c: ConfigReader, num_heads: int) -> GatedDeltaSpec:
    keys, values = c.size("linear_num_key_heads", num_heads), "linear_num_value_heads"
    key_dim = c.size("linear_key_head_dim", max(1, int(0.75 * c.size("hidden_size") / keys)))
    c.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
    c.ignore("linear_dt_init_floor")
    c.require("hidden_act", "silu")
    return GatedDeltaSpec(
        num_key_heads=keys,
        num_heads=c.size(values, num_heads),
        key_dim=key_dim,
        value_dim=c.size("linear_value_head_dim", 2 * key_dim),
        conv_width=c.size("linear_conv_kernel_dim", 4),
        eps=1e-5,  # fixed, whatever rms_norm_eps says
        negative_eigenvalues=c.take("linear_allow_neg_eigval", bool, True),
    )


DELTA: dict[str, Theirs] = {
    "recurrent.in": tuple(f"linear_attn.{x}_proj" for x in "qkvg"),
    "recurrent.gates": ("linear_attn.b_proj", "linear_attn.a_proj"),
    "recurrent.conv": tuple(f"linear_attn.{x}_conv1d" for x in "qkv"),
    "recurrent.decay": {"weight": "linear_attn.A_log"},
    "recurrent.time": {"weight": "linear_attn.dt_bias"},
    "recurrent.norm": "linear_attn.o_norm",
    "recurrent.out": "linear_attn.o_proj",
    "pre_attention": "attention_layer_norm",
    "pre_mlp": "feedforward_layer_norm",
    "post_attention": "post_attention_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}

FAMILIES = (
    Family(
        model_type="olmo_hybrid",
        architectures=("OlmoHybridForCausalLM",),
        read=read,
        names=table({**LLAMA, **DELTA}, changes={"recurrent.conv": of_conv}),
    ),
)
