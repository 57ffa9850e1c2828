"""Shared memory and messages of Hopper's attention kernel: `hopper.py` says how it works."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LOG2E = gl.constexpr(1.4426950408889634)
CONSUMER_ROWS = gl.constexpr(64)
MAX_PARTS = gl.constexpr(16)
"""Maximum number of parts of a tile's keys. With fewer key tiles there are proportionally fewer
parts: merging parts takes as long as some key tiles (GPU_NOTES.md)."""
# Gluon's names change between Triton's versions (`gluon_support.py`); both known names are tried.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory viewed as another dtype and shape."""
    if HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM barriers, each of which opens after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def send(mailbox, AT: gl.constexpr, numbers):
    """Write numbers to the mailbox in shared memory, from place AT."""
    for i in gl.static_range(len(numbers)):
        mailbox.index(AT + i).store(
            gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        )


@gluon.jit
def receive(mailbox, i: gl.constexpr):
    return gl.max(mailbox.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
