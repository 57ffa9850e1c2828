"""Bindings of libslipstream_cpu (csrc/cpu): ctypes over its C interface, so that one binary serves
every Python and torch.

The library lies in this package. `pip install .` builds it; in a source tree
`python -m slipstream.kernels.build` does. It is given the addresses of arrays and checks nothing.
`packed.py` has the weights that it multiplies, `native_program.py` its programs of operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.arrays import address
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
from slipstream.spec.stored.gguf_types import TYPES

if TYPE_CHECKING:
    from slipstream.kernels.cpu.thread_pool import ThreadPool

_logger = logging.getLogger(__name__)

Bytes: TypeAlias = npt.NDArray[np.uint8]

ABI = 36
LIBRARY = "libslipstream_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

F32, BF16, I8, Q8, Q4, Q4M, S8, Q5, Q5M, Q4K, Q5K, Q6K, W4, W4M, W4M32, MX, Q2K, Q3K = range(18)
"""Kinds of weights, as in csrc/cpu/formats.h."""

CEILINGS = ("read", "int8", "bfloat16", "float32", "int6")
"""Kinds of work of `add_ceiling`, as in csrc/cpu/formats.h. int6 means codes of up to 6 bits, whose
products are faster on some processors."""

ROWS_F32, ROWS_BF16 = -1, -2
"""Kinds of embedding tables in torch's layout, which only `embed` reads."""

BLOCK_KINDS = {quant.name: quant.cpu_kind for quant in TYPES.values() if quant.cpu_kind is not None}
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
"""Formats in which products read activations."""

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
    """Returns an activation as the operators' arguments (kind, alpha, limit); None if the library
    lacks it."""
    if isinstance(activation, ClampedSwiglu):
        return CLAMPED_SWIGLU, activation.alpha, activation.limit
    if isinstance(activation, Xielu):
        return XIELU, activation.positive, activation.negative
    return (
        None
        if isinstance(activation, OwnActivation | ClampedSilu)
        else (ACTIVATIONS[activation], 0.0, 0.0)
    )


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
        name
        for name in isa_names()
        if (emulated or not CPU_ISAS[name].emulated) and _runs_here(name)
    ]


def without_tiles(isa: str | None) -> str:
    """Returns `isa` (None: the machine's best), but without matrix tiles if it has them."""
    isa = isa or instruction_sets()[-1]
    return CPU_ISAS[isa].without_tiles or isa


@cache
def isa_names() -> list[str]:
    """Returns all instruction sets of the library, by number."""
    library = load()
    return [library.ss_isa_name(i).decode() for i in range(library.ss_num_isas())]


@cache
def _runs_here(isa: str) -> bool:
    usable = load().ss_isa_usable(isa_names().index(isa))
    if usable < 0:
        _logger.warning(
            "the instruction set %s is left out: its small test products were wrong on this machine",
            isa,
        )
    return bool(usable > 0)


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
