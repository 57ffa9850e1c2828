"""Variants of Triton kernels: which ones a run launches, and compiling them without running.

Triton compiles a kernel for each combination of constexprs, argument types, integers that are 1 or
multiples of 16, pointers that are multiples of 16, and options. That combination is a *variant*.

1. `recording` notes the variants that an engine on a described GPU (`platform/meta.py`) launches.
2. `compile_variants` compiles them into Triton's cache, in several processes. A GPU is not needed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """One kernel as Triton specialises it."""

    module: str
    name: str
    key: str
    """Triton's key: types, specialisations and constexprs of the arguments, then options."""
    data: str = field(compare=False)
    """What `JITFunction.preload` compiles it from, as JSON."""


class TargetDriver:
    """Triton's driver of a GPU that is not there. It launches nothing."""

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
    """Triton's compiled kernel, without one."""

    function = packed_metadata = None

    @staticmethod
    def launch_metadata(*_: Any) -> None: ...

    @staticmethod
    def run(*_: Any) -> None: ...


@contextmanager
def recording(capability: tuple[int, int]) -> Iterator[set[Variant]]:
    """Collect the variants launched inside. None of them runs or compiles."""
    found: set[Variant] = set()
    touched: list[Any] = []

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(Variant(fn.module.__name__ if hasattr(fn.module, "__name__") else fn.module, fn.name, key, compile["specialization_data"]))
        cache = fn.jit_function.device_caches[0][0]
        cache[key] = NotLaunched  # the next launch of the variant ends there
        touched.append(cache)
        return True  # Triton neither compiles nor launches

    before = knobs.runtime.jit_cache_hook
    driver.set_active(TargetDriver(capability))  # type: ignore[arg-type]
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before
        for cache in touched:
            cache.clear()
