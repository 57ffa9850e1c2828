"""Mixtures of experts in the C++ kernels (csrc/cpu/experts.cpp): how their weights are held, and a layer's operators.

An expert's weight is packed like any product's, in every form but the sparse one; the experts stand one after the other. A
layer's operators do this:

1. Choose each token's experts, and put the tokens' rows in the order of their experts.
2. Run each product over all rows of an expert, cut into tasks of about the same cost.
3. Sum a token's rows in the order of its choices, so that the sum does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.kernels.native import Arena, Packed, PackedExperts, Program
from slipstream.kernels.quantize import ROWS_AT_ONCE, unpack4
from slipstream.kernels.weights import BlockLinear, GroupedLinear, Linear, ScaledLinear
from slipstream.spec.model import MoESpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExperts(Linear):
    """All experts' weights. `parts` follow one another in each expert's rows; several where a checkpoint mixes types. `weight`
    only tells shape and type (on the meta device). `bias` is float32."""

    parts: tuple[PackedExperts, ...]

    @property
    def is_rounded(self) -> bool:
        return native.is_rounded(self.parts)

    @property
    def form(self) -> int:
        """What every part reads."""
        return native.form_of(self.parts[0].kind)

    @property
    def rows(self) -> int:
        """Of one expert."""
        return sum(part.rows for part in self.parts)

    @property
    def inner(self) -> int:
        return self.parts[0].inner


def pack_expert_weight(w: Linear, num_experts: int, arena: Arena, *, eight_bits: bool = False) -> NativeExperts:
    """The weights of all experts, one below the other, in any form that a checkpoint or `quantize.round_linear` has; dense ones
    in their own type, or rounded to int8 with a scale a row."""
    rows = w.out_features // num_experts
    if isinstance(w, BlockLinear):
        parts, stand_in = _of_blocks(w, num_experts, arena), w.weight
    elif isinstance(w, GroupedLinear):
        form = group_form(w)
        experts = PackedExperts.empty(form.kind, rows, w.weight.shape[1] * 4, num_experts, arena)
        for e in range(num_experts):
            form.put(experts.of(e), e * rows)
        parts, stand_in = (experts,), torch.empty(len(w.weight), experts.inner, device="meta", dtype=w.scales.dtype)
    else:
        scaled = isinstance(w, ScaledLinear)
        if scaled and w.weight.dtype != torch.int8:
            raise ConfigError("the CPU's kernels have no fp8 product; use kernels='reference'", field="kernels")
        dense = native.BF16 if w.weight.dtype == torch.bfloat16 else native.F32
        kind = native.I8 if scaled or eight_bits else dense
        experts = PackedExperts.empty(kind, rows, w.weight.shape[1], num_experts, arena)
        for e in range(num_experts):
            own = slice(e * rows, (e + 1) * rows)
            if isinstance(w, ScaledLinear):
                experts.of(e).put_codes(w.weight[own], w.scales[own])
            else:
                experts.of(e).put_dense(w.weight[own])
        kept = w.out_dtype if isinstance(w, ScaledLinear) else w.weight.dtype
        parts, stand_in = (experts,), torch.empty_like(w.weight, device="meta", dtype=kept)
    return NativeExperts(weight=stand_in, bias=None if w.bias is None else w.bias.float().contiguous(), parts=parts)


def _of_blocks(w: BlockLinear, num_experts: int, arena: Arena) -> tuple[PackedExperts, ...]:
    """One part if all rows of an expert have one type, else a part for each tensor of the checkpoint."""
    rows, inner = w.out_features // num_experts, w.weight.shape[1]
    pieces = sorted(w.pieces, key=lambda piece: piece.start)
    assert all(piece.copies == num_experts and piece.order is None for piece in pieces)
    whole = None
    if len({piece.type for piece in pieces}) == 1:
        whole = PackedExperts.empty(native.BLOCK_KINDS[pieces[0].type], rows, inner, num_experts, arena)
    parts = []
    for piece in pieces:
        count = piece.rows // num_experts
        experts = whole or PackedExperts.empty(native.BLOCK_KINDS[piece.type], count, inner, num_experts, arena)
        for e in range(num_experts):
            experts.of(e).put_blocks(piece.blocks[e * count :].ctypes.data, count, piece.start if whole else 0)
        parts.append(experts)
    return (whole,) if whole is not None else tuple(parts)


# --- Groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupForm:
    """How a `GroupedLinear` is packed: 4-bit codes as they are, with scales, and what is added, in float32 [out, groups]."""

    w: GroupedLinear
    kind: int
    scales: Tensor
    minima: Tensor | None

    def put(self, packed: Packed, first: int = 0) -> None:
        """The weight's rows from `first` on, as many as `packed` has."""
        for row in range(0, packed.rows, ROWS_AT_ONCE):
            at = slice(first + row, first + min(packed.rows, row + ROWS_AT_ONCE))
            codes = unpack4(self.w.weight[at], self.w.chunk).to(torch.uint8)
            packed.put_codes4(codes, self.scales[at], None if self.minima is None else self.minima[at], row)


def group_form(w: GroupedLinear) -> GroupForm:
    """Scales are held in float32; in groups of 32 in float16, if that holds them exactly, as GGUF's Q4_0; of floats (e2m1)
    their exponents."""
    scales = w.scales.float().T.contiguous()
    if w.codes == "e2m1":
        return GroupForm(w, native.MX, scales, None)
    minima = None if w.zeros is None else -w.zeros.float().T * scales
    kind = native.W4 if minima is None else native.W4M
    if w.group_size == 32:
        if minima is None:  # of a group of zeros any scale is right
            some = (unpack4(part, w.chunk).unflatten(1, (-1, 32)).ne(8).any(-1) for part in w.weight.split(ROWS_AT_ONCE))
            scales = scales.where(torch.cat([*some]), 0.0)
        halves = minima is None and torch.equal(scales.half().float(), scales)
        kind = native.Q4 if halves else native.W4M32
        minima = -8 * scales if minima is None and not halves else minima
    return GroupForm(w, kind, scales, minima)


# --- A layer's operators ----------------------------------------------------------------------------------------------

NewBuffer = Callable[[str, int, int, int], int]
"""(name, form, size, rows a token) → a buffer of the program"""


def add_choice(
    p: Program, x: int, logits: int, counts: int, spec: MoESpec, correction: Tensor | None, rows: int, form: int, size: int
) -> None:
    """Each token's experts by the router's `logits` (float32), and the tokens' rows x (float32) in the order of their experts,
    into `rows` in `form`. `counts`: a buffer for int64 [experts], bound if they are counted."""
    g = spec.groups
    groups = (0, 0, False) if g is None else (g.num_groups, g.num_chosen, g.by == "best_two")
    sizes = (spec.num_experts, spec.num_experts_per_token)
    how = (spec.scores == "sigmoid", spec.normalize, spec.weight_scale)
    p.add("route", logits, *sizes, *how, None if correction is None else correction.float(), *groups)
    p.add("gather", x, rows, form, size, counts)


def add_experts(p: Program, x: int, up: NativeExperts, down: NativeExperts, spec: MoESpec, new: NewBuffer) -> int:
    """The two products and the activation between them, over gathered rows in `up.form`; where the results are."""
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
    p: Program, x: int, y: int, w: NativeExperts, form: int = -1, activation: tuple[int, float, float] = (0, 0.0, 0.0)
) -> None:
    """Part by part; with a form, gate and up whose activation goes out in it."""
    for column, part in _columns(w.parts):
        bias = None if w.bias is None else w.bias[column:]
        weight = (part.kind, part.rows, part.inner, part.data, part.stride)
        p.add("expert_linear", x, y, column, form, *activation, *weight, bias, w.rows, weights=part)


def _columns(parts: tuple[PackedExperts, ...]) -> Iterator[tuple[int, PackedExperts]]:
    column = 0
    for part in parts:
        yield column, part
        column += part.rows
