"""Allocates the tensors of a KV cache on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.config.settings import CacheConfig
from slipstream.kernels.metadata import LayerKV, cache_tensors, shared_caches
from slipstream.kernels.ops import OpSet
from slipstream.platform import Platform
from slipstream.spec.model import ModelSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Makes caches for the layers that this device holds, as listed in `spec`."""

    spec: ModelSpec
    ops: OpSet
    platform: Platform
    config: CacheConfig

    def shared(
        self, num_blocks: int, scales: Sequence[tuple[Tensor, Tensor]] | None
    ) -> list[LayerKV]:
        """Zeroed keys and values of the layers, with an 8-bit cache's `scales` (`shared_caches`)."""
        dtype, spec = TORCH_DTYPES[self.config.dtype], self.spec
        return shared_caches(
            spec.local_layers,
            spec.cache_places,
            lambda i: self._layer(i, num_blocks, dtype),
            scales,
        )

    def of_each_layer(self, num_blocks: int, dtype: torch.dtype) -> list[LayerKV]:
        """Zeroed keys and values without scales, one tensor pair per layer."""
        return [LayerKV(*self._layer(i, num_blocks, dtype)) for i in self.spec.local_layers]

    def _layer(self, layer: int, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        attention, by_dim = self.spec.layers[layer].attention, self.ops.values_by_dim(dtype)
        zeros = self.platform.zeros
        return cache_tensors(
            attention,
            num_blocks,
            self.config.block_size,
            lambda s: zeros(s, dtype),
            values_by_dim=by_dim,
        )
