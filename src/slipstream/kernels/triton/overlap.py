"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, CUDA 12.3, Hopper and later).

A decode step of one sequence is some three hundred kernels of a few microseconds, and between two of them the chip would
stand idle for about one. A kernel launched with `**overlapped(x)` may take free multiprocessors while its predecessor still
runs: it loads what no kernel writes (weights), calls `follow()`, and only then touches what others write.

The rule that keeps this right: every kernel launched so calls `follow()` before its first access to memory that any
kernel writes, its own output included. Then a kernel that has passed `follow()` knows that all kernels before it are done.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow():
    """Let the next kernel start, and wait until the one before has ended and its writes can be seen."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def fetch_ahead(ptr, n, N, row_bytes, start, COUNT: tl.constexpr):
    """Ask for the first COUNT · 128 bytes of rows n of a weight, from byte `start` on, to be brought into the L2 cache. To be
    called before `follow()`: memory stays busy while the kernel ahead ends."""
    at = start + tl.arange(0, COUNT) * 128
    address = ptr.to(tl.int64) + n[:, None].to(tl.int64) * row_bytes + at[None, :]
    address = tl.where((n < N)[:, None] & (at < row_bytes)[None, :], address, ptr.to(tl.int64))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


def overlapped(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel that keeps the rule; `PDL` is its compile-time argument."""
    return _options(x.device)


@functools.cache
def _options(device: torch.device) -> dict[str, bool]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
