"""Support check for Gluon kernels: they run on Hopper, with the Triton versions that they were
compiled with."""

from __future__ import annotations

import functools

import torch
import triton

from slipstream.platform import platform_of

HOPPER_TRITON = ((3, 6), (3, 9))
"""First and last Triton version whose Gluon the kernels were compiled with. Gluon's names change
between versions."""


@functools.cache
def runs_on_hopper(device: torch.device) -> bool:
    """Whether the chip and Triton's version fit. With other versions even importing the kernels may
    fail."""
    if not platform_of(device).arch.wgmma:
        return False
    return (
        HOPPER_TRITON[0]
        <= tuple(int(n) for n in triton.__version__.split(".")[:2])
        <= HOPPER_TRITON[1]
    )
