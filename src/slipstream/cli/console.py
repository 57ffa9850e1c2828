"""Output of the command: answers and JSON to standard output, files into the named folder,
everything else to standard error.

Without a terminal there are no animations or colors: progress is then a line every few seconds."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

LINE_EVERY_S = 5.0


def print_json(value: Any) -> None:
    """Print `value` as one line of JSON to standard output, with dataclasses as objects. If writing
    fails, as on a full disk, the line goes to standard error, because it may have taken hours to
    compute, and ConfigError is raised."""
    from slipstream.costs.environment import plain  # imported late: most commands write no JSON

    text = json.dumps(value, default=plain, ensure_ascii=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        say(text)
        why = error.strerror or error
        raise ConfigError(
            f"cannot write to standard output: {why}; its line is above, on standard error"
        ) from None


def drop_output() -> None:
    """Discard standard output after its reader has closed it. Otherwise Python would report
    unwritten output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write `texts` by file name; each file appears complete. ConfigError if the folder can't be
    written."""
    from slipstream.base.files import write_whole, writing

    with writing(folder, "dir"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Progress of a task, as text: its phase, the number of steps done (by `unit`), and the
    estimated time left after the first step."""

    def __init__(self, what: str, unit: Callable[[int], str] = str) -> None:
        self.what, self._unit = what, unit
        self.phase = ""
        self.done = self.total = 0
        self._begin = self._heard = self._counted_from = time.monotonic()
        self._done_before = 0

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    def set_done(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self.total or done < self.done:  # a new series of steps
            # One step was done since the last call. Several steps at once were done by an
            # interrupted run, and don't show the speed.
            self._counted_from, self._done_before = (self._heard, 0) if done == 1 else (now, done)
        self.done, self.total, self._heard = done, total, now

    def update(self, phase: str, done: int, total: int) -> None:
        self.set_phase(phase)
        self.set_done(done, total)

    def seconds_left(self) -> float | None:
        """Estimated seconds left. None before the first step, after the last, and if the current
        step takes longer than those before."""
        new = self.done - self._done_before
        if new <= 0:
            return None
        step_s = (self._heard - self._counted_from) / new
        left = step_s * (self.total - self.done) - (time.monotonic() - self._heard)
        return left if left > 0 else None

    def line(self) -> str:
        parts = [self.what + (f": {self.phase}" if self.phase else "")]
        if self.total:
            parts.append(f"{self._unit(self.done)} of {self._unit(self.total)}")
        left = self.seconds_left()
        parts.append(
            f"{time.monotonic() - self._begin:.0f} s"
            + ("" if left is None else f", about {left:.0f} s left")
        )
        return ", ".join(parts)


@contextmanager
def shown(progress: Progress) -> Iterator[Progress]:
    """Context manager that shows a task's progress: on a terminal one line that changes, elsewhere
    a new line every `LINE_EVERY_S` seconds."""
    ended = threading.Event()
    with _way_to_show(progress) as (interval_s, show):

        def repeat() -> None:
            while not ended.wait(interval_s):
                show()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            ended.set()
            thread.join()


@contextmanager
def _way_to_show(progress: Progress) -> Iterator[tuple[float, Callable[[], None]]]:
    """Context manager. Yields the seconds between two lines, and the function that shows a line."""
    if not sys.stderr.isatty():
        yield LINE_EVERY_S, lambda: say(f"slipstream: {progress.line()}")
        return
    from rich.console import Console

    with Console(stderr=True).status(progress.what) as status:
        yield 0.2, lambda: status.update(progress.line())


@contextmanager
def phases(what: str) -> Iterator[Callable[[str], None]]:
    """Context manager that shows a task with several phases. Yields the function that names the
    current one."""
    with shown(Progress(what)) as progress:
        yield progress.set_phase


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager that shows a task with many steps. Yields a function of (done, total)."""
    with shown(Progress(what)) as progress:
        yield progress.set_done


def print_info(title: str, rows: list[tuple[str, str]]) -> None:
    """Print two columns to standard output."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    console.print(Text(title, style="bold"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(Text.assemble((f"{name:<{width}}  ", "dim"), value))


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 replica, 2 replicas. For nouns with a plural in -s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(num_bytes: int) -> str:
    """Format a number of bytes for people: exact, and in a suitable unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes:,} B ({num_bytes / scale:.2f} {unit})"
    return f"{num_bytes:,} B"
