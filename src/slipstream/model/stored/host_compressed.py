"""Quantized weights of a checkpoint, packed for the CPU's kernels without torch.

`model/stored/compressed.py` does the same with torch, and describes the layouts.

1. Packed as they are: int8 with a scale per row, and 2 to 4 bits in groups, with or without zero
   points, as the tools of compressed-tensors, GPTQ and AWQ write them.
2. Expanded to the model's type when they are read: other quantized weights
   (`stored_weights.expanded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.moe import pack4
from slipstream.kernels.weights import GroupedLinear, Linear, ScaledLinear, chunk_of
from slipstream.model.load.checkpoint import PASSED_OVER
from slipstream.model.load.pulled import Pulled
from slipstream.model.stored.parts import stored_parts, stored_shape, unpack_words
from slipstream.spec.native_formats import native_group_size
from slipstream.spec.parameters import Placement, Shape
from slipstream.spec.quantization_config import AWQ_COLUMNS, PLAIN_ZEROS, Method
from slipstream.spec.scheme import WeightFormat

Array = npt.NDArray[Any]
_Taken: TypeAlias = tuple[str, str, Placement, Callable[[], Array]]
"""A tensor of the checkpoint: its name, the part of a weight that it is, its place, its reader."""


@dataclass(slots=True)
class _Weight:
    codes: Array  # int8 [out, in], or with 4 bits int16 [out, in / 4] (`GroupedLinear.weight`)
    scales: Array  # float32 [out], or with 4 bits in the model's type [groups, out]
    zeros: Array | None  # same layout as the scales
    chunk: int = 0  # of 4-bit codes; 0 for int8

    @property
    def inner(self) -> int:
        held: int = self.codes.shape[1]
        return 4 * held if self.chunk else held


class HostRoundedWeights:
    """Collects a checkpoint's quantized tensors, as `StoredWeights` does.

    `formats`, by our names, are those of the weights that are held as stored.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        formats: Mapping[str, WeightFormat],
        method: Method,
        dtype: str,
    ) -> None:
        self._formats, self._method, self._dtype = formats, method, np.dtype(dtype)
        self._shapes = shapes
        self._taken: dict[str, list[_Taken]] = {name: [] for name in formats}

    def __contains__(self, target: str) -> bool:
        return target in self._taken

    def _empty(self, name: str) -> _Weight:
        fmt, (rows, inner) = self._formats[name], self._shapes[name]
        if fmt.inputs is not None:
            return _Weight(np.empty((rows, inner), np.int8), np.empty(rows, np.float32), None)
        size = native_group_size(fmt, rows, inner)
        assert size, "`check_scheme` and `native_formats` see to it"
        scales = np.empty((inner // size, rows), self._dtype)
        zeros = np.empty_like(scales) if self._method == "awq" or not fmt.symmetric else None
        return _Weight(np.empty((rows, inner // 4), np.int16), scales, zeros, chunk_of(inner, size))

    def take(
        self, name: str, read: Callable[[], Array], find: Callable[[str], Placement | None]
    ) -> bool:
        stem, _, part = name.rpartition(".")
        if part in PASSED_OVER:
            return True
        place = find(f"{stem}.weight")
        if place is None or place.target not in self._taken:
            return False
        parts = self._parts(self._formats[place.target])
        if part not in (*parts, *(("qzeros", "g_idx") if "qweight" in parts else ())):
            if part.startswith("weight_"):
                raise _unsupported(name)
            return False
        if place.transform is not None or place.copies is not None:
            raise CheckpointError(
                f"{name}: rounded weights in this order of rows are not supported", field=name
            )
        self._taken[place.target].append((name, part, place, read))
        return True

    def _put(
        self, into: _Weight, name: str, part: str, place: Placement, read: Callable[[], Array]
    ) -> None:
        fmt = self._formats[place.target]
        rows = len(into.codes) - place.start if place.rows is None else place.rows
        at, inner, groups = (
            slice(place.start, place.start + rows),
            into.inner,
            fmt.groups(into.inner),
        )
        if part == "weight":
            into.codes[at] = _checked(name, read(), (rows, inner), np.int8)
        elif part == "weight_packed":
            words = _checked(name, read(), stored_shape(fmt, part, rows, inner), np.int32)
            into.codes[at] = pack4(
                (unpack_words(words, fmt.bits, inner) + np.int8(8)).view(np.uint8), into.chunk
            )
        elif part == "qweight" and self._method == "awq":
            codes = _awq_codes(_checked(name, read(), (inner, rows // 8), np.int32))
            into.codes[at] = pack4(codes.T, into.chunk)
        elif part == "qweight":
            words = _checked(name, read(), (inner // 8, rows), np.int32)
            into.codes[at] = pack4(_nibbles(np.ascontiguousarray(words.T)), into.chunk)
        elif part == "weight_zero_point":
            words = _checked(name, read(), stored_shape(fmt, part, rows, inner), np.int32)
            assert into.zeros is not None
            into.zeros[:, at] = _spread(
                unpack_words(words.T, fmt.bits, rows) + np.int8(8), len(into.zeros)
            )
        elif part == "qzeros" and into.zeros is not None:
            into.zeros[:, at] = _spread(
                _awq_codes(_checked(name, read(), (groups, rows // 8), np.int32)), len(into.zeros)
            )
        elif part in ("qzeros", "g_idx"):
            self._check_plain(name, part, inner // groups, read())
        elif fmt.inputs is None:
            scales = _checked(
                name, read(), (groups, rows) if part == "scales" else (rows, groups), None
            )
            into.scales[:, at] = _spread(scales if part == "scales" else scales.T, len(into.scales))
        else:
            scales = read().reshape(-1)
            if len(scales) not in (1, rows):
                raise CheckpointError(
                    f"{name} holds {len(scales)} scales for {rows} rows", field=name
                )
            into.scales[at] = scales

    def _check_plain(self, name: str, part: str, group: int, value: Array) -> None:
        """Checks that GPTQ's zero points are 8, or that the inputs of a group are neighbours.
        CheckpointError if not."""
        plain = PLAIN_ZEROS[self._method] if part == "qzeros" else np.arange(value.size) // group
        if not (value.reshape(-1).astype(np.int64) & 0xFFFFFFFF == plain).all():
            raise _unsupported(name)

    def _parts(self, fmt: WeightFormat) -> tuple[str, ...]:
        """Returns the parts that a weight needs. GPTQ's zero points are checked, not kept."""
        if self._method != "compressed-tensors":
            return (
                ("qweight", "scales", "qzeros") if self._method == "awq" else ("qweight", "scales")
            )
        return stored_parts(fmt)

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        return [
            name.removesuffix("weight") + part
            for name, place in names.items()
            if place.target in self._taken
            for part in self._parts(self._formats[place.target])
            if all(
                (place.start, part) != (p.start, own) for _, own, p, _ in self._taken[place.target]
            )
        ]

    def linears(self) -> Mapping[str, Linear]:
        return Pulled({name: partial(self._linear, name) for name in self._taken})

    def _linear(self, name: str) -> Linear:
        w, given = self._empty(name), dict[str, Any]()
        for taken in self._taken[name]:
            self._put(w, *taken)
        if self._formats[name].inputs is not None:
            given = dict(weight=w.codes, scales=w.scales, out_dtype=self._dtype)
            return ScaledLinear(**given)
        given = dict(weight=w.codes, scales=w.scales, zeros=w.zeros)
        return GroupedLinear(**given, group_size=w.inner // len(w.scales), chunk=w.chunk)


def _unsupported(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: zero points and reordered inputs are not supported", field=name
    )


def _nibbles(words: Array) -> npt.NDArray[np.uint8]:
    """Unpacks int32 words [rows, n] to codes [rows, 8 n], from the low bits up."""
    octets = words.astype("<i4", copy=False).view(np.uint8)
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(words), -1)


def _awq_codes(words: Array) -> npt.NDArray[np.uint8]:
    """int32 [rows, out / 8] → codes [rows, out]."""
    return (
        _nibbles(words).reshape(len(words), -1, 8)[..., list(AWQ_COLUMNS)].reshape(len(words), -1)
    )


def _spread(values: Array, count: int) -> Array:
    """[groups, rows] → [count, rows], repeating each group for its smaller groups."""
    return np.repeat(values, count // len(values), axis=0)


def _checked(name: str, value: Array, shape: tuple[int, int], dtype: npt.DTypeLike | None) -> Array:
    if value.shape != shape or (dtype is not None and value.dtype != dtype):
        wanted = f"{list(shape)}" + (f" of {np.dtype(dtype)}" if dtype is not None else "")
        raise CheckpointError(
            f"{name} is {list(value.shape)} of {value.dtype}; {wanted} was expected", field=name
        )
    return value
