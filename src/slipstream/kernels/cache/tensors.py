"""Tensors of the KV cache: their shapes, and the parts that blocks and states have in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from slipstream.kernels.metadata import LayerKV
from slipstream.spec.layers import int4_row_bytes
from slipstream.spec.model import AttentionKind, LatentAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.states import LayerState


def cache_tensors(
    attention: AttentionKind | None,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
    *,
    values_by_dim: bool = False,
    int4: bool = False,
) -> tuple[Tensor, Tensor]:
    """Makes `LayerKV`'s k and v for a layer; one number each without attention. `new` allocates tensors, of bytes if `int4`."""
    if attention is None:
        return new((1, 1, 1, 1)), new((1, 1, 1, 1))
    if int4:
        rows = int4_row_bytes(attention.head_dim)
        k, v = (new((num_blocks, attention.num_kv_heads, block_size, n)) for n in rows)
        return k, v
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    k = new(shape)
    if isinstance(attention, LatentAttentionSpec):
        return k, k[..., attention.rotary_dim :]
    return k, new((*shape[:2], shape[3], shape[2])).transpose(2, 3) if values_by_dim else new(shape)


def index_tensor(
    attention: AttentionKind | None,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
) -> Tensor | None:
    """Makes `LayerKV`'s index for a layer; None if it has no index of its own."""
    if attention is None or not attention.index_dim:
        return None
    return new((num_blocks, 1, block_size, attention.index_dim))


def shared_caches(
    layers: Iterable[int],
    places: Sequence[int],
    new: Callable[[int], tuple[Tensor, Tensor]],
    scales: Sequence[tuple[Tensor, ...]] | None = None,
    state: Callable[[int], LayerState | None] = lambda layer: None,
    index: Callable[[int], Tensor | None] = lambda layer: None,
) -> list[LayerKV]:
    """Makes the caches of `layers`. An 8-bit cache gets its `scales`, an int4 cache its folds.
    `state` and `index` make a layer's states and index keys. `places` (`ModelSpec.cache_places`)
    gives the place of every layer: layers of different groups at the same place share the tensors
    that `new` makes for the first of them.
    """
    held = {i: places[i] for i in layers}
    made = {place: new(i) for i, place in reversed(held.items())}
    caches = [(*made[place], state(i)) for i, place in held.items()]
    if scales is None:
        keys = (index(i) for i in held)
        return [LayerKV(k, v, state=s, index=x) for (k, v, s), x in zip(caches, keys, strict=True)]
    return [
        LayerKV(k, v, *scale, state=s) if len(scale) == 2 else LayerKV(k, v, state=s, fold=scale[0])
        for (k, v, s), scale in zip(caches, scales, strict=True)
    ]


def cache_parts(layers: Iterable[LayerKV]) -> list[Tensor]:
    """Returns the layers' tensors, each of which holds a part of every block. Layers of different groups may share some."""
    parts = (
        layer.whole or (layer.k, None if layer.latent else layer.v, layer.index) for layer in layers
    )
    return [x for own in parts for x in own if x is not None and len(x) > 1]


def by_dim(v: Tensor) -> Tensor:
    """Returns the same values [B, K, block_size, D] with the memory layout
    [B, K, D, block_size]."""
    return v.transpose(2, 3).contiguous().transpose(2, 3)
