"""Runs library calls that may never return, in separate threads with a time limit.

A thread can't be killed. When a call exceeds its limit, its caller gets an error, it no longer counts in the pool, and its
later result is dropped. The thread still uses a core. So with `most_stuck` such threads, new calls are refused until one
ends.

Calls of one client wait for each other, and clients take turns, so one who sends many holds up nobody else. A client that
has half of the allowed stuck calls, or too many waiting ones, is refused before others are.

The threads have a large stack: what they call may be recursive in C, where too deep a recursion ends the process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from slipstream.engine.threads.client_threads import ClientThreads, ThreadCall
from slipstream.errors import EngineOverloadedError

T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Address space of a thread's stack. Memory is taken only for the part in use."""

MAX_WAITING = 64
"""Maximum waiting calls of one client."""

MIN_TURN_S = 5.0
"""Minimum seconds that a call may wait for its turn before it is refused, even if the time limit of
a call is shorter."""

_starting = threading.Lock()  # guards the stack size, which is one setting for the whole process


class BoundedThreads(ClientThreads, Generic[T]):
    """Threads that run at most `most` calls at a time, one for each client. `seconds` returns the
    time limit of a call, which counts from its beginning."""

    def __init__(
        self, seconds: Callable[[], float], *, most: int, most_stuck: int, name: str
    ) -> None:
        super().__init__(name, most, per_client=1)
        self._seconds, self._most_stuck = seconds, most_stuck
        self._stuck: Counter[str | None] = Counter()

    @property
    def num_stuck(self) -> int:
        """Number of calls that were given up but still run."""
        with self._lock:
            return self._stuck.total()

    def submit(self, run: Callable[[], T], client: str | None = None) -> Future[T]:
        """Queue a call. The future holds its result or its exception, and TimeoutError if it takes
        too long.

        EngineOverloadedError, raised here or set later, has one of three reasons:

        1. No more calls are started, because too many are stuck.
        2. The client has too many calls that are stuck or wait.
        3. The call waited too long for its turn.

        Calls without a client run at the same time and wait as long as it takes.
        """
        with self._lock:
            self._refuse(client)
            future: Future[T] = self._queue(run, client, MAX_WAITING)
        self._begin()
        return future

    def _refuse(self, client: str | None) -> None:
        own = self._stuck[client]
        if client is not None and own and own >= self._most_stuck // 2:
            raise EngineOverloadedError(
                f"{own} calls of this client are stuck ({self.name}); try again when they have ended"
            )
        if (stuck := self._stuck.total()) >= self._most_stuck:
            raise EngineOverloadedError(
                f"{stuck} calls are stuck ({self.name}), as many as may be; try again later"
            )

    def _is_full(self) -> bool:
        # With too many stuck calls, a call whose turn has come is refused at once.
        return super()._is_full() and self._stuck.total() < self._most_stuck

    def _start(self, call: ThreadCall) -> None:
        with self._lock:
            self._refuse(call.client)
        waited = time.monotonic() - call.submitted
        if call.client is not None and waited > max(self._seconds(), MIN_TURN_S):
            raise EngineOverloadedError(
                f"others were served all the time ({self.name}); try again later"
            )
        start_thread(self._run, call, name=self.name)

    def _run(self, call: ThreadCall) -> None:
        timer = threading.Timer(self._seconds(), self._give_up, [call])
        timer.daemon = True
        timer.start()
        found, failure = None, None
        try:
            found = call.run()
        except BaseException as error:
            failure = error
        timer.cancel()
        self._end(call, found, failure)
        self._begin()

    def _give_up(self, call: ThreadCall) -> None:
        with self._lock:
            if call.future not in self._running:
                return
            self._leave(call)
            self._stuck[call.client] += 1
        call.future.set_exception(TimeoutError())
        self._begin()

    def _leave(self, call: ThreadCall) -> bool:
        in_time = super()._leave(call)
        if not in_time:  # it was given up before, and has ended now
            self._stuck[call.client] -= 1
            self._stuck += Counter()  # drops clients with a count of zero
        return in_time


def start_thread(target: Callable[..., None], *args: object, name: str) -> None:
    """Start a daemon thread with a large stack. EngineOverloadedError if there is no memory for one."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise EngineOverloadedError(f"no thread can be started ({name}): {error}") from None
        finally:
            threading.stack_size(before)
