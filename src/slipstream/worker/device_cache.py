"""Allocates a KV cache on a device. No torch: values are tensors or NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.config.sections import CacheConfig
from slipstream.kernels.cache_tensors import cache_tensors, index_tensor, shared_caches
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.states import LayerState, layer_state
from slipstream.platform import Platform
from slipstream.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Makes caches for the layers that this device holds, as listed in `spec`."""

    spec: ModelSpec
    ops: OpSet
    platform: Platform
    config: CacheConfig
    dtype: str
    """Type of the model, and of the convolutions' last inputs."""

    def shared(self, num_blocks: int, scales: Sequence[tuple[Tensor, ...]] | None) -> list[LayerKV]:
        """Zeroed keys and values of the layers, with a rounded cache's `scales` (`shared_caches`)."""
        spec, dtype = self.spec, self.config.dtype
        return shared_caches(
            spec.local_layers,
            spec.cache_places,
            lambda i: self._layer(i, num_blocks, dtype),
            scales,
            lambda i: self._state(i, self.config.state_slots),
            lambda i: self._index(i, num_blocks, dtype),
        )

    def of_each_layer(self, num_blocks: int, dtype: str) -> list[LayerKV]:
        """Zeroed keys and values without scales, one tensor pair per layer that has its own."""
        owners = self.spec.owners
        made = {
            i: LayerKV(
                *self._layer(i, num_blocks, dtype),
                state=self._state(i, 2),
                index=self._index(i, num_blocks, dtype),
            )
            for i in self.spec.local_layers
            if owners[i] == i
        }
        return [made[owners[i]] for i in self.spec.local_layers]

    def _state(self, layer: int, num_slots: int) -> LayerState | None:
        dtype, zeros = self.platform.values.dtype, self.platform.zeros
        recurrent = self.spec.layers[layer].recurrent
        return layer_state(
            recurrent,
            num_slots,
            dtype(self.dtype),
            dtype("float32"),
            lambda shape, dtype: zeros(shape, dtype),
        )

    def _index(self, layer: int, num_blocks: int, name: str) -> Tensor | None:
        attention, dtype = self.spec.layers[layer].attention, self.platform.values.dtype(name)
        new, size = self.platform.zeros, self.config.block_size
        return index_tensor(attention, num_blocks, size, lambda shape: new(shape, dtype))

    def _layer(self, layer: int, num_blocks: int, name: str) -> tuple[Any, Any]:
        int4 = name == "int4"
        dtype = self.platform.values.dtype("uint8" if int4 else name)
        attention, zeros = self.spec.layers[layer].attention, self.platform.zeros
        return cache_tensors(
            attention,
            num_blocks,
            self.config.block_size,
            lambda s: zeros(s, dtype),
            values_by_dim=self.ops.values_by_dim(dtype),
            int4=int4,
        )
