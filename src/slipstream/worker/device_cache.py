"""Allocates a KV cache on a device. No torch: values are tensors or NumPy arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.config.sections import CacheConfig
from slipstream.kernels.cache.tensors import cache_tensors, index_tensor, shared_caches
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.states import LayerState, layer_state
from slipstream.platform import Platform
from slipstream.spec.cache import MixedLayout
from slipstream.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Allocator of the caches of this device's layers, which `spec` lists."""

    spec: ModelSpec
    ops: OpSet
    platform: Platform
    config: CacheConfig
    dtype: str
    """The model's dtype, also used for the stored inputs of convolutions."""

    def shared(self, num_blocks: int, scales: Sequence[tuple[Tensor, ...]] | None) -> list[LayerKV]:
        """Zeroed keys and values of the layers, with the `scales` of a quantized cache (`shared_caches`)."""
        spec, dtype = self.spec, self.config.dtype
        if (layout := spec.mixed_layout) is not None:
            return self._mixed(layout, num_blocks, scales)
        return shared_caches(
            spec.local_layers,
            spec.cache_places,
            lambda i: self._layer(i, num_blocks, dtype),
            scales,
            # the null slot and one, also before the cache is sized
            lambda i: self._state(i, max(2, self.config.slots[0])),
            lambda i: self._index(i, num_blocks, dtype),
        )

    def _mixed(
        self, layout: MixedLayout, num_blocks: int, scales: Sequence[tuple[Tensor, ...]] | None
    ) -> list[LayerKV]:
        """Allocates keys and values for a model whose layers have keys of different sizes, which
        share memory."""
        values, size = self.platform.values, self.config.rank_block_size
        dtype, shape = values.dtype(self.config.dtype), (num_blocks, layout.width * size)
        wholes = {i: self.platform.zeros(shape, dtype) for i in layout.tensors}
        caches = {}
        for i, places in layout.places.items():
            attention, left = self.spec.layers[i].self_attention, iter(places)
            scale = layout.width // (attention.num_kv_heads * attention.head_dim)
            count = (num_blocks - 1) * scale + 1

            def part(s: tuple[int, ...], left: Any = left) -> Any:
                tensor, first = next(left)
                each = math.prod(s[1:])
                flat = wholes[tensor].reshape(-1)
                return flat[first * each : (first + s[0]) * each].reshape(s)

            by_dim = self.ops.values_by_dim(dtype)
            k, v = cache_tensors(attention, count, size, part, values_by_dim=by_dim)
            caches[i] = LayerKV(k, v, whole=tuple(wholes[tensor] for tensor, _ in places))
        made = [caches[self.spec.owners[i]] for i in self.spec.local_layers]
        if scales is None:
            return made
        pairs = zip(made, scales, strict=True)
        return [dataclasses.replace(kv, k_scale=own[0], v_scale=own[1]) for kv, own in pairs]

    def of_each_layer(self, num_blocks: int, dtype: str) -> list[LayerKV]:
        """Zeroed keys and values without scales, one pair of tensors per layer that caches its own."""
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
        new, size = self.platform.zeros, self.config.rank_block_size
        return index_tensor(attention, num_blocks, size, lambda shape: new(shape, dtype))

    def _layer(self, layer: int, num_blocks: int, name: str) -> tuple[Any, Any]:
        int4 = name == "int4"
        dtype = self.platform.values.dtype("uint8" if int4 else name)
        attention, zeros = self.spec.layers[layer].attention, self.platform.zeros
        return cache_tensors(
            attention,
            num_blocks,
            self.config.rank_block_size,
            lambda s: zeros(s, dtype),
            values_by_dim=self.ops.values_by_dim(dtype),
            int4=int4,
        )


def slot_parts(layers: Iterable[LayerKV]) -> list[list[Tensor]]:
    """Tensors of the layers for each `SlotKind`, [slots, …], each of which holds a part of every slot."""
    states = [layer.state for layer in layers if layer.state is not None]
    parts = [x for own in states for x in (own.conv, own.recurrent)]
    return [[x for x in parts if x is not None and 0 not in x.shape]]
