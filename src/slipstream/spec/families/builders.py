"""Builders that families share. Each reads its keys of a config and returns a part of a `ModelSpec`. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from slipstream.spec.families.base import ConfigReader
from slipstream.spec.model import (
    Activation,
    AttentionSpec,
    BlockSpec,
    ClampedSilu,
    ClassifierSpec,
    DenseSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MLPSpec,
    ModelSpec,
    NormSpec,
    ProportionalScaling,
    QKNormSpec,
    QueryScale,
    RopeScaling,
    RopeSpec,
    SequentialBlock,
    YarnScaling,
)

NO_SETTINGS: Mapping[str, Any] = {}

# --- Layers -----------------------------------------------------------------------------------------------------------


class HeadCounts(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads(
    c: ConfigReader,
    *,
    hidden: str = "hidden_size",
    num_heads: str = "num_attention_heads",
    num_kv_heads: str | None = "num_key_value_heads",
) -> HeadCounts:
    """Head counts and sizes, read under the given keys. `num_kv_heads` None: as many kv heads as query heads."""
    queries, size = c.size(num_heads), c.size(hidden)
    if "head_dim" not in c and size % queries:
        raise c.unsupported(
            hidden, f"is no multiple of {num_heads} ({queries}), and head_dim is missing"
        )
    return HeadCounts(
        queries,
        queries if num_kv_heads is None else c.size(num_kv_heads, queries),
        c.size("head_dim", size // queries),
    )


def called(c: ConfigReader, *keys: str) -> str:
    """The first of several keys that the config has; the first of all if it has none."""
    return next((key for key in keys if key in c), keys[0])


def attention(
    h: HeadCounts, position: Any, *, scale: float | None = None, **more: Any
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


def clamped(mlp: DenseSpec, limit: float) -> DenseSpec:
    """Returns the MLP with its activations clamped (Step 3.5), or unchanged for 0."""
    return replace(mlp, activation=ClampedSilu(limit=limit)) if limit else mlp


def limits(c: ConfigReader, key: str) -> list[float]:
    """Clamp limit of each layer's activations; 0 for none. The config's list may be longer, for MTP layers."""
    count = c.size("num_hidden_layers")
    found = [x or 0.0 for x in c.take(key, list, [0.0] * count)]
    if len(found) < count or not all(type(x) in (int, float) and x >= 0 for x in found):
        raise c.unsupported(key, f"must have {count} numbers")
    return [float(x) for x in found]


def rms(size: int, eps: float, **more: Any) -> NormSpec:
    """An RMS norm. `more` are further fields of `NormSpec`."""
    return NormSpec(kind="rms", size=size, eps=eps, **more)


def layer_norm(size: int, eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(kind="layer", size=size, eps=eps, bias=bias)


def before(norm: NormSpec) -> SequentialBlock:
    """A function that makes a block with a norm before attention and one before the MLP."""
    return SequentialBlock(pre_attention=norm, pre_mlp=norm)


def after(norm: NormSpec) -> SequentialBlock:
    """A function that makes a block which norms the outputs of attention and MLP before adding them to the residual (OLMo
    2)."""
    return SequentialBlock(post_attention=norm, post_mlp=norm)


def around(norm: NormSpec) -> SequentialBlock:
    """A function that makes a block with norms before and after both attention and MLP."""
    return SequentialBlock(pre_attention=norm, post_attention=norm, pre_mlp=norm, post_mlp=norm)


def decoder(
    c: ConfigReader,
    family: str,
    *,
    h: HeadCounts | None = None,
    max_position: int = 2048,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
    block: Callable[[NormSpec], BlockSpec] = before,
    bias: tuple[bool, bool] | None = None,
    mlp: MLPSpec | Callable[[int], MLPSpec] | None = None,
    over: Literal["head", "row", "each"] | None = None,
    after_rotation: bool = False,
    learned: bool = True,
    kinds: list[str] | None = None,
    window: int | None = None,
    rotated: Callable[[int], bool] | None = None,
    position: Callable[[int], RopeSpec | None] | None = None,
    positions: Mapping[str, Any] = NO_SETTINGS,
    more: Mapping[str, Any] = NO_SETTINGS,
    residual_scale: float = 1.0,
    **whole: Any,
) -> ModelSpec:
    """Spec of a decoder whose config has Llama's keys. Arguments give what is different in a family.

    `max_position`, `eps`: defaults of these keys. `norm`: by default RMS norms with `rms_norm_eps`. `bias`:
    whether q, k and v have one, and whether the output projection has; by default `attention_bias` for both.
    `mlp`: one for all layers, or a function of the layer's index; by default gated, with `mlp_bias`. `over`:
    the dimension of the norms of q and k. `after_rotation`: these norms follow the rotation. `learned`: these
    norms have weights. `kinds`, `window`: the kind of each layer, and the window of the sliding ones.
    `rotated`: whether a layer, by its index, has the rotary embedding. `position`: position embedding by
    layer index, if it is not `rope`'s. `positions`, `more`, `whole`: further arguments of `rope`, `attention`
    and `model`.
    """
    h = h or heads(c)
    longest = c.size("max_position_embeddings", max_position)
    norm = norm or rms(c.size("hidden_size"), c.take("rms_norm_eps", float, eps))
    if position is None:
        of_all = rope(c, h.head_dim, max_position=longest, **positions)
        position = lambda i: of_all if rotated is None or rotated(i) else None
    if bias is None:
        bias = (c.take("attention_bias", bool, False),) * 2
    mlp = mlp or gated(c, bias=c.take("mlp_bias", bool, False))
    qk_norm = None
    if over is not None:
        qk_norm = QKNormSpec(over=over, eps=norm.eps, after=after_rotation, learned=learned)

    def layer(i: int) -> LayerSpec:
        of = attention(
            h,
            position(i),
            qkv_bias=bias[0],
            out_bias=bias[1],
            window=window if kinds and kinds[i] == "sliding_attention" else None,
            qk_norm=qk_norm,
            **more,
        )
        own = mlp(i) if callable(mlp) else mlp
        return LayerSpec(attention=of, mlp=own, block=block(norm), residual_scale=residual_scale)

    return model(c, family, layer, norm, longest, **whole)


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
    count: int | None = None,
    **more: Any,
) -> ModelSpec:
    """The whole spec. Call it last, because it raises if a config key is unread. `layer`: one layer for all,
    or a function of the index. `count`: number of layers, if it is not the value of `num_layers`. `tied`:
    default of tie_word_embeddings. `more`: fields of `ModelSpec`. If the architecture is a classifier's, a
    decoder gets the head that transformers gives all of them (`score`)."""
    if "classifier" not in more and (labels := num_labels(c)) is not None:
        more["classifier"] = ClassifierSpec(num_labels=labels, activation=None, pooling="last")
    is_tied = c.take("tie_word_embeddings", bool, tied)
    count = c.size(num_layers) if count is None else count
    layers = (layer,) * count if isinstance(layer, LayerSpec) else tuple(map(layer, range(count)))
    # the config describes a head that is not loaded
    is_encoder = not getattr(layers[0].attention, "causal", True)
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
    return _labels_of(c, "ForSequenceClassification")


def num_token_labels(c: ConfigReader) -> int | None:
    """The number of labels of a model for token classification."""
    return _labels_of(c, "ForTokenClassification")


def _labels_of(c: ConfigReader, end: str) -> int | None:
    named = c.take("architectures", list, [])
    if not named or not str(named[0]).endswith(end):
        return None
    return len(c.take("id2label", dict, {"0": "", "1": ""}))


def kinds_of_layers(c: ConfigReader, default: str | Callable[[int], str]) -> list[str]:
    """Kind of each layer from `layer_types`: full_attention or sliding_attention. `default` is for
    configs without the key."""
    return kinds(c, ("full_attention", "sliding_attention"), default)


def windows(
    c: ConfigReader, default: str | Callable[[int], str], size: int | None = None
) -> dict[str, Any]:
    """`layer_types` and `sliding_window` as arguments of `decoder`. `size`: default window in tokens."""
    window = c.maybe("sliding_window", int) if c.says("sliding_window") else size
    found = kinds_of_layers(c, default)
    if not window and "sliding_attention" in found:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")
    return {"kinds": found, "window": window or None}


LEGACY_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
"""Names of layer kinds in configs of transformers 4."""


def kinds(
    c: ConfigReader,
    known: Collection[str],
    default: str | Callable[[int], str],
    key: str = "layer_types",
) -> list[str]:
    """The kind of each layer, one of `known`. `default` is for configs without the key."""
    count = c.size("num_hidden_layers")
    assumed = [default if isinstance(default, str) else default(i) for i in range(count)]
    given: list[Any] = c.take(key, list, assumed)
    found = [LEGACY_KINDS.get(kind, kind) if isinstance(kind, str) else "" for kind in given]
    if len(found) != count or not set(found) <= {*known}:
        raise c.unsupported(key, f"must be {count} of {' or '.join(known)}")
    return found


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

Style = Literal["half", "interleaved"]
NO_NAMES: Mapping[str, str] = {}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Sections(NamedTuple):
    """How rotary frequencies are distributed over a token's three positions: the default of `mrope_section`, and
    `RopeSpec.alternate`."""

    default: tuple[int, int, int] | None = None
    alternate: bool = False


def rope(
    c: ConfigReader,
    head_dim: int,
    *,
    max_position: int,
    theta: float = 10000.0,
    partial: float | None = None,
    style: Style = "half",
    sections: Sections | None = None,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    default: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] = NO_NAMES,
    rope_types: tuple[str, ...] = ROPE_TYPES,
    alpha: bool = False,
    without: tuple[str, ...] = (),
    backwards: bool = False,
) -> RopeSpec:
    """Rotary embedding by the rule of transformers 5, whose `rope_parameters` may stand next to the keys of version 4.

    1. A non-empty `rope_scaling` replaces `rope_parameters`. Without either, `default` applies.
    2. If the object lacks the base or the rotated fraction, they are read from the top level, under `keys`.
    3. A top-level `original_max_position_embeddings` overrides the one inside the object.

    `theta` and `partial` are the family's defaults. `partial` None: the family's code in transformers rotates whole
    heads, whatever the config says, so another part is refused. `sections`: reads `mrope_section`. `renamed`: aliases
    of rope types in this family. `rope_types`: the types that it supports. `alpha`: the type `dynamic` may have a
    fixed factor of this name, which stretches the base (Hunyuan). `without`: keys of the object that only matter for
    images. `backwards`: rotates in the opposite direction."""
    scaling, own = c.maybe("rope_scaling", dict), c.maybe("rope_parameters", dict)
    key = "rope_scaling" if scaling else "rope_parameters"
    raw = dict(scaling or (own if own is not None else default) or {})
    base = c.take(keys[0], float, theta)
    part = c.take(keys[1], float, 1.0 if partial is None else partial)
    raw = {"rope_theta": base, "partial_rotary_factor": part, **raw}
    raw = {name: value for name, value in raw.items() if name not in without}
    kind = raw.pop("rope_type", raw.pop("type", "default"))
    kind = renamed.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in rope_types:
        raise c.unsupported(
            key, f"rope_type {kind!r} is not supported; {', '.join(rope_types)} are"
        )
    if alpha and kind == "dynamic" and raw.get("alpha"):
        stretched = _number(c, key, raw, "rope_theta") * _number(c, key, raw, "alpha") ** (
            head_dim / (head_dim - 2)
        )
        kind, raw = "default", {"rope_theta": stretched, "partial_rotary_factor": part}
    raw["rope_type"] = kind
    # keys of `query_scale`; must equal the top-level ones
    for name in (BETA, "max_position_embeddings"):
        raw.pop(name, None)
    original = c.maybe("original_max_position_embeddings", int)
    if original is not None:
        raw["original_max_position_embeddings"] = original
    if partial is None and raw["partial_rotary_factor"] not in (None, 1):
        where = keys[1] if raw["partial_rotary_factor"] == part else key
        raise c.unsupported(where, "transformers rotates whole heads in this family; leave it out")
    made = _rope_from(
        c, key, raw, head_dim, max_position=max_position, style=style, sections=sections
    )
    return replace(made, backwards=True) if backwards else made


BETA = "llama_4_scaling_beta"


def query_scale(c: ConfigReader, default: Mapping[str, Any]) -> QueryScale | None:
    """Scale of queries by position, from keys in the rotary embedding's object. `default` is for
    configs without that object."""
    own = c.maybe("rope_parameters", dict)
    raw = c.maybe("rope_scaling", dict) or (own if own is not None else default)
    beta, period = raw.get(BETA), raw.get("original_max_position_embeddings")
    if beta is None:
        return None
    period = c.value("original_max_position_embeddings") or period
    numbers = {BETA: beta, "original_max_position_embeddings": period}
    beta, period = (_number(c, "rope_parameters", numbers, name) for name in list(numbers))
    return QueryScale(beta=beta, period=period)


def rope_of_kind(
    c: ConfigReader,
    kind: str,
    head_dim: int,
    *,
    max_position: int,
    theta: float,
    theta_key: str = "rope_theta",
    scaled: bool = True,
    default: dict[str, Any] | None = None,
    proportional: bool = False,
    partial: float | None = None,
    sections: Sections | None = None,
) -> RopeSpec:
    """The rotary embedding of one kind of layer in families where each kind has its own, by the rule of transformers 5.

    1. `rope_parameters` has an object for each kind. A base missing there is read from the top-level key `theta_key`.
    2. `rope_scaling` changes the object if `scaled`.
    3. Without `rope_parameters`, `default` applies.

    `proportional`: the family has this rope_type, too. `partial`: default fraction of a head that is rotated; None: the
    whole head. `sections`: reads `mrope_section`."""
    scaling, own = c.maybe("rope_scaling", dict), c.maybe("rope_parameters", dict)
    own = default if own is None else own
    kinds, key = ("full_attention", "sliding_attention"), "rope_parameters"
    if own is not None and (others := sorted(own.keys() - {*kinds})):
        raise c.unsupported(key, f"has {', '.join(others)}; its keys are {' and '.join(kinds)}")
    raw = {"rope_type": "default"} if own is None else own.get(kind)
    if own is not None and kind in own and not isinstance(raw, dict):
        raise c.unsupported(key, f"{kind} must be an object")
    if scaling is not None and scaled:
        if raw is None:
            raise c.unsupported("rope_scaling", f"rope_parameters lacks {kind}, which it changes")
        key, raw = "rope_scaling", {**raw, **scaling}
    raw = {
        "rope_theta": c.take(theta_key, float, theta),
        "partial_rotary_factor": partial or 1.0,
        **(raw or {}),
    }
    # transformers looks for this key beside the objects of the kinds, not inside
    if raw.get("truncate") is False:
        raise c.unsupported(key, "truncate has no effect in transformers in a kind of layer")
    is_proportional = proportional and raw.get("rope_type") == "proportional"
    if partial is None and raw["partial_rotary_factor"] not in (None, 1) and not is_proportional:
        raise c.unsupported(key, "transformers rotates whole heads in this family")
    return _rope_from(
        c,
        key,
        raw,
        head_dim,
        max_position=max_position,
        style="half",
        sections=sections,
        proportional=is_proportional,
    )


def _rope_from(
    c: ConfigReader,
    key: str,
    raw: dict[str, Any],
    head_dim: int,
    *,
    max_position: int,
    style: Style,
    sections: Sections | None = None,
    proportional: bool = False,
) -> RopeSpec:
    """The rotary embedding described by `raw`, the value of the config's `key`. Keys of `raw` that are not read raise an
    error."""
    kind = raw.pop("rope_type", raw.get("type", "default"))
    raw.pop("type", None)
    of_axes: Any = None
    if sections is not None:
        of_axes = raw.pop("mrope_section", None) or sections.default
        if (
            not isinstance(of_axes, list | tuple)
            or not all(type(n) is int for n in of_axes)
            or len(of_axes) != 3
        ):
            raise c.unsupported(key, "mrope_section must be three whole numbers")
        if sections.alternate and raw.pop("mrope_interleaved", True) is not True:
            raise c.unsupported(key, "mrope_interleaved must be true, as transformers takes it")

    def number(name: str, default: float | None = None) -> float:
        return _number(c, key, raw, name, default)

    theta, partial = number("rope_theta"), number("partial_rotary_factor", 1.0)
    rotary_dim = head_dim if proportional else int(head_dim * partial)

    def factors(name: str) -> tuple[float, ...]:
        values = raw.pop(name, None)
        if (
            not isinstance(values, list)
            or len(values) != rotary_dim // 2
            or not all(isinstance(value, (int, float)) for value in values)
        ):
            raise c.unsupported(key, f"{name} must be a list of {rotary_dim // 2} numbers")
        return tuple(float(value) for value in values)

    def original_length() -> int:
        return int(number("original_max_position_embeddings", max_position))

    scaling: RopeScaling = None
    if proportional:
        turned = int(partial * head_dim // 2)
        scaling = ProportionalScaling(num_turned=turned, factor=number("factor", 1.0))
    elif kind in ("default", "dynamic"):
        # A dynamic base grows with contexts beyond max_position_embeddings, which an engine refuses.
        factor = number("factor", 1.0 if kind == "default" else None)
        if kind == "dynamic" and rotary_dim < 4:
            raise c.unsupported(key, "rope_type 'dynamic' takes a rotated part of at least 4")
        if kind == "default" and factor != 1.0:
            raise c.unsupported(
                key, "factor has no effect with rope_type 'default'; name a rope_type"
            )
        raw.pop("original_max_position_embeddings", None)
    elif kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
        raw.pop("original_max_position_embeddings", None)
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=original_length(),
        )
    elif kind == "yarn":
        for name in ("finetuned", "attn_factor"):  # transformers ignores these, too
            raw.pop(name, None)
        truncate, original = raw.pop("truncate", True), original_length()
        if not isinstance(truncate, bool):
            raise c.unsupported(key, "truncate must be true or false")
        factor = number("factor", max_position / original if "factor" in raw else None)
        mscale, all_dim = number("mscale", 0.0), number("mscale_all_dim", 0.0)
        by_factor = _mscale(factor, 1.0)
        if mscale and all_dim:
            by_factor = _mscale(factor, mscale) / _mscale(factor, all_dim)
        scaling = YarnScaling(
            truncate=truncate,
            mscale_all_dim=all_dim,
            factor=factor,
            original_max_position=original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=number("attention_factor", by_factor),
        )
    elif kind == "longrope":
        original = original_length()
        factor = number("factor", max_position / original)
        by_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        scaling = LongRopeScaling(
            short_factors=factors("short_factor"),
            long_factors=factors("long_factor"),
            original_max_position=original,
            attention_factor=number("attention_factor", by_factor),
        )
    else:
        raise c.unsupported(
            key, f"rope_type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are"
        )
    if unknown := sorted(name for name, value in raw.items() if value is not None):
        raise c.unsupported(key, f"{', '.join(unknown)} is not known with rope_type {kind!r}")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        style=style,
        scaling=scaling,
        sections=None if of_axes is None else tuple(of_axes),
        alternate=sections is not None and sections.alternate,
    )


def _number(
    c: ConfigReader, key: str, raw: dict[str, Any], name: str, default: float | None = None
) -> float:
    """Removes the number `name` from `raw`, the value of the config's `key`, and returns it."""
    value = raw.pop(name, None)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise c.unsupported(key, f"{name} must be a number")
    return float(value)


def _mscale(factor: float, scale: float) -> float:
    """YaRN's factor for cos and sin."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
