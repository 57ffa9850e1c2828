"""Results as a JSON document and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.bench.power import Energy
from slipstream.costs.environment import environment
from slipstream.costs.metrics import DEFINITIONS, DISTRIBUTIONS, PERCENTILES, Distribution, Summary


def document(kind: str, **parts: Any) -> dict[str, Any]:
    """Add to `parts` the data that is needed to interpret them later."""
    return {"benchmark": kind, **environment(), **parts, "definitions": DEFINITIONS}


def summary_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Rows of (name, mean, p50, p90, p99) in milliseconds, for the distributions that were
    measured."""
    found = ((name, getattr(summary, field)) for name, field in DISTRIBUTIONS.items())
    return [(f"{name}, ms", *_milliseconds(d)) for name, d in found if d is not None]


def _milliseconds(d: Distribution) -> tuple[str, ...]:
    return tuple(f"{value * 1e3:,.2f}" for value in (d.mean, d.p50, d.p90, d.p99))


def print_summary(title: str, summary: Summary) -> None:
    """Print the table of one run."""
    print_table(title, ("", "mean", "p50", "p90", "p99"), summary_rows(summary))
    steady = summary.steady_throughput
    lines = [
        f"requests            {summary.num_requests:,}, of which {summary.num_failed:,} failed "
        f"({summary.num_refused:,} refused); "
        f"{summary.requests_per_s:,.2f} requests/s over {summary.wall_s:,.2f} s",
        f"tokens              {summary.input_tokens:,} in ({summary.cached_tokens:,} cached), "
        f"{summary.output_tokens:,} out",
        f"output throughput   {summary.output_throughput:,.1f} tok/s",
        *([] if steady is None else [f"steady throughput   {steady:,.1f} tok/s"]),
        f"total throughput    {summary.total_throughput:,.1f} tok/s",
    ]
    if summary.goodput is not None:
        wanted = ", ".join(f"{name} ≤ {value:g}" for name, value in summary.objectives.items())
        lines.append(f"goodput             {summary.goodput:,.2f} requests/s ({wanted})")
    lines += [f"{count:,} × error           {text}" for text, count in summary.errors.items()]
    print("\n".join(lines))


def compare_rows(ours: Summary, theirs: Summary) -> list[tuple[str, ...]]:
    """Rows of (name, ours, theirs, ours over theirs) for two servers."""
    pairs: list[tuple[str, float | None, float | None, float]] = [
        (
            f"{name} throughput, tok/s",
            getattr(ours, f"{name}_throughput"),
            getattr(theirs, f"{name}_throughput"),
            1,
        )
        for name in ("output", "steady", "total")
    ]
    for name, field in DISTRIBUTIONS.items():
        a, b = getattr(ours, field), getattr(theirs, field)
        if a is not None and b is not None:
            pairs += [(f"{name} {q}, ms", getattr(a, q), getattr(b, q), 1e3) for q in PERCENTILES]
    return [
        (name, f"{a * unit:,.2f}", f"{b * unit:,.2f}", f"{a / b:.3f}" if b else "–")
        for name, a, b, unit in pairs
        if a is not None and b is not None
    ]


def print_energy(energy: Energy | None) -> None:
    if energy is not None:
        each = energy.joules_per_output_token
        per_token = "" if each is None else f"{each:.4g} J an output token, "
        print(
            f"energy              {per_token}{energy.joules:,.1f} J at {energy.watts:,.1f} W ({', '.join(energy.sources)})"
        )
        if energy.cpu_watts is not None:
            print(f"CPU beside it       {energy.cpu_watts:,.1f} W")


def print_definitions() -> None:
    print("\n" + "\n".join(f"{name}: {text}" for name, text in DEFINITIONS.items()))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: a first column of names, then numbers. Without a terminal nothing is cut off."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = 10_000  # a table uses only the width that it needs
    console.print(table)
