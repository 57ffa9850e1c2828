"""Variants of Triton kernels: which ones a run launches, and compiling them without running.

Triton compiles a kernel for each combination of constexprs, argument types, integers that are 1 or
multiples of 16, pointers that are multiples of 16, and options. That combination is a *variant*.

1. `recording` notes the variants that an engine on a described GPU (`platform/meta.py`) launches.
2. `KernelVariant.load` takes one from Triton's cache, or compiles it. Compiling needs no GPU.
3. `Compilers` compile many in several processes, as soon as they are known.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.cache import _base32

from slipstream.kernels.triton.cuda import CudaSource


@dataclass(frozen=True, slots=True, order=True)
class KernelVariant:
    """One variant of a Triton kernel: what it is specialised for."""

    module: str
    name: str
    key: str
    """Triton's key: types, specialisations and constexprs of the arguments, then options."""
    data: str = field(compare=False)
    """Argument of `JITFunction.preload`, which compiles it: JSON."""

    @classmethod
    def of(cls, module: str, name: str, key: str, data: str) -> KernelVariant:
        given = json.loads(data)
        given["options"]["extern_libs"] = None  # a path of this machine; each finds its own
        return cls(module, name, key, json.dumps(given))

    def load(self) -> Any:
        """Triton's kernel, from this process, from its cache or compiled into it; launches find it from now on."""
        for value in json.loads(self.data)["constant_vals"]:  # functions that it calls
            if isinstance(value, dict) and "jit_function" in value:
                importlib.import_module(value["jit_function"].split(":")[0])
        function = getattr(importlib.import_module(self.module), self.name)
        loaded = function.device_caches[driver.active.get_current_device()][0].get(self.key)
        return function.preload(self.data) if loaded is None else loaded


class TargetDriver:
    """Stand-in for Triton's driver, for a GPU that this machine may lack. It launches nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NotLaunched:
    """Stand-in for a compiled kernel while variants are only recorded."""

    function = packed_metadata = None

    @staticmethod
    def launch_metadata(*_: Any) -> None: ...

    @staticmethod
    def run(*_: Any) -> None: ...


@contextlib.contextmanager
def recording(
    capability: tuple[int, int], take: Callable[[KernelVariant], None] = lambda variant: None
) -> Iterator[set[KernelVariant]]:
    """Context manager that collects the variants that its body launches, and gives each to `take`.
    None of them runs or compiles here."""
    found: set[KernelVariant] = set()
    touched: list[Any] = []

    def note(*, key: str, fn: Any, **given: Any) -> bool:
        data = given["compile"]["specialization_data"]
        found.add(variant := KernelVariant.of(fn.module, fn.name, key, data))
        take(variant)
        cache = fn.jit_function.device_caches[0][0]
        cache[key] = NotLaunched  # the next launch of the variant ends there
        touched.append(cache)
        return True  # Triton neither compiles nor launches

    before = knobs.runtime.jit_cache_hook
    driver.set_active(TargetDriver(capability))
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before
        for cache in touched:
            cache.clear()


@contextlib.contextmanager
def noting_new_kernels() -> Iterator[list[str]]:
    """Context manager that collects descriptions of the kernels that this process compiles or
    loads."""
    found: list[str] = []
    before = knobs.runtime.jit_cache_hook

    def note(**given: Any) -> bool:
        found.append(given["repr"])
        return False

    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


Job: TypeAlias = KernelVariant | CudaSource


class Compilers:
    """Processes that compile for a GPU of this compute capability into Triton's cache, or into `folder`.

    They are forked with the first job, so this process must not use a GPU. A CUDA source takes up to
    half a minute: give it early.
    """

    def __init__(
        self, capability: tuple[int, int], *, num_processes: int, folder: str | None = None
    ) -> None:
        self._capability, self._jobs = capability, dict[Job, Future[tuple[str, str]]]()
        self._pool = ProcessPoolExecutor(
            num_processes, multiprocessing.get_context("fork"), partial(_begin, capability, folder)
        )

    def __enter__(self) -> Self:
        self._driver = contextlib.ExitStack()
        self._driver.enter_context(_driver_to_link())
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._driver.close()

    def compile(self, jobs: Iterable[Job]) -> None:
        """Begin to compile those that are not begun yet."""
        for job in jobs:
            if job not in self._jobs:
                self._jobs[job] = self._pool.submit(_compiled, self._capability, job)

    def results(self) -> tuple[dict[Job, str], dict[str, str]]:
        """Wait for all. The name of each one's folder in the cache, and of those that do not compile the error, by the
        kernel's name."""
        found = {job: future.result() for job, future in self._jobs.items()}
        return (
            {job: name for job, (name, error) in found.items() if not error},
            {job.name: error for job, (_, error) in found.items() if error},
        )


def _begin(capability: tuple[int, int], folder: str | None) -> None:
    os.nice(5)  # weights are read and requests are answered at the same time
    driver.set_active(TargetDriver(capability))
    knobs.runtime.jit_cache_hook = None  # of `recording`
    build._load_module_from_path = _Unloaded  # the driver may not be there
    if folder is not None:
        knobs.cache.dir = folder


class _Unloaded:
    """A module in C that is compiled and not loaded."""

    def __init__(self, name: str, path: str) -> None: ...

    def __getattr__(self, name: str) -> None: ...


def _compiled(capability: tuple[int, int], job: Job) -> tuple[str, str]:
    """Result of a compilation: (folder name, "") or ("", error)."""
    try:
        if isinstance(job, CudaSource):
            job.cubin(capability)
            return _base32(job.key(capability)), ""
        kernel = job.load()
    except Exception as error:  # of any stage of a compiler
        return "", f"{type(error).__name__}: {error}"
    _compile_launcher(kernel)
    return _base32(kernel.hash), ""


def _compile_launcher(kernel: Any) -> None:
    """Compile the C code that launches kernels into Triton's cache: the module that loads kernels, and in Triton 3.6
    one for each signature. What fails here fails at the start, which says why."""
    with contextlib.suppress(Exception):
        nvidia.CudaUtils()
    if hasattr(nvidia, "make_launcher"):
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _driver_to_link() -> Iterator[None]:
    """Context manager that makes Triton link with an empty libcuda where the driver is not
    installed."""
    try:
        nvidia.library_dirs()
        found = True
    except Exception:  # what is raised differs by what is missing
        found = False
    compiler = shutil.which("cc")
    if found or compiler is None:
        yield
        return
    before = knobs.nvidia.libcuda_path
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        command = [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c"]
        subprocess.run([*command, os.devnull], check=False, capture_output=True)
        knobs.nvidia.libcuda_path = folder
        try:
            yield
        finally:
            knobs.nvidia.libcuda_path = before
