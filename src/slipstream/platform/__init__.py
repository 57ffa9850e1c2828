"""Kinds of devices, with their capabilities and operations: one `Platform` object for each device.
No other module uses `torch.cuda`.

    host.py  a CPU whose values are NumPy arrays, without torch
    cpu.py   a CPU whose values are torch tensors
    cuda.py  an NVIDIA GPU
    meta.py  a described NVIDIA GPU that computes nothing
    collectives.py  all-reduce, reduce-scatter, all-gather and all-to-all of several processes
    peer_copies.py  sums of two GPUs that overlap with their products

The features of GPU architectures and CPU instruction sets are data: `spec/devices/gpu_archs.py`,
`spec/devices/cpu_isas.py`.

A new kind of device is one more subclass of `Platform` and one line in `platform_of`. Importing
this package imports no torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from slipstream.platform.base import CopyQueue as CopyQueue
from slipstream.platform.base import Event as Event
from slipstream.platform.base import Graph as Graph
from slipstream.platform.base import GraphRecorder as GraphRecorder
from slipstream.platform.base import Platform as Platform
from slipstream.platform.host import HostPlatform

if TYPE_CHECKING:
    import torch

    from slipstream.platform.cuda import CudaPlatform


@functools.cache
def platform_of(device: torch.device | None) -> Platform:
    """The platform of a torch device, or of a CPU without torch (None). All calls for a device
    return the same object."""
    if device is None:
        return HostPlatform()
    if device.type == "cuda":
        from slipstream.platform.cuda import CudaPlatform

        return CudaPlatform(device)
    if device.type == "meta":
        from slipstream.platform.meta import MetaPlatform

        return MetaPlatform(device)
    from slipstream.platform.cpu import CpuPlatform

    return CpuPlatform(device)


def gpu_platform(ordinal: int) -> CudaPlatform:
    """The platform of one of the GPUs that torch sees."""
    import torch

    from slipstream.platform.cuda import CudaPlatform

    platform = platform_of(torch.device("cuda", ordinal))
    assert isinstance(platform, CudaPlatform)
    return platform


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def num_gpus() -> int:
    """Number of GPUs that torch can use: 0 if it sees some but cannot start them."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
