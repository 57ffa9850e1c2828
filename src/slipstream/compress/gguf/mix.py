"""GGUF's names of mixtures, such as Q4_K_M: the type of each tensor. No torch.

The meaning of the names is llama.cpp's, so that a file has the bits that its name promises. If a
type's blocks do not divide a matrix's rows, the next type that fits is used, as in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import AttentionSpec, MoESpec
from slipstream.spec.stored.gguf_types import BY_NAME
from slipstream.spec.stored.native_formats import is_product


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """A tensor's position: layer `index` of `count`; for attention values, the index counts only these."""

    index: int
    count: int
    grouped: bool
    """Whether at least four query heads use one kv head."""
    weighed: bool
    """Whether importances from a text weight the errors."""


Where = Callable[[TensorPosition], bool]

Rule = tuple[str, Where, str]
"""A rule: (part of a tensor's name, condition on its position, type)."""


def everywhere(place: TensorPosition) -> bool:
    return True


def grouped(place: TensorPosition) -> bool:
    return place.grouped


def more_bits_pay(place: TensorPosition) -> bool:
    """Whether the layer is in the first or last eighth, or every third between: llama.cpp gives these more bits."""
    eighth = place.count // 8
    last = place.index >= 7 * place.count // 8
    return place.index < eighth or last or (place.index - eighth) % 3 == 2


def first(number: int) -> Where:
    return lambda place: place.index < number


def first_share(part: int, *, weighed: bool | None = None) -> Where:
    """Condition for the first 1/`part` of the layers; `weighed`: only with importances (True), or only without (False)."""
    return lambda place: place.index < place.count // part and weighed in (None, place.weighed)


VALUES = "values"
"""Placeholder name in rules: matrices that compute attention values, alone or combined with others."""

_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")


@dataclass(frozen=True, slots=True)
class Mix:
    """The type of most matrices, and rules for others; the first matching rule applies. `head` is
    the type of the output head, or of tied embeddings."""

    base: str
    rules: tuple[Rule, ...] = ()
    head: str = "Q6_K"


_MORE: tuple[Rule, ...] = ((VALUES, more_bits_pay, "Q6_K"), ("ffn_down", more_bits_pay, "Q6_K"))
_IQ4: tuple[Rule, ...] = (
    (VALUES, grouped, "Q5_K"),
    ("ffn_down", first_share(8, weighed=False), "Q5_K"),
)

MIXES: dict[str, Mix] = {
    "Q2_K": Mix(
        "Q2_K",
        (
            (VALUES, grouped, "Q4_K"),
            *((name, everywhere, "Q3_K") for name in (VALUES, "ffn_down", "attn_output")),
        ),
    ),
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_M": Mix(
        "Q3_K",
        (
            (VALUES, first(2), "Q5_K"),
            ("ffn_down", first_share(16), "Q5_K"),
            *((name, everywhere, "Q4_K") for name in (VALUES, "ffn_down", "attn_output")),
        ),
    ),
    "IQ4_XS": Mix("IQ4_XS", _IQ4),
    "IQ4_NL": Mix("IQ4_NL", _IQ4),
    "MXFP4": Mix("Q8_0", (("_exps", everywhere, "MXFP4"),), head="Q8_0"),
    "Q4_0": Mix("Q4_0", (("ffn_down", first_share(8, weighed=True), "Q4_1"),)),
    "Q4_K_S": Mix("Q4_K", ((VALUES, first(4), "Q5_K"), ("ffn_down", first_share(8), "Q5_K"))),
    "Q4_K_M": Mix("Q4_K", _MORE),
    "Q4_1": Mix("Q4_1"),
    "Q5_0": Mix("Q5_0", (("ffn_down", first_share(8, weighed=True), "Q5_1"),)),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", _MORE),
    "Q5_1": Mix("Q5_1"),
    "Q6_K": Mix("Q6_K"),
    "Q8_0": Mix("Q8_0", head="Q8_0"),
    "F16": Mix("F16", head="F16"),
}
"""Mixtures by name, fewest bits first."""

_EIGHT_EXPERTS = {"Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_K"}
"""Base types for which attn_output gets Q5_K in a mixture of eight experts (Mixtral)."""

SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""llama.cpp's short names."""

FITS = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Replacement for a type whose superblocks do not divide a matrix's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUF:
    """Writes a GGUF file, whose matrices have the types of the mixture `type` (Q4_K_M), or with
    `bits` those that `budget` chooses.

    `bits`: maximum average bits per weight over all matrices, embeddings and head included;
    `choices`: allowed types (default: all that fit a matrix). `rounding`: choose codes to nearest
    or by GPTQ. `importance`: weight the errors of scales by the squared inputs of the calibration
    text; without it, rounding to nearest needs no text. `types` gives other types to the tensors
    whose names match a pattern, such as {"blk.*.ffn_down.weight": "Q6_K"}."""

    type: str | None = None
    bits: float | None = None
    choices: tuple[str, ...] = ()
    rounding: Literal["nearest", "gptq"] = "gptq"
    importance: bool = True
    types: Mapping[str, str] = field(default_factory=dict)
    damping: float = 0.01

    def check(self) -> None:
        if self.bits is not None and self.type is not None:
            raise ConfigError("bits finds the types of matrices; leave type out", field="bits")
        if self.choices and self.bits is None:
            raise ConfigError("choices are for bits; take types", field="choices")
        if self.bits is not None and not 0 < self.bits <= 8.5:
            raise ConfigError(f"bits={self.bits} must be above 0 and at most 8.5", field="bits")
        if wrong := sorted(set(self.choices) - CHOICES):
            raise ConfigError(
                f"choices: {wrong[0]!r} is not one of {', '.join(sorted(CHOICES))}", field="choices"
            )
        if self.name not in MIXES:
            raise ConfigError(f"type={self.type!r} is not one of {', '.join(MIXES)}", field="type")
        for pattern, kind in self.types.items():
            if kind not in SINGLE:
                raise ConfigError(
                    f"types: {kind!r} is not one of {', '.join(sorted(SINGLE))}",
                    field=f"types.{pattern}",
                )
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping={self.damping} must be between 0 and 1", field="damping")
        if self.rounding == "gptq" and not self.importance:
            raise ConfigError(
                "rounding: gptq reads the calibration text; take nearest, or leave importance out",
                field="importance",
            )
        if self.bits is not None and not self.importance:
            raise ConfigError(
                "bits are measured on the calibration text; leave importance out",
                field="importance",
            )

    @property
    def name(self) -> str:
        """The mixture's name in `MIXES`."""
        return SHORT.get(self.type or "Q4_K_M", self.type or "Q4_K_M")

    @property
    def mix(self) -> Mix:
        return MIXES[self.name]

    def fixed(self, name: str) -> str | None:
        """Type that `types` sets for a tensor; the last matching pattern wins."""
        return next((t for p, t in [*self.types.items()][::-1] if fnmatchcase(name, p)), None)

    def options(self, inner: int) -> list[str]:
        """Types that a budget may choose for a matrix with rows of `inner` values, fewest bits first."""
        fit = [k for k in self.choices or CHOICES if inner % BY_NAME[k].block_size == 0]
        return sorted(fit, key=lambda kind: (bits_of(kind), kind)) or ["F16"]

    def needs_text(self, planned: Iterable[PlannedBlocks]) -> bool:
        """Whether a tensor's codes depend on the calibration text."""
        return self.importance and any(tensor.type not in ("F32", "F16") for tensor in planned)


SINGLE = frozenset(
    kind for mix in MIXES.values() for kind in (mix.base, mix.head, *(r[2] for r in mix.rules))
)
"""Block types that can be written for single tensors."""

CHOICES = SINGLE - {"F16"}
"""Types that a budget of bits chooses from."""


def bits_of(kind: str) -> float:
    return 8 * BY_NAME[kind].block_bytes / BY_NAME[kind].block_size


@dataclass(frozen=True, slots=True)
class PlannedBlocks:
    """A tensor of the file, and its type."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        quant = BY_NAME[self.type]
        return self.num_values // quant.block_size * quant.block_bytes


def plan_blocks(source: ModelDescription, step: GGUF) -> tuple[PlannedBlocks, ...]:
    """Plan the tensors of the file. ConfigError if a pattern of `types` matches none, or if `bits`
    is not reachable. Until a budget is allocated, a matrix has the type nearest to its average."""
    from slipstream.compress.gguf.source import stored_shapes

    spec, found, used = source.spec, list[PlannedBlocks](), set[str]()
    shapes, kind_of = stored_shapes(source), _types(step, source)
    values = [name for name in sorted(shapes, key=_layer) if _VALUES.search(name)]
    for name, (target, shape) in shapes.items():
        if not (is_product(target) or target == "embed.weight") or len(shape) < 2:
            found.append(PlannedBlocks(name, "F32", shape))
            continue
        is_head = target == ("embed.weight" if spec.tied_embeddings else "head.weight")
        kind = step.mix.head if is_head else kind_of(name, values)
        if step.bits is not None:
            average = step.bits
            kind = min(step.options(shape[-1]), key=lambda option: abs(bits_of(option) - average))
        for pattern, given in step.types.items():
            if fnmatchcase(name, pattern):
                kind = given
                used.add(pattern)
        found.append(PlannedBlocks(name, fitting(kind, shape[-1]), shape))
    if step.type == "MXFP4" and all(p.type != "MXFP4" for p in found):
        raise ConfigError(
            "type=MXFP4 is for mixtures of experts, whose experts it rounds; all of this model would be Q8_0. "
            "Take Q4_0 or IQ4_NL, or say types: {'blk.*': MXFP4}",
            field="type",
        )
    if unused := sorted(step.types.keys() - used):
        name = next(p.name for p in found if p.type != "F32")
        raise ConfigError(
            f"types: {unused[0]!r} names no matrix of this model; they are called like {name!r}",
            field=f"types.{unused[0]}",
        )
    if step.bits is not None:
        _check_budget(step, found)
    return tuple(found)


def _check_budget(step: GGUF, planned: Iterable[PlannedBlocks]) -> None:
    matrices = [p for p in planned if p.type != "F32"]
    fewest = sum(
        p.num_values
        * bits_of(p.type if step.fixed(p.name) is not None else step.options(p.shape[-1])[0])
        for p in matrices
    ) / sum(p.num_values for p in matrices)
    if step.bits is not None and fewest > step.bits:
        odd = {p.shape[-1] for p in matrices if p.shape[-1] % 256}
        why = (
            f"; 256 does not divide rows of {max(odd)}, which K types and IQ4_XS need"
            if odd
            else ""
        )
        raise ConfigError(
            f"bits={step.bits:g} is below the {fewest:.3f} of the smallest types that fit{why}",
            field="bits",
        )


def fitting(kind: str, inner: int) -> str:
    """The type itself if its blocks divide a row of `inner` values, else its replacement."""
    for name in (kind, FITS.get(kind, kind)):
        if inner % BY_NAME[name].block_size == 0:
            return name
    return "F16"


def _layer(name: str) -> int:
    at = re.match(r"blk\.(\d+)\.", name)
    return -1 if at is None else int(at[1])


def _types(step: GGUF, source: ModelDescription) -> Callable[[str, list[str]], str]:
    """Function from a tensor's name, and the names of the matrices that compute attention values,
    to the type that llama.cpp would choose."""
    from slipstream.compress.gguf.source import gguf_family_of

    spec, mix = source.spec, step.mix
    heads = [a for layer in spec.layers if isinstance(a := layer.attention, AttentionSpec)][:1]
    is_grouped = any(a.num_heads >= 4 * a.num_kv_heads for a in heads)
    is_70b = (
        gguf_family_of(source).architecture in ("llama", "qwen2")
        and spec.num_layers == 80
        and any(a.num_heads != a.num_kv_heads for a in heads)
    )
    experts = {m.num_experts for layer in spec.layers if isinstance(m := layer.mlp, MoESpec)}
    is_mixtral = experts == {8} and mix.base != "F16" and step.type != "MXFP4"

    def kind_of(name: str, values: list[str]) -> str:
        is_value, index = bool(_VALUES.search(name)), _layer(name)
        if index < 0:
            return mix.base
        if is_mixtral and (is_value or "attn_k.weight" in name):
            return "Q8_0"
        if is_mixtral and "attn_output.weight" in name:
            return "Q5_K" if mix.base in _EIGHT_EXPERTS else mix.base
        place = TensorPosition(index, spec.num_layers, is_grouped, step.importance)
        if is_value:
            place = TensorPosition(values.index(name), len(values), is_grouped, step.importance)
        part = VALUES if is_value else name
        kind = next((k for p, where, k in mix.rules if p in part and where(place)), mix.base)
        return "Q5_K" if is_70b and is_value and kind in ("Q3_K", "Q4_K") else kind

    return kind_of
