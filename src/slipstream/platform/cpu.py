"""The host's processor. Work is done when a call returns, so nothing is queued, copied or waited for."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import sys
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.costs.hardware import host_memory
from slipstream.platform.base import Event, Platform
from slipstream.spec.gpu_archs import HOPPER_SHARED_BYTES, INTERPRETER


class CpuPlatform(Platform):
    kind = "cpu"
    collectives = "gloo"
    arch = INTERPRETER
    multiprocessors = 1
    shared_bytes = HOPPER_SHARED_BYTES
    is_asynchronous = False
    caches_memory = False

    def memory(self) -> tuple[int, int]:
        total, free = host_memory()
        return free, total

    def release_unused(self) -> None:
        pass

    def start_peak(self) -> int:
        """Begin to measure the peak of memory. Where the system can't begin anew, the peak is the process's highest
        ever, and less is found."""
        gc.collect()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass
        return self.peak()

    def peak(self) -> int:
        try:
            with open("/proc/self/status") as file:
                line = next(line for line in file if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The system zeroes a page when it is first written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        pass

    def activate(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def record(self) -> None:
        return None

    def run_after(self, event: Event | None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def call_host(self, function: int, argument: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

    def copy_queue(self) -> InlineCopies:
        return InlineCopies()


class InlineCopies:
    def behind(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> None:
        return None

    def join(self) -> None:
        pass
