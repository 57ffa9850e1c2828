"""Split-K: the K dimension of a product is split over thread blocks; the last one to arrive adds
their partial sums.

The partial sums are added in a fixed order, whichever thread block arrives last. All products of a
device share the counters, so such kernels must not run at the same time: one stream only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.spec.devices.autotune_table import NUM_COUNTERS


class ArrivalCounters:
    """Counters of arrived splits on one device, all zero between kernels. One stream only."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def reduce_splits(
    acc,
    partial_ptr,
    counter_ptr,
    at,
    pid_n,
    pid_k,
    size,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds the partial sums of all splits. Returns (their sum, whether this thread block is the one that has it).
    `at`: this thread block's elements of a split's partial sums; `size`: elements of one split; `pid_n`: its
    counter."""
    tl.store(partial_ptr + pid_k * size + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + pid_n, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            acc += tl.load(partial_ptr + split * size + at, cache_modifier=".cg")
        tl.store(counter_ptr + pid_n, 0)
    return acc, last
