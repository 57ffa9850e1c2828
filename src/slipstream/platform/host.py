"""The host's processor, with NumPy arrays as values and without torch.

Work is done when a call returns, so nothing is queued, copied or waited for. The one exception is a step that the
CPU's own threads still compute: its event comes from the forward path that started it (`worker/forward/program.py`).
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.costs.hardware import host_memory
from slipstream.platform.base import Event, Platform, Values
from slipstream.spec.devices.gpu_archs import HOPPER_SHARED_BYTES, INTERPRETER

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]


class Arrays:
    """`Values` that are NumPy arrays."""

    def dtype(self, name: str) -> Any:
        return np.dtype(name)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        return np.full(shape, value, np.float32)

    def arange(self, count: int) -> Array:
        return np.arange(count)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype, copy=False)

    def take(self, x: Array, index: Array, dim: int = 0) -> Array:
        return x[:, index] if dim else x[index]

    def ranges(self, starts: Array, lengths: Array, total: int) -> Array:
        shifts = starts - (lengths.cumsum() - lengths)
        found: Array = np.arange(total) + np.repeat(shifts, lengths)
        return found

    def put(self, x: Array, rows: Array, values: Array) -> None:
        x[rows] = values

    def array(self, x: Array) -> Array:
        return x

    def on_host(self, x: Array) -> Array:
        return x

    def floats(self, x: Array) -> npt.NDArray[np.float32]:
        return x.astype(np.float32, copy=False)

    def magnitudes(self, cache: Array) -> Array:
        return np.abs(cache.astype(np.float32)).max(axis=(0, 2, 3))  # type: ignore[no-any-return]

    def inference(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostPlatform(Platform):
    kind = "cpu"
    collectives = "gloo"
    arch = INTERPRETER
    multiprocessors = 1
    shared_bytes = HOPPER_SHARED_BYTES
    is_asynchronous = False
    caches_memory = False
    values: Values = Arrays()

    def __init__(self, device: Any = None) -> None:
        """Make a platform; only subclasses have a torch device."""
        super().__init__(device)

    def memory(self) -> tuple[int, int]:
        total, free = host_memory()
        return free, total

    def release_unused(self) -> None:
        pass

    def start_peak(self) -> int:
        """Begin to measure the peak of memory. If the system can't reset it, the peak is the
        process's highest ever, and differences come out too small."""
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

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Zeros; the system zeroes a page when it is first written."""
        return np.zeros(shape, dtype)

    def upload(self, array: Array) -> Any:
        return array

    def to_host(self, tensor: Any) -> Any:
        return tensor

    def upload_into(self, tensor: Any, array: Array) -> None:
        tensor[...] = array

    def pinned(self, num_bytes: int) -> Tensor:
        raise ValueError("without torch no device copies from the host's memory")

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        pass

    def activate(self, num_threads: int) -> None:
        pass

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
