"""Quantized weights of a checkpoint (`rounded.py`) in NumPy's arrays, packed for the CPU's kernels. No torch.

1. Packed as they are: int8 with a scale per row, MXFP4, and 2 to 4 bits in groups, with or without
   zero points, as the tools of compressed-tensors, GPTQ and AWQ write them.
2. Expanded to the model's type when they are read: other quantized weights
   (`stored_weights.expanded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.program.moe import pack4
from slipstream.kernels.weights.forms import GroupedLinear, Linear, ScaledLinear, chunk_of
from slipstream.model.stored.parts import code_pairs, group_scales, unpack_words
from slipstream.model.stored.rounded import RoundedTensors, RoundedWeight
from slipstream.spec.parameters import Shape
from slipstream.spec.scheme import WeightFormat
from slipstream.spec.stored.native_formats import native_group_size
from slipstream.spec.stored.quantization_config import Method

Array = npt.NDArray[Any]


class HostRoundedWeights(RoundedTensors):
    int32, uint8 = np.dtype("int32"), np.dtype("uint8")

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        formats: Mapping[str, WeightFormat],
        method: Method,
        dtype: str,
    ) -> None:
        """Prepares for the weights of `formats`, those that are held as stored."""
        super().__init__(shapes, formats, method)
        self._dtype = np.dtype(dtype)

    def empty(self, name: str) -> RoundedWeight:
        fmt, (rows, inner) = self.formats[name], self.shapes[name]
        if fmt.inputs is not None:
            return RoundedWeight(np.empty((rows, inner), np.int8), np.empty(rows, np.float32), None)
        size = native_group_size(fmt, rows, inner)
        assert size, "`check_scheme` and `native_formats` see to it"
        codes, scales = (
            np.empty((rows, inner // 4), np.int16),
            np.empty((inner // size, rows), self._dtype),
        )
        zeros = np.empty_like(scales) if self.method == "awq" or not fmt.symmetric else None
        return RoundedWeight(codes, scales, zeros, chunk_of(inner, size))

    def linear(self, name: str, weight: RoundedWeight) -> Linear:
        w, given = weight, dict[str, Any](weight=weight.codes, scales=weight.scales)
        if not w.chunk:
            given |= dict(out_dtype=self._dtype)
            return ScaledLinear(**given)
        size = w.inner // len(w.scales)
        given |= dict(codes="e2m1" if self.formats[name].in_pairs else "int4")
        return GroupedLinear(**given, zeros=w.zeros, group_size=size, chunk=w.chunk)

    def on_host(self, value: Array) -> Array:
        return value

    def pack4(self, codes: Array, chunk: int) -> Array:
        return pack4(codes, chunk)

    def unpack(self, words: Array, bits: int, count: int) -> Array:
        return (unpack_words(words, bits, count) + np.int8(8)).view(np.uint8)

    def code_pairs(self, octets: Array) -> Array:
        return code_pairs(octets)

    def group_scales(self, value: Array, fmt: WeightFormat) -> Array:
        return group_scales(fmt, value).astype(self._dtype)

    def nibbles(self, words: Array, order: Sequence[int] = range(8)) -> Array:
        octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
        codes = np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(words), -1, 8)
        return (codes if order == range(8) else codes[..., list(order)]).reshape(len(words), -1)

    def repeat(self, values: Array, times: int) -> Array:
        return np.repeat(values, times, axis=0)
