"""The page of a sweep: one HTML file with its data, its script and the libraries that draw it (d3
and Observable Plot, ISC).

It opens from disk, without a network. Rows are stored as one list per column. `dashboard.js` draws
the charts, and combines repetitions to means with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from slipstream.base.html import head
from slipstream.bench.sweep.results import Row, columns_of

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """The rows of one sweep and their common data (`bench.report.document`)."""

    name: str
    rows: Sequence[Row]
    meta: Mapping[str, Any]


def render(runs: Sequence[SweepRun]) -> str:
    """Render the page of one run, or of several to compare, newest first."""
    data = {
        "runs": [
            {
                "name": run.name,
                "meta": _shown(run.meta),
                "num_rows": len(run.rows),
                "columns": _rounded(run.rows),
            }
            for run in runs
        ],
        "definitions": runs[0].meta.get("definitions", {}),
    }
    return fill_page(
        HERE / "dashboard.html", title=" and ".join(run.name for run in runs), data=data
    )


def fill_page(template: Path, *, title: str, data: Any) -> str:
    """Fill a template, in which names between %% stand for the title, the data, and what all pages share."""
    # In a script element only "</script" and "<!--" have a special meaning; JSON reads an escaped
    # "<" as the same character.
    parts = {
        "TITLE": escape(title),
        "LICENSE": (HERE / "vendor" / "LICENSE").read_text("utf-8"),
        "LIBRARIES": (HERE / "vendor" / "charts.min.js").read_text("utf-8"),
        "DATA": json.dumps(
            data, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).replace("<", "\\u003c"),
        "SCRIPT": (HERE / "dashboard.js").read_text("utf-8"),
        "STYLE": (HERE / "dashboard.css").read_text("utf-8"),
    }
    pieces = template.read_text("utf-8").split("%%")
    return head(scripts=True) + "".join(parts.get(piece, piece) for piece in pieces)


def _rounded(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Columns shown in charts, rounded to the digits that charts show."""
    columns = columns_of(rows)
    for name in ("key", "time", "engine"):
        columns.pop(name, None)
    return {
        name: [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]
        for name, values in columns.items()
    }


def _shown(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Data about a run for the page, without the machine's file paths."""
    host = meta.get("machine", {}).get("host", {})
    return {
        "time": meta.get("time"),
        "versions": meta.get("versions"),
        "git_commit": meta.get("git_commit"),
        "ceilings": meta.get("ceilings"),
        "cpu": host.get("cpu"),
        "num_cores": host.get("num_cores"),
        "gpus": [gpu.get("name") for gpu in meta.get("machine", {}).get("gpus", [])],
    }
