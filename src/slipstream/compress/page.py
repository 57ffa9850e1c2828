"""Renders the report as one HTML page with inline SVG, without scripts or external resources. Text from models is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from slipstream.base import html
from slipstream.costs.environment import plain

WIDTH, HEIGHT = 900, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 38, 34
"""Size of a plot in SVG units, and its margins."""


def render(document: Mapping[str, Any]) -> str:
    """Render the page of a `Report.document`."""
    filters = {
        "size": size,
        "percent": percent,
        "number": number,
        "change": change,
        "token": token,
        "passage": passage,
    }
    a, b = document["original"], document["compressed"]
    names = labels(document)
    sizes = [
        ("on disk", a["file_bytes"], b["file_bytes"]),
        ("in memory", a["weights_bytes"], b["weights_bytes"]),
    ]
    speeds = [
        (f"{batch} at once", value, b["tokens_per_s"][batch])
        for batch, value in a["tokens_per_s"].items()
        if batch in b["tokens_per_s"]
    ]
    return html.render(
        Path(__file__).with_name("page.html"),
        filters,
        d=document,
        names=names,
        changes=changes(document),
        histogram=Markup(histogram(document["kl"])),
        layers=Markup(layers(document["layers"])) if document["layers"] else "",
        sizes=Markup(pairs(sizes, size, names)),
        speeds=Markup(pairs(speeds, lambda value: f"{number(value)} tok/s", names))
        if speeds
        else "",
        speed_rows=speeds,
        size_rows=sizes,
        recipe=json.dumps(document["recipe"], ensure_ascii=False, indent=2, default=plain),
    )


def labels(document: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the two models as the user gave them. If they are equal, the differing settings are
    added."""
    a, b = document["original"], document["compressed"]
    if a["model"] != b["model"]:
        return a["model"], b["model"]
    differ = [name for name in a["run_as"] if a["run_as"][name] != b["run_as"][name]]
    told = [
        ", ".join(f"{name}={side['run_as'][name] or 'none'}" for name in differ) for side in (a, b)
    ]
    return f"{a['model']} ({told[0] or 'first'})", f"{b['model']} ({told[1] or 'second'})"


def changes(document: Mapping[str, Any]) -> list[tuple[str, str, str, float | None]]:
    """Memory figures that differ between the two models: (name, first, second, second over first)."""
    a, b = document["original"], document["compressed"]
    found: list[tuple[str, str, str, float | None]] = []
    for key, name, show in (
        ("weights_bytes", "weights in memory", size),
        ("file_bytes", "weights on disk", size),
        ("num_parameters", "parameters", lambda value: f"{value:,}"),
        ("kv_bytes_per_token", "KV cache of a token", size),
    ):
        if a[key] != b[key]:
            found.append((name, show(a[key]), show(b[key]), b[key] / a[key] if a[key] else None))
    if a["zeros"] != b["zeros"]:
        first, second = (percent(side["zeros"] or 0.0, 1) for side in (a, b))
        found.append(("zeros in sparsified products", first, second, None))
    return found


# --- Formatting -------------------------------------------------------------------------------------------------------


def size(num_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:,.0f} B"


def percent(share: float, digits: int = 2) -> str:
    return f"{share:.{digits}%}"


def change(ratio: float) -> str:
    """Format a ratio as a change in percent, or as a multiple if it is more than tenfold."""
    return f"{ratio - 1:+.2%}" if ratio < 10 else f"× {number(ratio)}"


def number(value: float) -> str:
    """Format a number with four significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return (
        f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
        if abs(value) >= 1e-4
        else f"{value:.2e}"
    )


SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token(text: str) -> Markup:
    """Format a token with visible signs for white space and control characters."""
    return (
        Markup("").join(_sign(c) for c in text)
        if text
        else Markup('<span class="ws">nothing</span>')
    )


def passage(text: str) -> Markup:
    """Format a text with visible signs for control characters, line ends, and white space at its start and end."""
    if not text or text.isspace():
        return token(text)
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    inside = Markup("").join(
        c if c == " " else _sign(c) + ("\n" if c == "\n" else "") for c in text[begin:end]
    )
    return Markup("").join([*map(_sign, text[:begin]), inside, *map(_sign, text[end:])])


def _sign(character: str) -> Markup | str:
    if character.isprintable() and not character.isspace():
        return character
    return Markup('<span class="ws">{}</span>').format(
        SIGNS.get(character, f"U+{ord(character):04X}")
    )


# --- Plots ------------------------------------------------------------------------------------------------------------


def histogram(kl: Mapping[str, Any]) -> str:
    """Plot the fraction of tokens by KL, on a logarithmic axis, with mean and p99."""
    edges, counts = kl["edges"], kl["histogram"]
    low, high = math.log10(edges[0]), math.log10(edges[-1])
    total, most = sum(counts) or 1, max(counts) or 1

    def x(value: float) -> float:
        at = (math.log10(max(value, edges[0])) - low) / (high - low)
        return LEFT + min(at, 1.0) * (WIDTH - LEFT - RIGHT)

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - count / most * (HEIGHT - TOP - BOTTOM)

    parts = [_grid([(y(most * i / 3), percent(most * i / 3 / total, 1)) for i in range(4)])]
    for i, count in enumerate(counts):
        if count:
            least = "below" if i == 0 else f"{edges[i]:.1e} to"
            told = f"{least} {edges[i + 1]:.1e} nats: {percent(count / total)} of tokens"
            parts.append(
                _bar(
                    x(edges[i]) + 0.5,
                    y(count),
                    x(edges[i + 1]) - x(edges[i]) - 1,
                    HEIGHT - BOTTOM,
                    "b",
                    told,
                )
            )
    for power in range(math.ceil(low), math.floor(high) + 1):
        parts.append(
            _text(
                x(10.0**power), HEIGHT - 16, f"1e{power}" if power < 0 else str(10**power), "middle"
            )
        )
    for i, (label, value) in enumerate((("mean", kl["mean"]), ("p99", kl["p99"]))):
        at, anchor = x(value), "end" if x(value) > WIDTH * 0.8 else "start"
        top = 4 + 15 * i
        parts.append(
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>'
        )
        shift = -5 if anchor == "end" else 5
        parts.append(_text(at + shift, top + 9, f"{label} {number(value)}", anchor, "told"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 2, "KL of a token, nats", "end"))
    return _svg("How the KL is spread over the tokens", parts)


def layers(found: Sequence[Mapping[str, Any]]) -> str:
    """Plot the errors by layer: bars for each layer's own error, dots for the residual's error after it."""
    most = max(max(layer["own"], layer["state"]) for layer in found) or 1.0
    step = (WIDTH - LEFT - RIGHT) / len(found)
    every = max(1, -(-len(found) // 30))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)

    parts = [_grid([(y(most * i / 3), percent(most * i / 3, 1)) for i in range(4)])]
    dots = []
    for i, layer in enumerate(found):
        left = LEFT + i * step
        told = f"layer {layer['layer']}: own {percent(layer['own'])}, residual {percent(layer['state'])}"
        parts.append(
            _bar(left + step * 0.15, y(layer["own"]), step * 0.7, HEIGHT - BOTTOM, "b", told)
        )
        dots.append((left + step / 2, y(layer["state"])))
        if i % every == 0:
            parts.append(_text(left + step / 2, HEIGHT - 18, str(layer["layer"]), "middle"))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    parts.append(f'<polyline class="line" points="{points}"/>')
    parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in dots]
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 2, "layer", "end"))
    return _svg("Error layer by layer", parts)


def pairs(rows: Sequence[tuple[str, float, float]], show: Any, names: tuple[str, str]) -> str:
    """Plot two bars for each row: the first model's above the second's."""
    most = max(max(a, b) for _, a, b in rows) or 1.0
    width, bar, gap, left = 430, 15, 16, 78
    parts = []
    for i, (label, *values) in enumerate(rows):
        y = 4 + i * (2 * bar + gap)
        parts.append(_text(left - 8, y + bar + 4, label, "end"))
        for value, css in zip(values, "ab", strict=True):
            length = value / most * (width - left - 96)
            parts.append(
                f'<rect class="{css}" x="{left}" y="{y}" width="{max(length, 1):.1f}" height="{bar - 2}"/>'
            )
            parts.append(_text(left + length + 6, y + bar - 4, show(value), "start", "told"))
            y += bar
    return _svg(" and ".join(names), parts, width, len(rows) * (2 * bar + gap))


def _svg(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    most = f"max-width:{width}px"  # same font size in all plots
    return f'<svg viewBox="0 0 {width} {height}" style="{most}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _grid(lines: Sequence[tuple[float, str]]) -> str:
    ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}"'
    return "".join(
        f'<line class="grid" {ends} y1="{y:.1f}" y2="{y:.1f}"/>{_text(LEFT - 6, y + 4, label, "end")}'
        for y, label in lines
    )


def _bar(x: float, y: float, width: float, bottom: float, css: str, told: str) -> str:
    return (
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(bottom - y, 0):.1f}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str, css: str = "label") -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
