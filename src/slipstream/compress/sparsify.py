"""Zeros in weights: which ones, and what the others take over. A weight is [out, in]; x are its inputs.

    magnitude   the smallest |w| of the whole weight: needs no text
    wanda       the smallest |w| · ‖x‖ of each row (Sun et al. 2024, Eq. 1)
    sparsegpt   block after block of columns those whose loss costs least, and what is lost is taken up by the columns after
                them (Frantar & Alistarh 2023, Alg. 1); with a grid, kept weights are rounded to it on the way, in one solution
A pattern n:m keeps n of m neighbours in a row (2:4 is what tensor cores take); without one, any share of a weight goes.

Layers differ in how much they bear. With `ratios="outliers"` those with more outliers (weights whose |w| · ‖x‖ is far above the
layer's mean) lose less and others more, the average staying what it is (OWL, Yin et al. 2024).

Weights are written dense, zeros and all: vLLM and compressed-tensors gave their formats of sparse weights up in 2026 and refuse
them, and what runs them sees the zeros when it loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.compress.quantize.rounding import Grid, inverse_factor
from slipstream.compress.steps import Pattern, Sparsify
from slipstream.errors import ConfigError

BLOCK = 128
"""Columns whose mask SparseGPT chooses together."""


def sparsify_weight(weight: Tensor, settings: Sparsify, stats: InputStats | None, ratio: float | None = None) -> Tensor:
    """The float32 weight with its zeros. Without `stats` (an expert that no token reached) magnitude decides."""
    ratio = settings.ratio if ratio is None else ratio
    if settings.method == "sparsegpt" and stats is not None:
        return sparsegpt(weight, stats, ratio, settings.pattern, damping=settings.damping)
    by_row = settings.method != "magnitude" and stats is not None
    score = weight.abs() * stats.mean_square.sqrt() if by_row and stats is not None else weight.abs()
    return weight * keep(score, ratio, settings.pattern, by_row=by_row)


def keep(score: Tensor, ratio: float, pattern: Pattern | None, *, by_row: bool) -> Tensor:
    """bool [out, in]: what stays of a weight, the highest scores. What goes is the ratio of each row, or of the whole, rounded
    down."""
    if pattern is not None:
        n, m = sizes(pattern)
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


def sizes(pattern: Pattern) -> tuple[int, int]:
    """(n, m): n of m stay."""
    n, m = pattern.split(":")
    return int(n), int(m)


def check_inner(inner: int, pattern: Pattern) -> None:
    if inner % sizes(pattern)[1]:
        raise ConfigError(
            f"pattern={pattern!r} does not divide the {inner} inputs of a product; ignore it there", field="pattern"
        )


def sparsegpt(
    weight: Tensor,
    stats: InputStats,
    ratio: float,
    pattern: Pattern | None,
    *,
    damping: float = 0.01,
    grid: Grid | None = None,
) -> Tensor:
    """The weight with its zeros and what the others became, on `grid` if there is one (0 is on every symmetric grid). The order
    of columns is theirs: a pattern's neighbours must stay together."""
    work = weight.float().clone()
    hessian = stats.hessian / max(1, stats.num_rows)
    inner = work.shape[1]
    dead = hessian.diagonal() == 0
    work[:, dead] = 0
    upper = inverse_factor(hessian, damping, dead)
    diagonal = upper.diagonal()
    group = inner // grid.scales.shape[1] if grid is not None and not grid.fmt.whole else inner
    m = 0 if pattern is None else sizes(pattern)[1]
    if pattern is not None:
        check_inner(inner, pattern)
    for begin in range(0, inner, BLOCK):
        end = min(begin + BLOCK, inner)
        block, errors = work[:, begin:end].clone(), torch.empty_like(work[:, begin:end])
        stays = torch.ones_like(block, dtype=torch.bool)
        if pattern is None:
            stays = keep(block.square() / diagonal[begin:end].square(), ratio, None, by_row=False)
        for j in range(end - begin):
            at = begin + j
            if pattern is not None and j % m == 0:
                score = block[:, j : j + m].square() / diagonal[at : at + m].square()
                stays[:, j : j + m] = keep(score, ratio, pattern, by_row=True)
            column = block[:, j]
            value = column if grid is None else grid.column(column, at // group)
            made = torch.where(stays[:, j], value, 0.0)
            errors[:, j] = (column - made) / upper[at, at]
            block[:, j:] -= errors[:, j : j + 1] * upper[at, at:end]
            block[:, j] = made
        work[:, begin:end] = block
        work[:, end:] -= errors @ upper[begin:end, end:]
    return work


# --- Ratios by layer --------------------------------------------------------------------------------------------------


def outlier_share(weights: Mapping[str, Tensor], stats: Mapping[str, InputStats], times: float) -> float:
    """The share of a layer's weights whose |w| · ‖x‖ is above so many times the mean of their product."""
    above = count = 0
    for name, weight in weights.items():
        if name in stats:
            score = weight.abs() * stats[name].mean_square.sqrt()
            above += int((score > times * score.mean()).sum())
            count += score.numel()
    return above / max(1, count)


def layer_ratios(shares: Sequence[float], ratio: float, spread: float) -> list[float]:
    """From each layer's share of outliers its ratio of zeros: the average is `ratio`, the most outliers lose least, and between
    the extremes lie 2 · spread (OWL, section 4)."""
    low, high = min(shares), max(shares)
    scaled = [2 * spread * (s - low) / (high - low) if high > low else 0.0 for s in shares]
    mean = sum(scaled) / len(scaled)
    return [ratio + mean - s for s in scaled]


def zeros(tensors: Mapping[str, Tensor]) -> float:
    """The share of zeros."""
    return sum(int((t == 0).sum()) for t in tensors.values()) / max(1, sum(t.numel() for t in tensors.values()))

