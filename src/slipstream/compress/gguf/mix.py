"""GGUF's names of mixtures, such as Q4_K_M: the type of each tensor. No torch.

The meaning of the names is llama.cpp's, so that a file has the bits that its name promises. A
matrix whose rows a type's blocks do not divide takes the next type that fits, as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import AttentionSpec
from slipstream.spec.stored.gguf_types import BY_NAME, TYPES
from slipstream.spec.stored.native_formats import is_product

Which = int | Literal["all", "more", "grouped"]
"""Layers that a rule applies to. An integer n stands for the first 1/n of the layers. "more" stands
for the first and the last eighth, and every third layer between. "grouped" stands for all layers of
a model with four or more query heads a key head, and for none of another."""

Rule = tuple[str, Which, str]
"""A rule of a `Mix`: a part of the tensor's name, the layers, and the GGUF type."""

FIRST_TWO = 0
"""Value of `Which` for the first two layers."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixture of types: the type of most matrices, and rules for others. The first rule that
    applies holds. `head` is the type of the output head, or of embeddings that are the head."""

    base: str
    rules: tuple[Rule, ...] = ()
    head: str = "Q6_K"


_MORE: tuple[Rule, ...] = (("attn_v", "more", "Q6_K"), ("ffn_down", "more", "Q6_K"))
_V: Rule = ("attn_v", "grouped", "Q4_K")

MIXES: dict[str, Mix] = {
    "Q2_K": Mix("Q2_K", (_V, *((n, "all", "Q3_K") for n in ("attn_v", "ffn_down", "attn_output")))),
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_M": Mix(
        "Q3_K",
        (
            *(("attn_v", FIRST_TWO, "Q5_K"), ("attn_v", "all", "Q4_K")),
            *(("ffn_down", 16, "Q5_K"), ("ffn_down", "more", "Q4_K")),
            ("attn_output", "all", "Q4_K"),
        ),
    ),
    "IQ4_XS": Mix("IQ4_XS", (("attn_v", "grouped", "Q5_K"),)),
    "IQ4_NL": Mix("IQ4_NL", (("attn_v", "grouped", "Q5_K"),)),
    "MXFP4": Mix("MXFP4"),
    "Q4_0": Mix("Q4_0"),
    "Q4_K_S": Mix("Q4_K", (("ffn_down", 8, "Q5_K"),)),
    "Q4_K_M": Mix("Q4_K", _MORE),
    "Q4_1": Mix("Q4_1"),
    "Q5_0": Mix("Q5_0"),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", _MORE),
    "Q5_1": Mix("Q5_1"),
    "Q6_K": Mix("Q6_K"),
    "Q8_0": Mix("Q8_0", head="Q8_0"),
    "F16": Mix("F16", head="F16"),
}
"""Mixtures by name, in the order of their bits."""

SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""llama.cpp's short names of mixtures."""

FITS = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Replacements for types whose superblocks do not divide a matrix's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUF:
    """Writes a GGUF file, whose matrices have the types that `type` stands for.

    `rounding`: codes are the nearest ones, or GPTQ's. `importance`: the squared inputs of the
    calibration text weigh the errors of scales; without it, rounding to nearest needs no text.
    `types` gives other types to the tensors whose names match a pattern, such as
    {"blk.*.ffn_down.weight": "Q6_K"}."""

    type: str = "Q4_K_M"
    rounding: Literal["nearest", "gptq"] = "gptq"
    importance: bool = True
    types: Mapping[str, str] = field(default_factory=dict)
    damping: float = 0.01

    def check(self) -> None:
        if SHORT.get(self.type, self.type) not in MIXES:
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

    @property
    def mix(self) -> Mix:
        return MIXES[SHORT.get(self.type, self.type)]

    @property
    def needs_text(self) -> bool:
        return self.importance and self.type != "F16"


SINGLE = frozenset(
    kind for mix in MIXES.values() for kind in (mix.base, mix.head, *(r[2] for r in mix.rules))
)
"""Types that `types` may give to single tensors."""


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
    """The tensors of the file. ConfigError if a pattern of `types` matches none."""
    from slipstream.compress.gguf.source import stored_shapes

    spec, found, used = source.spec, list[PlannedBlocks](), set[str]()
    for name, (target, shape) in stored_shapes(source).items():
        if not (is_product(target) or target == "embed.weight") or len(shape) < 2:
            found.append(PlannedBlocks(name, "F32", shape))
            continue
        is_head = target == ("embed.weight" if spec.tied_embeddings else "head.weight")
        kind = step.mix.head if is_head else _type(step.mix, name, source)
        for pattern, given in step.types.items():
            if fnmatchcase(name, pattern):
                kind = given
                used.add(pattern)
        found.append(PlannedBlocks(name, fitting(kind, shape[-1]), shape))
    if unused := sorted(step.types.keys() - used):
        names = [p.name for p in found if p.type != "F32"]
        raise ConfigError(
            f"types: {unused[0]!r} names no matrix of this model; they are called like {names[1]!r}",
            field=f"types.{unused[0]}",
        )
    return tuple(found)


def fitting(kind: str, inner: int) -> str:
    """Returns `kind` if its blocks divide a row of `inner` values, else the first of `FITS` and F16
    that does."""
    for name in (kind, FITS.get(kind, kind)):
        if inner % BY_NAME[name].block_size == 0:
            return name
    return "F16"


def _type(mix: Mix, name: str, source: ModelDescription) -> str:
    at, num_layers = re.match(r"blk\.(\d+)\.", name), source.spec.num_layers
    if at is None:
        return mix.base
    index = int(at[1])
    attention = source.spec.layers[index].attention
    grouped = (
        isinstance(attention, AttentionSpec) and attention.num_heads >= 4 * attention.num_kv_heads
    )
    eighth = num_layers // 8
    more = index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2
    for part, which, kind in mix.rules:
        if part not in name:
            continue
        applies = {"all": True, "more": more, "grouped": grouped, FIRST_TWO: index < 2}
        if applies[which] if which in applies else index < num_layers // int(which):
            return kind
    return mix.base


assert {t.name for t in TYPES.values()} >= SINGLE
