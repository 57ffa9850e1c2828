"""Quantized weights of a checkpoint (`rounded.py`) in torch's tensors, on any device."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.weights.forms import (
    GroupedLinear,
    Linear,
    ScaledLinear,
    SplitLinear,
    TileScaledLinear,
    chunk_of,
)
from slipstream.kernels.weights.quantize import DTYPES, pack4
from slipstream.model.stored.packing import code_pairs, group_scales, unpack_words
from slipstream.model.stored.rounded import RoundedTensors, RoundedWeight
from slipstream.spec.parameters import Shape
from slipstream.spec.scheme import WeightFormat
from slipstream.spec.stored.native_formats import native_group_size
from slipstream.spec.stored.quantization_config import Method


class RoundedWeights(RoundedTensors):
    int32, uint8 = torch.int32, torch.uint8

    def __init__(
        self,
        shapes: dict[str, Shape],
        formats: Mapping[str, WeightFormat],
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device,
        columns: Mapping[str, tuple[int, ...]] | None = None,
        on_host: Container[str] = (),
    ) -> None:
        """Prepares for the weights of `formats`, a mapping from names in `shapes`.

        `columns` lists for some of them the inputs that keep the model's type. Weights in `on_host`
        are held in host memory.
        """
        super().__init__(shapes, formats, method)
        self.dtype, self.columns = dtype, columns or {}
        self._device, self._on_host = device, on_host

    def empty(self, name: str) -> RoundedWeight:
        """Allocates a weight. What no tensor fills (a rank's padding heads) stays zero."""
        fmt, (outer, inner) = self.formats[name], self.shapes[name]
        device = torch.device("cpu") if name in self._on_host else self._device
        if fmt.inputs is not None:
            codes = torch.zeros(outer, inner, dtype=DTYPES[fmt.inputs], device=device)
            blocks = (
                (-(-outer // fmt.block_rows), fmt.groups(inner)) if fmt.block_rows > 1 else (outer,)
            )
            scales = torch.zeros(blocks, dtype=torch.float32, device=device)
            return RoundedWeight(codes, scales, None)
        size = native_group_size(fmt, outer, inner)
        assert size, "`check_scheme` and `native_formats` see to it"
        codes = torch.zeros(outer, inner // 4, dtype=torch.int16, device=device)
        scales = torch.zeros(inner // size, outer, dtype=self.dtype, device=device)
        zeros = torch.zeros_like(scales) if self.method == "awq" or not fmt.symmetric else None
        rows = torch.ones(outer, dtype=torch.float32, device=device) if fmt.factor else None
        return RoundedWeight(codes, scales, zeros, chunk_of(inner, size), rows)

    def linear(self, name: str, weight: RoundedWeight) -> Linear:
        w, fmt = weight, self.formats[name]
        if fmt.block_rows > 1:
            return TileScaledLinear(weight=w.codes, scales=w.scales, out_dtype=self.dtype)
        if w.chunk:
            size = w.inner // len(w.scales)
            return GroupedLinear(
                weight=w.codes,
                scales=w.scales,
                zeros=w.zeros,
                group_size=size,
                chunk=w.chunk,
                codes="e2m1" if fmt.in_pairs else "int4",
                row_scales=w.row_scales,
                divides=not fmt.by_modelopt,
            )
        if fmt.split:
            return SplitLinear.of(w.codes, w.scales, self.columns[name], self.dtype)
        return ScaledLinear(weight=w.codes, scales=w.scales, out_dtype=self.dtype)

    def on_device(self, value: Tensor, name: str) -> Tensor:
        return value if name in self._on_host else value.to(self._device)

    def on_host(self, value: Tensor) -> np.ndarray[Any, Any]:
        return value.cpu().numpy()

    def put_eight_bits(self, codes: Tensor, value: Tensor) -> None:
        codes.view(torch.uint8).copy_(value.view(torch.uint8))

    def pack4(self, codes: Tensor, chunk: int) -> Tensor:
        return pack4(codes.contiguous(), chunk)

    def unpack(self, words: Tensor, bits: int, count: int) -> Tensor:
        return unpack_words(words.contiguous(), bits, count).int() + 8

    def code_pairs(self, octets: Tensor) -> Tensor:
        return code_pairs(octets)

    def group_scales(self, value: Tensor, fmt: WeightFormat) -> Tensor:
        return group_scales(fmt, value)

    def nibbles(self, words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
        return torch.stack([words >> 4 * i & 15 for i in order], dim=-1).flatten(1)

    def repeat(self, values: Tensor, times: int) -> Tensor:
        return values.repeat_interleave(times, dim=0)
