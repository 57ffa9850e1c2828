"""Quantized weights of a checkpoint (`rounded.py`) as torch tensors, on any device."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.arrays import to_array, to_tensor
from slipstream.kernels.weights.forms import Linear, ScaledLinear, SplitLinear
from slipstream.kernels.weights.quantize import pack4
from slipstream.model.stored.parts import unpack_words
from slipstream.model.stored.rounded import RoundedTensors
from slipstream.spec.parameters import Shape
from slipstream.spec.scheme import WeightFormat
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
        """Expects the weights in `formats`, by names in `shapes`.

        `columns`: for some of them, the input columns that keep the model's dtype. Weights in
        `on_host` go to host memory.
        """
        super().__init__(shapes, formats, method)
        self.dtype, self.columns = dtype, columns or {}
        self._device, self._on_host = device, on_host

    def make(self, name: str, part: str, shape: Shape, kind: str | None) -> Tensor:
        """Allocates a tensor. Parts that no checkpoint tensor fills (a rank's padding heads) stay
        zero."""
        device = torch.device("cpu") if name in self._on_host else self._device
        new = torch.ones if part == "row_scales" else torch.zeros
        return new(shape, dtype=getattr(torch, kind) if kind else self.dtype, device=device)

    def finished(self, name: str, weight: Linear) -> Linear:
        if not self.formats[name].split:
            return weight
        assert isinstance(weight, ScaledLinear)
        return SplitLinear.of(weight.weight, weight.scales, self.columns[name], self.dtype)

    def on_device(self, value: Tensor, name: str) -> Tensor:
        return value if name in self._on_host else value.to(self._device)

    def on_host(self, value: Tensor) -> np.ndarray[Any, Any]:
        return value.cpu().numpy()

    def put_eight_bits(self, codes: Tensor, value: Tensor) -> None:
        codes.view(torch.uint8).copy_(value.view(torch.uint8))

    def pack4(self, codes: Tensor, chunk: int) -> Tensor:
        return pack4(codes.contiguous(), chunk)

    def unpack(self, words: Tensor, bits: int, count: int) -> Tensor:
        return to_tensor(unpack_words(to_array(words), bits, count)).int() + 8

    def code_pairs(self, octets: Tensor) -> Tensor:
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1).int()

    def group_scales(self, value: Tensor, fmt: WeightFormat) -> Tensor:
        value = value.float()
        return torch.exp2(value - 127) if fmt.scale_type == "e8m0" else value

    def nibbles(self, words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
        return torch.stack([words >> 4 * i & 15 for i in order], dim=-1).flatten(1)

    def repeat(self, values: Tensor, times: int) -> Tensor:
        return values.repeat_interleave(times, dim=0)
