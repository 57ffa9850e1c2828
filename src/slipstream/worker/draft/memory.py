"""Memory of a drafter's keys, values and states, on any platform. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.kernels.cache.tensors import cache_tensors, index_tensor
from slipstream.kernels.metadata import LayerKV
from slipstream.platform import Platform
from slipstream.spec.model import LayerSpec

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet


class DraftMemory:
    def __init__(self, ops: OpSet, platform: Platform, dtype: str) -> None:
        """Make an allocator of keys, values and states of type `dtype`."""
        self.ops, self.platform, self.dtype = ops, platform, platform.values.dtype(dtype)
        self.itemsize: int = self.dtype.itemsize

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.platform.zeros(shape, self.dtype)

    def layer(self, layer: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        """Zeroed keys and values of a layer."""
        by_dim = self.ops.values_by_dim(self.dtype)
        return LayerKV(
            *cache_tensors(
                layer.self_attention, num_blocks, block_size, self.zeros, values_by_dim=by_dim
            ),
            index=index_tensor(layer.self_attention, num_blocks, block_size, self.zeros),
        )
