"""Kinds of devices, what they can do and how they are used: one `Platform` object a kind. Nothing else asks `torch.cuda`.

    cpu.py   the host's own processor
    cuda.py  an NVIDIA GPU
    collectives.py  sums and collections over several processes
    peer_copies.py  sums of two GPUs beside their products

What each GPU architecture and each CPU instruction set has is data: `spec/gpu_archs.py`, `spec/cpu_isas.py`.

A new kind of device is one more subclass of `Platform` and one line in `platform_of`.
"""

from __future__ import annotations

import functools

import torch

from slipstream.platform.base import CopyQueue as CopyQueue
from slipstream.platform.base import Event as Event
from slipstream.platform.base import Graph as Graph
from slipstream.platform.base import GraphRecorder as GraphRecorder
from slipstream.platform.base import Platform as Platform
from slipstream.platform.collectives import OverlappedSum as OverlappedSum
from slipstream.platform.collectives import PeerSums as PeerSums
from slipstream.platform.collectives import Pipe as Pipe
from slipstream.platform.collectives import RankGroup as RankGroup
from slipstream.platform.collectives import Rendezvous as Rendezvous
from slipstream.platform.cpu import CpuPlatform
from slipstream.platform.cuda import CudaPlatform
from slipstream.platform.cuda import hash_triton as hash_triton


@functools.cache
def platform_of(device: torch.device) -> Platform:
    """The platform of a device. Every call with one device gives the same object."""
    return CudaPlatform(device) if device.type == "cuda" else CpuPlatform(device)


def gpu_platform(ordinal: int) -> CudaPlatform:
    """The platform of one of the GPUs that torch sees."""
    platform = platform_of(torch.device("cuda", ordinal))
    assert isinstance(platform, CudaPlatform)
    return platform


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """How many GPUs torch can use: 0 where it sees some but cannot start them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
