"""Copies of KV blocks between a GPU's cache and pinned memory of the host, beside the steps.

1. Copies run on a stream of their own, behind all steps that were launched before the order. The engine hears of a block when
   the event behind its copy is reached, and no step is launched that reads it before.
2. A block's numbers lie in many tensors, some ten kilobytes in each. A few kernels bring a batch of blocks together in a
   staging buffer, and those with neighbouring slots then cross the bus in one piece.
3. Blocks go on from the host's memory to files, and come back, as on a CPU (`BlockStore`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.platform import Event, Platform
from slipstream.types import BlockCopy
from slipstream.worker.block_store import BlockStore
from slipstream.worker.disk_tier import DiskTier

CHUNK_BYTES = 2**30
"""Pinned memory is taken in pieces of so many bytes. torch rounds each piece up to a power of two."""


class DeviceBlocks(BlockStore):
    """`caches`: the layers' tensors, [B, K, block_size, D] or with another order of the last two in memory. `num_staged`:
    blocks of the staging buffer."""

    def __init__(
        self, caches: Sequence[Tensor], num_slots: int, num_staged: int, disk: DiskTier | None, platform: Platform
    ) -> None:
        self._places: list[tuple[Tensor, int]] = []  # [B, n] of numbers as wide as possible, and where they stand in a block
        whole = [cache if cache.is_contiguous() else cache.transpose(2, 3) for cache in caches]
        parts = [cache.view(torch.uint8).view(len(cache), -1) for cache in whole]
        wide = all(rows.shape[1] % 8 == 0 for rows in parts)
        begin = 0
        for rows in parts:
            self._places.append((rows.view(torch.int64) if wide else rows, begin))
            begin += rows.shape[1]
        self._platform, self._copies = platform, platform.copy_queue()
        per_chunk = max(1, CHUNK_BYTES // begin)
        sizes = [per_chunk] * (num_slots // per_chunk) + [num_slots % per_chunk] * (num_slots % per_chunk > 0)
        self._chunks = [platform.pinned(n * begin).view(n, begin) for n in sizes]
        self._per_chunk = per_chunk
        self._staging = torch.empty(num_staged, begin, dtype=torch.uint8, device=platform.device)
        self._under_way: deque[tuple[Event | None, list[int]]] = deque()
        super().__init__([], disk, lambda: None)
        self.block_bytes, self.num_slots = begin, num_slots

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if "disk" in (copy.source, copy.target):
                self._queue(copy)
        for outwards in (True, False):
            way = ("device", "host") if outwards else ("host", "device")
            wanted = sorted((c for c in copies if (c.source, c.target) == way), key=lambda copy: copy.slot)
            for begin in range(0, len(wanted), len(self._staging)):
                self._run(wanted[begin : begin + len(self._staging)], outwards=outwards)

    def finished(self) -> list[tuple[int, bool]]:
        while self._under_way and ((event := self._under_way[0][0]) is None or event.query()):
            self._done += [(number, True) for number in self._under_way.popleft()[1]]
        return super().finished()

    def close(self) -> None:
        super().close()
        self._platform.synchronize()

    @torch.inference_mode()
    def _run(self, copies: Sequence[BlockCopy], *, outwards: bool) -> None:
        staged = self._staging[: len(copies)]
        with self._copies.behind():
            blocks = self._platform.upload(np.array([copy.block for copy in copies], np.int64))
            for at, slots in self._runs(copies) if not outwards else ():
                staged[at].copy_(slots, non_blocking=True)
            for rows, begin in self._places:
                width = rows.shape[1] * rows.element_size()
                part = staged[:, begin : begin + width].view(rows.dtype)
                if outwards:
                    part.copy_(rows.index_select(0, blocks))
                else:
                    rows.index_copy_(0, blocks, part)
            for at, slots in self._runs(copies) if outwards else ():
                slots.copy_(staged[at], non_blocking=True)
            self._under_way.append((self._copies.record(), [copy.number for copy in copies]))

    def _runs(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[slice, Tensor]]:
        """Which of `copies`, ordered by slot, lie side by side in the host's memory, and that memory."""
        begin = 0
        for end in range(1, len(copies) + 1):
            if end < len(copies) and copies[end].slot == copies[end - 1].slot + 1 and (copies[end].slot - 1) % self._per_chunk:
                continue
            yield slice(begin, end), self._slots(copies[begin].slot, end - begin)
            begin = end

    def _slots(self, first: int, count: int) -> Tensor:
        """Slots count from 1, as blocks do."""
        chunk, row = divmod(first - 1, self._per_chunk)
        return self._chunks[chunk][row : row + count]

    def _pieces(self, copy: BlockCopy) -> list[memoryview]:
        numbers: Any = self._slots(copy.slot, 1)[0].numpy()
        return [memoryview(numbers)]
