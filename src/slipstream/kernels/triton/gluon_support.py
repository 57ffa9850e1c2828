"""Where kernels in Gluon run: on Hopper, with the versions of Triton whose names they know."""

from __future__ import annotations

import functools

import torch
import triton

from slipstream.platform import platform_of

HOPPER_TRITON = ((3, 6), (3, 9))
"""First and last version of Triton whose Gluon the kernels were compiled with. Gluon's names change."""


@functools.cache
def runs_on_hopper(device: torch.device) -> bool:
    """Whether the chip and Triton's version fit. Other versions may not even import the kernels' modules."""
    if not platform_of(device).arch.wgmma:
        return False
    return (
        HOPPER_TRITON[0]
        <= tuple(int(n) for n in triton.__version__.split(".")[:2])
        <= HOPPER_TRITON[1]
    )
