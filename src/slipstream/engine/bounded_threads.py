"""Runs library calls that may never return, in threads of their own with a time limit.

A thread can't be killed. When a call exceeds its limit, its caller gets an error, its place in the pool is free, and its later
result is dropped. The thread still uses a core. So beyond `most_stuck` such threads, new calls are refused until one ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from slipstream.errors import EngineOverloadedError

T = TypeVar("T")


class BoundedThreads(Generic[T]):
    """At most `most` calls at a time; `seconds` says how long one may take, from when it begins."""

    def __init__(
        self, seconds: Callable[[], float], *, most: int, most_stuck: int, name: str
    ) -> None:
        self._seconds, self._most, self._most_stuck, self._name = seconds, most, most_stuck, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[T], Callable[[], T]]] = deque()
        self._running: set[Future[T]] = set()
        self._num_stuck = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What the call gives, or its exception; TimeoutError if it takes too long. EngineOverloadedError, here or later, if so
        many calls are stuck that no more are begun."""
        future: Future[T] = Future()
        with self._lock:
            if self._num_stuck >= self._most_stuck:
                raise self._busy()
            self._waiting.append((future, call))
        self._begin()
        return future

    def _begin(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or (
                    self._num_stuck < self._most_stuck and len(self._running) >= self._most
                ):
                    return
                future, call = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                if self._num_stuck >= self._most_stuck:
                    future.set_exception(self._busy())
                    continue
                self._running.add(future)
            # As daemons: the process can end while one is stuck.
            threading.Thread(
                target=self._run, args=(future, call), name=self._name, daemon=True
            ).start()

    def _run(self, future: Future[T], call: Callable[[], T]) -> None:
        timer = threading.Timer(self._seconds(), self._give_up, [future])
        timer.daemon = True
        timer.start()
        try:
            found, failure = call(), None
        except BaseException as error:
            failure = error
        timer.cancel()
        with self._lock:
            in_time = future in self._running
            self._running.discard(future)
            self._num_stuck -= not in_time
        if in_time and failure is None:
            future.set_result(found)
        elif in_time:
            future.set_exception(failure)
        self._begin()

    def _give_up(self, future: Future[T]) -> None:
        with self._lock:
            if future not in self._running:
                return
            self._running.discard(future)
            self._num_stuck += 1
        future.set_exception(TimeoutError())
        self._begin()

    def _busy(self) -> EngineOverloadedError:
        return EngineOverloadedError(
            f"{self._num_stuck} calls are stuck ({self._name}), as many as may be; try again later"
        )
