"""The places of a checkpoint's tensors in a model's parameters. No torch.

If we hold several tensors as one parameter (q, k and v; gate and up; experts), each tensor fills a
slice of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slipstream.spec.model import Shape as Shape
from slipstream.spec.model import parameters as parameters


@dataclass(frozen=True, slots=True)
class Transpose:
    """The tensor is [in, out] (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Turnable:
    """The tensor is [out, in], or [in, out] as other writers have it (Qwen 3 VL's experts). Its shape tells."""


@dataclass(frozen=True, slots=True)
class Ungroup:
    """Rows are ordered by kv head: its `group` query heads, its key, its value (GPT-NeoX, Falcon)."""

    num_kv_heads: int
    group: int


@dataclass(frozen=True, slots=True)
class Unpermute:
    """Rows of rotary heads are in llama.cpp's order, which interleaves the two halves of each head."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class MinusOne:
    """Stored values are larger by one (norms of Gemma and Nemotron in GGUF)."""


@dataclass(frozen=True, slots=True)
class NegatedExp:
    """Stored values are −exp of ours (decays in GGUF)."""


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Rows of gate and up alternate (gpt-oss). `transposed`: the tensor is also [in, out]."""

    transposed: bool


@dataclass(frozen=True, slots=True)
class SwapGateUp:
    """The rows of up come before those of gate (GTE)."""


@dataclass(frozen=True, slots=True)
class Flatten:
    """The tensor is a convolution's, [out, *kernel]. Its windows do not overlap, so it is a matrix
    product."""

    kernel: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OneRow:
    """The tensor has a dimension of 1 before the others (ERNIE 4.5's correction of a router)."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The tensor is one row without a dimension for rows (a head's norm in StableLM)."""


@dataclass(frozen=True, slots=True)
class Regroup:
    """Rows are ordered by group, and in each by part, of `sizes` rows. Ours are ordered by part: `order` has the parts."""

    num_groups: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Untile:
    """Rows from `start` on are heads of `size` rows, ordered by [repeat, group] (value heads of Qwen 3.5 in GGUF, whose
    groups share a key head). Ours are ordered by [group, repeat]. `columns`: so are the tensor's columns."""

    num_groups: int
    size: int
    start: int = 0
    columns: bool = False


@dataclass(frozen=True, slots=True)
class TransformChain:
    """Several changes, in the order in which they are undone."""

    steps: tuple[Transform, ...]


@dataclass(frozen=True, slots=True)
class AxisHalves:
    """Rows of a head are ordered by axis, and in each by its two halves (Gemma 4's image encoder). Ours are ordered by half,
    so that a head is rotated as one."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Rows are multiplied by numbers of the config. Each pair has a count of rows and their number (Falcon-H1)."""

    factors: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Stacked:
    """The tensor has the rows of all experts below each other, [copies · rows, in] (DBRX). `transposed`: an expert's are
    [in, out]."""

    copies: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Reshape:
    """A vector is stored with more dimensions (Kimi Linear's decays, norms of groups in GGUF), or a table with rows of `width`
    numbers (MoonViT's positions)."""

    shape: tuple[int, ...]
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Integers:
    """The tensor has whole numbers, int64 (DeepSeek V4's experts of each token)."""


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
    """Tells whether a transform only reorders whole rows. Weights in blocks of a row's numbers
    allow no other."""
    if isinstance(transform, Untile):
        return not transform.columns
    return isinstance(transform, Unpermute | Regroup | None)


def keeps_float32(name: str) -> bool:
    """Tells whether a parameter stays float32 in a model of any type: corrections that decide
    between near scores of experts, scales of experts, tables of tokens' experts, the decays of
    recurrent layers, gates' biases of compressed keys, and the coefficients of hyper-connections."""
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
    """The place of a checkpoint tensor: rows [start, start + rows) of parameter `target`, or all if
    `rows` is None.

    With `copies` the tensor has all experts, [copies, rows, in], and fills these rows of each
    expert.
    """

    target: str
    start: int = 0
    rows: int | None = None
    transform: Transform | None = None
    copies: int | None = None
