"""Quantizes weights to GGUF's block types, and packs the blocks.

A type's `CodeForm` defines its values: value = book[code] · scale − minimum.

1. `fit` finds scales and minima with the least squared error, weighted by the mean squares of the
   inputs. Scales of superblocks are rounded to their few bits before codes are chosen.
2. Codes are the nearest ones, or GPTQ's on these scales.
3. `pack` is the inverse of `kernels.weights.gguf_codes.split`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import COLUMNS_AT_ONCE, inverse_factor, round_columns
from slipstream.kernels.weights.gguf_codes import book
from slipstream.spec.stored.gguf_types import BY_NAME, CodeForm, QuantType

Blocks: TypeAlias = npt.NDArray[np.uint8]

LEVELS = {
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127),
    "IQ4_XS": (-32, 31),
}  # fmt: skip
"""Minimum and maximum scale of a group, as multiples of its superblock's float16 scale."""

HALVES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
WRITABLE = frozenset((*LEVELS, *HALVES, "MXFP4"))
"""Names of the block types that `compress` can write."""

SHRINKS = tuple(0.75 + 0.025 * i for i in range(15))
"""Factors by which the search for scales multiplies the maximum magnitude, or the range."""
VALUES_AT_ONCE = 1 << 22
"""Maximum number of weights whose scales are searched together; whole rows only."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The grid of a weight [out, in]. `scales` and `mins`, float32 [out, groups], are the values read from the file;
    `levels` and `min_levels` are the integers by which `d` and `dmin`, float16 [out, superblocks], are multiplied."""

    quant: QuantType
    scales: Tensor
    mins: Tensor | None
    levels: Tensor | None = None
    min_levels: Tensor | None = None
    d: Tensor | None = None
    dmin: Tensor | None = None

    @property
    def form(self) -> CodeForm:
        return form_of(self.quant)

    def each(self, per_group: Tensor) -> Tensor:
        """Repeat a value of each group for all of its weights: [out, groups] → [out, in]."""
        return per_group.repeat_interleave(self.form.group, 1)


def form_of(quant: QuantType) -> CodeForm:
    assert quant.form is not None
    return quant.form


def codes_of(form: CodeForm, x: Tensor, scales: Tensor, mins: Tensor | None) -> Tensor:
    """Nearest codes of x, float32, in x's shape. A group with scale 0 gets the code whose value is 0."""
    y = x if mins is None else x + mins
    y = torch.where(scales == 0, 0.0, y / torch.where(scales == 0, 1.0, scales))
    if form.book == "linear":
        lowest = 1 if form.bits == 8 else 0  # kernels for 8 bits don't support −128
        return (y + form.zero).round_().clamp_(lowest, (1 << form.bits) - 1)
    values = torch.from_numpy(book(form)).to(x.device)
    values, order = values.sort(stable=True)
    places = torch.bucketize(y, (values[1:] + values[:-1]) / 2)
    return order[places].float()


def values_of(form: CodeForm, codes: Tensor, scales: Tensor, mins: Tensor | None) -> Tensor:
    """Values of codes, computed as readers of GGUF files do."""
    numbers = (
        codes - form.zero
        if form.book == "linear"
        else torch.from_numpy(book(form)).to(codes.device)[codes.long()]
    )
    made = numbers * scales
    return made if mins is None else made - mins


def on_grid(form: CodeForm, x: Tensor, scales: Tensor, mins: Tensor | None) -> Tensor:
    return values_of(form, codes_of(form, x, scales, mins), scales, mins)


# --- Scales -----------------------------------------------------------------------------------------------------------


def fit(weight: Tensor, kind: str, importance: Tensor | None = None) -> BlockGrid:
    """Search the grid of a float32 weight [out, in] in the block type `kind`. `importance` [in] weights the squared errors
    of its columns."""
    quant, rows = BY_NAME[kind], max(1, VALUES_AT_ONCE // weight.shape[1])
    weighed = torch.ones(weight.shape[1], device=weight.device)
    if importance is not None:
        weighed = importance.clamp(min=1e-4 * float(importance.mean()) + 1e-30)
    parts = [_fit(part, quant, weighed) for part in weight.split(rows)]

    def whole(name: str) -> Tensor | None:
        own = [value for part in parts if (value := getattr(part, name)) is not None]
        return torch.cat(own) if own else None

    scales = whole("scales")
    assert scales is not None
    names = ("mins", "levels", "min_levels", "d", "dmin")
    return BlockGrid(quant, scales, *(whole(name) for name in names))


def _fit(weight: Tensor, quant: QuantType, importance: Tensor) -> BlockGrid:
    form = form_of(quant)
    x = weight.unflatten(1, (-1, form.group))  # [out, groups, group]
    w = importance.view(-1, form.group)
    if form.scales == "exponents":
        return _exponents(x, w, quant)
    scales, mins = _ranges(x, w, form, below_zero=form.shares_d) if form.mins else (
        _scales(x, w, form), None
    )  # fmt: skip
    if not form.shares_d:
        return BlockGrid(quant, _half(scales), None if mins is None else _half(mins))
    return _levels(x, w, quant, scales, mins)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-65504, 65504).half().float()


def _error(x: Tensor, w: Tensor, form: CodeForm, scales: Tensor, mins: Tensor | None) -> Tensor:
    """Weighted squared error of each group, [out, groups]."""
    own = None if mins is None else mins[..., None]
    made = on_grid(form, x, scales[..., None], own)
    return made.sub_(x).square_().mul_(w).sum(-1)


def _scales(x: Tensor, w: Tensor, form: CodeForm) -> Tensor:
    """Searches scales of a type without minima. Candidates map the maximum magnitude, times each of several
    factors, to either end of the codebook. Each scale is then refitted to its codes by least squares."""
    values = book(form)
    at = x.abs().argmax(-1, keepdim=True)
    top, weighed = x.gather(-1, at)[..., 0], w * x
    best = least = torch.zeros_like(top)
    ends = (values.min(), values.max())
    for end, shrink in product(ends, SHRINKS if form.bits < 8 else (1.0,)):
        scales = top * (shrink / float(end))
        numbers = on_grid(form, x, scales[..., None], None) / torch.where(
            scales == 0, 1.0, scales
        ).unsqueeze(-1)
        square = (w * numbers.square()).sum(-1).clamp_(min=1e-30)
        along = (weighed * numbers).sum(-1)
        gained = along.square() / square
        best = torch.where(gained > least, along / square, best)
        least = torch.maximum(gained, least)
    return best


def _ranges(x: Tensor, w: Tensor, form: CodeForm, *, below_zero: bool) -> tuple[Tensor, Tensor]:
    """Searches scales and minima; minima of superblock types are 0 or more. From several initial
    ranges, it alternates between the nearest codes and the least-squares line through them."""
    low, high = x.amin(-1), x.amax(-1)
    if below_zero:
        low = low.clamp(max=0)
    most = (1 << form.bits) - 1
    total, along_x = w.sum(-1).expand_as(low), (w * x).sum(-1)
    best_scale, best_min = (high - low) / most, -low
    least = _error(x, w, form, best_scale, best_min)
    for shrink in SHRINKS[::2]:
        scales, mins = shrink * (high - low) / most, -low * shrink
        for _ in range(3):
            q = codes_of(form, x, scales[..., None], mins[..., None])
            wq = w * q
            along_q, squares, both = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
            spread = total * squares - along_q.square()
            lined = spread > 1e-12 * total * squares
            safe = torch.where(lined, spread, 1.0)
            slope = torch.where(lined, (total * both - along_x * along_q) / safe, scales)
            offset = torch.where(lined, (squares * along_x - along_q * both) / safe, -mins)
            if below_zero:
                alone = both / squares.clamp(min=1e-30)
                slope = torch.where(offset > 0, alone, slope)
                offset = offset.clamp(max=0)
            scales, mins = slope, -offset
            error = _error(x, w, form, scales, mins)
            better = error < least
            least = torch.where(better, error, least)
            best_scale = torch.where(better, scales, best_scale)
            best_min = torch.where(better, mins, best_min)
    if below_zero:  # unsigned levels
        best_scale = best_scale.clamp(min=0)
    return best_scale, best_min


def _levels(
    x: Tensor, w: Tensor, quant: QuantType, scales: Tensor, mins: Tensor | None
) -> BlockGrid:
    """Build the grid of a superblock type, whose scales are integers times a float16. Each group
    gets the integers with the smallest error among the nearest ones and their neighbors."""
    form, (lowest, highest) = form_of(quant), LEVELS[quant.name]
    per = quant.block_size // form.group

    def unit(values: Tensor) -> tuple[Tensor, Tensor]:
        """A float16 unit for each superblock, and the same repeated for each of its groups."""
        blocks = values.unflatten(1, (-1, per))
        top = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
        d = (top / (lowest if lowest else highest)).clamp(-65504, 65504).half()
        return d, d.float().repeat_interleave(per, 1)

    def nearest(values: Tensor, each: Tensor) -> Tensor:
        return torch.where(each == 0, 0.0, values / torch.where(each == 0, 1.0, each)).round()

    d, each = unit(scales)
    level = nearest(scales, each)
    dmin = min_each = min_level = None
    if mins is not None:
        dmin, min_each = unit(mins)
        min_level = nearest(mins, min_each)
    steps = (0, -1, 1)
    best: tuple[Tensor, Tensor | None] | None = None
    least = torch.zeros_like(scales)
    for step, min_step in product(steps, (0,) if min_level is None else steps):
        own = (level + step).clamp(lowest, highest)
        own_min = None if min_level is None else (min_level + min_step).clamp(lowest, highest)
        error = _error(
            x,
            w,
            form,
            own * each,
            None if own_min is None or min_each is None else own_min * min_each,
        )
        if best is None:
            best, least = (own, own_min), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        kept = None if own_min is None or best[1] is None else torch.where(better, own_min, best[1])
        best = torch.where(better, own, best[0]), kept
    assert best is not None
    level, min_level = best
    found_mins = None if min_level is None or min_each is None else min_level * min_each
    return BlockGrid(quant, level * each, found_mins, level, min_level, d, dmin)


def _exponents(x: Tensor, w: Tensor, quant: QuantType) -> BlockGrid:
    """Chooses MXFP4's scales: of three neighbouring powers of two, the one with the smallest
    error."""
    form = form_of(quant)
    largest = x.abs().amax(-1)
    first = torch.where(largest == 0, -126.0, largest.clamp(min=2.0**-124).log2().floor() - 2)
    best, least = first, _error(x, w, form, first.exp2(), None)
    for step in (-1, 1):
        error = _error(x, w, form, (first + step).exp2(), None)
        best = torch.where(error < least, first + step, best)
        least = torch.minimum(error, least)
    return BlockGrid(quant, best.exp2(), None, levels=best + 127)


# --- Codes ------------------------------------------------------------------------------------------------------------


def round_blocks(
    weight: Tensor, kind: str, stats: InputStats | None, *, damping: float | None
) -> tuple[Blocks, Tensor]:
    """Quantize a float32 weight [out, in]. Returns its blocks, uint8 [out, bytes], and their
    dequantized values. Codes are chosen by GPTQ if `damping` and a Hessian are given, else to
    nearest."""
    grid = fit(weight, kind, None if stats is None else stats.mean_square)
    step = max(1, VALUES_AT_ONCE // weight.shape[1])
    stretches = [slice(i, i + step) for i in range(0, len(weight), step)]
    if damping is None or stats is None or stats.squares is not None:
        codes = torch.cat([
            codes_of(grid.form, weight[rows], *_part(grid, rows)).to(torch.uint8)
            for rows in stretches
        ])  # fmt: skip
    else:
        codes = _gptq(weight, grid, stats, damping)
    made = torch.cat([
        values_of(grid.form, codes[rows].float(), *_part(grid, rows)) for rows in stretches
    ])  # fmt: skip
    return pack(grid, codes), made


def _part(grid: BlockGrid, rows: slice) -> tuple[Tensor, Tensor | None]:
    mins = None if grid.mins is None else grid.each(grid.mins[rows])
    return grid.each(grid.scales[rows]), mins


def _gptq(weight: Tensor, grid: BlockGrid, stats: InputStats, damping: float) -> Tensor:
    """Quantize by GPTQ with fixed scales, columns of large inputs first."""
    hessian = stats.hessian / max(1, stats.num_rows)
    dead = hessian.diagonal() == 0
    order = hessian.diagonal().argsort(descending=True)
    upper = inverse_factor(hessian[order][:, order], damping, dead[order])
    group_of, form = order // grid.form.group, grid.form
    work, codes = weight[:, order].contiguous(), torch.empty_like(weight, dtype=torch.uint8)
    for begin in range(0, len(order), COLUMNS_AT_ONCE):
        end = min(begin + COLUMNS_AT_ONCE, len(order))
        scales = grid.scales[:, group_of[begin:end]]
        mins = None if grid.mins is None else grid.mins[:, group_of[begin:end]]
        block = work[:, begin:end].clone()

        def nearest(
            column: Tensor, j: int, scales: Tensor = scales, mins: Tensor | None = mins
        ) -> Tensor:
            return on_grid(form, column, scales[:, j], None if mins is None else mins[:, j])

        errors = round_columns(nearest, block, upper[begin:end, begin:end])
        codes[:, order[begin:end]] = codes_of(form, block, scales, mins).to(torch.uint8)
        work[:, end:] -= errors @ upper[begin:end, end:]
    return codes


# --- Packing ----------------------------------------------------------------------------------------------------------


def pack(grid: BlockGrid, codes: Tensor) -> Blocks:
    """Packs codes [out, in] into blocks, uint8 [out, bytes]."""
    size, blocks = grid.quant.block_size, codes.shape[1] // grid.quant.block_size
    q = codes.reshape(-1, size)
    made: list[Tensor] = _PACKS[grid.quant.name](q, grid, len(q))
    whole = torch.cat(made, 1)
    assert whole.shape[1] == grid.quant.block_bytes
    return whole.cpu().numpy().reshape(len(codes), blocks * grid.quant.block_bytes)


def _halves(x: Tensor | None, count: int) -> Tensor:
    """Convert one value of each block to the bytes of a float16, [N, 2]."""
    assert x is not None
    return x.half().reshape(count, 1).contiguous().view(torch.uint8)


def _ints(x: Tensor | None, count: int, shift: int = 0) -> Tensor:
    """Levels of N blocks plus `shift`, which makes them non-negative: int32 [N, groups]."""
    assert x is not None
    return x.reshape(count, -1).int() + shift


def _bytes(x: Tensor) -> Tensor:
    return x.to(torch.uint8)


def _joined(q: Tensor, size: int, width: int) -> Tensor:
    """Packs codes [N, n] of `width` bits into bytes. Each run of `size` · 8 / `width` codes becomes
    `size` bytes: bit field j of byte b is code j · `size` + b of the run."""
    parts = q.int().unflatten(1, (-1, 8 // width, size))
    shifts = torch.arange(0, 8, width, device=q.device)[:, None]
    return _bytes((parts << shifts).sum(2).flatten(1))


def _in_turn(q: Tensor, width: int) -> Tensor:
    """Packs codes [N, n] of `width` bits into bytes of 8 / `width` consecutive codes."""
    return _bytes(
        (q.int().unflatten(1, (-1, 8 // width)) << torch.arange(0, 8, width, device=q.device)).sum(
            2
        )
    )


def _simple(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    """Pack Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL: float16 values, then the fifth bit of each code, then
    the other bits."""
    heads = [_halves(g.scales, n)]
    if g.mins is not None:
        heads.append(_halves(-g.mins, n))
    fifth = [_in_turn(q >> 4, 1)] if g.form.bits == 5 else []
    return [*heads, *fifth, _joined(q & 15, 16, 4)]


def _q8_0(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    return [_halves(g.scales, n), q ^ 128]


def _q2_k(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    both = _ints(g.levels, n) | _ints(g.min_levels, n) << 4
    return [_bytes(both), _joined(q, 32, 2), _halves(g.d, n), _halves(g.dmin, n)]


def _q3_k(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    six = _ints(g.levels, n, 32)
    scales = [_joined(six & 15, 8, 4), _joined(six >> 4, 4, 2)]
    return [_joined(q >> 2, 32, 1), _joined(q & 3, 32, 2), *scales, _halves(g.d, n)]


def _six_bits(g: BlockGrid, n: int) -> Tensor:
    scale, low = _ints(g.levels, n), _ints(g.min_levels, n)
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6, low[:, :4] | low[:, 4:] >> 4 << 6
    return _bytes(torch.cat((*first, scale[:, 4:] & 15 | (low[:, 4:] & 15) << 4), 1))


def _q4_k(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    return [_halves(g.d, n), _halves(g.dmin, n), _six_bits(g, n), _joined(q, 32, 4)]


def _q5_k(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    heads = [_halves(g.d, n), _halves(g.dmin, n), _six_bits(g, n)]
    return [*heads, _joined(q >> 4, 32, 1), _joined(q & 15, 32, 4)]


def _q6_k(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    codes = [_joined(q & 15, 64, 4), _joined(q >> 4, 32, 2)]
    return [*codes, _bytes(_ints(g.levels, n) & 255), _halves(g.d, n)]


def _iq4_xs(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    six = _ints(g.levels, n, 32)
    return [_halves(g.d, n), _in_turn(six >> 4, 2), _in_turn(six & 15, 4), _joined(q, 16, 4)]


def _mxfp4(q: Tensor, g: BlockGrid, n: int) -> list[Tensor]:
    return [_bytes(_ints(g.levels, n)), _joined(q, 16, 4)]


_PACKS: dict[str, Callable[[Tensor, BlockGrid, int], Any]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), _simple),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
