"""Sparsifies weights: sets some to zero. A weight is [out, in]; x are its inputs.

    magnitude   zeros the smallest |w| of the whole weight; needs no text
    wanda       zeros the smallest |w| · ‖x‖ of each row (Sun et al. 2024, Eq. 1)
    sparsegpt   zeros the least costly weights of each group of columns; the columns after them compensate (Frantar & Alistarh
                2023, Alg. 1). With a grid, kept weights are rounded to it in the same pass.

A pattern n:m keeps n of m neighbours in a row (tensor cores support 2:4). Without one, any fraction of a weight can be zero.

With `ratios="outliers"`, layers with more outliers (weights whose |w| · ‖x‖ is far above the layer's mean) get fewer zeros
and others more, with the same average (OWL, Yin et al. 2024).

Weights are written dense, with their zeros: vLLM and compressed-tensors removed their sparse formats in 2026. Slipstream finds
the zeros when it loads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import QuantGrid, inverse_factor
from slipstream.compress.steps import Pattern, Sparsify
from slipstream.errors import ConfigError

MASK_COLUMNS = 128
"""Number of columns for which SparseGPT chooses the mask at a time."""


def sparsify_weight(
    weight: Tensor, settings: Sparsify, stats: InputStats | None, ratio: float | None = None
) -> Tensor:
    """Sparsify a weight, float32. Without `stats` (for an expert that received no tokens) the method is magnitude."""
    ratio = settings.ratio if ratio is None else ratio
    if settings.method == "sparsegpt" and stats is not None:
        return sparsegpt(weight, stats, ratio, settings.pattern, damping=settings.damping)
    by_row = settings.method != "magnitude" and stats is not None
    score = (
        weight.abs() * stats.mean_square.sqrt() if by_row and stats is not None else weight.abs()
    )
    return weight * keep(score, ratio, settings.pattern, by_row=by_row)


def keep(score: Tensor, ratio: float, pattern: Pattern | None, *, by_row: bool) -> Tensor:
    """Mask of the weights with the highest scores, bool [out, in]. A fraction `ratio` of each row,
    or of the whole, is False; the count is rounded down."""
    if pattern is not None:
        n, m = pattern_sizes(pattern)
        check_inner(score.shape[1], pattern)
        groups = score.unflatten(1, (-1, m))
        best = groups.topk(n, dim=-1).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, best, True).flatten(1)
    rows = score if by_row else score.flatten()[None]
    count = int(rows.shape[1] * ratio)
    if count == 0:
        return torch.ones_like(score, dtype=torch.bool)
    least = rows.topk(count, dim=1, largest=False).indices
    return torch.ones_like(rows, dtype=torch.bool).scatter_(1, least, False).view_as(score)


def pattern_sizes(pattern: Pattern) -> tuple[int, int]:
    """Parses a pattern "n:m", in which n of m weights stay."""
    n, m = pattern.split(":")
    return int(n), int(m)


def check_inner(inner: int, pattern: Pattern) -> None:
    if inner % pattern_sizes(pattern)[1]:
        raise ConfigError(
            f"pattern={pattern!r} does not divide the {inner} inputs of a product; ignore it there",
            field="pattern",
        )


def sparsegpt(
    weight: Tensor,
    stats: InputStats,
    ratio: float,
    pattern: Pattern | None,
    *,
    damping: float = 0.01,
    grid: QuantGrid | None = None,
) -> Tensor:
    """Sparsify by SparseGPT: remaining weights are compensated, and rounded to `grid` if there is one; 0 is
    on every symmetric grid. Columns keep their order, because a pattern is about neighbors."""
    work = weight.float().clone()
    hessian = stats.hessian / max(1, stats.num_rows)
    inner = work.shape[1]
    dead = hessian.diagonal() == 0
    work[:, dead] = 0
    upper = inverse_factor(hessian, damping, dead)
    diagonal = upper.diagonal()
    group = inner // grid.scales.shape[1] if grid is not None and not grid.fmt.whole else inner
    m = 0 if pattern is None else pattern_sizes(pattern)[1]
    if pattern is not None:
        check_inner(inner, pattern)
    for begin in range(0, inner, MASK_COLUMNS):
        end = min(begin + MASK_COLUMNS, inner)
        columns, errors = work[:, begin:end].clone(), torch.empty_like(work[:, begin:end])
        stays = torch.ones_like(columns, dtype=torch.bool)
        if pattern is None:
            stays = keep(columns.square() / diagonal[begin:end].square(), ratio, None, by_row=False)
        for j in range(end - begin):
            at = begin + j
            if pattern is not None and j % m == 0:
                score = columns[:, j : j + m].square() / diagonal[at : at + m].square()
                stays[:, j : j + m] = keep(score, ratio, pattern, by_row=True)
            column = columns[:, j]
            value = column if grid is None else grid.column(column, at // group)
            made = torch.where(stays[:, j], value, 0.0)
            errors[:, j] = (column - made) / upper[at, at]
            columns[:, j:] -= errors[:, j : j + 1] * upper[at, at:end]
            columns[:, j] = made
        work[:, begin:end] = columns
        work[:, end:] -= errors @ upper[begin:end, end:]
    return work


# --- Ratios by layer --------------------------------------------------------------------------------------------------


def outlier_share(
    weights: Mapping[str, Tensor], stats: Mapping[str, InputStats], times: float
) -> float:
    """Fraction of a layer's weights whose |w| · ‖x‖ exceeds `times` the mean of their linear layer."""
    above = count = 0
    for name, weight in weights.items():
        if name in stats:
            score = weight.abs() * stats[name].mean_square.sqrt()
            above += int((score > times * score.mean()).sum())
            count += score.numel()
    return above / max(1, count)


def layer_ratios(shares: Sequence[float], ratio: float, spread: float) -> list[float]:
    """Fraction of zeros of each layer, from its fraction of outliers. The average is `ratio`; layers with
    more outliers get fewer zeros, and the extremes differ by 2 · spread (OWL, section 4)."""
    low, high = min(shares), max(shares)
    scaled = [2 * spread * (s - low) / (high - low) if high > low else 0.0 for s in shares]
    mean = sum(scaled) / len(scaled)
    return [ratio + mean - s for s in scaled]
