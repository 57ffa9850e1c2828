"""Quantized weights of a checkpoint (`rounded.py`) as NumPy arrays, packed for the CPU kernels. No
torch.

1. Packed without change: int8 with a scale per row, MXFP4, and 2 to 4 bits in groups, with or
   without zero points, from compressed-tensors, GPTQ and AWQ.
2. Expanded to the model's dtype when read: other quantized weights (`stored_weights.expanded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.program.moe import pack4
from slipstream.model.stored.parts import code_pairs, group_scales, unpack_words
from slipstream.model.stored.rounded import RoundedTensors
from slipstream.spec.parameters import Shape
from slipstream.spec.scheme import WeightFormat
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
        """Expects the weights in `formats`, which are held as stored."""
        super().__init__(shapes, formats, method)
        self.dtype = np.dtype(dtype)

    def make(self, name: str, part: str, shape: Shape, kind: str | None) -> Array:
        return np.empty(shape, kind or self.dtype)

    def on_host(self, value: Array) -> Array:
        return value

    def pack4(self, codes: Array, chunk: int) -> Array:
        return pack4(codes, chunk)

    def unpack(self, words: Array, bits: int, count: int) -> Array:
        return (unpack_words(words, bits, count) + np.int8(8)).view(np.uint8)

    def code_pairs(self, octets: Array) -> Array:
        return code_pairs(octets)

    def group_scales(self, value: Array, fmt: WeightFormat) -> Array:
        return group_scales(fmt, value).astype(self.dtype)

    def nibbles(self, words: Array, order: Sequence[int] = range(8)) -> Array:
        octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
        codes = np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(words), -1, 8)
        return (codes if order == range(8) else codes[..., list(order)]).reshape(len(words), -1)

    def repeat(self, values: Array, times: int) -> Array:
        return np.repeat(values, times, axis=0)
