"""The weights and activations of products, in the formats of `spec.scheme`.

A weight is [out, in]; the weights of experts are stacked. `OpSet.rounded` and `OpSet.block_types`
name the formats that an op set computes with. Op sets may have formats of their own. On a CPU the
tensors may be NumPy arrays. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.spec.scheme import FP8_TILE, InputFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations of 8 bits. Row t is values[t] · scales[t]; in `fp8-block` each 128 elements of a
    row have a scale."""

    values: Tensor  # float8_e4m3fn or int8 [T, E]
    scales: Tensor  # float32 [T, 1], or with `fp8-block` [T, E / 128]


Activations: TypeAlias = "Tensor | Quantized"
"""The input of `linear`: rows of the model's type, or quantized as the weight's scheme needs
them."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A sum that the next norm computes: x + y, rounded to the model's type."""

    x: Tensor  # [T, E]
    y: Tensor  # [T, E]


def chunk_of(inner: int, size: int) -> int:
    """Returns `GroupedLinear.chunk` of a weight with `inner` inputs in groups of `size`.

    A longer chunk means longer reads. A quarter of a chunk may not span two groups or hold fewer
    than 16 inputs.
    """
    return next(c for c in (4 * size, 2 * size, size) if inner % c == 0 and c >= 64)


@dataclass(frozen=True, slots=True)
class SparseCopy:
    """A 2:4 weight without its zeros, in a library's layout. It is faster from `from_tokens` tokens
    on."""

    packed: Tensor
    from_tokens: int


NO_ROWS: dict[str, tuple[int, int]] = {}
"""`ROWS` of a layout whose rows can't be taken apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight in the layout of its op. Here it is dense: `weight` [out, in] of the compute dtype.
    Subclasses are for schemes."""

    weight: Tensor
    bias: Tensor | None = None
    sparse: SparseCopy | None = None

    ROWS: ClassVar[dict[str, tuple[int, int]]] = {"weight": (0, 1), "bias": (0, 1)}
    """Places of rows: by tensor, the dimension that has the weight's rows, and the rows of an element."""

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def part(self, rows: slice) -> Self:
        """Returns some of its rows, such as those of one expert."""
        found = dict[str, Any](sparse=None)
        for name, (dim, size) in self.ROWS.items():
            if (x := getattr(self, name)) is not None:
                assert rows.start % size == 0
                own = slice(rows.start // size, -(-rows.stop // size))
                found[name] = x[own] if dim == 0 else x[:, own]
        return replace(self, **found)

    @property
    def inputs(self) -> InputFormat | None:
        """Format of activations that it multiplies; None: the model's type."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLinear(Linear):
    """A weight in `fp8` or `int8`: `weight` [out, in] of float8_e4m3fn or int8, times scales[row].
    Inputs have the same format."""

    scales: Tensor  # float32 [out]
    out_dtype: torch.dtype
    ROWS = Linear.ROWS | {"scales": (0, 1)}

    @property
    def inputs(self) -> InputFormat:
        return "int8" if str(self.weight.dtype).endswith("int8") else "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class TileScaledLinear(Linear):
    """A weight in `fp8-block`: `weight` float8_e4m3fn [out, in], with a scale for each tile of 128
    × 128.

    Inputs have the same format. `in` and the rows of each expert are multiples of 128.
    """

    scales: Tensor  # float32 [⌈out / 128⌉, in / 128]
    out_dtype: torch.dtype
    ROWS = Linear.ROWS | {"scales": (0, FP8_TILE)}

    @property
    def inputs(self) -> InputFormat:
        return "fp8-block"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLinear(Linear):
    """A weight in `int8-split` (LLM.int8(), Dettmers et al. 2022).

    The input columns `columns` are multiplied with `dense` in the model's type, the others with
    `weight` as in an int8 `ScaledLinear`, which has zeros in these columns. Inputs have the model's
    type.
    """

    scales: Tensor  # float32 [out]
    out_dtype: torch.dtype
    columns: Tensor  # int64 [C]
    dense: Tensor  # [out, C] of the model's type
    ROWS = Linear.ROWS | {"scales": (0, 1), "dense": (0, 1)}

    @classmethod
    def of(
        cls, codes: Tensor, scales: Tensor, columns: Sequence[int], dtype: torch.dtype
    ) -> SplitLinear:
        """Splits the codes int8 [out, in] of all columns. They are changed in place."""
        import torch

        at = torch.tensor(columns, device=codes.device)
        dense = (codes[:, at].float() * scales[:, None]).to(dtype)
        codes[:, at] = 0
        return cls(weight=codes, scales=scales, out_dtype=dtype, columns=at, dense=dense)

    @property
    def rest(self) -> ScaledLinear:
        """The int8 product of the other columns, with the bias."""
        return ScaledLinear(
            weight=self.weight, bias=self.bias, scales=self.scales, out_dtype=self.out_dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear(Linear):
    """A 4-bit weight with scales by groups of inputs.

    `int4`: `weight` is int16 [out, in / 4], four codes 0 … 15 per word. A value is (code − zero) ·
    scale; without `zeros`, zero is 8. Word j of a chunk of C inputs has, from its low bits up, the
    codes of inputs j, j + C/4, j + C/2 and j + 3C/4.

    `mxfp4` (OCP Microscaling Formats 1.0): `codes` is "e2m1", floats from −6 to 6 with a sign bit,
    two exponent bits and one mantissa bit. Scales are powers of two.

    `nvfp4`: the same codes. Scales are e4m3's numbers times `row_scales`, or with `divides` over
    them, in float32.
    """

    scales: Tensor  # of the compute dtype [in / group_size, out]
    group_size: int
    chunk: int
    zeros: Tensor | None = None  # of the compute dtype [in / group_size, out]
    codes: Literal["int4", "e2m1"] = "int4"
    dense: Tensor | None = None  # the same values [out, in], for steps of many tokens
    row_scales: Tensor | None = None  # float32 [out]
    divides: bool = False
    ROWS = Linear.ROWS | {"scales": (1, 1), "zeros": (1, 1), "dense": (0, 1), "row_scales": (0, 1)}

    @property
    def in_features(self) -> int:
        return 4 * self.weight.shape[1]


def new_linear(
    product: str,
    shape: tuple[int, ...],
    dtype: Any,
    make: Callable[[str, tuple[int, ...], str | None], Any],
    *,
    size: int | None = None,
    zeros: bool = False,
    divides: bool = False,
) -> ScaledLinear | TileScaledLinear | GroupedLinear:
    """Allocates a weight of `shape` [out, in] for one of `spec.scheme.NATIVE_PRODUCTS`.

    `make(name, shape, type)` makes a tensor of it; the type None is the model's, `dtype`. `size` is
    that of its groups, if it has groups. `int8-split` has the tensors of `int8`.
    """
    rows, inner = shape
    if product == "fp8-block":
        tiles = -(-rows // FP8_TILE), -(-inner // FP8_TILE)
        return TileScaledLinear(
            weight=make("weight", (rows, inner), "float8_e4m3fn"),
            scales=make("scales", tiles, "float32"),
            out_dtype=dtype,
        )
    if product in ("fp8", "int8", "int8-split"):
        kind = "float8_e4m3fn" if product == "fp8" else "int8"
        return ScaledLinear(
            weight=make("weight", (rows, inner), kind),
            scales=make("scales", (rows,), "float32"),
            out_dtype=dtype,
        )
    assert size
    groups = inner // size, rows
    return GroupedLinear(
        weight=make("weight", (rows, inner // 4), "int16"),
        scales=make("scales", groups, None),
        zeros=make("zeros", groups, None) if zeros else None,
        group_size=size,
        chunk=chunk_of(inner, size),
        codes="int4" if product == "int4" else "e2m1",
        row_scales=make("row_scales", (rows,), "float32") if product == "nvfp4" else None,
        divides=divides,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Linear(Linear):
    """A weight [rows, in] of e2m1 codes, as `triton.float4.pack_float4` lays it out. Those of experts
    are stacked.

    Rows are a multiple of 8. `weight` is int16 [rows / 8, chunks, 8, 32]; a chunk is 128 inputs of
    a row. Four groups, 128 inputs of `mxfp4` or 64 of `nvfp4`, share words: word j of G has the
    codes of inputs j, j + G, j + 2 G and j + 3 G. A code's bits are placed so that a shift and a
    mask make them a bfloat16's, 2^126 too small.
    """

    # int32 [rows / 8, chunks, 8 or of nvfp4 16]: a byte per group, low ones first
    exponents: Tensor
    factor: float
    """Sums are multiplied by it, a power of two.

    `mxfp4`: the largest scale, and at least 1. A group's scale is factor · 2^(byte − 253), and a
    code's bits times 2^(byte − 127) are the weight / factor. Values below factor · 2^-126 may
    become 0.

    `nvfp4`: 256. A byte b has five exponent bits and three of a mantissa, so that e4m3's smallest
    numbers need no case of their own: the bfloat16 with the bits 0x7000 + 16 b is the scale · 2^118.
    """
    inner: int
    row_scales: Tensor | None = None  # float32 [rows], of `nvfp4`: see `GroupedLinear`
    divides: bool = False
    dense: Tensor | None = None  # [rows, in], the expanded weight, for steps of many tokens
    ROWS = Linear.ROWS | {
        "weight": (0, 8),
        "exponents": (0, 8),
        "row_scales": (0, 1),
        "dense": (0, 1),
    }

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] * self.weight.shape[2]

    @property
    def group_size(self) -> int:
        return 256 // self.exponents.shape[2]

    def row_factors(self) -> Tensor:
        """Returns the factor of each row's sums, float32 [rows]."""
        import torch

        if (rows := self.row_scales) is None:
            return torch.full((self.out_features,), self.factor, device=self.weight.device)
        return self.factor / rows if self.divides else rows * self.factor


LOT_BYTES = 4 * 2**20
"""Bytes of a file that are read at a time where they are packed anew, so that few of its pages are in
memory with the packed rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Some rows of a weight in a GGUF type, as in the file. Row i of `blocks` is the weight's row
    start + i, or start + order[i]."""

    type: str
    blocks: npt.NDArray[np.uint8]  # [rows, bytes per row]
    start: int
    order: npt.NDArray[np.int32] | None = None  # [rows]
    copies: int = 1  # experts, whose rows are stacked in `blocks`; `start` is a row of each
    release: Callable[[int, int], None] = lambda _begin, _end: None
    """Frees the memory pages of rows begin … end − 1, which are not needed again."""

    @property
    def rows(self) -> int:
        return len(self.blocks)

    def lots(self) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of `LOT_BYTES` of rows at a time. Releases a lot before the next."""
        step = max(1, LOT_BYTES // self.blocks.shape[1])
        for begin in range(0, self.rows, step):
            end = min(begin + step, self.rows)
            yield begin, end
            self.release(begin, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLinear(Linear):
    """A weight in GGUF types, for op sets with `block_types`. `weight` gives only the shape and
    type."""

    pieces: tuple[BlockRows, ...]
    device: Any = None  # the torch device where it is laid out; None: the host
    ROWS = NO_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedLinear(Linear):
    """A weight of one GGUF type on a GPU, as `triton.gguf.pack` lays it out.

    A *unit* is 8 groups of inputs that share a scale, of G = 16 or 32. Inputs are padded with zeros
    to whole units, rows to multiples of 8. Number j of a unit's words has the codes of the inputs
    j, j + G, … j + 7 · G, from its low bits up.

    - `weight`: the low bits [rows / 8, units, 8, G]. Codes of 4 to 6 bits have 4 in an int32, those
      of 2 and 3 bits have 2 in an int16. Codes of 8 bits are signed bytes [rows / 8, units, 2, 8,
      G] of int32, the first four in the first word.
    - `high`: the bits above, one each in an int8, or two in an int16.
    - `factors`: int32 [units, words, rows]: the scales of a unit's groups, then its minima. Two
      words have eight bytes, four have eight float16.
    - `d`: int32 [inputs / 256, rows]: two float16 that scales and minima are multiples of.
    """

    factors: Tensor
    high: Tensor | None = None
    d: Tensor | None = None
    type: str
    rows: int
    inner: int
    dtype: torch.dtype  # of the model
    dense: Tensor | None = None  # the same values [out, in], for steps of many tokens
    ROWS = NO_ROWS

    @property
    def out_features(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLinear(Linear):
    """A weight whose rows are in several GGUF types, one part after the other. `weight` is the
    first part's."""

    parts: tuple[CodedLinear, ...]
    dense: Tensor | None = None
    ROWS = NO_ROWS

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)
