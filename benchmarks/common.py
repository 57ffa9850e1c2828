"""What the benchmark scripts share: where a result goes, and medians."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.report import document
from slipstream.plan.environment import plain
from slipstream.plan.hardware import bound_spinning

bound_spinning()  # as the command line does, and before a script imports torch: for every engine in it alike

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = RESULTS / f"{name}.json"
    made.add_argument("--output", type=Path, default=default, help=f"(default: benchmarks/results/{name}.json)")
    return made


def save(path: Path, name: str, **parts: Any) -> None:
    """Write a result with versions, machine, commit and command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document(name, **parts), default=plain, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def with_source() -> dict[str, str]:
    """The environment in which another environment's Python finds this source."""
    return {**os.environ, "PYTHONPATH": str(RESULTS.parents[1] / "src")}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
