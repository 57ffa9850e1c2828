"""Builders that families share. Each reads its keys of a config and returns a part of a `ModelSpec`. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from slipstream.spec.families.base import ConfigReader
from slipstream.spec.model import (
    Activation,
    AttentionSpec,
    ClassifierSpec,
    DenseSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SequentialBlock,
    YarnScaling,
)

# --- Layers -----------------------------------------------------------------------------------------------------------


class QKVLayout(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads(
    c: ConfigReader,
    *,
    hidden: str = "hidden_size",
    num_heads: str = "num_attention_heads",
    num_kv_heads: str | None = "num_key_value_heads",
) -> QKVLayout:
    """The numbers of heads, under the given keys. `num_kv_heads` None: there are as many as query heads."""
    queries, size = c.size(num_heads), c.size(hidden)
    if "head_dim" not in c and size % queries:
        raise c.unsupported(
            hidden, f"is no multiple of {num_heads} ({queries}), and head_dim is missing"
        )
    return QKVLayout(
        queries,
        queries if num_kv_heads is None else c.size(num_kv_heads, queries),
        c.size("head_dim", size // queries),
    )


def called(c: ConfigReader, *keys: str) -> str:
    """The first of several keys that the config has; the first of all if it has none."""
    return next((key for key in keys if key in c), keys[0])


def attention(
    h: QKVLayout, position: Any, *, scale: float | None = None, **more: Any
) -> AttentionSpec:
    """Attention with the default scale 1/√head_dim. `more`: fields of `AttentionSpec`."""
    scale = h.head_dim**-0.5 if scale is None else scale
    return AttentionSpec(**h._asdict(), position=position, scale=scale, **more)


def gated(
    c: ConfigReader, key: str = "hidden_act", default: str = "silu", *, bias: bool = False
) -> DenseSpec:
    return DenseSpec(
        intermediate_size=c.size("intermediate_size"),
        activation=activation(c, key, default),
        bias=bias,
    )


def plain(size: int, act: Activation, *, bias: bool = True) -> DenseSpec:
    return DenseSpec(intermediate_size=size, activation=act, gated=False, bias=bias)


def rms(size: int, eps: float, *, weight_offset: float = 0.0) -> NormSpec:
    return NormSpec(kind="rms", size=size, eps=eps, weight_offset=weight_offset)


def layer_norm(size: int, eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(kind="layer", size=size, eps=eps, bias=bias)


def before(norm: NormSpec) -> SequentialBlock:
    """A block with a norm before attention and one before the MLP."""
    return SequentialBlock(pre_attention=norm, pre_mlp=norm)


def model(
    c: ConfigReader,
    family: str,
    layer: LayerSpec | Callable[[int], LayerSpec],
    norm: NormSpec | None,
    max_position: int,
    *,
    vocab: str = "vocab_size",
    hidden: str = "hidden_size",
    num_layers: str = "num_hidden_layers",
    tied: bool = False,
    **more: Any,
) -> ModelSpec:
    """The spec. Call it last: no key of the config may be left. `layer`: the one that all are like, or each by its index.
    `tied`: the default of tie_word_embeddings. `more`: fields of `ModelSpec`. If the architecture is a classifier's, a decoder
    gets the head that transformers gives all of them (`score`)."""
    if "classifier" not in more and (labels := num_labels(c)) is not None:
        more["classifier"] = ClassifierSpec(num_labels=labels, activation=None, pooling="last")
    is_tied = c.take("tie_word_embeddings", bool, tied)
    count = c.size(num_layers)
    layers = (layer,) * count if isinstance(layer, LayerSpec) else tuple(map(layer, range(count)))
    is_encoder = not getattr(
        layers[0].attention, "causal", True
    )  # its config speaks of a head that is not read
    spec = ModelSpec(
        family=family,
        vocab_size=c.size(vocab),
        hidden_size=c.size(hidden),
        max_position=max_position,
        layers=layers,
        final_norm=norm,
        tied_embeddings=is_tied and not is_encoder and more.get("classifier") is None,
        **more,
    )
    c.finish()
    return spec


def num_labels(c: ConfigReader) -> int | None:
    """The length of `id2label`, by default 2, if the architecture ends in ForSequenceClassification; otherwise None."""
    named = c.take("architectures", list, [])
    if not named or not str(named[0]).endswith("ForSequenceClassification"):
        return None
    return len(c.take("id2label", dict, {"0": "", "1": ""}))


def kinds_of_layers(c: ConfigReader, default: str | Callable[[int], str]) -> list[str]:
    """`layer_types`: full_attention or sliding_attention for each layer. `default` is for configs without it."""
    count = c.size("num_hidden_layers")
    kinds = c.take(
        "layer_types",
        list,
        [default if isinstance(default, str) else default(i) for i in range(count)],
    )
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise c.unsupported(
            "layer_types", f"must be {count} of full_attention or sliding_attention"
        )
    return kinds


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(c: ConfigReader, key: str, default: str | None = None) -> Activation:
    name = c.take(key, str, default)
    if name not in ACTIVATIONS:
        raise c.unsupported(key, f"the activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


# --- Positions --------------------------------------------------------------------------------------------------------


def rope(
    c: ConfigReader,
    head_dim: int,
    *,
    max_position: int,
    theta: float = 10000.0,
    partial: float = 1.0,
    kind: str | None = None,
    style: Literal["half", "interleaved"] = "half",
    sectioned: bool = False,
) -> RopeSpec:
    """Rotary embedding, from `rope_parameters` (transformers 5; in some models a dict for each `kind` of layer), or else from
    `rope_theta`, `rope_scaling` and `partial_rotary_factor`. `theta` and `partial` are defaults.
    `sectioned`: with `mrope_section`."""
    partial = c.take("partial_rotary_factor", float, partial)
    if "rope_parameters" in c:
        raw = c.take("rope_parameters", dict)
        if kind is not None and kind in raw:
            raw = raw[kind]
        key = "rope_parameters"
        c.maybe("rope_theta", float)
        c.maybe("rope_scaling", dict)
    else:
        raw = {
            "rope_theta": c.take("rope_theta", float, theta),
            **(c.maybe("rope_scaling", dict) or {}),
        }
        key = "rope_scaling"
    raw = {"rope_theta": theta, "partial_rotary_factor": partial, **raw}
    return _rope_from(
        c, key, raw, head_dim, max_position=max_position, style=style, sectioned=sectioned
    )


def _rope_from(
    c: ConfigReader,
    key: str,
    raw: dict[str, Any],
    head_dim: int,
    *,
    max_position: int,
    style: Literal["half", "interleaved"],
    sectioned: bool,
) -> RopeSpec:
    theta = float(raw.pop("rope_theta"))
    kind = raw.pop("rope_type", None) or raw.pop("type", None) or "default"
    raw.pop("type", None)
    sections = raw.pop("mrope_section", None) if sectioned else None
    if sectioned and (
        not isinstance(sections, list)
        or not all(type(n) is int for n in sections)
        or len(sections) != 3
    ):
        raise c.unsupported(key, "mrope_section must be three whole numbers")
    kind = "default" if sectioned and kind == "mrope" else kind
    rotary_dim = int(head_dim * raw.pop("partial_rotary_factor"))

    def number(name: str, default: float | None = None) -> float:
        value = raw.pop(name, None)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise c.unsupported(key, f"{name} must be a number")
        return float(value)

    def factors(name: str) -> tuple[float, ...]:
        values = raw.pop(name, None)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise c.unsupported(key, f"{name} must be a list of {rotary_dim // 2} numbers")
        return tuple(float(value) for value in values)

    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None
    if kind == "default":
        raw.pop("factor", None)
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=int(number("original_max_position_embeddings", max_position)),
        )
    elif kind == "yarn":
        for name in ("finetuned", "attn_factor"):  # which transformers passes over, too
            raw.pop(name, None)
        attention_factor, truncate = raw.pop("attention_factor", None), raw.pop("truncate", True)
        factor, mscale, all_dim = (
            number("factor"),
            number("mscale", 0.0),
            number("mscale_all_dim", 0.0),
        )
        if attention_factor is None and mscale and all_dim and factor > 1.0:
            attention_factor = (0.1 * mscale * math.log(factor) + 1.0) / (
                0.1 * all_dim * math.log(factor) + 1.0
            )
        if not isinstance(truncate, bool):
            raise c.unsupported(key, "truncate must be true or false")
        scaling = YarnScaling(
            truncate=truncate,
            mscale_all_dim=all_dim,
            factor=factor,
            original_max_position=int(number("original_max_position_embeddings", max_position)),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
        )
    elif kind in ("longrope", "su"):
        before_it = c.take("original_max_position_embeddings", int, max_position)
        original = int(number("original_max_position_embeddings", before_it))
        factor, attention_factor = number("factor", 1.0), raw.pop("attention_factor", None)
        if original != max_position:
            factor = max_position / original
        by_length = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        scaling = LongRopeScaling(
            short_factors=factors("short_factor"),
            long_factors=factors("long_factor"),
            original_max_position=original,
            attention_factor=by_length if attention_factor is None else float(attention_factor),
        )
    else:
        raise c.unsupported(
            key,
            f"rope_type {kind!r} is not supported; default, linear, llama3, yarn and longrope are",
        )
    if raw:
        raise c.unsupported(key, f"{', '.join(sorted(raw))} is not known")
    of_axes = None if sections is None else tuple(sections)
    return RopeSpec(
        theta=theta, rotary_dim=rotary_dim, style=style, scaling=scaling, sections=of_axes
    )
