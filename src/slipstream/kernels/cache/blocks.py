"""Access to KV blocks for copying: a block is one row in each of many tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.arrays import to_array


class BlockTensors:
    """Tensors that together hold the KV blocks. Row b of every tensor in `rows` ([B, n], of the
    widest possible type) is a part of block b."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = list(rows)
        places = [
            [part.data_ptr(), part.stride(0) * part.itemsize, part.shape[1] * part.itemsize]
            for part in self.rows
        ]
        device = self.rows[0].device if self.rows else None  # none are there without attention
        self.places = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 3)
        """Table for a kernel, int64 [parts, 3]: start address, bytes from row to row, bytes of a
        row."""
        self.row_bytes = [num_bytes for _, _, num_bytes in places]
        self.num_bytes = sum(self.row_bytes)
        self.is_aligned = all(number % 16 == 0 for place in places for number in place)

    @classmethod
    def of(cls, caches: Iterable[Tensor]) -> BlockTensors:
        """Makes the rows of tensors [B, …]. The last two dimensions may be swapped in memory. A
        tensor that occurs twice counts once."""
        once = {cache.data_ptr(): cache for cache in caches}.values()
        whole = [cache if cache.is_contiguous() else cache.mT for cache in once]
        return cls(
            _as_wide_as_possible([cache.view(len(cache), -1).view(torch.uint8) for cache in whole])
        )

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """The rows as arrays, on a CPU."""
        return [to_array(rows) for rows in self.rows]

    def in_buffer(self, buffer: Tensor) -> BlockTensors:
        """Returns views of `buffer`, uint8 [blocks, num_bytes], in which a block's parts follow one
        another."""
        return BlockTensors(
            [part.view(self.rows[0].dtype) for part in buffer.split(self.row_bytes, dim=1)]
        )


def _as_wide_as_possible(parts: list[Tensor]) -> list[Tensor]:
    return (
        [part.view(torch.int64) for part in parts]
        if all(part.shape[1] % 8 == 0 for part in parts)
        else parts
    )
