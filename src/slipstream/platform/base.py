"""The interface of a kind of device: memory, values, streams, events, graphs, capabilities,
collectives. No torch.

A device's values are torch tensors, or NumPy arrays on a `HostPlatform`. In code for both, a
value's type is `Any`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.spec.devices.gpu_archs import GpuArch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Event(Protocol):
    """A point in the device's queue of work."""

    def synchronize(self) -> None:
        """Wait until the point is reached."""

    def query(self) -> bool:
        """Whether the point is reached."""

    def wait(self) -> None:
        """Make all work that is queued on the current stream from now on wait for this point."""


class CopyQueue(Protocol):
    """A stream of work that runs concurrently with the steps."""

    def behind(self) -> AbstractContextManager[None]:
        """Context manager that queues work on this stream: it runs after all work queued so far,
        and concurrently with later work."""

    def record(self) -> Event | None:
        """An event after the work queued here; None if nothing is ever queued."""

    def join(self) -> None:
        """Make the steps' later work wait for the work queued here."""


class Graph(Protocol):
    """A recorded sequence of kernels."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records graphs that share one memory pool, so an output is valid only until the next replay
    of any of them."""

    def capture(
        self,
        work: Callable[[], Tensor],
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[Graph, Tensor]:
        """Run `work` once, then record it. Returns (graph, output); every replay overwrites the
        output. The first run, which compiles kernels, takes place inside `compiling()`."""


class Values(Protocol):
    """The few functions that torch and NumPy spell differently."""

    def dtype(self, name: str) -> Any:
        """The number type with our name: "bfloat16", "float32", "int8", "fp8", …"""

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        """float32 values on the device."""

    def arange(self, count: int) -> Any:
        """0, 1, …, int64 [count] on the device."""

    def cast(self, x: Any, dtype: Any) -> Any:
        """`x` in another type, or `x` itself."""

    def take(self, x: Any, index: Any, dim: int = 0) -> Any:
        """Copy of selected rows, or of selected columns (`dim` 1)."""

    def ranges(self, starts: Any, lengths: Any, total: int) -> Any:
        """Concatenated ranges of integers: int64 [total], from int64 `starts` and `lengths` on the
        device."""

    def put(self, x: Any, rows: Any, values: Any) -> None:
        """Write `values` to rows of `x`, in x's dtype."""

    def array(self, x: Any) -> npt.NDArray[Any]:
        """View of a host value's memory as a NumPy array."""

    def on_host(self, x: Any) -> Any:
        """The value on the host. Waits for the device."""

    def floats(self, x: Any) -> npt.NDArray[np.float32]:
        """A float32 array on the host. Waits for the device."""

    def magnitudes(self, cache: Any) -> Any:
        """Maximum magnitude of each head in a KV cache [B, K, …]: float32 [K]."""

    def inference(self) -> AbstractContextManager[Any]:
        """Context manager for computing without gradients."""


class Platform(ABC):
    """One device. Work is queued on the current stream, in order."""

    kind: Literal["cpu", "cuda"]
    collectives: Literal["gloo", "nccl"]
    """The backend of `torch.distributed` for processes with such a device."""
    arch: GpuArch
    """The GPU's architecture. A CPU has the interpreter's, for tests of kernels."""
    multiprocessors: int
    shared_bytes: int
    """Maximum shared memory, in bytes, of a thread block."""
    is_asynchronous: bool
    """Whether a launch returns before its work is done."""
    pins_memory = False
    """Whether host memory is pinned for copies to the device."""
    caches_memory: bool
    """Whether freed memory remains allocated by this process until `release_unused`."""

    values: Values
    device: torch.device
    device_uuid = ""
    """Identifier of the GPU among all of the machine, for other processes; empty on a CPU."""

    is_capturing = False
    """Whether work on the current stream is recorded in a graph instead of being executed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unsplit_products(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Context manager in which the library's matrix products of `dtype` sum along K without splits."""
        return nullcontext()

    # --- Memory --------------------------------------------------------------------------

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free bytes, total bytes) at this moment."""

    @abstractmethod
    def release_unused(self) -> None:
        """Return unused memory to the system."""

    @abstractmethod
    def start_peak(self) -> int:
        """Start measuring the peak of bytes in use; returns the bytes in use now."""

    @abstractmethod
    def peak(self) -> int:
        """The peak of bytes in use since `start_peak`."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that take memory only when used, if the system supports that."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy a host array to the device. The copy does not wait for queued work."""

    @abstractmethod
    def upload_into(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy a host array into a tensor of its shape, after the work queued so far. The host does
        not wait."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once an event recorded after this call is reached."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """Pinned host memory, uint8 [num_bytes], from and to which the device can copy asynchronously."""

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Pin whole pages of host memory in place, so that the device can copy from them, until the
        array is dropped. OutOfMemoryError if the system does not allow it."""

    # --- Order ---------------------------------------------------------------------------

    @abstractmethod
    def activate(self, num_threads: int) -> None:
        """Use this device in this process from now on, with this many host threads."""

    @abstractmethod
    def record(self) -> Event | None:
        """An event after all work queued so far; None if nothing is ever queued."""

    @abstractmethod
    def run_after(self, event: Event | None) -> None:
        """Make all work queued from now on run after `event`. The host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work."""

    @abstractmethod
    def call_host(self, function: int, argument: int) -> None:
        """Queue a call of the C function `void (*)(void*)` at an address, with an argument, on a
        host thread.

        Earlier work is done when it runs, and later work waits for it. Graphs record it, too. The
        function may not use the device.
        """

    @abstractmethod
    def copy_queue(self) -> CopyQueue:
        """A new copy queue."""

    def graphs(self) -> GraphRecorder:
        """A recorder of graphs. ValueError if this kind of device has none."""
        raise ValueError(f"a {self.kind} has no graphs")
