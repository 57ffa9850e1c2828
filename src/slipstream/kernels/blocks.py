"""The numbers of KV blocks, which lie in many tensors: what is copied from block to block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from slipstream.kernels.metadata import LayerKV


class BlockRows:
    """Row b of each tensor in `rows`, [B, n] in numbers as wide as possible, is a part of block b."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = list(rows)
        places = [
            [part.data_ptr(), part.stride(0) * part.itemsize, part.shape[1] * part.itemsize]
            for part in self.rows
        ]
        self.places = torch.tensor(places, dtype=torch.int64, device=self.rows[0].device)
        """int64 [parts, 3], for a kernel: where each begins, the bytes from row to row, and the bytes of a row."""
        self.row_bytes = [num_bytes for _, _, num_bytes in places]
        self.num_bytes = sum(self.row_bytes)
        self.is_aligned = all(number % 16 == 0 for place in places for number in place)

    @classmethod
    def of(cls, caches: Iterable[Tensor]) -> BlockRows:
        """Of tensors [B, …]. The last two dimensions may lie in memory in the other order. What is there twice counts once."""
        once = {cache.data_ptr(): cache for cache in caches}.values()
        whole = [cache if cache.is_contiguous() else cache.mT for cache in once]
        return cls(
            _as_wide_as_possible([cache.view(len(cache), -1).view(torch.uint8) for cache in whole])
        )

    @classmethod
    def of_layers(cls, layers: Iterable[LayerKV]) -> BlockRows:
        """Layers of different groups may share tensors."""
        return cls.of(
            cache
            for layer in layers
            for cache in ((layer.k,) if layer.latent else (layer.k, layer.v))
        )

    def in_buffer(self, buffer: Tensor) -> BlockRows:
        """The parts of blocks that lie side by side in `buffer`, uint8 [blocks, num_bytes]."""
        return BlockRows(
            [part.view(self.rows[0].dtype) for part in buffer.split(self.row_bytes, dim=1)]
        )


def _as_wide_as_possible(parts: list[Tensor]) -> list[Tensor]:
    return (
        [part.view(torch.int64) for part in parts]
        if all(part.shape[1] % 8 == 0 for part in parts)
        else parts
    )
