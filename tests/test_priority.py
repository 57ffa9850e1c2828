"""Work at a low priority (`base/priority.py`), and what a pool of threads does there."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import numpy as np
import pytest

from slipstream.base.priority import NICENESS, at_low_priority
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.packed import NativeLinear, Packed, stand_in
from slipstream.kernels.cpu.program.programs import LinearProgram
from slipstream.kernels.cpu.thread_pool import ThreadPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")


def threads_besides(others, expected):
    """The niceness of this process's threads, by number, as soon as there are `expected` besides
    `others`: one that ended is listed for a moment."""
    for _ in range(500):
        found = {}
        for name in set(map(int, os.listdir("/proc/self/task"))) - others:
            with contextlib.suppress(ProcessLookupError):
                found[name] = os.getpriority(os.PRIO_PROCESS, name)
        if len(found) == expected:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


@linux
def test_work_at_low_priority_leaves_the_callers_as_it_was():
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    inside = at_low_priority(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert inside == min(19, mine + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
    with pytest.raises(ValueError, match="as it was raised"):
        at_low_priority(lambda: _raise(ValueError("as it was raised")))


def _raise(error):
    raise error


@linux
def test_a_pools_workers_are_made_by_the_first_caller_of_normal_priority():
    """Workers of a load at low priority would have its priority in all later steps."""
    weight = np.random.default_rng(0).standard_normal((512, 256), np.float32)

    def load():
        pool = ThreadPool(3)
        packed = Packed.empty(native.F32, 512, 256, native.Arena(pool))
        packed.put_dense(weight)
        w = NativeLinear(weight=stand_in((512, 256), "float32"), parts=(packed,))
        return pool, LinearProgram(pool, w)

    before = set(map(int, os.listdir("/proc/self/task")))
    pool, gently = at_low_priority(load)
    threads_besides(before, 0)
    x = np.random.default_rng(1).standard_normal((9, 256), np.float32)
    found = gently(x)
    made = threads_besides(before, 2)
    assert list(made.values()) == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
    _, product = load()
    assert np.array_equal(found, product(x))
    assert pool.num_threads == 3
