"""Bindings of libslipstream_cpu (csrc/cpu): ctypes over its C interface, so that one binary serves every Python and torch.

The library lies in this package. `pip install .` builds it, in a source tree `python -m slipstream.kernels.build`. It is given
the addresses of tensors and checks nothing: `Program` keeps the tensors alive, and shapes are checked here or by the callers.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.build import remedy
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.weights import Linear
from slipstream.spec.model import Activation, ClampedSwiglu, NamedActivation, OwnActivation

ABI = 11
LIBRARY = "libslipstream_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

F32, BF16, I8, Q8, Q4, Q4M, S8, Q5, Q5M, Q4K, Q5K, Q6K, W4, W4M, W4M32, MX, Q2K, Q3K = range(18)
"""Kinds of weights: csrc/cpu/formats.h."""

CEILINGS = ("read", "int8", "bfloat16", "float32")
"""What `add_ceiling` can do: csrc/cpu/formats.h."""

ROWS_F32, ROWS_BF16 = -1, -2
"""Tables that only `embed` reads, row by row as torch keeps them."""

BLOCK_KINDS = {
    "Q8_0": Q8, "Q4_0": Q4, "Q4_1": Q4M, "Q5_0": Q5, "Q5_1": Q5M, "MXFP4": MX,
    "Q2_K": Q2K, "Q3_K": Q3K, "Q4_K": Q4K, "Q5_K": Q5K, "Q6_K": Q6K,
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
"""For a person."""

FORM_F32, FORM_BF16, FORM_Q = range(3)
"""Forms of activations that products read."""

ACTIVATIONS: dict[NamedActivation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
CLAMPED_SWIGLU = 5
CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def activation_of(activation: Activation) -> tuple[int, float, float] | None:
    """(kind, alpha, limit), as the operators take it. None: they don't have it."""
    if isinstance(activation, ClampedSwiglu):
        return CLAMPED_SWIGLU, activation.alpha, activation.limit
    return None if isinstance(activation, OwnActivation) else (ACTIVATIONS[activation], 0.0, 0.0)


class LayerPointers(ctypes.Structure):
    _fields_ = (("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p))


class GroupInputs(ctypes.Structure):
    """`ss_group`"""

    _fields_ = (("seq_lens", c_void_p), ("block_table", c_void_p), ("table_stride", c_int64), ("slots", c_void_p))


class StepInputs(ctypes.Structure):
    """`ss_step`"""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_decodes", "block_size")),
        ("cache", c_int32),
        *((name, c_void_p) for name in ("token_ids", "query_start_loc", "positions")),
        ("groups", ctypes.POINTER(GroupInputs)),
        ("layers", ctypes.POINTER(LayerPointers)),
    )


_I, _L, _F, _P = c_int32, c_int64, c_float, c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi": (_I, []),
    "num_isas": (_I, []),
    "isa_name": (c_char_p, [_I]),
    "isa_usable": (_I, [_I]),
    "engine_create": (_P, [_I, _I]),
    "engine_destroy": (None, [_P]),
    "packed_bytes": (_L, [_I, _L, _L]),
    "pack_dense": (None, [_P, _I, _L, _L, _P, _P, _I, _L, _L, _L, _P]),
    "pack_codes": (None, [_P, _L, _L, _P, _P, _P, _L, _L, _P]),
    "pack_blocks": (None, [_P, _I, _L, _L, _P, _P, _L, _L, _P]),
    "pack_codes4": (None, [_P, _I, _L, _L, _P, _P, _P, _P, _L, _L, _P]),
    "num_zeros": (_L, [_L, _L, _P]),
    "sparse_bytes": (_L, [_L, _L, _P]),
    "pack_sparse": (None, [_L, _L, _P, _P]),
    "unpack_rows": (None, [_I, _L, _L, _P, _P, _L, _P]),
    "program_create": (_P, [_P]),
    "program_destroy": (None, [_P]),
    "buffer": (_I, [_P, _L, _L]),
    "bind": (None, [_P, _I, _P, _L]),
    "form_bytes": (_L, [_I, _L]),
    "add_embed": (None, [_P, _I, _I, _L, _I, _L, _L, _P, _F, _I]),
    "add_norm": (None, [_P, _I, _I, _I, _I, _I, _L, _P, _P, _F, _F]),
    "add_convert": (None, [_P, _I, _I, _I, _L, _L]),
    "add_linear": (None, [_P, _I, _I, _L, _I, _L, _L, _P, _P, _I]),
    "add_head_linear": (None, [_P, _I, _I, _L, _L, _L, _I, _L, _L, _P, _L]),
    "add_gated_linear": (None, [_P, _I, _I, _I, _I, _F, _F, _I, _L, _L, _P, _P]),
    "add_activation": (None, [_P, _I, _I, _I, _I, _F, _F, _I, _L, _L]),
    "add_route": (None, [_P, _I, _L, _L, _I, _I, _F, _P, _L, _L, _I]),
    "add_gather": (None, [_P, _I, _I, _I, _L, _I]),
    "add_expert_linear": (None, [_P, _I, _I, _L, _I, _I, _F, _F, _I, _L, _L, _P, _L, _P, _L]),
    "add_combine": (None, [_P, _I, _I, _L, _I, _I, _I]),
    "add_rope_and_cache": (None, [_P, _I, _I, _I, _L, _L, _L, _P, _L, _I, _P, _P, _F, _F]),
    "add_latent_queries": (None, [_P, _I, _I, _I, _I, _I, _I, _L, _L, _L, _P, _F, _P, _L, _I]),
    "add_attention": (None, [_P, _I, _I, _I, _I, _L, _L, _L, _L, _F, _L, _F, _P, _P, _P, _L, _I]),
    "add_argmax": (None, [_P, _I, _I, _L]),
    "add_linear_argmax": (None, [_P, _I, _I, _I, _L, _L, _P, _P]),
    "add_ceiling": (None, [_P, _I, _P, _L, _L]),
    "ceiling_macs": (_L, [_P, _I, _L]),
    "run": (None, [_P, _P, ctypes.POINTER(StepInputs)]),
    "begin": (None, [_P, _P, ctypes.POINTER(StepInputs)]),
    "wait": (None, [_P]),
    "profile": (_I, [_P, _I, _P, _I]),
}


def library_path() -> Path | None:
    """Where the library lies: beside this file, or where an editable install keeps what it built."""
    import slipstream.kernels

    folders = [str(Path(__file__).parent), *slipstream.kernels.__path__]
    return next((path for folder in folders if (path := Path(folder) / LIBRARY).is_file()), None)


def has_cpu_kernels() -> bool:
    """Whether the C++ kernels are built."""
    return library_path() is not None


@cache
def load() -> ctypes.CDLL:
    """The library. ConfigError says what to do without one, or with one of another version."""
    path = library_path()
    if path is None:
        raise ConfigError(
            f"the C++ kernels are not built ({LIBRARY} is missing); use kernels='torch', or get them: {remedy()}",
            field="kernels",
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} can't be loaded: {error}; {remedy()}", field="kernels") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, "ss_" + name, None)
        if function is None:
            raise ConfigError(f"{path} is of another version (it lacks ss_{name}): {remedy()}", field="kernels")
        function.restype, function.argtypes = result, arguments
    if library.ss_abi() != ABI:
        raise ConfigError(f"{path} is of another version: {remedy()}", field="kernels")
    return library


@cache
def library_digest() -> str:
    """A digest that differs between builds of the library."""
    path = library_path()
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def instruction_sets() -> list[str]:
    """The instruction sets that the library was built for and this machine runs, the fastest last."""
    library = load()
    return [library.ss_isa_name(i).decode() for i in range(library.ss_num_isas()) if library.ss_isa_usable(i)]


class ThreadPool:
    """`num_threads` threads, of which the caller's is one, and an instruction set: `isa`, or the fastest."""

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        library = load()
        names = [library.ss_isa_name(i).decode() for i in range(library.ss_num_isas())]
        usable = instruction_sets()
        if isa is not None and isa not in usable:
            raise ConfigError(f"isa={isa!r} can't run here; {', '.join(usable)} can", field="isa")
        self.isa = usable[-1] if isa is None else isa
        self.num_threads = num_threads
        self.pointer = library.ss_engine_create(num_threads, names.index(self.isa))

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            load().ss_engine_destroy(self.pointer)


# --- Weights ----------------------------------------------------------------------------------------------------------


class Arena:
    """Memory for weights, in stretches that are large enough for the system's huge pages. (Through small pages a thread waits
    for the page table as long as for the weights.) Unwritten pages take no memory. The threads of `pool` pack what lies there;
    without a pool the caller's thread does."""

    SIZE = 64 * 2**20

    def __init__(self, pool: ThreadPool | None = None, size: int = SIZE) -> None:
        self.pool, self._size = pool, size
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeros, from an address that is a multiple of 64."""
        if num_bytes > self._rest.numel():
            fresh = torch.from_numpy(np.zeros(max(self._size, num_bytes) + 64, dtype=np.uint8))
            self._rest = fresh[-fresh.data_ptr() % 64 :]
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // 64) * 64 :]
        return taken


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [rows, inner] in the kernels' order."""

    kind: int
    rows: int
    inner: int
    data: Tensor  # uint8
    pool: ThreadPool | None = None  # whose threads pack it

    @staticmethod
    def empty(kind: int, rows: int, inner: int, arena: Arena) -> Packed:
        return Packed(kind, rows, inner, arena.take(load().ss_packed_bytes(kind, rows, inner)), arena.pool)

    @property
    def form(self) -> int:
        return form_of(self.kind)

    @property
    def _pool(self) -> int | None:
        return None if self.pool is None else int(self.pool.pointer)

    def put_dense(self, values: Tensor) -> None:
        """Pack the first n rows: float32 or bfloat16 [n, inner]."""
        values = values if values.dtype in (torch.float32, torch.bfloat16) else values.float()
        values = values if values.stride(1) == 1 else values.contiguous()
        self._check(values.shape[0], values.shape[1], 0, None)
        at, form = [_at(t) for t in (self.data, values)], (values.dtype == torch.bfloat16, values.stride(0))
        load().ss_pack_dense(self._pool, self.kind, self.rows, self.inner, *at, *form, len(values), 0, None)

    def put_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Pack the first n rows: int8 [n, inner] with scales float32 [n]."""
        codes, scales = codes.contiguous(), scales.float().contiguous()
        self._check(codes.shape[0], codes.shape[1], 0, None)
        at = [_at(t) for t in (self.data, codes, scales)]
        load().ss_pack_codes(self._pool, self.rows, self.inner, *at, len(codes), 0, None)

    def put_codes4(self, codes: Tensor, scales: Tensor, minima: Tensor | None, row0: int = 0) -> None:
        """Pack rows from row0 on: codes 0 … 15, uint8 [n, inner]; a number is code · scale + minimum, float32 [n, groups]."""
        codes, scales = codes.contiguous(), scales.contiguous()
        minima = None if minima is None else minima.contiguous()
        self._check(codes.shape[0], codes.shape[1], row0, None)
        assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
        assert scales.shape == (len(codes), self.inner // (128 if self.kind in (W4, W4M) else 32))
        assert (minima is not None) == (self.kind in (W4M, W4M32))
        assert minima is None or (minima.dtype, minima.shape) == (scales.dtype, scales.shape)
        at = [_at(t) for t in (self.data, codes, scales, minima)]
        load().ss_pack_codes4(self._pool, self.kind, self.rows, self.inner, *at, len(codes), row0, None)

    def put_blocks(self, blocks: int, count: int, row0: int = 0, to: Tensor | None = None) -> None:
        """Pack `count` rows of GGUF's blocks at the address `blocks`, from row0 on, or to the rows `to`, int32 [count]."""
        self._check(count, self.inner, row0, to)
        data = self.data.data_ptr()
        load().ss_pack_blocks(self._pool, self.kind, self.rows, self.inner, data, blocks, count, row0, _at(to))

    @property
    def zeros(self) -> float:
        """The share of zeros in an I8 weight."""
        assert self.kind == I8
        found: int = load().ss_num_zeros(self.rows, self.inner, self.data.data_ptr())
        return found / max(1, self.rows * self.inner)

    def sparse(self, arena: Arena) -> Packed:
        """An I8 weight without its zeros."""
        assert self.kind == I8
        packed = Packed(S8, self.rows, self.inner, arena.take(load().ss_sparse_bytes(self.rows, self.inner, _at(self.data))))
        load().ss_pack_sparse(self.rows, self.inner, self.data.data_ptr(), packed.data.data_ptr())
        return packed

    def moved(self, arena: Arena) -> Packed:
        packed = Packed(self.kind, self.rows, self.inner, arena.take(self.data.numel()), arena.pool)
        packed.data.copy_(self.data)
        return packed

    def rows_of(self, which: Tensor) -> Tensor:
        """float32 [n, inner] of int64 [n]."""
        which = which.long().contiguous()
        if len(which) and not (int(which.min()) >= 0 and int(which.max()) < self.rows):
            raise IndexError(f"rows {int(which.min())} to {int(which.max())} of {self.rows}")
        out = torch.empty(len(which), self.inner)
        load().ss_unpack_rows(
            self.kind, self.rows, self.inner, self.data.data_ptr(), which.data_ptr(), len(which), out.data_ptr()
        )
        return out

    def _check(self, count: int, inner: int, row0: int, to: Tensor | None) -> None:
        assert inner == self.inner
        if to is None:
            assert 0 <= row0 <= row0 + count <= self.rows
        else:
            assert (to.dtype, len(to)) == (torch.int32, count)
            assert 0 <= int(to.min()) <= int(to.max()) < self.rows


def form_of(kind: int) -> int:
    """The form of activations that products with such weights read."""
    return {F32: FORM_F32, BF16: FORM_BF16}.get(kind, FORM_Q)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The same rows of all experts' weights, [rows, inner] each, one weight after the other."""

    kind: int
    rows: int
    inner: int
    num_experts: int
    data: Tensor  # uint8
    pool: ThreadPool | None = None

    @staticmethod
    def empty(kind: int, rows: int, inner: int, num_experts: int, arena: Arena) -> PackedExperts:
        stride = -(-load().ss_packed_bytes(kind, rows, inner) // 64) * 64
        return PackedExperts(kind, rows, inner, num_experts, arena.take(stride * num_experts), arena.pool)

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return self.data.numel() // self.num_experts

    def of(self, expert: int) -> Packed:
        own = self.data[expert * self.stride : (expert + 1) * self.stride]
        return Packed(self.kind, self.rows, self.inner, own, self.pool)


def is_rounded(parts: Sequence[Packed | PackedExperts]) -> bool:
    """Whether no part holds numbers of the model's own type."""
    return all(part.kind not in (F32, BF16) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLinear(Linear):
    """`parts` follow one another in the rows; several where a checkpoint mixes types. `weight` only tells shape and type (on
    the meta device). `bias` is float32."""

    parts: tuple[Packed, ...]

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.parts)

    @property
    def form(self) -> int:
        """What every part reads."""
        return self.parts[0].form


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# --- Programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """`weights`: what a product reads."""

    name: str
    weights: Packed | PackedExperts | None = None


class Program:
    """A list of operators over buffers. `add` passes tensors as addresses and keeps them."""

    def __init__(self, pool: ThreadPool) -> None:
        self._library, self._pool, self._kept = load(), pool, list[Tensor]()
        self._pointer = self._library.ss_program_create(pool.pointer)
        self.operators: list[Operator] = []
        self.token_bytes = 0  # of its own buffers, a token

    def __del__(self) -> None:
        if pointer := self.__dict__.pop("_pointer", None):
            self._library.ss_program_destroy(pointer)

    def buffer(self, form: int, size: int, rows_a_token: int = 1) -> int:
        """A row of `size` values a token, or several, in `form`."""
        num_bytes = self._library.ss_form_bytes(form, size)
        self.token_bytes += num_bytes * rows_a_token
        return int(self._library.ss_buffer(self._pointer, num_bytes, rows_a_token))

    def bound(self, tensor: Tensor | None = None) -> int:
        """A buffer of the caller's: `tensor` [T, n], or what `bind` gives later."""
        buffer = int(self._library.ss_buffer(self._pointer, 0, 1))
        if tensor is not None:
            self.bind(buffer, tensor)
            self._kept.append(tensor)
        return buffer

    def bind(self, buffer: int, tensor: Tensor) -> None:
        assert tensor.dim() == 2
        assert tensor.stride(1) == 1
        self._library.ss_bind(self._pointer, buffer, tensor.data_ptr(), tensor.stride(0) * tensor.element_size())

    def add(self, name: str, *arguments: Any, weights: Packed | PackedExperts | None = None) -> None:
        self._kept += [a for a in arguments if isinstance(a, Tensor)]
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        getattr(self._library, "ss_add_" + name)(self._pointer, *plain)
        self.operators.append(Operator(name, weights))

    def run(self, step: StepInputs, then: Program | None = None) -> None:
        """`then`: another program over the same tokens, without a return to Python in between."""
        self._library.ss_run(self._pointer, None if then is None else then._pointer, ctypes.byref(step))

    def begin(self, step: StepInputs, then: Program | None, kept: object) -> Running:
        """`run` without waiting: the pool's other threads work while the caller does something else. `kept`: what the step
        reads and writes."""
        running = Running(self, then, kept)  # made first: a Ctrl-C may come in between
        self._library.ss_begin(self._pointer, None if then is None else then._pointer, ctypes.byref(step))
        return running

    def wait(self) -> None:
        """Until what was begun last on the pool is done, as one of its threads."""
        if pointer := self.__dict__.get("_pointer"):  # a collector of cycles may have destroyed it, which waits too
            self._library.ss_wait(pointer)

    def profile(self, clock: Literal["wall", "processor"] | None) -> list[int]:
        """Nanoseconds of each operator since the last call, which started a clock: the wall's, or the processor time of all
        threads, which a busy neighbour leaves alone."""
        ns = (c_int64 * len(self.operators))()
        self._library.ss_profile(self._pointer, {None: 0, "wall": 1, "processor": 2}[clock], ns, len(self.operators))
        return list(ns)


class Running:
    """A step that was begun, and what must live until it is done. Dropping it waits for the step."""

    _program: Program | None = None

    def __init__(self, program: Program, *kept: object) -> None:
        self._kept, self._program = kept, program

    def synchronize(self) -> None:
        """Help, and return when it is done."""
        if self._program is not None:
            self._program.wait()
            self._program, self._kept = None, ()

    def __del__(self) -> None:
        self.synchronize()


def layer_pointers(kv: Sequence[LayerKV]) -> Any:
    """An array of the layers' caches. The tensors must live as long as it is used."""
    array = (LayerPointers * len(kv))()
    for pointers, layer in zip(array, kv, strict=True):
        assert layer.k.is_contiguous()
        assert layer.latent or layer.v.is_contiguous()
        assert layer.k.dtype == layer.v.dtype
        pointers.k, pointers.v = layer.k.data_ptr(), layer.v.data_ptr()
        pointers.k_scale, pointers.v_scale = _at(layer.k_scale), _at(layer.v_scale)
    return array


def step_inputs(
    meta: AttentionMetadata, layers: Any, kv: LayerKV, token_ids: Tensor | None = None, num_groups: int = 1
) -> tuple[StepInputs, object]:
    """The step as the library reads it, for operators of up to `num_groups` groups, and what must live while it runs."""
    if kv.k.dtype not in CACHES:
        raise ConfigError(
            f"the C++ kernels have no cache of {kv.k.dtype}; use bfloat16, float32 or int8", field="kv_cache_dtype"
        )
    ids = None if token_ids is None else token_ids.to(torch.int32).contiguous()
    starts, positions = meta.query_start_loc.to(torch.int32), meta.positions.long().contiguous()
    groups, kept = (GroupInputs * num_groups)(), list[Tensor]()
    for i, group in enumerate(groups):
        own = meta.of_group(i)
        lens, table = own.seq_lens.to(torch.int32), own.block_table.to(torch.int32)
        table = table if table.stride(1) == 1 else table.contiguous()
        slots = own.slot_mapping.long().contiguous()
        group.seq_lens, group.block_table, group.slots = lens.data_ptr(), table.data_ptr(), slots.data_ptr()
        group.table_stride = table.stride(0)
        kept += (lens, table, slots)
    inputs = StepInputs(
        num_tokens=len(positions),
        num_seqs=len(starts) - 1,
        num_decodes=meta.num_decodes,
        block_size=kv.block_size,
        cache=CACHES[kv.k.dtype],
        token_ids=_at(ids),
        query_start_loc=starts.data_ptr(),
        positions=positions.data_ptr(),
        groups=groups,
        layers=layers,
    )
    return inputs, (ids, starts, positions, groups, kept)
