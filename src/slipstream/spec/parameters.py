"""Where a checkpoint's tensors go in a model's parameters. No torch.

A checkpoint that keeps apart what we hold as one (q, k and v; gate and up; experts) fills slices of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slipstream.spec.model import Shape as Shape
from slipstream.spec.model import parameters as parameters


@dataclass(frozen=True, slots=True)
class Transpose:
    """Stored as [in, out] (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Ungroup:
    """The rows of q, k and v stand by kv head: the `group` query heads that read it, its key, its value (GPT-NeoX, Falcon)."""

    num_kv_heads: int
    group: int


@dataclass(frozen=True, slots=True)
class Unpermute:
    """The rows of rotary heads stand in llama.cpp's order: the two halves of each head interleaved."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class MinusOne:
    """Stored with one added (GGUF's Gemma norms)."""


@dataclass(frozen=True, slots=True)
class Untwine:
    """The rows of gate and up stand in turn (gpt-oss); `transposed`: and as [in, out]."""

    transposed: bool


@dataclass(frozen=True, slots=True)
class Swap:
    """The rows of up stand before gate's (GTE)."""


Transform: TypeAlias = Transpose | Ungroup | Unpermute | MinusOne | Untwine | Swap


@dataclass(frozen=True, slots=True)
class Placement:
    """A checkpoint tensor fills rows [start, start + rows) of parameter `target` (all of it if `rows` is None).

    With `copies` it is of all experts, [copies, rows, in], and fills these rows of each.
    """

    target: str
    start: int = 0
    rows: int | None = None
    transform: Transform | None = None
    copies: int | None = None
