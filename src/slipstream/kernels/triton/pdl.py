"""Kernels that start before their predecessor ends (programmatic dependent launch; CUDA 12.3,
Hopper and later).

A decode step of one sequence has about three hundred kernels of a few microseconds. Without overlap
the chip idles for about one microsecond between two of them. A kernel launched with
`**pdl_options(x)` may start on free multiprocessors while its predecessor runs. It loads what no
kernel writes (weights), calls `pdl_wait()`, and then touches the rest.

The rule: every such kernel calls `pdl_wait()` before its first access to memory that any kernel
writes, its own output included. After `pdl_wait()` all earlier kernels are done."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.platform import platform_of


@triton.jit
def pdl_wait():
    """Let the next kernel start; wait until the previous one has ended and its writes are visible."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def pdl_wait_first():
    """Does `pdl_wait`, but lets the next kernel start after the wait, so this kernel's inputs are
    complete when that one begins."""
    gdc_wait()
    gdc_launch_dependents()


def pdl_options(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel that keeps the rule. `PDL` is its constexpr."""
    return _options(x.device)


@functools.cache
def _options(device: torch.device) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True} if platform_of(device).arch.pdl else {"PDL": False}
