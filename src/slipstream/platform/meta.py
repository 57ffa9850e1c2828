"""A described GPU that need not exist: tensors on torch's meta device, which have shapes and no memory.

An engine on it makes all the choices that it makes on that GPU, but computes nothing. So the kernels that a
start needs are known beforehand, on any machine (`kernels/triton/variants.py`). A process describes one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.platform.base import Event, Graph, Platform
from slipstream.platform.tensors import Tensors
from slipstream.spec.devices.gpu_archs import DescribedGpu, gpu_arch


class MetaValues(Tensors):
    def on_host(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype)

    def floats(self, x: Tensor) -> npt.NDArray[np.float32]:
        return np.ones(x.shape, np.float32)

    def ranges(self, starts: Tensor, lengths: Tensor, total: int) -> Tensor:
        # arithmetic is in Python here
        return torch.empty(total, dtype=torch.int64, device=self.device)


class Nothing:
    """Events, queues and graphs of a device that executes nothing."""

    def synchronize(self) -> None: ...

    def wait(self) -> None: ...

    def join(self) -> None: ...

    def replay(self) -> None: ...

    def query(self) -> bool:
        return True

    def record(self) -> Event | None:
        return None

    @contextmanager
    def behind(self) -> Iterator[None]:
        yield

    def capture(
        self,
        work: Callable[[], Tensor],
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[Graph, Tensor]:
        with compiling():
            work()
        return self, work()


class MetaPlatform(Platform):
    kind = "cuda"
    collectives = "nccl"
    is_asynchronous = True
    caches_memory = False
    has_sparse_products = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.values = MetaValues(device)
        self._gpu: DescribedGpu | None = None
        self.name = ""
        self.cuda_sources: set[Any] = set()
        """Kernels in CUDA C++ that were requested (`kernels/triton/cuda.py`)."""

    def describe(self, gpu: DescribedGpu) -> None:
        """Set the GPU that this process compiles for. ConfigError if another one was set before."""
        if self._gpu not in (None, gpu):
            raise ConfigError(
                f"this process describes {self.name} already; start another for {gpu.name}",
                field="device",
            )
        self._gpu, self.arch = gpu, gpu_arch(gpu.capability)
        self.capability, self.name = gpu.capability, gpu.name
        self.multiprocessors, self.shared_bytes = gpu.multiprocessors, gpu.shared_bytes

    # --- Memory --------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        assert self._gpu is not None
        return self._gpu.memory_bytes, self._gpu.memory_bytes

    def held(self) -> int:
        return 0

    def release_unused(self) -> None: ...

    def start_peak(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def upload_into(self, tensor: Tensor, array: npt.NDArray[np.generic]) -> None:
        assert tensor.shape == array.shape

    def to_host(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None: ...

    # --- Order ---------------------------------------------------------------------------

    def activate(self, num_threads: int) -> None: ...

    def record(self) -> Event | None:
        return None

    def run_after(self, event: Event | None) -> None: ...

    def synchronize(self) -> None: ...

    def stream_pointer(self) -> int:
        return 0

    def call_host(self, function: int, argument: int) -> None: ...

    def copy_queue(self) -> Nothing:
        return Nothing()

    def graphs(self) -> Nothing:
        return Nothing()
