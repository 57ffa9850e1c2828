"""How tests wait for what another thread or process does."""

from __future__ import annotations

import secrets
import socket
import time

PATIENCE_S = 240.0
"""The bound of every wait. It ends a test that hangs, and says nothing about how long a thing may take: a loaded machine can be
fifty times slower than a quiet one."""


def wait_for(condition, what, seconds=PATIENCE_S):
    """The first true value of `condition()`. `what`: the message if it does not come, or a function that gives it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.01)
    return found


def free_port():
    """A port that nobody listens at, and that the system gives to nobody who does not name it."""
    while True:
        port = 20_000 + secrets.randbelow(
            12_000
        )  # Linux gives those from 32,768 on, macOS from 49,152
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
