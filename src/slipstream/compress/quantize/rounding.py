"""Weights on a grid: scales with the least squared error, codes to nearest, and codes by GPTQ.

A weight is [out, in]; a *grid* is its scales, and zero points where it is not symmetric, for each row and group. Scales are
rounded to the type they are written in before any code is chosen, so that what is written is what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.kernels.quantize import SMALLEST
from slipstream.model.packing import numbers
from slipstream.spec.scheme import WeightFormat

SHRINKS = tuple(1.06 - 0.02 * i for i in range(31))
"""Shares of the largest magnitude that clipping tries: a little above the end of the range, where its last code is only
reached from one side, down to half."""

FLOAT_SHRINKS = tuple(2 ** (i / 32) for i in range(32))
"""The same of floats: where in a factor of two the largest magnitude falls. The error of a float is a share of it that depends
on its mantissa, so that a scale can put the few weights that meet large inputs on codes; beyond, all codes come again."""

COLUMNS_AT_ONCE = 128
"""GPTQ updates the columns of so many at once, and those after them in one product."""


@dataclass(frozen=True, slots=True)
class Grid:
    """`scales` [out, groups] in the type they are written in, or [1, 1] for a whole weight; `zeros` int8 [out, groups]."""

    fmt: WeightFormat
    scales: Tensor
    zeros: Tensor | None

    def codes(self, weight: Tensor) -> Tensor:
        """float32 [out, in] to nearest: int8, or float8_e4m3fn."""
        scales = self.scales.float().expand(len(weight), -1)[..., None]
        x = weight.unflatten(1, (scales.shape[1], -1)) / scales
        if self.fmt.kind == "float":
            floats: Tensor = x.clamp(-448, 448).to(torch.float8_e4m3fn)
            return floats.flatten(1)
        if self.zeros is not None:
            x = x + self.zeros.float()[..., None]
        lowest, highest = bounds(self.fmt)
        ints: Tensor = x.round_().clamp_(lowest, highest).to(torch.int8)
        return ints.flatten(1)

    def column(self, column: Tensor, group: int) -> Tensor:
        """One column of weights [out] to nearest, as numbers."""
        zeros = self.zeros[:, group].float() if self.zeros is not None else None
        return on_grid(self.fmt, column, self.scales[:, group].float(), zeros)


def on_grid(fmt: WeightFormat, x: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """To nearest, as numbers; all float32 of one shape."""
    if fmt.kind == "float":
        floats: Tensor = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        return floats
    lowest, highest = bounds(fmt)
    if zeros is None:
        return (x / scales).round_().clamp_(lowest, highest) * scales
    return ((x / scales + zeros).round_().clamp_(lowest, highest) - zeros) * scales


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight as it is written."""

    grid: Grid
    codes: Tensor  # int8 or float8_e4m3fn [out, in]

    @property
    def fmt(self) -> WeightFormat:
        return self.grid.fmt

    def numbers(self) -> Tensor:
        """float32 [out, in]"""
        return numbers(self.codes, self.grid.scales, self.grid.zeros)

    def to(self, device: torch.device) -> Rounded:
        zeros = None if self.grid.zeros is None else self.grid.zeros.to(device)
        return Rounded(Grid(self.fmt, self.grid.scales.to(device), zeros), self.codes.to(device))


def bounds(fmt: WeightFormat) -> tuple[int, int]:
    """The ends of an int's codes; symmetric 8-bit products leave the lowest out."""
    return fmt.lowest + (fmt.inputs is not None), -fmt.lowest - 1


def fit(weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, clip: bool, importance: Tensor | None = None) -> Grid:
    """The grid of a float32 weight [out, in], its scales in `dtype`. With `clip` each scale is the one of `SHRINKS` with the
    least squared error, inputs weighed by `importance` [in] (their mean squares)."""
    whole = weight.reshape(1, 1, -1) if fmt.whole else weight.unflatten(1, (fmt.groups(weight.shape[1]), -1))
    weighed = None
    if importance is not None and not fmt.whole:
        weighed = importance.clamp(min=1e-10 * float(importance.max()) + 1e-30).view(whole.shape[1], -1)
    best: tuple[Tensor, Tensor | None] | None = None
    least = None
    for shrink in (SHRINKS if fmt.kind == "int" else FLOAT_SHRINKS) if clip else (1.0,):
        scales, zeros = _range(whole, fmt, shrink, dtype)
        if not clip:
            return Grid(fmt, scales, zeros)
        grid = Grid(fmt, scales, zeros)
        rounded = numbers(grid.codes(whole.flatten(1)), scales, zeros).view(whole.shape)
        error = (rounded - whole).square_()
        total = (error if weighed is None else error.mul_(weighed)).sum(-1)
        if best is None or least is None:
            best, least = (scales, zeros), total
            continue
        better = total < least
        least = torch.where(better, total, least)
        kept = None if zeros is None or best[1] is None else torch.where(better, zeros, best[1])
        best = torch.where(better, scales, best[0]), kept
    assert best is not None
    return Grid(fmt, *best)


def _range(groups: Tensor, fmt: WeightFormat, shrink: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(scales, zeros) with the extremes of `groups` [rows, groups, size], times `shrink`, on the ends of the range."""
    if fmt.kind == "float":
        return (groups.abs().amax(-1).clamp(min=SMALLEST) * (shrink / 448)).to(dtype), None
    if fmt.symmetric:
        top = 127.0 if fmt.inputs is not None else ((1 << fmt.bits) - 1) / 2
        return (groups.abs().amax(-1).clamp(min=SMALLEST) * (shrink / top)).to(dtype), None
    low, high = (groups.amin(-1).clamp(max=0) * shrink, groups.amax(-1).clamp(min=0) * shrink)
    scales = ((high - low).clamp(min=SMALLEST) / ((1 << fmt.bits) - 1)).to(dtype)
    zeros = (fmt.lowest - low / scales.float()).round().clamp(fmt.lowest, -fmt.lowest - 1)
    return scales, zeros.to(torch.int8)


def nearest(weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, clip: bool, stats: InputStats | None = None) -> Rounded:
    """To nearest."""
    grid = fit(weight, fmt, dtype, clip=clip, importance=None if stats is None else stats.mean_square)
    return Rounded(grid, grid.codes(weight))


def gptq(
    weight: Tensor,
    fmt: WeightFormat,
    dtype: torch.dtype,
    stats: InputStats,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    clip: bool = True,
) -> Rounded:
    """GPTQ (Frantar et al. 2023): columns are rounded one after another, and each one's error is taken up by those that
    follow, as the inverse of the inputs' second moments says. With `act_order` the columns of large inputs come first, on
    grids that were found before (so that groups stay neighbours in memory); without, a group's grid is found when its turn
    comes."""
    return solved(weight, fmt, dtype, stats, damping=damping, act_order=act_order, clip=clip)[0]


def solved(
    weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, stats: InputStats, *, damping: float, act_order: bool, clip: bool
) -> tuple[Rounded, Tensor]:
    """`gptq`, and beside it what each weight was when its turn came, the errors of those before it taken up: float32
    [out, in]."""
    work = weight.float().clone()
    hessian = stats.hessian / max(1, stats.num_rows)
    inner = work.shape[1]
    dead = hessian.diagonal() == 0
    importance = stats.mean_square
    grid = fit(work, fmt, dtype, clip=clip, importance=importance)
    work[:, dead] = 0
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(inner, device=work.device)
    back = order.argsort()
    work, hessian = work[:, order], hessian[order][:, order]
    upper = inverse_factor(hessian, damping, dead[order])
    size = inner // fmt.groups(inner)
    group_of = torch.zeros_like(order) if fmt.whole else order // size
    found, met = torch.empty_like(work), torch.empty_like(work)
    at_once = COLUMNS_AT_ONCE if act_order or fmt.group_size is None else min(size, COLUMNS_AT_ONCE)
    for begin in range(0, inner, at_once):
        end = min(begin + at_once, inner)
        if not act_order and begin % size == 0 and begin > 0:
            part = fit(work[:, begin : begin + size], fmt, dtype, clip=clip, importance=importance[begin : begin + size])
            grid.scales[:, begin // size] = part.scales[:, 0]
            if grid.zeros is not None and part.zeros is not None:
                grid.zeros[:, begin // size] = part.zeros[:, 0]
        own = group_of[begin:end]
        zeros = None if grid.zeros is None else grid.zeros[:, own].float()
        scales = grid.scales[:, own].float().expand(len(work), -1)
        made = found[:, begin:end].copy_(work[:, begin:end])
        errors = round_columns(fmt, made, upper[begin:end, begin:end], scales, zeros)
        met[:, begin:end] = made + errors * upper.diagonal()[begin:end]
        work[:, end:] -= errors @ upper[begin:end, end:]
    return Rounded(grid, grid.codes(found[:, back].contiguous())), met[:, back].contiguous()


def round_columns(fmt: WeightFormat, block: Tensor, upper: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Round the columns of `block` [out, n] in place, one after another on grids of their own [out, n], each one's error taken
    up by those that follow; the errors over the factor's diagonal [out, n]. `upper` [n, n] is the factor's part here."""
    errors = torch.empty_like(block)
    for j in range(block.shape[1]):
        column = block[:, j]
        made = on_grid(fmt, column, scales[:, j], None if zeros is None else zeros[:, j])
        error = (column - made) / upper[j, j]
        block[:, j + 1 :].addcmul_(error[:, None], upper[j, j + 1 :][None], value=-1.0)
        errors[:, j], block[:, j] = error, made
    return errors


def caught_up(weight: Tensor, stats: InputStats, share: float, *, damping: float = 0.01) -> Tensor:
    """The weight [out, in] that comes nearest to what the original gives of the original's inputs x° where it reads x, which
    earlier layers' rounding made of them: W + share · W (Σ (x° − x) xᵀ) (Σ x xᵀ + damping)⁻¹. Without `stats.shift` as it is.
    (The aim of GPTAQ, Li et al. 2025, reached before any column is rounded: it goes with every way of rounding.)"""
    if stats.shift is None or not share:
        return weight
    damped = stats.hessian.clone()
    damped.diagonal().add_(damping * float(damped.diagonal().mean()) + 1e-30)
    change: Tensor = torch.linalg.solve(damped, (weight @ stats.shift).T).T
    return weight + share * change


def inverse_factor(hessian: Tensor, damping: float, dead: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped matrix's inverse; damping grows where rounding made it singular."""
    live = hessian.diagonal()[~dead]
    mean = float(live.mean()) if len(live) else 1.0
    for _ in range(8):
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        damped.diagonal()[dead] = mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper
        damping *= 10
    raise FloatingPointError("the second moments of a product's inputs are no positive matrix, however damped")
