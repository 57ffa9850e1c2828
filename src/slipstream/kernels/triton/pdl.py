"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, CUDA 12.3, Hopper and later).

A decode step of one sequence is some three hundred kernels of a few microseconds, and between two of them the chip would
stand idle for about one. A kernel launched with `**overlapped(x)` may take free multiprocessors while its predecessor still
runs: it loads what no kernel writes (weights), calls `pdl_wait()`, and only then touches what others write.

The rule that keeps this right: every kernel launched so calls `pdl_wait()` before its first access to memory that any
kernel writes, its own output included. Then a kernel that has passed `pdl_wait()` knows that all kernels before it are done.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.platform import platform_of


@triton.jit
def pdl_wait():
    """Let the next kernel start, and wait until the one before has ended and its writes can be seen."""
    gdc_launch_dependents()
    gdc_wait()


def overlapped(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel that keeps the rule; `PDL` is its compile-time argument."""
    return _options(x.device)


@functools.cache
def _options(device: torch.device) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True} if platform_of(device).arch.pdl else {"PDL": False}
