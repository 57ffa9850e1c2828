"""Placement of a checkpoint's tensors in a model's parameters, and the transforms between their layouts. No torch.

Where several tensors form one parameter (q, k and v; gate and up; experts), each fills a slice of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slipstream.spec.model import Shape as Shape
from slipstream.spec.model import parameters as parameters


@dataclass(frozen=True, slots=True)
class Transpose:
    """The tensor is stored as [in, out] (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Turnable:
    """The tensor is stored as [out, in] or, by some writers, as [in, out] (Qwen 3 VL's experts). Its shape tells which."""


@dataclass(frozen=True, slots=True)
class Ungroup:
    """Rows are grouped by kv head: its `group` query heads, its key, its value (GPT-NeoX, Falcon)."""

    num_kv_heads: int
    group: int


@dataclass(frozen=True, slots=True)
class Unpermute:
    """Rows of rotary heads are in llama.cpp's order, which interleaves the two halves of each head."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class MinusOne:
    """Stored values are 1 larger than ours (norms of Gemma and Nemotron in GGUF)."""


@dataclass(frozen=True, slots=True)
class NegatedExp:
    """Stored values are −exp(ours) (decays in GGUF)."""


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Rows of gate and up alternate (gpt-oss). `transposed`: the tensor is also [in, out]."""

    transposed: bool


@dataclass(frozen=True, slots=True)
class SwapGateUp:
    """The rows of up come before those of gate (GTE)."""


@dataclass(frozen=True, slots=True)
class Flatten:
    """The tensor is a convolution's, [out, *kernel]. Its windows don't overlap, so it acts as a
    matrix."""

    kernel: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OneRow:
    """The tensor has an additional leading dimension of size 1 (ERNIE 4.5's router correction)."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The tensor is one row, stored without the row dimension (a head's norm in StableLM)."""


@dataclass(frozen=True, slots=True)
class Regroup:
    """Rows are stored group by group, and within a group part by part, with `sizes` rows each. Our rows are ordered by part;
    `order` lists the parts."""

    num_groups: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Untile:
    """Rows from `start` on are heads of `size` rows, ordered by [repeat, group] (value heads of Qwen 3.5 in GGUF, whose
    groups share a key head). Ours are ordered by [group, repeat]. `columns`: applies to the columns instead of the rows."""

    num_groups: int
    size: int
    start: int = 0
    columns: bool = False


@dataclass(frozen=True, slots=True)
class TransformChain:
    """Several transforms, in the order in which they are undone."""

    steps: tuple[Transform, ...]


@dataclass(frozen=True, slots=True)
class AxisHalves:
    """Rows of a head are ordered by axis, and in each by its two halves (Gemma 4's image encoder). Ours are ordered by half,
    so that a head is rotated as one."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Rows are multiplied by factors from the config. Each pair is (number of rows, their factor) (Falcon-H1)."""

    factors: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Stacked:
    """The tensor has all experts' rows stacked in one dimension, [copies · rows, in] (DBRX).
    `transposed`: each expert's part is [in, out]."""

    copies: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Reshape:
    """The parameter is stored in another shape: a vector with more dimensions (Kimi Linear's
    decays, group norms in GGUF), or a table with rows of `width` elements (MoonViT's positions)."""

    shape: tuple[int, ...]
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Integers:
    """The tensor holds integers, int64 (DeepSeek V4's experts of each token id)."""


Transform: TypeAlias = (
    Integers
    | Transpose
    | Turnable
    | Ungroup
    | Unpermute
    | MinusOne
    | NegatedExp
    | Deinterleave
    | SwapGateUp
    | Flatten
    | OneRow
    | Vector
    | Regroup
    | Untile
    | TransformChain
    | AxisHalves
    | Scale
    | Reshape
    | Stacked
)


def orders_rows(transform: Transform | None) -> bool:
    """Whether a transform only reorders whole rows. Weights quantized in blocks along a row allow
    no other transform."""
    if isinstance(transform, Untile):
        return not transform.columns
    return isinstance(transform, Unpermute | Regroup | None)


def keeps_float32(name: str) -> bool:
    """Whether a parameter stays float32 in a model of any dtype: router corrections that decide
    between close scores, scales of experts, tables of tokens' experts, decays of recurrent layers,
    gate biases of compressed keys, and coefficients of hyper-connections."""
    kept = (
        *(
            ".correction.weight",
            ".expert_table.weight",
            "gate_bias.weight",
            ".expert_scales.weight",
        ),
        *("recurrent.decay.weight", "recurrent.time.weight", "recurrent.skip.weight"),
    )
    return name.endswith(kept) or ".hyper." in name


@dataclass(frozen=True, slots=True)
class Placement:
    """Destination of a checkpoint tensor: rows [start, start + rows) of parameter `target`, or all
    if `rows` is None.

    With `copies` the tensor has all experts, [copies, rows, in], and fills these rows of each
    expert.
    """

    target: str
    start: int = 0
    rows: int | None = None
    transform: Transform | None = None
    copies: int | None = None
