"""Programs of the C++ kernels, and the inputs of a step in the form that the library reads.

`Program` keeps the arrays alive whose addresses it passes. Shapes are checked here or by the callers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.arrays import (
    Array,
    address,
    address_or_null,
    lies_together,
    row_bytes,
    type_name,
)
from slipstream.kernels.cpu.native import CACHES, load
from slipstream.kernels.cpu.native_interface import GroupInputs, Job, LayerPointers, StepInputs
from slipstream.kernels.cpu.packed import Packed, PackedExperts
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.states import LayerState


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a program. `weights`: the packed weights of a product."""

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
        """Makes a buffer in the format `form`, with one or several rows of `size` per token."""
        num_bytes = self._library.ss_form_bytes(form, size)
        self.token_bytes += num_bytes * rows_a_token
        return int(self._library.ss_buffer(self._pointer, num_bytes, rows_a_token))

    def bound(self, x: Array | None = None) -> int:
        """Makes a buffer in the caller's memory: `x` [T, n], or an array given to `bind` later."""
        buffer = int(self._library.ss_buffer(self._pointer, 0, 1))
        if x is not None:
            self.bind(buffer, x)
            self._kept.append(x)
        return buffer

    def bind(self, buffer: int, x: Array) -> None:
        assert len(x.shape) == 2
        assert lies_together(x, rows_only=True)
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
        """Starts `run` without waiting. The pool's other threads compute while the caller does other work.

        `kept` is the memory that the step reads and writes.
        """
        # made before the step begins, in case Ctrl-C comes in between
        running = RunningStep(self, then, kept)
        self._library.ss_begin(
            self._pointer, None if then is None else then._pointer, ctypes.byref(step)
        )
        return running

    def wait(self) -> None:
        """Waits until the pool's last job is done. The caller computes meanwhile, as one of its threads."""
        # the garbage collector may have destroyed it, which waits too
        if pointer := self.__dict__.get("_pointer"):
            self._library.ss_wait(pointer)

    def job(self, num_tokens: int) -> Job:
        """Returns a job for `run_job`: a step of `num_tokens` tokens. Program and job must live as
        long as it may be called."""
        return Job(self._pointer, num_tokens)

    def profile(self, clock: Literal["wall", "processor"] | None) -> list[int]:
        """Returns the nanoseconds of each operator since the last call, and starts a clock.

        The clock is wall time, or the processor time of all threads, which other processes do not change.
        """
        ns = (c_int64 * len(self.operators))()
        self._library.ss_profile(
            self._pointer, {None: 0, "wall": 1, "processor": 2}[clock], ns, len(self.operators)
        )
        return list(ns)


class RunningStep:
    """A step that the thread pool is computing, with the memory that must live until its end.
    Deleting the object waits for the step. `ended` is called after the first wait."""

    _program: Program | None = None

    def __init__(self, program: Program, *kept: object) -> None:
        self.ended: Callable[[], None] | None = None
        self._kept, self._program = kept, program

    def synchronize(self) -> None:
        """Computes with the other threads until the step is done."""
        if self._program is not None:
            self._program.wait()
            self._program, self._kept = None, ()
            if self.ended is not None:
                self.ended()

    def query(self) -> bool:
        """Tells without waiting whether the step is done."""
        return self._program is None

    def wait(self) -> None:
        self.synchronize()

    def __del__(self) -> None:
        self.synchronize()


def run_job() -> int:
    """Returns the address of the C function that runs a `Job`, given its address."""
    return int(ctypes.cast(load().ss_run_job, ctypes.c_void_p).value or 0)


def layer_pointers(kv: Sequence[LayerKV]) -> Any:
    """Returns the layers' caches as an array of C structs, which must outlive its use."""
    array = (LayerPointers * len(kv))()
    for pointers, layer in zip(array, kv, strict=True):
        assert lies_together(layer.k)
        assert layer.latent or lies_together(layer.v)
        assert layer.k.dtype == layer.v.dtype
        pointers.k, pointers.v = address(layer.k), address(layer.v)
        pointers.k_scale, pointers.v_scale = (
            address_or_null(layer.k_scale),
            address_or_null(layer.v_scale),
        )
        pointers.index = address_or_null(layer.index)
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
    assert lies_together(state.conv)
    assert recurrent is None or (lies_together(recurrent) and type_name(recurrent) == "float32")
    pointers.conv, pointers.conv_type = address(state.conv), CACHES[kind]
    pointers.recurrent = address_or_null(recurrent)


def read_and_written(inputs: StepInputs, meta: AttentionMetadata) -> object:
    """Sets the slots of a step's states. The caller must hold the returned object while the step runs."""
    if meta.states is None:
        return None
    read, write = ints(meta.states.read), ints(meta.states.write)
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
    ids = None if token_ids is None else ints(token_ids)
    starts, positions = ints(meta.query_start_loc), _longs(meta.positions)
    groups, kept = (GroupInputs * num_groups)(), list[Array]()
    for i, group in enumerate(groups):
        own = meta.of_group(i)
        lens, table, slots = ints(own.seq_lens), ints(own.block_table), _longs(own.slot_mapping)
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
        token_ids=address_or_null(ids),
        query_start_loc=address(starts),
        positions=address(positions),
        groups=groups,
        layers=layers,
    )
    return inputs, (ids, starts, positions, groups, kept, read_and_written(inputs, meta))


def ints(x: Array) -> Array:
    return np.ascontiguousarray(x, np.int32) if isinstance(x, np.ndarray) else x.int().contiguous()


def _longs(x: Array) -> Array:
    return np.ascontiguousarray(x, np.int64) if isinstance(x, np.ndarray) else x.long().contiguous()
