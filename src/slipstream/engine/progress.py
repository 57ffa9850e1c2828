"""The progress bar of `LLM`'s calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Context manager of a progress bar with tokens per second, on a terminal only. Yields a
    function to report progress: (number of newly finished requests, number of their tokens)."""
    if not (shown and sys.stderr.isatty()):
        yield lambda num_requests, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.0f} tok/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin, done = time.perf_counter(), 0
    with bar:
        task = bar.add_task("requests", total=total, speed=0.0)

        def advance(num_requests: int, num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            bar.update(task, advance=num_requests, speed=done / (time.perf_counter() - begin))

        yield advance
