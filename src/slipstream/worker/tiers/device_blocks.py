"""Copies KV blocks between a GPU's cache and pinned host memory, in parallel with the steps.

1. Copies run on a separate stream, after all steps launched before the order. A copy is reported to
   the engine when the event recorded after it is reached. No step that reads the block is launched
   earlier.
2. A block's values are spread over many tensors, about ten kilobytes in each. One kernel gathers a
   batch of blocks in a staging buffer. Those with neighbouring slots then cross the bus in one
   transfer.
3. Blocks are copied from host memory to files and back as on a CPU (`HostBlockStore`).
4. Hand-overs between engines pass through `Transit`: pinned rows between the device and the
   exchange's memory. So the exchange, its sockets and its mapped memory are the same as on a CPU.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.ops import OpSet
from slipstream.messages.tiers import BlockCopy
from slipstream.platform import Event, Platform
from slipstream.worker.tiers.block_store import HostBlockStore
from slipstream.worker.tiers.disk_tier import DiskTier

if TYPE_CHECKING:
    from slipstream.worker.tiers.exchange import BlockExchange

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


def _is_reached(event: Event | None) -> bool:
    return event is None or event.query()


class Transit:
    """Pinned rows for blocks being copied to or from other engines, by copy number.

    The engine's thread allocates and frees them; threads that fetch blocks allocate them, too.
    """

    def __init__(self, kind: Staged, platform: Platform) -> None:
        count, size = len(kind.order), kind.blocks.num_bytes
        self.rows = platform.pinned(count * size).view(count, size)
        self._free = list(range(count))
        self._taken: dict[int, int] = {}
        self._changed = threading.Condition()
        self._is_open = True

    def take(self, number: int) -> bool:
        """Allocate a row for a copy. False if none is free."""
        with self._changed:
            if self._free:
                self._taken[number] = self._free.pop()
            return number in self._taken

    def wait_for(self, number: int) -> None:
        """Wait for a free row and allocate it. EOFError if the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free) or not self._is_open)
            if not self._is_open:
                raise EOFError("the cache is closed")
            self._taken[number] = self._free.pop()

    def row(self, number: int) -> Tensor:
        with self._changed:
            return self.rows[self._taken[number]]

    def release(self, numbers: Sequence[int]) -> None:
        """Free the rows of these copies, if they have any."""
        with self._changed:
            self._free += [self._taken.pop(n) for n in numbers if n in self._taken]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()


class DeviceBlocks(HostBlockStore):
    """Copies between a GPU's cache and the tiers below, and to and from other engines.

    `rows`, `slots` and `staged` have an item for each kind of cache: the tensors on the device, the
    number of slots in host memory, and in the staging buffer. `exchange` and `layout`: see
    `HostBlockStore`.
    """

    def __init__(
        self,
        rows: Sequence[BlockTensors],
        ops: OpSet,
        slots: Sequence[int],
        staged: Sequence[int],
        disk: DiskTier | None,
        platform: Platform,
        exchange: BlockExchange | None = None,
        layout: Mapping[str, str] | None = None,
    ) -> None:
        self._ops = ops
        self._platform, self._copies = platform, platform.copy_queue()
        self._kinds = [Staged(*sizes, platform) for sizes in zip(rows, slots, staged, strict=True)]
        self._under_way: deque[tuple[Event | None, list[int]]] = deque()
        self._transits = [] if exchange is None else [Transit(k, platform) for k in self._kinds]
        self._waiting: deque[BlockCopy] = deque()  # reserved for other engines, without a row yet
        self._leaving: deque[tuple[Event | None, list[BlockCopy]]] = deque()
        self._coming: dict[int, BlockCopy] = {}  # copies from other engines, by number
        super().__init__([], disk, lambda: None, exchange, layout)
        self.sizes, self.slots = [part.num_bytes for part in rows], slots

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        from_peers = [copy for copy in copies if copy.source == "peer"]
        self._coming |= {copy.number: copy for copy in from_peers}
        super().submit([copy for copy in copies if "peer" in (copy.source, copy.target)])
        for copy in copies:
            if "disk" in (copy.source, copy.target):
                self._queue(copy)
        for outwards, kind in itertools.product((True, False), range(len(self._kinds))):
            way = ("device", "host") if outwards else ("host", "device")
            own = [c for c in copies if (c.source, c.target) == way and c.kind == kind]
            wanted, size = sorted(own, key=lambda copy: copy.slot), len(self._kinds[kind].order)
            for begin in range(0, len(wanted), max(1, size)):
                self._run(wanted[begin : begin + size], outwards=outwards)
        self._send_off()

    def finished(self) -> list[tuple[int, bool]]:
        while self._leaving and _is_reached(self._leaving[0][0]):
            for copy in self._leaving.popleft()[1]:  # it has been copied to its row
                self._gifts.put(copy)
        while self._under_way and _is_reached(self._under_way[0][0]):
            numbers = self._under_way.popleft()[1]
            self._release(numbers)
            self._done += [(number, True) for number in numbers]
        ended, arrived = list[tuple[int, bool]](), list[BlockCopy]()
        for number, ok in super().finished():
            came = self._coming.pop(number, None)
            if ok and came is not None:  # it is in its row, and not yet on the device
                arrived.append(came)
                continue
            self._release([number])
            ended.append((number, ok))
        for kind in range(len(self._kinds)):
            self._take_in([copy for copy in arrived if copy.kind == kind])
        self._send_off()
        return ended

    def close(self) -> None:
        for transit in self._transits:
            transit.close()
        super().close()
        self._platform.synchronize()

    # --- Other engines ------------------------------------------------------------------------------------------------

    def _give(self, copy: BlockCopy) -> None:
        self._waiting.append(copy)

    def _rows(self, copy: BlockCopy) -> list[npt.NDArray[np.uint8]]:
        """The pinned row of a block that leaves, or that arrives; for the latter a fetching thread waits."""
        transit = self._transits[copy.kind]
        if copy.source == "peer":
            transit.wait_for(copy.number)
        row: npt.NDArray[np.uint8] = transit.row(copy.number).numpy()
        return [row]

    def _release(self, numbers: Sequence[int]) -> None:
        for transit in self._transits:
            transit.release(numbers)

    @torch.inference_mode()
    def _send_off(self) -> None:
        """Copy reserved blocks to pinned rows, as far as rows are free, after the steps launched so far."""
        taken: list[BlockCopy] = []
        while self._waiting and self._transits[(first := self._waiting[0]).kind].take(first.number):
            taken.append(self._waiting.popleft())
        for number, (kind, transit) in enumerate(zip(self._kinds, self._transits, strict=False)):
            if not (own := [copy for copy in taken if copy.kind == number]):
                continue
            with self._copies.behind():
                blocks = self._platform.upload(np.array([copy.block for copy in own], np.int64))
                self._ops.copy_blocks(kind.blocks, kind.staged, blocks, kind.order[: len(own)])
                for row, copy in zip(kind.staging, own, strict=False):
                    transit.row(copy.number).copy_(row, non_blocking=True)
                self._leaving.append((self._copies.record(), own))

    @torch.inference_mode()
    def _take_in(self, arrived: Sequence[BlockCopy]) -> None:
        """Copy blocks of other engines from their rows to the device. A copy counts as done when it
        has arrived."""
        if not arrived:
            return
        kind, transit = self._kinds[arrived[0].kind], self._transits[arrived[0].kind]
        with self._copies.behind():
            blocks = self._platform.upload(np.array([copy.block for copy in arrived], np.int64))
            for row, copy in zip(kind.staging, arrived, strict=False):
                row.copy_(transit.row(copy.number), non_blocking=True)
            self._ops.copy_blocks(kind.staged, kind.blocks, kind.order[: len(arrived)], blocks)
            self._under_way.append((self._copies.record(), [copy.number for copy in arrived]))

    # --- Host memory --------------------------------------------------------------------------------------------------

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
