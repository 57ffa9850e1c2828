"""Work that leaves the processor to others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10
"""Addition to a thread's niceness. The thread then gets about a tenth of a core that another wants,
and all of one that is free."""


def at_low_priority(work: Callable[[], T]) -> T:
    """Do `work` in a thread of low priority, and return what it returns. It must start no processes
    and threads that are to be fast: they would have its priority.

    A thread of its own, because a process without privileges can't raise a priority again."""
    done = Future[T]()

    def lowered() -> None:
        lower_priority()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=lowered, name="low priority")
    thread.start()
    thread.join()
    return done.result()


def lower_priority() -> None:
    """Lower the priority of this thread, for good. Only Linux has a thread's own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + NICENESS))
