"""Runs library calls that may never return, in threads of their own with a time limit.

A thread can't be killed. When a call exceeds its limit, its caller gets an error, its place in the pool is free, and its later
result is dropped. The thread still uses a core. So beyond `most_stuck` such threads, new calls are refused until one ends.

Calls of one client wait for each other, and clients take turns, so one who sends many holds up nobody else. A client with half
of the calls that may be stuck, or with too many that wait, is refused before all others.

The threads have a large stack: what they call may be recursive in C, where too deep a recursion ends the process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from slipstream.errors import EngineOverloadedError

T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Address space of a thread's stack. Memory is taken only for the part in use."""

MAX_WAITING = 64
"""Calls of one client that may wait."""

MIN_TURN_S = 5.0
"""Seconds that a call may wait for its turn before it is refused, even if the time limit of a call
is shorter."""

_starting = threading.Lock()  # the size of stacks is one setting for the process


class _Call(NamedTuple, Generic[T]):
    future: Future[T]
    run: Callable[[], T]
    client: str | None
    submitted: float  # time.monotonic()


class BoundedThreads(Generic[T]):
    """Threads that run at most `most` calls at a time. `seconds` returns the time limit of a call,
    which counts from its beginning."""

    def __init__(
        self, seconds: Callable[[], float], *, most: int, most_stuck: int, name: str
    ) -> None:
        self._seconds, self._most, self._most_stuck, self._name = seconds, most, most_stuck, name
        self._lock = threading.Lock()
        self._waiting: dict[str | None, deque[_Call[T]]] = {}  # the client whose turn is next first
        self._running: dict[Future[T], str | None] = {}
        self._stuck: Counter[str | None] = Counter()

    @property
    def num_stuck(self) -> int:
        """Calls that were given up and still run."""
        with self._lock:
            return self._stuck.total()

    def submit(self, run: Callable[[], T], client: str | None = None) -> Future[T]:
        """Queue a call. The future holds its result or its exception, and TimeoutError if it takes
        too long.

        EngineOverloadedError, raised here or set later, has one of three reasons:

        1. No more calls are begun, because too many are stuck.
        2. The client has too many calls that are stuck or wait.
        3. The call's turn does not come in time.

        Calls without a client run at the same time and wait as long as it takes.
        """
        future: Future[T] = Future()
        with self._lock:
            self._refuse(client)
            waiting = self._waiting.setdefault(client, deque())
            if client is not None and len(waiting) >= MAX_WAITING:
                left = [call for call in waiting if not call.future.cancelled()]
                waiting = self._waiting[client] = deque(left)
                if len(waiting) >= MAX_WAITING:
                    raise EngineOverloadedError(
                        f"{MAX_WAITING} calls of this client wait ({self._name}); try again later"
                    )
            waiting.append(_Call(future, run, client, time.monotonic()))
        self._begin()
        return future

    def _refuse(self, client: str | None) -> None:
        own = self._stuck[client]
        if client is not None and own and own >= self._most_stuck // 2:
            raise EngineOverloadedError(
                f"{own} calls of this client are stuck ({self._name}); try again when they have ended"
            )
        if (stuck := self._stuck.total()) >= self._most_stuck:
            raise EngineOverloadedError(
                f"{stuck} calls are stuck ({self._name}), as many as may be; try again later"
            )

    def _next(self) -> _Call[T] | None:
        """Remove and return the next call to begin, None if none may begin. Its client is the one
        that has waited longest for a turn among those with no running call."""
        running = set(self._running.values()) - {None}
        is_full = len(self._running) >= self._most and self._stuck.total() < self._most_stuck
        client = next((c for c in self._waiting if c not in running), ...)
        if is_full or client is ...:
            return None
        waiting = self._waiting.pop(client)
        call = waiting.popleft()
        if waiting:
            self._waiting[client] = waiting  # behind the others
        return call

    def _begin(self) -> None:
        while True:
            with self._lock:
                call = self._next()
                if call is None:
                    return
                if not call.future.set_running_or_notify_cancel():
                    continue
                try:
                    self._refuse(call.client)
                    waited = time.monotonic() - call.submitted
                    if call.client is not None and waited > max(self._seconds(), MIN_TURN_S):
                        raise EngineOverloadedError(
                            f"others were served all the time ({self._name}); try again later"
                        )
                    self._running[call.future] = call.client
                    # As a daemon: the process can end while it is stuck.
                    start_thread(self._run, call, name=self._name)
                except EngineOverloadedError as error:
                    failure = error
                    self._running.pop(call.future, None)
                else:
                    continue
            call.future.set_exception(failure)

    def _run(self, call: _Call[T]) -> None:
        timer = threading.Timer(self._seconds(), self._give_up, [call])
        timer.daemon = True
        timer.start()
        try:
            found, failure = call.run(), None
        except BaseException as error:
            failure = error
        timer.cancel()
        with self._lock:
            in_time = call.future in self._running
            self._running.pop(call.future, None)
            self._stuck[call.client] -= not in_time
            self._stuck += Counter()  # without those who have none
        if in_time and failure is None:
            call.future.set_result(found)
        elif in_time:
            call.future.set_exception(failure)
        self._begin()

    def _give_up(self, call: _Call[T]) -> None:
        with self._lock:
            if call.future not in self._running:
                return
            del self._running[call.future]
            self._stuck[call.client] += 1
        call.future.set_exception(TimeoutError())
        self._begin()


def start_thread(target: Callable[..., None], *args: object, name: str) -> None:
    """Start a daemon with a large stack. EngineOverloadedError if there is no room for one."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise EngineOverloadedError(f"no thread can be started ({name}): {error}") from None
        finally:
            threading.stack_size(before)
