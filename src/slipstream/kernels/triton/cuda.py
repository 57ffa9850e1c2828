"""CUDA C++ for what Triton can't express. NVRTC, which comes with torch, compiles it; no CUDA toolkit is needed.

A kernel is compiled once per device and set of definitions. The cubin is kept in Triton's cache. Sources include
nothing."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from slipstream.errors import EngineError
from slipstream.platform.cuda import CudaPlatform
from slipstream.platform.meta import MetaPlatform

MAX_DYNAMIC_SHARED = 8
"""The driver API's constant CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
LAUNCHES = {"cooperative": 2, "overlapped": 6, "after": None}
"""CUlaunchAttributeID by kind of launch:

- `cooperative`: all thread blocks are resident at once.
- `overlapped`: starts next to the preceding kernel, and waits for it itself (`pdl.py`).
- `after`: starts after the preceding kernel, as usual."""
OPTIONS = ("--std=c++17", "--use_fast_math", "--device-as-default-execution-space")


def cuda_version() -> str:
    """Major version of torch's CUDA, or of the newest NVRTC where torch has none. Kernels of a version
    run with any driver of it."""
    if torch.version.cuda is not None:
        return torch.version.cuda.split(".")[0]
    return max((p.name.split(".")[2] for p in _nvrtc_files("[0-9]*")), default="0", key=int)


def _nvrtc_files(version: str) -> list[Path]:
    pattern = f"*/lib/libnvrtc.so.{version}"
    return [p for folder in sys.path for p in sorted(Path(folder, "nvidia").glob(pattern))]


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC library of `cuda_version`. Raises EngineError if it is missing."""
    version = cuda_version()
    for path in (f"libnvrtc.so.{version}", *map(str, _nvrtc_files(version))):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise EngineError(
        f"libnvrtc.so.{version} was not found, which torch {torch.__version__} needs: reinstall torch with its CUDA libraries, "
        "or pip install nvidia-cuda-nvrtc where there is no GPU"
    )


def compile_source(
    source: str, arch: str, definitions: Mapping[str, int | float], library: ctypes.CDLL
) -> bytes:
    """The cubin of `source` for `arch` (such as sm_90a). Raises EngineError with the compiler's log."""
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    options += [f"-D{name}={_literal(value)}" for name, value in definitions.items()]
    program = ctypes.c_void_p()
    _checked(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"slipstream.cu", 0, None, None
        )
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if library.nvrtcCompileProgram(program, len(options), array):
            raise EngineError(
                f"a CUDA kernel does not compile: {_read(library, program, 'ProgramLog').decode().strip()}"
            )
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _literal(value: float) -> str:
    return f"{float(value)!r}f" if isinstance(value, float) else str(int(value))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _checked(getattr(library, f"nvrtcGet{what}")(program, text))
    return text.raw


def _checked(code: int) -> None:
    if code:
        raise EngineError(f"CUDA returned error {code}")


class _Attribute(ctypes.Structure):
    """The C struct CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("_", ctypes.c_int),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    )


class _Launch(ctypes.Structure):
    """The C struct CUlaunchConfig."""

    _fields_ = (
        *(
            ("grid", ctypes.c_uint * 3),
            ("block", ctypes.c_uint * 3),
            ("shared_bytes", ctypes.c_uint),
        ),
        *(
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.POINTER(_Attribute)),
            ("num_attributes", ctypes.c_uint),
        ),
    )


def _arch(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


@dataclass(frozen=True, slots=True)
class CudaSource:
    """CUDA source of one kernel: the text, the kernel's name in it, and the macros to define."""

    text: str
    name: str
    definitions: tuple[tuple[str, int | float], ...]

    def key(self, capability: tuple[int, int]) -> str:
        made_of = self.text, _arch(capability), OPTIONS, sorted(self.definitions), cuda_version()
        return hashlib.sha256(repr(made_of).encode()).hexdigest()

    def cubin(self, capability: tuple[int, int]) -> bytes:
        """The kernel for a GPU, from Triton's cache or compiled into it."""
        cache, file = get_cache_manager(self.key(capability)), f"{self.name}.cubin"
        kept = cache.get_file(file)
        if kept is not None:
            return Path(kept).read_bytes()
        cubin = compile_source(self.text, _arch(capability), dict(self.definitions), nvrtc())
        cache.put(cubin, file, binary=True)
        return cubin


class CudaKernel:
    """One kernel compiled from CUDA source. `launch`: a key of `LAUNCHES`. On a GPU that is only
    described (`platform/meta.py`) nothing is compiled: the source is recorded for later."""

    def __init__(
        self,
        platform: CudaPlatform | MetaPlatform,
        sources: Sequence[Path],
        name: str,
        definitions: Mapping[str, int | float],
        *,
        shared_bytes: int,
        launch: str = "cooperative",
    ) -> None:
        self.shared_bytes = shared_bytes
        attribute = LAUNCHES[launch]
        self._attributes = (_Attribute * 1)(_Attribute(id=attribute or 0, value=1))
        self._num_attributes = 0 if attribute is None else 1
        self.platform = platform
        text = "".join(source.read_text() for source in sources)
        source = CudaSource(text, name, tuple(sorted(definitions.items())))
        if isinstance(platform, MetaPlatform):
            platform.cuda_sources.add(source)
            return
        cubin = source.cubin(platform.capability)
        self._driver = ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        platform.stream_pointer()  # creates the context
        _checked(self._driver.cuModuleLoadData(ctypes.byref(module), cubin))
        _checked(
            self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        )
        _checked(self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes))

    def __call__(self, programs: int, threads: int, arguments: Sequence[Tensor | int]) -> None:
        """Launch on the current stream. Tensors are passed as pointers, integers as 32 bits."""
        if isinstance(self.platform, MetaPlatform):
            return
        values: list[Any] = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a)
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        launch = _Launch(
            grid=(programs, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=self.shared_bytes,
            stream=self.platform.stream_pointer(),
            attributes=self._attributes,
            num_attributes=self._num_attributes,
        )
        _checked(
            self._driver.cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None)
        )
