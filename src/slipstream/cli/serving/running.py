"""The running servers of this user: each has a file in the cache folder, named by its process id.

A file whose process has ended, or whose id another process has now, is removed by the next
reader."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.base.files import write_whole
from slipstream.hub import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running server. `began` is the process's start time by the kernel's clock, which
    distinguishes it from a later process with the same id."""

    pid: int
    began: str
    url: str
    models: tuple[str, ...]
    device: str
    memory_bytes: int
    started_at: float
    states: list[dict[str, Any]] = field(default_factory=list)
    """State of each model, for a server of several models."""


def _folder() -> Path:
    return cache_folder() / "running"


def began(pid: int) -> str | None:
    """Start time of a process by the kernel's clock; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _signalled(pid)
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return None if fields[0] in "ZX" else fields[19]


def _signalled(pid: int) -> str | None:
    """Fixed string if the process exists, for systems without /proc."""
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return "?"


def register(
    pid: int,
    *,
    url: str,
    models: tuple[str, ...],
    device: str,
    memory_bytes: int,
    now: float,
    states: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the file of a server that is ready. If the cache folder is not writable, it does nothing."""
    server = RunningServer(
        pid=pid,
        began=began(pid) or "?",
        url=url,
        models=models,
        device=device,
        memory_bytes=memory_bytes,
        started_at=now,
        states=[*states],
    )
    with suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        write_whole(_folder() / f"{pid}.json", json.dumps(asdict(server)))


def forget(pid: int) -> None:
    with suppress(OSError):
        (_folder() / f"{pid}.json").unlink()


def running_servers() -> list[RunningServer]:
    """Servers whose process is alive, oldest first."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            server = RunningServer(**json.loads(path.read_text("utf-8")))
            alive = began(server.pid) == server.began
        except (OSError, ValueError, TypeError):
            alive = False
        if alive:
            found.append(server)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda s: s.started_at)
