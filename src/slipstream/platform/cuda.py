"""An NVIDIA GPU through torch.cuda."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.errors import OutOfMemoryError
from slipstream.platform.base import Event, Graph, Platform
from slipstream.platform.tensors import Tensors
from slipstream.spec.devices.gpu_archs import GpuArch, gpu_arch


class CudaPlatform(Platform):
    kind = "cuda"
    collectives = "nccl"
    is_asynchronous = True
    pins_memory = True
    caches_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.values = Tensors(device)

    # --- Capabilities --------------------------------------------------------------------

    @cached_property
    def properties(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    @property
    def name(self) -> str:
        return str(self.properties.name)

    @property
    def is_capturing(self) -> bool:  # type: ignore[override]
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def unsplit_products(self, dtype: torch.dtype) -> Iterator[None]:
        """Context manager in which torch multiplies by cuBLASLt, which can be told not to split K
        (cuBLAS can't)."""
        matmul, blas = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
        kind = "bf16" if dtype == torch.bfloat16 else "fp16"
        name = f"allow_{kind}_reduced_precision_reduction"
        before, library = (getattr(matmul, name), getattr(matmul, name + "_split_k")), blas()
        setattr(matmul, name, (False, False))
        blas("cublaslt")
        try:
            yield
        finally:
            blas(library)
            setattr(matmul, name, before)

    @cached_property
    def capability(self) -> tuple[int, int]:
        return self.properties.major, self.properties.minor

    @cached_property
    def arch(self) -> GpuArch:  # type: ignore[override]
        return gpu_arch(self.capability)

    @cached_property
    def multiprocessors(self) -> int:  # type: ignore[override]
        return int(self.properties.multi_processor_count)

    @cached_property
    def shared_bytes(self) -> int:  # type: ignore[override]
        return int(self.properties.shared_memory_per_block_optin)

    @property
    def has_sparse_products(self) -> bool:
        """Whether products with 2:4 sparse weights are available, through cuSPARSELt."""
        return torch.backends.cusparselt.is_available()

    @property
    def device_uuid(self) -> str:  # type: ignore[override]
        return str(torch.cuda.get_device_properties(self.device).uuid)

    # --- Memory --------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def held(self) -> int:
        """Bytes that torch holds in this process, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def start_peak(self) -> int:
        if gc.isenabled():  # garbage freed later would lower the peak
            gc.collect()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Copy through pinned memory, which torch's host allocator keeps until the copy is done."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def upload_into(self, tensor: Tensor, array: npt.NDArray[np.generic]) -> None:
        tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        runtime, at = torch.cuda.cudart(), memory.ctypes.data
        if error := int(runtime.cudaHostRegister(at, memory.nbytes, 0)):
            self._clear_last_error()
            raise OutOfMemoryError(
                f"{memory.nbytes / 2**30:.1f} GiB of the host's memory can't be kept in place for the GPU to read (CUDA error "
                f"{error}); raise the limit on locked memory (ulimit -l)"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, at)

    def _clear_last_error(self) -> None:
        """Clear the error of a rejected call. If the call was not torch's own, CUDA stores the error, and the
        check after torch's next launch raises and clears it. This makes such a launch."""
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)

    # --- Order ---------------------------------------------------------------------------

    def activate(self, num_threads: int) -> None:
        torch.cuda.set_device(self.device)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def run_after(self, event: Event | None) -> None:
        if event is not None:
            event.wait()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream_pointer(self) -> int:
        """Pointer of the current stream, for launches through the driver. The call creates the
        context if there is none."""
        return int(torch.cuda.current_stream().cuda_stream)

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def call_host(self, function: int, argument: int) -> None:
        where = ctypes.c_void_p(self.stream_pointer())
        what = ctypes.c_void_p(function)
        given = ctypes.c_void_p(argument)
        if error := self._driver.cuLaunchHostFunc(where, what, given):
            raise RuntimeError(f"cuLaunchHostFunc: CUDA error {error}")

    def copy_queue(self) -> SideStream:
        return SideStream()

    def graphs(self) -> CudaGraphs:
        return CudaGraphs()

    def timed_replays(self, graph: Graph, count: int) -> list[float]:
        """Milliseconds of `count` replays."""
        times = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            self.synchronize()
            times.append(begin.elapsed_time(end))
        return times


class SideStream:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @contextmanager
    def behind(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


class CudaGraphs:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: Any = None  # the first graph's memory, which all graphs share

    @torch.inference_mode()
    def capture(
        self,
        work: Callable[[], Tensor],
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[Graph, Tensor]:
        """Record a graph without `torch.cuda.graph`, which collects garbage and empties torch's
        cache each time."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with compiling():
                work()  # kernels compile and choose their tiles outside the capture
            # Other threads of the process may use the GPU meanwhile.
            more = {} if self._pool is None else {"pool": self._pool}
            graph.capture_begin(**more, capture_error_mode="thread_local")
            try:
                output = work()
            finally:  # a stream left capturing would block all later steps
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or graph.pool()
        return graph, output


@cache
def hash_triton() -> Callable[[], None]:
    """Start hashing Triton's files in a thread; the returned function waits for its end. Triton
    does this once per process before it looks for a kernel in its cache, which takes 0.3 s."""
    try:
        from triton.runtime.cache import triton_key
    except (
        Exception
        # Another or broken version: the first kernel hashes, or reports the fault.
    ):
        return lambda: None
    thread = threading.Thread(target=triton_key, daemon=True)
    thread.start()
    return thread.join
