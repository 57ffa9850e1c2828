"""Ranks of several engines as forks of one process: importing torch takes each engine's own three seconds of a core.

Its parent is the process that forks, so a test that looks for children does not take this one. `test_ranks.py` starts ranks
as users do.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from unittest import mock

from slipstream.worker.ranks.fork_server import ForkServer


def _in_its_place(forks: ForkServer):
    """Patch of `ForkServer.start`: `forks` for ranks. Engines of several models keep their own."""
    real = ForkServer.start

    def start(*module: str, **how: bool) -> ForkServer:
        return real(*module, **how) if module else forks

    return mock.patch.object(ForkServer, "start", start)


@functools.cache
def server() -> ForkServer:
    """The process that forks, of which this process has one."""
    return ForkServer.start()


@contextlib.contextmanager
def used():
    """Engines that this process starts meanwhile, here or in processes of theirs, start their ranks so."""
    forks = server()
    with (
        _in_its_place(forks),
        mock.patch.object(ForkServer, "close"),
    ):
        yield forks


def take_from(end: socket.socket) -> None:
    """Engines that this process starts from now on have their ranks of the process at the other end."""
    forks = ForkServer(end)
    _in_its_place(forks).start()
    mock.patch.object(ForkServer, "close").start()
