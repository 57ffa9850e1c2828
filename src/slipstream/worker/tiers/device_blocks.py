"""Copies KV blocks between a GPU's cache and pinned host memory, in parallel with the steps.

1. Copies run on a stream of their own, after all steps that were launched before the order. A copy
   is reported to the engine when the event recorded after it is reached. No step that reads the
   block is launched earlier.
2. A block's values are spread over many tensors, about ten kilobytes in each. One kernel gathers a
   batch of blocks in a staging buffer. Those with neighbouring slots then cross the bus in one
   transfer.
3. Blocks go from host memory to files and back as on a CPU (`HostBlockStore`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.ops import OpSet
from slipstream.messages.tiers import BlockCopy
from slipstream.platform import Event, Platform
from slipstream.worker.tiers.block_store import HostBlockStore
from slipstream.worker.tiers.disk_tier import DiskTier

CHUNK_BYTES = 2**30
"""Size of a piece of pinned memory. torch rounds each piece up to a power of two."""


class Staged:
    """Pinned memory for `num_slots` rows of `blocks`, and a staging buffer of the device for
    `num_staged` of them."""

    def __init__(
        self, blocks: BlockTensors, num_slots: int, num_staged: int, platform: Platform
    ) -> None:
        self.blocks, self.num_slots, num_bytes = blocks, num_slots, blocks.num_bytes
        self.per_chunk = max(1, CHUNK_BYTES // max(1, num_bytes))
        left = num_slots % self.per_chunk
        sizes = [self.per_chunk] * (num_slots // self.per_chunk) + [left] * (left > 0)
        self.chunks = [platform.pinned(n * num_bytes).view(n, num_bytes) for n in sizes]
        self.staging = torch.empty(num_staged, num_bytes, dtype=torch.uint8, device=platform.device)
        self.staged = blocks.in_buffer(self.staging) if blocks.rows else blocks
        self.order = torch.arange(num_staged, device=platform.device)

    def slots(self, first: int, count: int) -> Tensor:
        """Host memory of `count` slots. Slots are numbered from 1, like blocks."""
        chunk, row = divmod(first - 1, self.per_chunk)
        return self.chunks[chunk][row : row + count]


class DeviceBlocks(HostBlockStore):
    """Copies between a GPU's cache and the tiers below.

    `rows`, `slots` and `staged` have an item for each kind of cache: the tensors on the device, the
    number of places in host memory, and in the staging buffer.
    """

    def __init__(
        self,
        rows: Sequence[BlockTensors],
        ops: OpSet,
        slots: Sequence[int],
        staged: Sequence[int],
        disk: DiskTier | None,
        platform: Platform,
    ) -> None:
        self._ops = ops
        self._platform, self._copies = platform, platform.copy_queue()
        self._kinds = [Staged(*sizes, platform) for sizes in zip(rows, slots, staged, strict=True)]
        self._under_way: deque[tuple[Event | None, list[int]]] = deque()
        super().__init__([], disk, lambda: None)
        self.sizes, self.slots = [part.num_bytes for part in rows], slots

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if "disk" in (copy.source, copy.target):
                self._queue(copy)
        for outwards, kind in itertools.product((True, False), range(len(self._kinds))):
            way = ("device", "host") if outwards else ("host", "device")
            own = [c for c in copies if (c.source, c.target) == way and c.kind == kind]
            wanted, size = sorted(own, key=lambda copy: copy.slot), len(self._kinds[kind].order)
            for begin in range(0, len(wanted), max(1, size)):
                self._run(wanted[begin : begin + size], outwards=outwards)

    def finished(self) -> list[tuple[int, bool]]:
        while self._under_way and ((event := self._under_way[0][0]) is None or event.query()):
            self._done += [(number, True) for number in self._under_way.popleft()[1]]
        return super().finished()

    def close(self) -> None:
        super().close()
        self._platform.synchronize()

    @torch.inference_mode()
    def _run(self, copies: Sequence[BlockCopy], *, outwards: bool) -> None:
        """Copy blocks, or slots of one kind, between the device and host memory."""
        kind = self._kinds[copies[0].kind]
        staged = kind.staging[: len(copies)]
        with self._copies.behind():
            blocks = self._platform.upload(np.array([copy.block for copy in copies], np.int64))
            for at, slots in self._runs(copies) if not outwards else ():
                staged[at].copy_(slots, non_blocking=True)
            order = kind.order[: len(copies)]
            if outwards:
                self._ops.copy_blocks(kind.blocks, kind.staged, blocks, order)
            else:
                self._ops.copy_blocks(kind.staged, kind.blocks, order, blocks)
            for at, slots in self._runs(copies) if outwards else ():
                slots.copy_(staged[at], non_blocking=True)
            self._under_way.append((self._copies.record(), [copy.number for copy in copies]))

    def _runs(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[slice, Tensor]]:
        """Split `copies`, ordered by slot, into runs that are adjacent in host memory.

        Yields (range of the copies, their memory).
        """
        kind, begin = self._kinds[copies[0].kind], 0
        for end in range(1, len(copies) + 1):
            if (
                end < len(copies)
                and copies[end].slot == copies[end - 1].slot + 1
                and (copies[end].slot - 1) % kind.per_chunk
            ):
                continue
            yield slice(begin, end), kind.slots(copies[begin].slot, end - begin)
            begin = end

    def _pieces(self, copy: BlockCopy) -> list[memoryview]:
        numbers: Any = self._kinds[copy.kind].slots(copy.slot, 1)[0].numpy()
        return [memoryview(numbers)]
