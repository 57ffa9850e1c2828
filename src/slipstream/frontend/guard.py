"""The guard of a server with one front end: the process that the user started. The server is its child.

1. A server that dies is started again as a whole, with its engine.
2. The guard keeps the listening socket open, so connections wait meanwhile and are not refused.
3. After too many deaths (`deaths`) it ends with an error. A first start that fails is not repeated.
4. SIGTERM and SIGINT reach the server as STOP_SIGNAL. The server itself ignores SIGTERM and SIGINT, because
   terminals and service managers send them to all processes, and a second one would mean not to wait.
5. If the guard dies, the server ends at once.

It is a fork of a process that has imported next to nothing: no request passes through it, and it costs a start 1 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from slipstream.base.deaths import WINDOW_S, Deaths, describe_exit
from slipstream.errors import EngineError

if TYPE_CHECKING:
    from slipstream.server.state import ServerSettings

STOP_SIGNAL = signal.SIGUSR1

_REFUSED = (2, 3)  # exit codes (`cli.main`): a setting or the model is at fault


class Guarded:
    """The server's end of the connection to its guard."""

    def __init__(
        self, control: socket.socket, listener: socket.socket | None, num_deaths: int, last: str
    ) -> None:
        self.listener, self.num_deaths, self.last_death = listener, num_deaths, last
        self.pause_s = 0.0
        self._control, self._taken = control, threading.Event()
        threading.Thread(target=self._end_with_guard, daemon=True).start()

    @property
    def for_server(self) -> dict[str, Any]:
        """Arguments for `server.run.serve`."""
        return {"signals": (STOP_SIGNAL,), "num_deaths": self.num_deaths}

    def serves(self, listener: socket.socket) -> None:
        """Give the listening socket to the guard. When this returns, the guard forwards signals."""
        socket.send_fds(self._control, [b"s"], [listener.fileno()])
        self._taken.wait()

    def _end_with_guard(self) -> None:
        while self._control.recv(1):
            self._taken.set()
        os._exit(1)  # the engine ends with us


def warn_of_start(
    settings: ServerSettings, guarded: Guarded | None, kv_handover_address: str | None = None
) -> None:
    """Warn that the server or its cache is open to everyone, or that it died before. Waits after a
    death."""
    import logging
    import time

    logger = logging.getLogger("slipstream.server")
    local = ("127.0.0.1", "localhost", "::1", "[::1]")
    is_local = settings.host in local
    if not (settings.api_keys or settings.keys_file or is_local):
        logger.warning(
            "anyone who reaches %s can use this server; --keys-file asks for a key", settings.host
        )
    kind, _, rest = (kv_handover_address or "").partition("://")
    if kind == "tcp" and (host := rest.rpartition(":")[0]) not in local:
        logger.warning(
            "anyone who reaches %s can read blocks of prompts' cache (kv_handover_address asks for no key); "
            "leave it within a network of your own, or take unix:NAME",
            host,
        )
    if guarded is not None and guarded.num_deaths:
        logger.error(
            "the server's process %s: it starts again in %g s (death %d)",
            guarded.last_death,
            guarded.pause_s,
            guarded.num_deaths,
        )
        time.sleep(guarded.pause_s)


class ServerGuard:
    def __init__(self) -> None:
        self._pid, self._serves, self._stopping = 0, False, False
        self._listener: socket.socket | None = None
        self._deaths, self._num_deaths, self._last = Deaths(), 0, ""

    def run(self, serve: Callable[[Guarded], int]) -> int:
        """Starts the server in a child process, again after each death, and returns the exit code.
        In the child process it returns the code of `serve`. EngineError if the server dies too
        often."""
        while True:
            ours, theirs = socket.socketpair()
            self._serves = False
            self._pid = os.fork()
            if not self._pid:
                ours.close()
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                guarded = Guarded(theirs, self._listener, self._num_deaths, self._last)
                guarded.pause_s = self._deaths.pause_s
                return serve(guarded)
            theirs.close()
            if self._stopping:
                self._send(signal.SIGKILL)
            with ours:
                code = self._watch(ours)
            if (ended := self._judge(code)) is not None:
                return ended

    def _watch(self, control: socket.socket) -> int:
        """Waits until the child has ended, and returns its exit code."""
        try:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if fds and self._listener is None:
                self._listener = socket.socket(fileno=fds[0])
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, self._stop)
            elif fds:
                os.close(fds[0])
            if fds:
                self._serves = True
                control.sendall(b"t")
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except BaseException:  # an interrupt of the start
            self._send(signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise

    def _judge(self, code: int) -> int | None:
        """Returns the guard's own exit code, or None if the server is to be started again."""
        how = describe_exit(code)
        if self._stopping and (not self._serves or code == -STOP_SIGNAL):
            return 0  # killed by us, or it had ended its work and ignores signals
        if self._stopping or self._listener is None:
            if code < 0:
                when = "ended" if self._stopping else "started"
                raise EngineError(f"the server's process {how} while it {when}")
            return code
        if code == 0 or (code in _REFUSED and not self._serves):
            return code
        self._deaths.add()
        self._num_deaths += 1
        self._last = how
        if self._deaths.too_many:
            raise EngineError(
                f"the server's process died too often within {WINDOW_S:g} s, {self._num_deaths} times in all; "
                f"the last one {how}: it stays down"
            )
        return None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._send(STOP_SIGNAL if self._serves else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._pid:  # 0 in a child that a signal reaches before it ignores them
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
