"""The interface of a kind of device: memory, values, streams, events, graphs, capabilities, collectives. No torch.

A device's values are torch tensors, or NumPy arrays on a `HostPlatform`. Where both occur, a value's type here is `Any`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.spec.gpu_archs import GpuArch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until it is reached."""

    def query(self) -> bool:
        """Whether it is reached."""

    def wait(self) -> None:
        """Have what is queued on the current stream from now on run after it."""


class CopyQueue(Protocol):
    """Work beside the steps."""

    def behind(self) -> AbstractContextManager[None]:
        """Queue work on this stream: it runs after all that is queued now, and concurrently with what is queued later."""

    def record(self) -> Event | None:
        """An event behind what is queued here; None where nothing is ever queued."""

    def join(self) -> None:
        """Make the steps wait: what they queue from now on runs after what is queued here."""


class Graph(Protocol):
    """A recorded sequence of kernels."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records graphs that share one memory pool, so an output holds only until the next replay of any of them."""

    def capture(
        self,
        work: Callable[[], Tensor],
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[Graph, Tensor]:
        """Run `work` once, then record it: the graph, and its output, which every replay overwrites. The run, which compiles
        kernels, is made within `compiling()`."""


class Values(Protocol):
    """The few functions that tensors and arrays spell differently."""

    def dtype(self, name: str) -> Any:
        """The type of numbers with our name: "bfloat16", "float32", "int8", "fp8", …"""

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        """float32 values on the device."""

    def arange(self, count: int) -> Any:
        """0, 1, …, int64 [count] on the device."""

    def cast(self, x: Any, dtype: Any) -> Any:
        """`x` in another type, or itself."""

    def take(self, x: Any, index: Any, dim: int = 0) -> Any:
        """A copy of some rows, or of some columns (`dim` 1)."""

    def put(self, x: Any, rows: Any, values: Any) -> None:
        """Writes rows of `x`, in its own type."""

    def array(self, x: Any) -> npt.NDArray[Any]:
        """The memory of a value of the host, as an array."""

    def floats(self, x: Any) -> npt.NDArray[np.float32]:
        """A float32 array of the host. Waits for the device."""

    def magnitudes(self, cache: Any) -> Any:
        """The largest magnitude of each head in a KV cache [B, K, …]: float32 [K]."""

    def inference(self) -> AbstractContextManager[Any]:
        """A context for computing without gradients."""


class Platform(ABC):
    """One device. Work is queued on the current stream, in order."""

    kind: Literal["cpu", "cuda"]
    collectives: Literal["gloo", "nccl"]
    """The backend of `torch.distributed` for processes that each have such a device."""
    arch: GpuArch
    """The GPU's architecture; on a CPU the interpreter's, for kernels that are tested there."""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one thread block may take."""
    is_asynchronous: bool
    """Whether a launch returns before the work is done."""
    caches_memory: bool
    """Whether memory that is freed stays with this process until `release_unused`."""

    values: Values
    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # --- Memory -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free bytes, all bytes), now."""

    @abstractmethod
    def release_unused(self) -> None:
        """Give memory that nothing uses back to the system."""

    @abstractmethod
    def start_peak(self) -> int:
        """Begin a new measurement of the most bytes in use; the bytes in use now."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes in use since `start_peak`."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that costs nothing before it is used, where the system can do that."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A host array on the device. The copy does not wait for work that is queued."""

    @abstractmethod
    def upload_into(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        """A host array into a tensor of its shape, in the order of what is queued. The host does not wait."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once an event recorded after it is reached."""
        return tensor

    @abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8 [num_bytes], that the device copies from and to by itself."""

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make whole pages of the host's memory, where they are, memory that the device copies from by itself, until the array
        is dropped. OutOfMemoryError: the system does not allow it."""

    # --- Order --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def activate(self, num_threads: int) -> None:
        """This process computes on this device from now on, with so many host threads."""

    @abstractmethod
    def record(self) -> Event | None:
        """An event behind all that is queued; None where nothing is ever queued."""

    @abstractmethod
    def run_after(self, event: Event | None) -> None:
        """Make what is queued from now on run after `event`. The host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that is queued."""

    @abstractmethod
    def call_host(self, function: int, argument: int) -> None:
        """Queue a call of the C function `void (*)(void*)` at an address, with an argument, on a thread of the host. What is
        queued before is done then, and what is queued later waits for it. It is recorded in graphs, too. The function may not
        use the device."""

    @abstractmethod
    def copy_queue(self) -> CopyQueue:
        """A new one."""

    def graphs(self) -> GraphRecorder:
        """A recorder of graphs. ValueError: this kind of device has none."""
        raise ValueError(f"a {self.kind} has no graphs")
