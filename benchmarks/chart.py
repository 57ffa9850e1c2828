"""The README's chart: how Slipstream stands against the fastest peer, row by row, drawn from a record.

    python benchmarks/chart.py [--output docs/chart.svg]

The record is benchmarks/results/independent.json; its rows with `chart` are drawn. A bar is the ratio of the two figures,
turned so that above 1 is better, on a logarithmic axis. Its colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
RECORD, CHART = HERE / "results" / "independent.json", HERE.parent / "docs" / "chart.svg"
TITLES = {"gpu": "One H200, Llama-3-8B's shape, FP8", "cpu": "Two CPU cores, SmolLM2-135M"}
WIDTH, LEFT, RIGHT, ROW, LOW, HIGH = 980, 262, 312, 24, 0.07, 9.0
TICKS = (0.125, 0.25, 0.5, 1, 2, 4)
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:12px;fill:#59636e}.head{font-weight:600}
.axis{stroke:#8c959f}.grid{stroke:#d1d9e0}.better{fill:#1a7f64}.worse{fill:#c4432b}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.grid{stroke:#3d444d}.better{fill:#3fb68b}.worse{fill:#e5735c}}"""


def ratio(row: dict) -> tuple[float, str, float]:
    """(how many times as good as the best peer, that peer, its figure)"""
    best = max if row["better"] == "higher" else min
    name = best(row["peers"], key=row["peers"].get)
    theirs = row["peers"][name]
    return (
        (row["ours"] / theirs if row["better"] == "higher" else theirs / row["ours"]),
        name,
        theirs,
    )


def at(value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / LOW) / math.log(HIGH / LOW)


def draw(record: dict) -> str:
    parts, y = [], 34
    for part, title in TITLES.items():
        parts.append(f'<text class="head" x="8" y="{y + 16}">{escape(title)}</text>')
        y += ROW + 4
        for row in (row for row in record[part]["rows"] if row.get("chart")):
            times, peer, theirs = ratio(row)
            left, right = sorted((at(1), at(times)))
            kind = "better" if times >= 1 else "worse"
            parts.append(
                f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(row["what"])}</text>'
            )
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{y + 4}" width="{right - left:.1f}" height="{ROW - 8}"/>'
            )
            end, anchor = (right + 5, "start") if times >= 1 else (left - 5, "end")
            parts.append(
                f'<text x="{end:.1f}" y="{y + 16}" text-anchor="{anchor}">{times:.2f} ×</text>'
            )
            figures = f"{row['ours']:,} to {theirs:,} {row['unit']} · {peer}"
            parts.append(
                f'<text class="small" x="{WIDTH - 8}" y="{y + 16}" text-anchor="end">{escape(figures)}</text>'
            )
            y += ROW
        y += 10
    axis = [
        f'<line class="{"axis" if t == 1 else "grid"}" x1="{at(t):.1f}" x2="{at(t):.1f}" y1="34" y2="{y}"/>'
        for t in TICKS
    ]
    axis += [
        f'<text class="small" x="{at(t):.1f}" y="{y + 16}" text-anchor="middle">{t:g} ×</text>'
        for t in TICKS
    ]
    axis.append(
        '<text class="small" x="8" y="18">Slipstream over the fastest peer; longer to the right is better</text>'
    )
    axis.append(
        f'<text class="small" x="{WIDTH - 8}" y="18" text-anchor="end">Slipstream to the fastest peer</text>'
    )
    size = f'viewBox="0 0 {WIDTH} {y + 26}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Slipstream over its peers">'
    return "\n".join((head, f"<style>{STYLE}</style>", *axis, *parts, "</svg>", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=CHART, help="(default: docs/chart.svg)")
    parser.parse_args().output.write_text(draw(json.loads(RECORD.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
