"""Work at a low priority (`base/priority.py`), and the threads of the kernels that it makes."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest

from slipstream.base.priority import (
    NICENESS,
    after_low_priority,
    at_callers_priority,
    at_low_priority,
    leave_low_priority,
)
from slipstream.kernels.cpu.thread_pool import ThreadPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")


def niceness(thread=None):
    return os.getpriority(os.PRIO_PROCESS, thread or threading.get_native_id())


@linux
def test_work_at_low_priority_leaves_the_callers_as_it_was():
    mine = niceness()
    low, callers = at_low_priority(lambda: (niceness(), at_callers_priority(niceness)))
    assert (low, callers, niceness()) == (min(19, mine + NICENESS), mine, mine)
    assert at_low_priority(niceness, low_priority=False) == mine


def test_errors_come_through_and_what_is_left_for_later_is_done_by_the_caller():
    done = []

    def work(fails):
        assert after_low_priority(lambda: done.append(threading.current_thread()))
        if fails:
            at_callers_priority(np.linalg.inv, np.zeros((2, 2)))
        return "made"

    assert at_low_priority(work, False) == "made"
    with pytest.raises(np.linalg.LinAlgError):
        at_low_priority(work, True)
    assert done == [threading.current_thread()] * 2
    assert not after_low_priority(done.clear)


def test_work_that_leaves_low_priority_is_done_anew_by_the_caller():
    threads = []

    def work(what):
        threads.append(threading.current_thread())
        leave_low_priority()
        return what

    assert at_low_priority(work, "made") == "made"
    assert len(threads) == 2
    assert threads[1] is threading.current_thread() is not threads[0]


@linux
def test_a_pool_made_at_low_priority_computes_alone_then_with_threads_of_the_callers_priority():
    before = set(map(int, os.listdir("/proc/self/task")))
    used = []

    def load():
        pool = ThreadPool(3)
        used.append(pool.num_used)
        return pool, threading.get_native_id()

    pool, low = at_low_priority(load)
    made = set(map(int, os.listdir("/proc/self/task"))) - before - {low}
    assert [niceness(thread) for thread in made] == [niceness()] * 2
    assert (*used, pool.num_used) == (1, 3)
