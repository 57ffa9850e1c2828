"""Quantizes weights: finds scales with the least squared error, then codes to nearest or by GPTQ.

A weight is [out, in]. Its *grid* has a scale for each row and group, and a zero point if it is not symmetric. Scales
are rounded to their stored dtype before codes are chosen, so that the codes match the scales in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize_step import Quantize
from slipstream.kernels.weights.quantize import LARGEST_SCALE, SMALLEST, e2m1_codes, e2m1_values
from slipstream.model.stored.packing import numbers
from slipstream.spec.scheme import WeightFormat

SHRINKS = tuple(1.06 - 0.02 * i for i in range(31))
"""Factors by which the maximum magnitude is multiplied in the search for the best clipping of
integer formats. Above 1, weights reach the last code only by rounding up."""

FLOAT_SHRINKS = tuple(2 ** (i / 32) for i in range(32))
"""Factors tried for float formats, from 1 to 2; beyond 2 the same codes repeat. The relative error
of a float depends on its mantissa, so a scale can place the few weights with large inputs exactly
on codes."""

NVFP4_SHRINKS = (
    1.0,
    1.5,
    *(0.75 + 0.05 * i for i in range(5)),
    *(1.05 + 0.05 * i for i in range(9)),
)
"""Factors tried for NVFP4: the maximum magnitude is mapped to 6, 4 ("four over six"), or a value
between or near them."""
MXFP4_SHRINKS = (1.0, 2.0, 0.5)
"""Factors tried for MXFP4, whose scales are powers of two."""

COLUMNS_AT_ONCE = 128
"""Number of columns that GPTQ rounds one by one before it updates all later columns with one matrix product."""


@dataclass(frozen=True, slots=True)
class QuantGrid:
    """Scales and zeros of a weight. `scales` [out, groups] in their stored dtype, or [1, 1] for a
    whole weight; `zeros` int8 [out, groups]. Scales of 4-bit floats are float32 and include all
    factors; NVFP4 stores scales · `factors` [out] in e4m3, and the weight's factor."""

    fmt: WeightFormat
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None = None

    def codes(self, weight: Tensor) -> Tensor:
        """Nearest codes of a float32 weight [out, in]: int8, or float8_e4m3fn values."""
        scales = self.scales.float().expand(len(weight), -1)[..., None]
        x = weight.unflatten(1, (scales.shape[1], -1)) / scales
        if self.fmt.in_pairs:
            return e2m1_values(e2m1_codes(x)).to(torch.float8_e4m3fn).flatten(1)
        if self.fmt.kind == "float":
            floats: Tensor = x.clamp(-448, 448).to(torch.float8_e4m3fn)
            return floats.flatten(1)
        if self.zeros is not None:
            x = x + self.zeros.float()[..., None]
        lowest, highest = bounds(self.fmt)
        ints: Tensor = x.round_().clamp_(lowest, highest).to(torch.int8)
        return ints.flatten(1)

    def column(self, column: Tensor, group: int) -> Tensor:
        """Round one column of a weight [out] to nearest."""
        zeros = self.zeros[:, group].float() if self.zeros is not None else None
        return on_grid(self.fmt, column, self.scales[:, group].float(), zeros)


def on_grid(fmt: WeightFormat, x: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Round x to the nearest values of its grid. All arguments are float32 of one shape."""
    if fmt.in_pairs:
        return e2m1_values(e2m1_codes(x / scales)) * scales
    if fmt.kind == "float":
        floats: Tensor = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        return floats
    lowest, highest = bounds(fmt)
    if zeros is None:
        return (x / scales).round_().clamp_(lowest, highest) * scales
    return ((x / scales + zeros).round_().clamp_(lowest, highest) - zeros) * scales


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized weight: codes and their grid."""

    grid: QuantGrid
    codes: Tensor  # int8 or float8_e4m3fn [out, in]

    @property
    def fmt(self) -> WeightFormat:
        return self.grid.fmt

    def dequantized(self) -> Tensor:
        """Dequantized weight, float32 [out, in]."""
        return numbers(self.codes, self.grid.scales, self.grid.zeros)

    @classmethod
    def cat(cls, parts: Sequence[Rounded]) -> Rounded:
        """Concatenate the rows of several weights of one format."""
        zeros = [part.grid.zeros for part in parts if part.grid.zeros is not None]
        factors = [part.grid.factors for part in parts if part.grid.factors is not None]
        grid = QuantGrid(
            parts[0].fmt,
            torch.cat([p.grid.scales for p in parts]),
            torch.cat(zeros) if zeros else None,
            torch.cat(factors) if factors else None,
        )
        return cls(
            grid, torch.cat([p.codes.view(torch.int8) for p in parts]).view(parts[0].codes.dtype)
        )


def bounds(fmt: WeightFormat) -> tuple[int, int]:
    """Lowest and highest integer code. Weights multiplied by 8-bit inputs do not use −128."""
    return fmt.lowest + (fmt.inputs is not None), -fmt.lowest - 1


def fit(
    weight: Tensor,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    clip: bool,
    importance: Tensor | None = None,
    factors: Tensor | None = None,
) -> QuantGrid:
    """Fit the grid of a float32 weight [out, in], with scales in `dtype`. With `clip` each scale is
    the one with the least squared error among those for the format's factors; `importance` [in]
    weights the errors by input. NVFP4's `factors` are computed from the weight unless given."""
    if fmt.factor is not None and factors is None:
        top = weight.abs().amax().clamp(min=SMALLEST)
        factors = (6 * LARGEST_SCALE / top).expand(len(weight)).contiguous()
    whole = (
        weight.reshape(1, 1, -1)
        if fmt.whole
        else weight.unflatten(1, (fmt.groups(weight.shape[1]), -1))
    )
    weighed = None
    if importance is not None and not fmt.whole:
        weighed = importance.clamp(min=1e-10 * float(importance.max()) + 1e-30).view(
            whole.shape[1], -1
        )
    best: tuple[Tensor, Tensor | None] | None = None
    least = None
    for shrink in shrinks_of(fmt) if clip else (1.0,):
        scales, zeros = _range(whole, fmt, shrink, dtype, factors)
        grid = QuantGrid(fmt, scales, zeros, factors)
        if not clip:
            return grid
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
    return QuantGrid(fmt, *best, factors)


def shrinks_of(fmt: WeightFormat) -> Sequence[float]:
    if fmt.in_pairs:
        return MXFP4_SHRINKS if fmt.factor is None else NVFP4_SHRINKS
    return SHRINKS if fmt.kind == "int" else FLOAT_SHRINKS


def _range(
    groups: Tensor, fmt: WeightFormat, shrink: float, dtype: torch.dtype, factors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scales, zeros) that map the extremes of `groups` [rows, groups, size], times `shrink`, to
    the ends of the code range."""
    if fmt.in_pairs:
        largest = groups.abs().amax(-1).clamp(min=SMALLEST)
        if factors is None:
            return (largest.log2().floor() - 2).exp2() * shrink, None
        wanted = (largest * (shrink / 6) * factors[:, None]).clamp(2.0**-9, 448)
        return wanted.to(torch.float8_e4m3fn).float() / factors[:, None], None
    if fmt.kind == "float":
        return (groups.abs().amax(-1).clamp(min=SMALLEST) * (shrink / 448)).to(dtype), None
    if fmt.symmetric:
        top = 127.0 if fmt.inputs is not None else ((1 << fmt.bits) - 1) / 2
        return (groups.abs().amax(-1).clamp(min=SMALLEST) * (shrink / top)).to(dtype), None
    low, high = (groups.amin(-1).clamp(max=0) * shrink, groups.amax(-1).clamp(min=0) * shrink)
    scales = ((high - low).clamp(min=SMALLEST) / ((1 << fmt.bits) - 1)).to(dtype)
    zeros = (fmt.lowest - low / scales.float()).round().clamp(fmt.lowest, -fmt.lowest - 1)
    return scales, zeros.to(torch.int8)


def nearest(
    weight: Tensor,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    clip: bool,
    stats: InputStats | None = None,
) -> Rounded:
    """Quantize to nearest. With `stats`, clipping weights errors by the inputs' mean squares."""
    grid = fit(
        weight, fmt, dtype, clip=clip, importance=None if stats is None else stats.mean_square
    )
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
    """Quantize by GPTQ (Frantar et al. 2023): columns are rounded one after another, and the later columns compensate for
    each error, by the inverse Hessian. With `act_order` columns of large inputs come first, and all grids are fitted
    beforehand (so that groups stay contiguous). Without it, a group's grid is fitted when its first column is rounded."""
    return gptq_trace(weight, fmt, dtype, stats, damping=damping, act_order=act_order, clip=clip)[0]


def gptq_trace(
    weight: Tensor,
    fmt: WeightFormat,
    dtype: torch.dtype,
    stats: InputStats,
    *,
    damping: float,
    act_order: bool,
    clip: bool,
) -> tuple[Rounded, Tensor]:
    """Result of `gptq`, and each weight just before it was rounded, float32 [out, in]."""
    work = weight.float().clone()
    hessian = stats.hessian / max(1, stats.num_rows)
    inner = work.shape[1]
    dead = hessian.diagonal() == 0
    importance = stats.mean_square
    grid = fit(work, fmt, dtype, clip=clip, importance=importance)
    work[:, dead] = 0
    order = (
        hessian.diagonal().argsort(descending=True)
        if act_order
        else torch.arange(inner, device=work.device)
    )
    back = order.argsort()
    work, hessian = work[:, order], hessian[order][:, order]
    upper = inverse_factor(hessian, damping, dead[order])
    size = inner // fmt.groups(inner)
    group_of = torch.zeros_like(order) if fmt.whole else order // size
    found, compensated = torch.empty_like(work), torch.empty_like(work)
    at_once = COLUMNS_AT_ONCE if act_order or fmt.group_size is None else min(size, COLUMNS_AT_ONCE)
    for begin in range(0, inner, at_once):
        end = min(begin + at_once, inner)
        if not act_order and begin % size == 0 and begin > 0:
            part = fit(
                work[:, begin : begin + size],
                fmt,
                dtype,
                clip=clip,
                importance=importance[begin : begin + size],
                factors=grid.factors,
            )
            grid.scales[:, begin // size] = part.scales[:, 0]
            if grid.zeros is not None and part.zeros is not None:
                grid.zeros[:, begin // size] = part.zeros[:, 0]
        own = group_of[begin:end]
        zeros = None if grid.zeros is None else grid.zeros[:, own].float()
        scales = grid.scales[:, own].float().expand(len(work), -1)
        made = found[:, begin:end].copy_(work[:, begin:end])

        def on_own(
            column: Tensor, j: int, scales: Tensor = scales, zeros: Tensor | None = zeros
        ) -> Tensor:
            return on_grid(fmt, column, scales[:, j], None if zeros is None else zeros[:, j])

        errors = round_columns(on_own, made, upper[begin:end, begin:end])
        compensated[:, begin:end] = made + errors * upper.diagonal()[begin:end]
        work[:, end:] -= errors @ upper[begin:end, end:]
    return Rounded(grid, grid.codes(found[:, back].contiguous())), compensated[:, back].contiguous()


def round_weight(
    weight: Tensor,
    settings: Quantize,
    fmt: WeightFormat,
    dtype: torch.dtype,
    stats: InputStats | None,
) -> Rounded:
    """Quantize as the recipe says: by GPTQ if it is set and there are statistics, else to nearest."""
    if settings.rounding == "gptq" and stats is not None:
        return gptq(
            weight,
            fmt,
            dtype,
            stats,
            damping=settings.damping,
            act_order=settings.act_order,
            clip=settings.clip,
        )
    return nearest(weight, fmt, dtype, clip=settings.clip, stats=stats)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Value of `rounded` with the gradient of x."""
    return x + (rounded - x).detach()


def round_columns(on_own: Callable[[Tensor, int], Tensor], block: Tensor, upper: Tensor) -> Tensor:
    """Round the columns of `block` [out, n] in place, one after another; the later columns compensate for
    each error. `on_own(column, j)` rounds column j to nearest, `upper` [n, n] is this part of the Cholesky
    factor. Returns the errors divided by the factor's diagonal, [out, n]."""
    errors = torch.empty_like(block)
    for j in range(block.shape[1]):
        column = block[:, j]
        made = on_own(column, j)
        error = (column - made) / upper[j, j]
        block[:, j + 1 :].addcmul_(error[:, None], upper[j, j + 1 :][None], value=-1.0)
        errors[:, j], block[:, j] = error, made
    return errors


def compensate(weight: Tensor, stats: InputStats, share: float, *, damping: float = 0.01) -> Tensor:
    """Compute the weight [out, in] whose outputs for the inputs x are nearest to the original outputs W x°, where x° are the
    inputs before earlier layers were compressed: W + share · W (Σ (x° − x) xᵀ) (Σ x xᵀ + damping)⁻¹. Returns W if there is
    no `stats.shift`.

    This is the objective of GPTAQ (Li et al. 2025), solved before rounding, so that any rounding method can follow."""
    if stats.shift is None or not share:
        return weight
    damped = stats.hessian.clone()
    damped.diagonal().add_(damping * float(damped.diagonal().mean()) + 1e-30)
    change: Tensor = torch.linalg.solve(damped, (weight @ stats.shift).T).T
    return weight + share * change


def inverse_factor(hessian: Tensor, damping: float, dead: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse. Damping grows until the factorization
    succeeds."""
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
    raise FloatingPointError(
        "the second moments of a product's inputs are not a positive definite matrix, at any damping"
    )
