"""Draws loss curves as one SVG file, readable on light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 320, 60, 130, 16, 36
MAX_POINTS = 400  # of a line
COLOURS = ("#2f6fde", "#d9534f", "#3a9d5d", "#b07aa1")
STYLE = "text{font:12px sans-serif;fill:#777}.grid{stroke:#8884;stroke-width:1}.line{fill:none;stroke-width:1.8}"


def curves(series: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> str:
    """Plot lines of (step, value) by name, on a logarithmic axis. Values that are not positive and finite are left out."""
    kept = {
        name: [(x, y) for x, y in points if y > 0 and math.isfinite(y)]
        for name, points in series.items()
    }
    kept = {name: points for name, points in kept.items() if points}
    values = [y for points in kept.values() for _, y in points] or [1.0]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = (low - 0.05, high + 0.05) if high - low < 0.1 else (low, high)
    first = min((points[0][0] for points in kept.values()), default=0)
    last = max(first + 1, max((points[-1][0] for points in kept.values()), default=1))

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / (last - first), (math.log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = []
    for i in range(5):
        value = 10 ** (low + (high - low) * i / 4)
        _, y = at(first, value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        step = first + (last - first) * i // 4
        parts.append(
            f'<text x="{at(step, value)[0]:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{step}</text>'
        )
    bottom = 0.0
    for i, (name, points) in enumerate(sorted(kept.items(), key=lambda item: -item[1][-1][1])):
        colour = COLOURS[i % len(COLOURS)]
        drawn = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in _thinned(points))
        parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
        end = at(*points[-1])
        bottom = max(end[1] + 4, bottom + 14)  # labels must not overlap
        parts.append(
            f'<text x="{WIDTH - RIGHT + 6}" y="{bottom:.1f}" style="fill:{colour}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">step</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>"


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce to `MAX_POINTS` points or fewer, each the mean of consecutive ones."""
    size = -(-len(points) // MAX_POINTS)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
