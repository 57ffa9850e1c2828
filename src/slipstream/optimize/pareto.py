"""Pareto fronts and hypervolumes. A point is a tuple of objectives; smaller is better for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Point: TypeAlias = Sequence[float]


def front(points: Sequence[Point]) -> list[int]:
    """Indices, ascending, of the points that no other point dominates. Of equal points only the
    first."""
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (tuple(points[i]), i)):
        # In this order a point comes after all points that dominate or equal it.
        if not any(all(x <= y for x, y in zip(points[j], points[i], strict=True)) for j in found):
            found.append(i)
    return sorted(found)


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Volume that the points dominate up to `reference`, exact for any number of objectives (slices
    along the last one: While, Hingston, Barone, Huband, "A faster algorithm for calculating
    hypervolume", 2006). Points not below the reference in every objective are ignored."""
    inside = [tuple(p) for p in points if all(x < r for x, r in zip(p, reference, strict=True))]
    return _volume([inside[i] for i in front(inside)], tuple(reference))


def _volume(points: list[tuple[float, ...]], reference: tuple[float, ...]) -> float:
    if not points:
        return 0.0
    if len(reference) == 1:
        return reference[0] - min(p[0] for p in points)
    if len(reference) == 2:
        total, ceiling = 0.0, reference[1]
        for x, y in sorted(points):
            if y < ceiling:
                total += (reference[0] - x) * (ceiling - y)
                ceiling = y
        return total
    ordered = sorted(points, key=lambda p: p[-1])
    ends = [p[-1] for p in ordered[1:]] + [reference[-1]]
    total = 0.0
    # between this point's last objective and the next one's, only the first i + 1 points count
    for i, end in enumerate(ends):
        if end > ordered[i][-1]:
            below = [p[:-1] for p in ordered[: i + 1]]
            total += (end - ordered[i][-1]) * _volume(
                [below[j] for j in front(below)], reference[:-1]
            )
    return total


def expected_gain(
    points: Sequence[Point], reference: Point, mean: Any, deviation: Any, third: Any
) -> Any:
    """Expected hypervolume [N] that each of N candidates adds to `points` of three objectives. A
    candidate's first two objectives are independent normal variables (`mean` and `deviation` [N,
    2]); the third is known (`third` [N]).

    Exact. Along the third objective the points divide space into slabs, in each of which the same
    points count. Within a slab the non-dominated area consists of strips between neighbors of the
    front. A candidate covers a rectangle of each strip, whose expected area is a product (Emmerich,
    Giannakoglou, Naujoks, "Single- and multiobjective evolutionary optimization assisted by
    Gaussian random field metamodels", 2006)."""
    inside = [p for p in points if all(x < r for x, r in zip(p, reference, strict=True))]
    levels = sorted({p[2] for p in inside})
    gain = np.zeros(len(mean))
    for low, high in zip([-math.inf, *levels], [*levels, reference[2]], strict=True):
        thickness = np.maximum(high - np.maximum(third, low), 0)
        here = [(p[0], p[1]) for p in inside if p[2] <= low]
        stairs = sorted(here[i] for i in front(here))
        ends = [-math.inf, *(x for x, _ in stairs), reference[0]]
        heights = [reference[1], *(y for _, y in stairs)]
        area = sum(
            (_below(end, mean[:, 0], deviation[:, 0]) - _below(begin, mean[:, 0], deviation[:, 0]))
            * _below(height, mean[:, 1], deviation[:, 1])
            for begin, end, height in zip(ends, ends[1:], heights, strict=False)
        )
        gain += thickness * area
    return gain


def _below(limit: float, mean: Any, deviation: Any) -> Any:
    """E[max(0, limit − X)] of normal X, elementwise."""
    if limit == -math.inf:
        return np.zeros_like(mean)
    z = (limit - mean) / np.maximum(deviation, 1e-9)
    share = 0.5 * (1 + np.array([math.erf(v) for v in z / math.sqrt(2)]))
    return (limit - mean) * share + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
