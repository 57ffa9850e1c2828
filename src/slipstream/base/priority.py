"""Runs work in threads that leave the processor to other threads."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

NICENESS = 5
"""Increment of a thread's niceness. The thread then gets a quarter of a core that another thread
needs, and all of an idle one."""


class _LeftError(BaseException):
    """Raised by `leave_low_priority`; error handlers must not catch it."""


class _LowPriority(threading.Thread):
    """The thread that runs `work`. Without privileges it can't raise its priority again, and threads that it
    starts inherit it. So the caller keeps its own priority, and runs what is `asked` meanwhile."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="low priority")
        self.asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.later: list[Callable[[], None]] = []
        self._work = work

    def run(self) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            thread = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(19, now + NICENESS))
        self._work()
        self.asked.put(None)


def at_low_priority(work: Callable[[*Ts], T], *given: *Ts, low_priority: bool = True) -> T:
    """Run `work` in a thread of low priority, and return its result. If not `low_priority`, run it in
    this thread."""
    if not low_priority:
        return work(*given)
    done = Future[T]()
    thread = _LowPriority(lambda: _settle(done, lambda: work(*given)))
    thread.start()
    while (asked := thread.asked.get()) is not None:
        asked()
    thread.join()
    for then in thread.later:
        then()
    try:
        return done.result()
    except _LeftError:
        return work(*given)


def leave_low_priority() -> None:
    """Let `at_low_priority` run its work again at its caller's priority, because it starts threads
    of a library that would keep the low one. Does nothing outside of it."""
    if isinstance(threading.current_thread(), _LowPriority):
        raise _LeftError


def at_callers_priority(work: Callable[[*Ts], T], *given: *Ts) -> T:
    """Run `work`, such as starting threads that must be fast: within `at_low_priority` in its
    caller's thread, elsewhere in this thread."""
    thread = threading.current_thread()
    if not isinstance(thread, _LowPriority):
        return work(*given)
    done = Future[T]()
    thread.asked.put(lambda: _settle(done, lambda: work(*given)))
    return done.result()


def after_low_priority(then: Callable[[*Ts], None], *given: *Ts) -> bool:
    """Let the caller's thread of `at_low_priority` call `then` when the work is done. False outside
    of it."""
    thread = threading.current_thread()
    if isinstance(thread, _LowPriority):
        thread.later.append(lambda: then(*given))
    return isinstance(thread, _LowPriority)


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
