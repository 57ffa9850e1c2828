"""Pareto fronts and hypervolumes. All objectives are to be small; a point is a tuple of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = Sequence[float]


def dominates(a: Point, b: Point) -> bool:
    """`a` is nowhere worse than `b`, and somewhere better."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def front(points: Sequence[Point]) -> list[int]:
    """The numbers of the points that no other dominates, in their order. Of points that are equal, the first."""
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (tuple(points[i]), i)):
        # Whoever dominates a point, or is equal to it, comes before it in this order.
        if not any(all(x <= y for x, y in zip(points[j], points[i], strict=True)) for j in found):
            found.append(i)
    return sorted(found)


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The volume that the points dominate up to `reference`, exact for any number of objectives (slices along the last one:
    While, Hingston, Barone, Huband, "A faster algorithm for calculating hypervolume", 2006). Points that are not below the
    reference in every objective add nothing."""
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
    for i, end in enumerate(
        ends
    ):  # between this point's last objective and the next one's, the first i + 1 points count
        if end > ordered[i][-1]:
            below = [p[:-1] for p in ordered[: i + 1]]
            total += (end - ordered[i][-1]) * _volume([below[j] for j in front(below)], reference[:-1])
    return total
