"""Mixtures of experts in the C++ kernels (csrc/cpu/experts.cpp): the layout of their weights, and a
layer's operators.

An expert's weight is packed like any product's, in every format except the sparse one. The experts
follow one another. A layer's operators do this:

1. Choose each token's experts, and sort the token–expert pairs by expert.
2. Run each product over all rows of an expert, cut into tasks of about the same cost.
3. Sum a token's rows in the order of its choices, so that the sum does not depend on the rest of
   the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.packed import Packed, PackedExperts, form_of, is_rounded, stand_in
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.weights.forms import (
    BlockLinear,
    GroupedLinear,
    Linear,
    ScaledLinear,
    chunk_of,
)
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import E2M1, Scheme

if TYPE_CHECKING:
    from slipstream.kernels.cpu.arrays import Array

ROWS_AT_ONCE = 4096
"""Number of a weight's rows that are converted to float32 and quantized at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExperts(Linear):
    """Packed weights of all experts. `parts` hold each expert's rows, one part after another; there
    are several if a checkpoint mixes types. `weight` is a placeholder with the shape and type.
    `bias` is float32.
    """

    parts: tuple[PackedExperts, ...]

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.parts)

    @property
    def form(self) -> int:
        """Format of the inputs, the same for every part."""
        return form_of(self.parts[0].kind)

    @property
    def rows(self) -> int:
        """Rows of one expert."""
        return sum(part.rows for part in self.parts)

    @property
    def inner(self) -> int:
        return self.parts[0].inner


def pack_expert_weight(
    w: Linear, num_experts: int, arena: Arena, *, rounded: int | None = None
) -> NativeExperts:
    """Packs the stacked weights of all experts (arrays), in any format that a checkpoint or
    `round_groups` has.

    Dense weights keep their type, or are quantized to the kind `rounded`, one that
    `Packed.put_dense` makes.
    """
    rows, weight, kept = w.out_features // num_experts, _array(w.weight), _array(w.weight)
    if isinstance(w, BlockLinear):
        parts = _of_blocks(w, num_experts, arena)
    elif isinstance(w, GroupedLinear):
        form = group_form(w)
        experts = PackedExperts.empty(form.kind, rows, weight.shape[1] * 4, num_experts, arena)
        for e in range(num_experts):
            form.put(experts.of(e), e * rows)
        parts, kept = (experts,), stand_in((len(weight), experts.inner), _array(w.scales).dtype)
    else:
        scaled = isinstance(w, ScaledLinear)
        if scaled and weight.dtype != np.int8:
            raise ConfigError(
                "the CPU's kernels have no fp8 product; use kernels='reference'", field="kernels"
            )
        dense = native.BF16 if arrays.type_name(weight) == "bfloat16" else native.F32
        kind = native.I8 if scaled else dense if rounded is None else rounded
        experts = PackedExperts.empty(kind, rows, weight.shape[1], num_experts, arena)
        for e in range(num_experts):
            own = slice(e * rows, (e + 1) * rows)
            if isinstance(w, ScaledLinear):
                experts.of(e).put_codes(weight[own], _array(w.scales)[own])
                own_type: Any = w.out_dtype
                kept = stand_in(weight.shape, own_type)
            else:
                experts.of(e).put_dense(weight[own])
        parts = (experts,)
    bias: Any = None if w.bias is None else arrays.float32(w.bias)
    only: Any = stand_in(kept.shape, kept.dtype)
    return NativeExperts(weight=only, bias=bias, parts=parts)


def _array(x: Any) -> npt.NDArray[Any]:
    assert isinstance(x, np.ndarray), "the kernels' weights are made of arrays (kernels/arrays.py)"
    return x


def _of_blocks(w: BlockLinear, num_experts: int, arena: Arena) -> tuple[PackedExperts, ...]:
    """Packs GGUF blocks. If all rows of an expert have one type, there is one part; otherwise there
    is one for each of the checkpoint's tensors."""
    rows, inner = w.out_features // num_experts, w.weight.shape[1]
    pieces = sorted(w.pieces, key=lambda piece: piece.start)
    assert all(piece.copies == num_experts and piece.order is None for piece in pieces)
    whole = None
    if len({piece.type for piece in pieces}) == 1:
        whole = PackedExperts.empty(
            native.BLOCK_KINDS[pieces[0].type], rows, inner, num_experts, arena
        )
    parts = []
    for piece in pieces:
        count = piece.rows // num_experts
        experts = whole or PackedExperts.empty(
            native.BLOCK_KINDS[piece.type], count, inner, num_experts, arena
        )
        for e in range(num_experts):
            begin, end = e * count, (e + 1) * count
            experts.of(e).put_blocks(
                piece.blocks[begin:].ctypes.data, count, piece.start if whole else 0
            )
            piece.release(begin, end)
        parts.append(experts)
    return (whole,) if whole is not None else tuple(parts)


# --- Groups ---


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Packs a `GroupedLinear`: its 4-bit codes unchanged, with scales and minima in float32
    [out, groups]."""

    w: GroupedLinear
    kind: int
    scales: npt.NDArray[np.float32]
    minima: npt.NDArray[np.float32] | None

    def put(self, packed: Packed, first: int = 0) -> None:
        """Packs the weight's rows from `first` on, as many as `packed` has."""
        for row in range(0, packed.rows, ROWS_AT_ONCE):
            at = slice(first + row, first + min(packed.rows, row + ROWS_AT_ONCE))
            codes = unpack4(_array(self.w.weight)[at], self.w.chunk)
            packed.put_codes4(
                codes, self.scales[at], None if self.minima is None else self.minima[at], row
            )


def group_form(w: GroupedLinear) -> GroupForm:
    """Chooses the packed format of a grouped weight.

    Scales are held in float32. In groups of 32 they are in float16 if that is exact, as in GGUF's
    Q4_0. For floats (e2m1) their exponents are held.
    """
    scales = np.ascontiguousarray(_array(w.scales).astype(np.float32).T)
    if w.codes == "e2m1":
        return GroupForm(w, native.MX, scales, None)
    minima = None if w.zeros is None else -_array(w.zeros).astype(np.float32).T * scales
    kind = native.W4 if minima is None else native.W4M
    if w.group_size == 32:
        if minima is None:  # for a group of zeros any scale is right
            parts = (
                _array(w.weight)[at : at + ROWS_AT_ONCE]
                for at in range(0, len(w.weight), ROWS_AT_ONCE)
            )
            some = [
                (unpack4(part, w.chunk).reshape(len(part), -1, 32) != 8).any(-1) for part in parts
            ]
            scales = np.where(np.concatenate(some), scales, np.float32(0.0))
        with np.errstate(over="ignore"):
            halves = minima is None and np.array_equal(
                scales.astype(np.float16).astype(np.float32), scales
            )
        kind = native.Q4 if halves else native.W4M32
        minima = np.float32(-8) * scales if minima is None and not halves else minima
    return GroupForm(w, kind, scales, minima)


def round_groups(weight: npt.NDArray[Any], bias: Any, scheme: Scheme) -> GroupedLinear:
    """Quantizes a dense weight [out, in] to mxfp4, as `quantize.round_linear` does, in arrays and
    some rows at a time.

    Scales have the weight's type.
    """
    size = scheme.group_size
    assert size is not None
    assert scheme.name == "mxfp4"
    chunk = chunk_of(weight.shape[1], size)
    parts = [
        _round_floats(weight[at : at + ROWS_AT_ONCE], size, weight.dtype)
        for at in range(0, len(weight), ROWS_AT_ONCE)
    ]
    made: Any = np.concatenate([pack4(codes, chunk) for codes, _ in parts])
    scales: Any = np.concatenate([scales for _, scales in parts], axis=1)
    return GroupedLinear(
        weight=made, scales=scales, bias=bias, group_size=size, chunk=chunk, codes="e2m1"
    )


def _round_floats(
    weight: npt.NDArray[Any], size: int, kind: np.dtype[Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Quantizes groups to e2m1, and returns (codes, scales).

    The scale is the power of two that brings the group's largest magnitude into [4, 8), where the
    largest code, 6, lies (OCP Microscaling Formats 1.0, section 6.3). Of two equally near codes the
    larger is taken.
    """
    groups = weight.astype(np.float32).reshape(len(weight), -1, size)
    exponents = np.floor(
        np.log2(np.maximum(np.abs(groups).max(-1), np.float32(1e-12)))
    ) - np.float32(2)
    scaled = groups / np.exp2(exponents)[..., None]
    edges = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    codes = np.searchsorted(
        np.array(edges, np.float32), np.abs(scaled).reshape(-1), side="right"
    ).astype(np.uint8)
    codes = codes.reshape(weight.shape) + np.where(scaled < 0, np.uint8(8), np.uint8(0)).reshape(
        weight.shape
    )
    return codes, np.ascontiguousarray(np.exp2(exponents).astype(kind).T)


def pack4(codes: npt.NDArray[np.uint8], chunk: int) -> npt.NDArray[np.int16]:
    """Packs codes 0 … 15 [out, in] into `GroupedLinear.weight`."""
    a, b, c, d = np.split(codes.astype(np.uint16).reshape(len(codes), -1, chunk), 4, axis=-1)
    return (a | b << 4 | c << 8 | d << 12).view(np.int16).reshape(len(codes), -1)


def unpack4(words: npt.NDArray[np.int16], chunk: int) -> npt.NDArray[np.uint8]:
    """Unpacks `GroupedLinear.weight` to codes 0 … 15 [out, in]."""
    chunks = words.view(np.uint16).reshape(len(words), -1, chunk // 4)
    codes = np.concatenate([chunks >> shift & 15 for shift in (0, 4, 8, 12)], axis=-1)
    return codes.astype(np.uint8).reshape(len(words), -1)


# --- A layer's operators ---

NewBuffer = Callable[[str, int, int, int], int]
"""(name, form, size, rows per token) → a buffer of the program."""


def add_choice(
    p: Program,
    x: int,
    logits: int,
    counts: int,
    spec: MoESpec,
    correction: Array | None,
    scales: Array | None,
    rows: int,
    form: int,
    size: int,
) -> None:
    """Adds the choice of each token's experts by the router's `logits` (float32), and the gathering
    of their rows.

    The tokens' rows x (float32), sorted by expert, are written to `rows` in `form`. `counts` is a
    buffer for int64 [experts], bound if tokens are counted.
    """
    g = spec.groups
    groups = (0, 0, False) if g is None else (g.num_groups, g.num_chosen, g.by == "best_two")
    sizes = (spec.num_choices, spec.num_experts_per_token)
    held = *(spec.held or (0, spec.num_experts)), spec.num_experts if spec.adds_identity else -1
    how = (spec.scores == "sigmoid", spec.nearness, spec.normalize, spec.weight_scale)
    numbers = [None if x is None else arrays.float32(x) for x in (correction, scales)]
    p.add("route", logits, *sizes, *how, *numbers, *groups, *held)
    p.add("gather", x, rows, form, size, counts, spec.scales_input)


def add_made_choice(
    p: Program, x: int, choice: int, spec: MoESpec, rows: int, form: int, size: int
) -> None:
    """Adds the gathering of rows for a choice made elsewhere, as `add_choice` does.

    `choice` has a token's experts and then their weights, float32 [2 · k]. A negative expert means
    none.
    """
    p.add("choice", choice, spec.num_experts, spec.num_experts_per_token)
    p.add("gather", x, rows, form, size, -1, spec.scales_input)


def add_experts(
    p: Program, x: int, up: NativeExperts, down: NativeExperts, spec: MoESpec, new: NewBuffer
) -> int:
    """Adds the experts' two products and the activation between them. They read the gathered rows,
    whose format is `up.form`. Returns the results' buffer."""
    e, k = spec.expert, spec.num_experts_per_token
    activation = native.activation_of(e.activation)
    assert activation is not None
    inner = new("expert inner", down.form, e.intermediate_size, k)
    if e.gated and len(up.parts) == 1 and e.intermediate_size % 32 == 0:
        add_expert_linear(p, x, inner, up, down.form, activation)
    else:
        wide = new("expert up", native.FORM_F32, up.rows, k)
        add_expert_linear(p, x, wide, up)
        p.add("activation", wide, inner, down.form, *activation, e.gated, e.intermediate_size, k)
    return add_down(p, inner, down, spec, new)


def add_down(p: Program, inner: int, down: NativeExperts, spec: MoESpec, new: NewBuffer) -> int:
    out = new("expert out", native.FORM_F32, down.rows, spec.num_experts_per_token)
    add_expert_linear(p, inner, out, down)
    return out


def add_expert_linear(
    p: Program,
    x: int,
    y: int,
    w: NativeExperts,
    form: int = -1,
    activation: tuple[int, float, float] = (0, 0.0, 0.0),
) -> None:
    """Adds a product, part by part. If `form` is given, the weight is gate and up, and the result
    is their activation in that format."""
    for column, part in _columns(w.parts):
        bias = None if w.bias is None else w.bias[column:]
        weight = (part.kind, part.rows, part.inner, part.data, part.stride)
        p.add("expert_linear", x, y, column, form, *activation, *weight, bias, w.rows, weights=part)


def _columns(parts: tuple[PackedExperts, ...]) -> Iterator[tuple[int, PackedExperts]]:
    column = 0
    for part in parts:
        yield column, part
        column += part.rows
