"""Bindings of libslipstream_cpu (csrc/cpu): ctypes over its C interface, so that one binary serves
every Python and torch.

The library lies in this package. `pip install .` builds it; in a source tree
`python -m slipstream.kernels.build` does. It is given the addresses of arrays and checks nothing.
`packed.py` has the weights that it multiplies, `native_program.py` its programs of operators.

An array (`Array`) is NumPy's or a CPU tensor. Nothing here imports torch. Arrays made here are
NumPy's.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native_interface import SIGNATURES
from slipstream.kernels.cpu.native_interface import GroupInputs as GroupInputs
from slipstream.kernels.cpu.native_interface import Job as Job
from slipstream.kernels.cpu.native_interface import StepInputs as StepInputs
from slipstream.spec.devices.cpu_isas import CPU_ISAS
from slipstream.spec.model import (
    Activation,
    ClampedSilu,
    ClampedSwiglu,
    NamedActivation,
    OwnActivation,
    Xielu,
)

if TYPE_CHECKING:
    from torch import Tensor

    Array: TypeAlias = npt.NDArray[Any] | Tensor
else:
    Array = Any

_logger = logging.getLogger(__name__)

Bytes: TypeAlias = npt.NDArray[np.uint8]

ABI = 34
LIBRARY = "libslipstream_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

F32, BF16, I8, Q8, Q4, Q4M, S8, Q5, Q5M, Q4K, Q5K, Q6K, W4, W4M, W4M32, MX, Q2K, Q3K = range(18)
"""Kinds of weights, as in csrc/cpu/formats.h."""

CEILINGS = ("read", "int8", "bfloat16", "float32", "int6")
"""Kinds of work of `add_ceiling`, as in csrc/cpu/formats.h. int6 means codes of up to 6 bits, whose
products are faster on some processors."""

ROWS_F32, ROWS_BF16 = -1, -2
"""Kinds of tables that only `embed` reads, in torch's layout."""

BLOCK_KINDS = {
    "Q8_0": Q8,
    "Q4_0": Q4,
    "Q4_1": Q4M,
    "Q5_0": Q5,
    "Q5_1": Q5M,
    "MXFP4": MX,
    "Q2_K": Q2K,
    "Q3_K": Q3K,
    "Q4_K": Q4K,
    "Q5_K": Q5K,
    "Q6_K": Q6K,
}
"""GGUF's types that are used as they are."""

KIND_NAMES = {kind: name for name, kind in BLOCK_KINDS.items()} | {
    F32: "float32",
    BF16: "bfloat16",
    I8: "int8",
    S8: "sparse int8",
    W4: "int4",
    W4M: "int4 with zero points",
    W4M32: "int4 by 32",
}
"""Names of the kinds, for messages."""

FORM_F32, FORM_BF16, FORM_Q = range(3)
"""Forms of activations that products read."""

ACTIVATIONS: dict[NamedActivation, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
}
CLAMPED_SWIGLU, XIELU = 5, 6
CACHES = {"float32": 0, "bfloat16": 1, "int8": 2}


def activation_of(activation: Activation) -> tuple[int, float, float] | None:
    """Returns the operators' arguments (kind, alpha, limit), or None if they do not have this
    activation."""
    if isinstance(activation, ClampedSwiglu):
        return CLAMPED_SWIGLU, activation.alpha, activation.limit
    if isinstance(activation, Xielu):
        return XIELU, activation.positive, activation.negative
    return (
        None
        if isinstance(activation, OwnActivation | ClampedSilu)
        else (ACTIVATIONS[activation], 0.0, 0.0)
    )


def address(x: Array) -> int:
    """Returns the address of an array's first element."""
    # not `x.ctypes.data`, which creates an object and takes twice as long
    return int(x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data_ptr())


def type_name(x: Array) -> str:
    """Returns the name of an array's type, such as "bfloat16"."""
    return _type_name(x.dtype)


@cache
def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def float32(x: Array) -> Array:
    """Returns the same values in float32, contiguous."""
    return (
        np.ascontiguousarray(x, np.float32) if isinstance(x, np.ndarray) else x.float().contiguous()
    )


def contiguous(x: Array) -> Array:
    """Returns the same values, contiguous."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def row_bytes(x: Array) -> int:
    """Bytes from one row of an array [n, m] to the next."""
    return int(x.strides[0] if isinstance(x, np.ndarray) else x.stride(0) * x.element_size())


def lies_together(x: Array, *, rows_only: bool = False) -> bool:
    """Tells whether an array, or with `rows_only` each of its rows, is contiguous."""
    if isinstance(x, np.ndarray):
        rows = x.strides[-1] == x.itemsize or x.shape[-1] == 1 or not x.size
        return rows if rows_only else x.flags.c_contiguous
    return x.stride(-1) == 1 if rows_only else x.is_contiguous()


def library_path() -> Path | None:
    """Returns the library's path: next to this file, or in an editable install's build folder. None
    if it is not built."""
    import slipstream.kernels

    folders = [str(Path(__file__).parents[1]), *slipstream.kernels.__path__]
    return next((path for folder in folders if (path := Path(folder) / LIBRARY).is_file()), None)


def has_cpu_kernels() -> bool:
    """Tells whether the C++ kernels are built."""
    return library_path() is not None


def _remedy() -> str:
    from slipstream.kernels.build import remedy  # late, as it imports what a build needs

    return remedy()


@cache
def load() -> ctypes.CDLL:
    """Loads the library. ConfigError with the remedy if it is missing or of another version."""
    path = library_path()
    if path is None:
        raise ConfigError(
            f"the C++ kernels are not built ({LIBRARY} is missing); use kernels='torch', or get them: {_remedy()}",
            field="kernels",
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be loaded: {error}; {_remedy()}", field="kernels"
        ) from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, "ss_" + name, None)
        if function is None:
            raise ConfigError(
                f"{path} is of another version (it lacks ss_{name}): {_remedy()}", field="kernels"
            )
        function.restype, function.argtypes = result, arguments
    if library.ss_abi() != ABI:
        raise ConfigError(f"{path} is of another version: {_remedy()}", field="kernels")
    return library


@cache
def library_digest() -> str:
    """Returns a digest that differs between builds of the library."""
    path = library_path()
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def instruction_sets(*, emulated: bool = False) -> list[str]:
    """Returns the instruction sets that the library was built for and this machine runs, fastest
    last.

    With `emulated` they include those that run on any machine, only for tests.
    """
    return [
        name for name in _names() if (emulated or not CPU_ISAS[name].emulated) and _runs_here(name)
    ]


@cache
def _names() -> list[str]:
    """Returns all instruction sets of the library, by number."""
    library = load()
    return [library.ss_isa_name(i).decode() for i in range(library.ss_num_isas())]


@cache
def _runs_here(isa: str) -> bool:
    usable = load().ss_isa_usable(_names().index(isa))
    if usable < 0:
        _logger.warning(
            "the instruction set %s is left out: its small test products were wrong on this machine",
            isa,
        )
    return bool(usable > 0)


class ThreadPool:
    """A pool of `num_threads` threads, the caller's included, with an instruction set: `isa`, or
    the fastest.

    `num_used` of the threads work (`use`).
    """

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        usable = instruction_sets(
            emulated=isa is not None and isa in CPU_ISAS and CPU_ISAS[isa].emulated
        )
        if isa is not None and isa not in usable:
            raise ConfigError(f"isa={isa!r} can't run here; {', '.join(usable)} can", field="isa")
        self.isa = usable[-1] if isa is None else isa
        self.num_threads = self.num_used = num_threads
        self.pointer = load().ss_engine_create(num_threads, _names().index(self.isa))

    def use(self, num_threads: int) -> None:
        """Sets the number of threads that work. Results stay the same, bit by bit."""
        assert 1 <= num_threads <= self.num_threads
        self.num_used = num_threads
        load().ss_engine_use(self.pointer, num_threads)

    @property
    def last_s(self) -> float:
        """Seconds that the last step took, from its beginning to its end, after it was waited
        for."""
        return int(load().ss_engine_last_ns(self.pointer)) * 1e-9

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            load().ss_engine_destroy(self.pointer)


# --- Weights ---


class Arena:
    """Memory for weights, allocated in pieces large enough for huge pages.

    With small pages a thread waits for the page table as long as for the weights. Unwritten pages
    take no memory. The threads of `pool` pack the weights; without a pool the caller's thread does.
    """

    SIZE = 64 * 2**20

    def __init__(self, pool: ThreadPool | None = None, size: int = SIZE) -> None:
        self.pool, self._size = pool, size
        self._rest = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """Returns zeroed memory whose address is a multiple of 64."""
        if num_bytes > self._rest.size:
            fresh = np.zeros(max(self._size, num_bytes) + 64, np.uint8)
            self._rest = fresh[-address(fresh) % 64 :]
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // 64) * 64 :]
        return taken


def address_or_null(x: Array | None) -> int | None:
    return None if x is None else address(x)


# --- Programs ---
