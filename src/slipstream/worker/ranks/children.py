"""The rank processes that a `ProcessExecutor` starts. When one ends, all end. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection

from slipstream.base.deaths import describe_exit
from slipstream.worker.ranks.fork_server import ForkedProcess, ForkServer
from slipstream.worker.ranks.messages import FromRank, RankLink

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment that disables NVLink multicast: a program that ends while using it can crash shared GPUs."""

LAST_WORDS_S = 0.2
"""Seconds for ranks to report why they end, after the first rank has ended.

A rank also fails when another has gone. So all reports are awaited, and the one that is not a
consequence of another is raised.
"""


@dataclass(slots=True)
class Rank:
    """A rank's process. If it runs on another host, `process` is None and `at` is its address."""

    number: int
    process: ForkedProcess | None
    link: RankLink
    at: str = ""


class RankProcesses:
    """The ranks' processes. When one ends, a thread kills the others, so that none waits for it."""

    def __init__(self) -> None:
        self.all: list[ForkedProcess] = []
        self._killed: set[int] = set()  # numbers of processes that we killed
        self._lock = threading.Lock()

    def add(self, rank: Rank) -> None:
        if rank.process is not None:
            self.all.append(rank.process)

    def watch(self) -> None:
        """Start watching; call this after all processes were started."""
        for number in range(len(self.all)):
            threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def _watch(self, number: int) -> None:
        self.all[number].wait()
        time.sleep(LAST_WORDS_S)
        self.kill()

    def kill(self) -> None:
        """Kill the processes that still run."""
        with self._lock:
            for number, process in enumerate(self.all):
                if process.poll() is None:
                    self._killed.add(number)
                    process.kill()

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, for at most `seconds`."""
        end = time.monotonic() + seconds
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def describe_first(self, but: Collection[int]) -> str:
        """Description of how a rank that we did not kill ended. Empty if there is none.

        A rank killed by a signal is preferred. `but`: ranks to ignore, which only ended because
        others did.
        """
        with self._lock:
            codes = [
                (p.poll(), n)
                for n, p in enumerate(self.all)
                if n not in self._killed and n not in but
            ]
        ended = sorted((code >= 0, n, code) for code, n in codes if code is not None)
        if not ended:
            return ""
        _, number, code = ended[0]
        return f"rank {number} {describe_exit(code)}"


def spawn(number: int, forks: ForkServer) -> Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        word, environment = str(theirs.fileno()), {**os.environ, **NO_MULTICAST}
        process = forks.fork([word], passed=[theirs.fileno()], environment=environment)
    return Rank(number, process, RankLink(Connection(ours.detach()), FromRank))
