"""Products whose inner dimension is split over programs: each leaves its part, and the last to arrive adds them up in order.

The order is fixed, so the sum does not depend on who comes last. Counters are shared by all products of a device, so such
kernels may not run beside each other: one stream only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.spec.autotune_table import NUM_COUNTERS


class Scratch:
    """What split products share on one device: counters of finished parts, all zero between kernels. One stream only."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def sum_parts(
    acc, part_ptr, counter_ptr, at, pid_n, pid_k, size, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(the sum of all parts, whether this program is the one that has it): the last to arrive adds them up in order."""
    tl.store(part_ptr + pid_k * size + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + pid_n, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            acc += tl.load(part_ptr + split * size + at, cache_modifier=".cg")
        tl.store(counter_ptr + pid_n, 0)
    return acc, last
