"""Where the command writes: answers and JSON to standard output, everything else to standard error.

Nothing moves and nothing is coloured unless standard error is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.bench.environment import plain


def print_json(value: Any) -> None:
    """`value`, with dataclasses as objects, on one line of standard output."""
    print(json.dumps(value, default=plain, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def phases(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the current phase on a terminal, nothing elsewhere. Yields the function that names the phase."""
    if not sys.stderr.isatty():
        yield lambda phase: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda phase: status.update(f"{what}: {phase}")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left on a terminal, nothing elsewhere. Yields a function of (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_info(title: str, rows: list[tuple[str, str]]) -> None:
    """Two columns on standard output."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    console.print(Text(title, style="bold"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(Text.assemble((f"{name:<{width}}  ", "dim"), value))


def size(num_bytes: int) -> str:
    """Bytes for a person: exact, and in the unit that fits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes:,} B ({num_bytes / scale:.2f} {unit})"
    return f"{num_bytes:,} B"
