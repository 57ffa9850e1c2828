"""Bindings of libslipstream_cpu (csrc/cpu): ctypes over its C interface, so that one binary serves
every Python and torch.

The library lies in this package. `pip install .` builds it; in a source tree
`python -m slipstream.kernels.build` does. It is given the addresses of arrays and checks nothing.
So `Program` keeps the arrays alive, and shapes are checked here or by the callers.

An array (`Array`) is NumPy's or a CPU tensor. Nothing here imports torch. Arrays made here are
NumPy's.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native_interface import SIGNATURES, LayerPointers
from slipstream.kernels.cpu.native_interface import GroupInputs as GroupInputs
from slipstream.kernels.cpu.native_interface import Job as Job
from slipstream.kernels.cpu.native_interface import StepInputs as StepInputs
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.states import LayerState
from slipstream.kernels.weights import Linear
from slipstream.spec.cpu_isas import CPU_ISAS
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


def _lies_together(x: Array, *, rows_only: bool = False) -> bool:
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


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [rows, inner] in the kernels' order.

    A sparse one may also be held as I8, `dense`, which steps of `dense_from` tokens and more read.
    """

    kind: int
    rows: int
    inner: int
    data: Bytes
    pool: ThreadPool | None = None  # its threads pack the weight
    dense: Bytes | None = None
    dense_from: int = 0

    @staticmethod
    def empty(kind: int, rows: int, inner: int, arena: Arena) -> Packed:
        return Packed(
            kind, rows, inner, arena.take(load().ss_packed_bytes(kind, rows, inner)), arena.pool
        )

    @property
    def form(self) -> int:
        return form_of(self.kind)

    @property
    def _pool(self) -> int | None:
        return None if self.pool is None else int(self.pool.pointer)

    def put_dense(self, values: Array) -> None:
        """Packs the first n rows: float32, bfloat16 or other floats [n, inner].

        I8 is quantized with a scale per row. Q4M and W4M are quantized with a scale and a minimum
        per group, found by search (csrc/cpu/round4.h).
        """
        if type_name(values) not in ("float32", "bfloat16") or not _lies_together(
            values, rows_only=True
        ):
            values = float32(values)
        self._check(values.shape[0], values.shape[1], 0, None)
        width = 2 if type_name(values) == "bfloat16" else 4
        at, form = [address(self.data), address(values)], (width == 2, row_bytes(values) // width)
        load().ss_pack_dense(
            self._pool, self.kind, self.rows, self.inner, *at, *form, len(values), 0, None
        )

    def put_codes(self, codes: Bytes, scales: npt.NDArray[np.float32]) -> None:
        """Packs the first n rows: int8 [n, inner] with scales float32 [n]."""
        codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales, np.float32)
        self._check(codes.shape[0], codes.shape[1], 0, None)
        at = [address(t) for t in (self.data, codes, scales)]
        load().ss_pack_codes(self._pool, self.rows, self.inner, *at, len(codes), 0, None)

    def put_codes4(
        self,
        codes: Bytes,
        scales: npt.NDArray[np.float32],
        minima: npt.NDArray[np.float32] | None,
        row0: int = 0,
    ) -> None:
        """Packs rows from row0 on: codes 0 … 15, uint8 [n, inner]. A value is code · scale +
        minimum, float32 [n, groups]."""
        codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
        minima = None if minima is None else np.ascontiguousarray(minima)
        self._check(codes.shape[0], codes.shape[1], row0, None)
        assert codes.dtype == np.uint8
        assert scales.dtype == np.float32
        assert scales.shape == (len(codes), self.inner // (128 if self.kind in (W4, W4M) else 32))
        assert (minima is not None) == (self.kind in (W4M, W4M32))
        assert minima is None or (minima.dtype, minima.shape) == (scales.dtype, scales.shape)
        at = [_at(t) for t in (self.data, codes, scales, minima)]
        load().ss_pack_codes4(
            self._pool, self.kind, self.rows, self.inner, *at, len(codes), row0, None
        )

    def put_blocks(
        self, blocks: int, count: int, row0: int = 0, to: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Packs `count` rows of GGUF's blocks at the address `blocks`, from row0 on, or to the rows
        `to`, int32 [count]."""
        self._check(count, self.inner, row0, to)
        at = address(self.data)
        load().ss_pack_blocks(
            self._pool, self.kind, self.rows, self.inner, at, blocks, count, row0, _at(to)
        )

    @property
    def zeros(self) -> float:
        """Share of zeros in an I8 weight."""
        assert self.kind == I8
        found: int = load().ss_num_zeros(self.rows, self.inner, address(self.data))
        return found / max(1, self.rows * self.inner)

    def sparse(self, arena: Arena) -> Packed:
        """Returns an I8 weight without its zeros."""
        assert self.kind == I8
        packed = Packed(
            S8,
            self.rows,
            self.inner,
            arena.take(load().ss_sparse_bytes(self.rows, self.inner, _at(self.data))),
        )
        load().ss_pack_sparse(self.rows, self.inner, address(self.data), address(packed.data))
        return packed

    def unfolded(self, arena: Arena) -> Packed:
        """Returns an S8 weight with its zeros."""
        assert self.kind == S8
        packed = Packed.empty(I8, self.rows, self.inner, arena)
        load().ss_unpack_sparse(self.rows, self.inner, address(self.data), address(packed.data))
        return packed

    def moved(self, arena: Arena) -> Packed:
        packed = Packed(self.kind, self.rows, self.inner, arena.take(self.data.size), arena.pool)
        packed.data[:] = self.data
        return packed

    def rows_of(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Unpacks the rows in int64 [n] to float32 [n, inner]."""
        which = np.ascontiguousarray(which, np.int64)
        if len(which) and not (which.min() >= 0 and which.max() < self.rows):
            raise IndexError(f"rows {which.min()} to {which.max()} of {self.rows}")
        out = np.empty((len(which), self.inner), np.float32)
        at = address(self.data), address(which), len(which), address(out)
        load().ss_unpack_rows(self.kind, self.rows, self.inner, *at)
        return out

    def _check(self, count: int, inner: int, row0: int, to: npt.NDArray[np.int32] | None) -> None:
        assert inner == self.inner
        if to is None:
            assert 0 <= row0 <= row0 + count <= self.rows
        else:
            assert to.dtype == np.int32
            assert len(to) == count
            assert 0 <= to.min() <= to.max() < self.rows


def form_of(kind: int) -> int:
    """Returns the form of activations that products with such weights read."""
    return {F32: FORM_F32, BF16: FORM_BF16}.get(kind, FORM_Q)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The same rows of all experts' weights, [rows, inner] each, one weight after another."""

    kind: int
    rows: int
    inner: int
    num_experts: int
    data: Bytes
    pool: ThreadPool | None = None

    @staticmethod
    def empty(kind: int, rows: int, inner: int, num_experts: int, arena: Arena) -> PackedExperts:
        stride = -(-load().ss_packed_bytes(kind, rows, inner) // 64) * 64
        return PackedExperts(
            kind, rows, inner, num_experts, arena.take(stride * num_experts), arena.pool
        )

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return self.data.size // self.num_experts

    def of(self, expert: int) -> Packed:
        own = self.data[expert * self.stride : (expert + 1) * self.stride]
        return Packed(self.kind, self.rows, self.inner, own, self.pool)


def is_rounded(parts: Sequence[Packed | PackedExperts]) -> bool:
    """Tells whether no part holds values of the model's own type."""
    return all(part.kind not in (F32, BF16) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLinear(Linear):
    """A packed weight.

    `parts` follow one another in the rows; there are several if a checkpoint mixes types. `weight`
    gives only the shape and type. `bias` is float32.
    """

    parts: tuple[Packed, ...]

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.parts)

    @property
    def form(self) -> int:
        """Form of the inputs, the same for every part."""
        return self.parts[0].form


def _at(x: Array | None) -> int | None:
    return None if x is None else address(x)


def stand_in(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array of that shape and type that takes no memory."""
    return np.broadcast_to(np.empty((), dtype), shape)


# --- Programs ---


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a program. `weights` is what a product reads."""

    name: str
    weights: Packed | PackedExperts | None = None


class Program:
    """A list of operators over buffers. `add` passes arrays as addresses and keeps them alive."""

    def __init__(self, pool: ThreadPool) -> None:
        self._library, self._pool, self._kept = load(), pool, list[Array]()
        self._pointer = self._library.ss_program_create(pool.pointer)
        self.operators: list[Operator] = []
        self.token_bytes = 0  # bytes of its own buffers per token

    def __del__(self) -> None:
        if pointer := self.__dict__.pop("_pointer", None):
            self._library.ss_program_destroy(pointer)

    def buffer(self, form: int, size: int, rows_a_token: int = 1) -> int:
        """Makes a buffer with one or several rows of `size` values per token, in `form`."""
        num_bytes = self._library.ss_form_bytes(form, size)
        self.token_bytes += num_bytes * rows_a_token
        return int(self._library.ss_buffer(self._pointer, num_bytes, rows_a_token))

    def bound(self, x: Array | None = None) -> int:
        """Makes a buffer of the caller's: `x` [T, n], or what `bind` sets later."""
        buffer = int(self._library.ss_buffer(self._pointer, 0, 1))
        if x is not None:
            self.bind(buffer, x)
            self._kept.append(x)
        return buffer

    def bind(self, buffer: int, x: Array) -> None:
        assert len(x.shape) == 2
        assert _lies_together(x, rows_only=True)
        self._library.ss_bind(self._pointer, buffer, address(x), row_bytes(x))

    def add(
        self, name: str, *arguments: Any, weights: Packed | PackedExperts | None = None
    ) -> None:
        arrays = [a for a in arguments if isinstance(a, np.ndarray) or hasattr(a, "data_ptr")]
        plain = [address(a) if any(a is x for x in arrays) else a for a in arguments]
        self._kept += arrays
        getattr(self._library, "ss_add_" + name)(self._pointer, *plain)
        self.operators.append(Operator(name, weights))

    def run(self, step: StepInputs, then: Program | None = None) -> None:
        """Runs the program, and then the program `then` over the same tokens, without returning to
        Python in between."""
        self._library.ss_run(
            self._pointer, None if then is None else then._pointer, ctypes.byref(step)
        )

    def begin(self, step: StepInputs, then: Program | None, kept: object) -> RunningStep:
        """Starts `run` without waiting. The pool's other threads compute while the caller does
        other work.

        `kept` is the memory that the step reads and writes.
        """
        running = RunningStep(
            self, then, kept
        )  # made before the step begins, in case Ctrl-C comes in between
        self._library.ss_begin(
            self._pointer, None if then is None else then._pointer, ctypes.byref(step)
        )
        return running

    def wait(self) -> None:
        """Waits until the pool's last job is done. The caller computes meanwhile, as one of its
        threads."""
        if pointer := self.__dict__.get(
            "_pointer"
        ):  # the garbage collector may have destroyed it, which waits too
            self._library.ss_wait(pointer)

    def job(self, num_tokens: int) -> Job:
        """Returns a job for `run_job`: a step of `num_tokens` tokens. Program and job must live as
        long as it may be called."""
        return Job(self._pointer, num_tokens)

    def profile(self, clock: Literal["wall", "processor"] | None) -> list[int]:
        """Returns the nanoseconds of each operator since the last call, and starts a clock.

        The clock is wall time, or the processor time of all threads, which other processes do not
        change.
        """
        ns = (c_int64 * len(self.operators))()
        self._library.ss_profile(
            self._pointer, {None: 0, "wall": 1, "processor": 2}[clock], ns, len(self.operators)
        )
        return list(ns)


class RunningStep:
    """A running step, with the memory that must live until it is done. Its deletion waits for the
    step."""

    _program: Program | None = None

    def __init__(self, program: Program, *kept: object) -> None:
        self._kept, self._program = kept, program

    def synchronize(self) -> None:
        """Computes with the other threads until the step is done."""
        if self._program is not None:
            self._program.wait()
            self._program, self._kept = None, ()

    def query(self) -> bool:
        """Tells whether the step is known to be done."""
        return self._program is None

    def wait(self) -> None:
        self.synchronize()

    def __del__(self) -> None:
        self.synchronize()


def run_job() -> int:
    """Returns the address of the C function that runs a `Job`, given its address."""
    return int(ctypes.cast(load().ss_run_job, ctypes.c_void_p).value or 0)


def layer_pointers(kv: Sequence[LayerKV]) -> Any:
    """Returns an array of the layers' caches, which must live as long as it is used."""
    array = (LayerPointers * len(kv))()
    for pointers, layer in zip(array, kv, strict=True):
        assert _lies_together(layer.k)
        assert layer.latent or _lies_together(layer.v)
        assert layer.k.dtype == layer.v.dtype
        pointers.k, pointers.v = address(layer.k), address(layer.v)
        pointers.k_scale, pointers.v_scale = _at(layer.k_scale), _at(layer.v_scale)
        pointers.index = _at(layer.index)
        if layer.state is not None:
            point_at(pointers, layer.state)
    return array


def point_at(pointers: LayerPointers, state: LayerState) -> None:
    """Sets a layer's states. ConfigError if the kernels lack the type of the convolution's."""
    kind, recurrent = type_name(state.conv), state.recurrent
    if kind not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the C++ kernels have no convolution in {kind}; use bfloat16 or float32", field="dtype"
        )
    assert _lies_together(state.conv)
    assert recurrent is None or (_lies_together(recurrent) and type_name(recurrent) == "float32")
    pointers.conv, pointers.conv_type = address(state.conv), CACHES[kind]
    pointers.recurrent = _at(recurrent)


def state_inputs(meta: AttentionMetadata, state: LayerState) -> tuple[StepInputs, object]:
    """Returns a step for operators that read the states of layer 0 alone, and an object that must
    live while it runs."""
    layers = (LayerPointers * 1)()
    point_at(layers[0], state)
    starts = _ints(meta.query_start_loc)
    inputs = StepInputs(
        num_tokens=len(meta.positions),
        num_seqs=len(starts) - 1,
        num_decodes=meta.num_decodes,
        query_start_loc=address(starts),
        layers=layers,
    )
    return inputs, (starts, layers, _read_and_written(inputs, meta))


def _read_and_written(inputs: StepInputs, meta: AttentionMetadata) -> object:
    """Sets the slots of a step's states. Returns an object that must live while it runs."""
    if meta.states is None:
        return None
    read, write = _ints(meta.states.read), _ints(meta.states.write)
    inputs.state_read, inputs.state_write = address(read), address(write)
    return read, write


def step_inputs(
    meta: AttentionMetadata,
    layers: Any,
    kv: LayerKV,
    token_ids: Array | None = None,
    num_groups: int = 1,
) -> tuple[StepInputs, object]:
    """Returns the step as the library reads it, and an object that must live while it runs.

    The step serves operators of up to `num_groups` groups.
    """
    cache = type_name(kv.k)
    if cache not in CACHES:
        raise ConfigError(
            f"the C++ kernels have no cache of {cache}; use bfloat16, float32 or int8",
            field="kv_cache_dtype",
        )
    ids = None if token_ids is None else _ints(token_ids)
    starts, positions = _ints(meta.query_start_loc), _longs(meta.positions)
    groups, kept = (GroupInputs * num_groups)(), list[Array]()
    for i, group in enumerate(groups):
        own = meta.of_group(i)
        lens, table, slots = _ints(own.seq_lens), _ints(own.block_table), _longs(own.slot_mapping)
        group.seq_lens, group.block_table, group.slots = (
            address(lens),
            address(table),
            address(slots),
        )
        group.table_stride = row_bytes(table) // 4
        kept += (lens, table, slots)
    inputs = StepInputs(
        num_tokens=len(positions),
        num_seqs=len(starts) - 1,
        num_decodes=meta.num_decodes,
        block_size=kv.block_size,
        cache=CACHES[cache],
        token_ids=_at(ids),
        query_start_loc=address(starts),
        positions=address(positions),
        groups=groups,
        layers=layers,
    )
    return inputs, (ids, starts, positions, groups, kept, _read_and_written(inputs, meta))


def _ints(x: Array) -> Array:
    return np.ascontiguousarray(x, np.int32) if isinstance(x, np.ndarray) else x.int().contiguous()


def _longs(x: Array) -> Array:
    return np.ascontiguousarray(x, np.int64) if isinstance(x, np.ndarray) else x.long().contiguous()
