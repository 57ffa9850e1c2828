"""Child processes: their input, how they ended, and the pause before they are started again."""

from __future__ import annotations

import signal
import time
from collections import deque
from typing import IO, Protocol

MAX_DEATHS, WINDOW_S = 5, 60.0
"""Maximum number of deaths within a window in seconds, after which the parent gives up."""

MAX_PAUSE_S = 30.0


class HasStdin(Protocol):
    """A child process: `subprocess.Popen`, or a fork of another one."""

    @property
    def stdin(self) -> IO[bytes] | None: ...


def stdin_of(process: HasStdin) -> IO[bytes]:
    """Pipe to the standard input of a child process. Our child processes end when it closes."""
    if process.stdin is None:
        raise ValueError("the process was started without a pipe to it")
    return process.stdin


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code."""
    if code >= 0:
        return f"ended with code {code}"
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"was killed by signal {-code}{names.get(-code, '')}"


KILLED = describe_exit(-signal.SIGKILL)


class Deaths:
    """Recent deaths of one process. After the first it is restarted at once, then after a pause
    that doubles."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()

    def add(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self._times.append(now)
        while self._times[0] < now - self._window_s:
            self._times.popleft()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        number = len(self._times)
        return min(2.0 ** (min(number, 10) - 3), MAX_PAUSE_S) if number > 1 else 0.0

    @property
    def too_many(self) -> bool:
        return len(self._times) > MAX_DEATHS
