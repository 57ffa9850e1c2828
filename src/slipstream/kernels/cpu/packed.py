"""Packed weights of the C++ kernels: their rows, by kind, and linear layers with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.arrays import (
    Array,
    address,
    address_or_null,
    float32,
    lies_together,
    row_bytes,
    type_name,
)
from slipstream.kernels.cpu.native import (
    BF16,
    F32,
    FORM_BF16,
    FORM_F32,
    FORM_Q,
    I8,
    S8,
    W4,
    W4M,
    W4M32,
    Arena,
    Bytes,
    load,
)
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.weights.forms import NO_ROWS, Linear


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [rows, inner] in the C++ kernels' memory order. A sparse weight may have a second
    copy `dense`, of kind I8, which steps of at least `dense_from` tokens use.
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
        if type_name(values) not in ("float32", "bfloat16") or not lies_together(
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
        at = [address_or_null(t) for t in (self.data, codes, scales, minima)]
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
            self._pool,
            self.kind,
            self.rows,
            self.inner,
            at,
            blocks,
            count,
            row0,
            address_or_null(to),
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
            arena.take(load().ss_sparse_bytes(self.rows, self.inner, address_or_null(self.data))),
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
    """Returns the activation format (`native.FORM_*`) that products with weights of this kind
    read."""
    return {F32: FORM_F32, BF16: FORM_BF16}.get(kind, FORM_Q)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Packed weights of all experts, or some rows of them: the same rows [rows, inner] of each
    expert, one expert after another."""

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
    """Tells whether all parts are quantized."""
    return all(part.kind not in (F32, BF16) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLinear(Linear):
    """A packed weight of a product. `parts` hold its rows, one part after another; there are
    several if a checkpoint mixes types. `weight` is a placeholder with the shape and type. `bias`
    is float32.
    """

    parts: tuple[Packed, ...]
    ROWS = NO_ROWS

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.parts)

    @property
    def form(self) -> int:
        """Format of the inputs, the same for every part."""
        return self.parts[0].form


def stand_in(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns a placeholder: an array of that shape and type without memory of its own."""
    return np.broadcast_to(np.empty((), dtype), shape)
