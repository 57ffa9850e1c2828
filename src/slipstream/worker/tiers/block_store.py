"""Copies KV blocks between the device's cache and the tiers below it, and to and from other engines
(`core/tiers/tiers.py` plans the copies).

No torch. `HostBlockStore` serves a CPU: the cache is host memory, and blocks are copied to files
and back. Its threads read and write the cache's own memory. They need no ordering with the steps,
because a block does not change while it is copied out, and belongs to nobody while it is copied in.
There is one exception: a running step may still write to a block that was released meanwhile. So
`submit` waits for that step before it copies blocks in.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.messages.tiers import BlockCopy
from slipstream.worker.tiers.disk_tier import DiskTier

if TYPE_CHECKING:
    from slipstream.worker.tiers.exchange import BlockExchange
    from slipstream.worker.tiers.peers import Peers

_logger = logging.getLogger("slipstream.engine")

READERS = 2
"""Number of reading threads. Half of a read's time is the checksum, which needs a core."""

NICENESS = 10
"""Niceness of the writing thread, which yields to computing threads."""


class HostBlockStore:
    """Block copies of a CPU.

    `kinds` has the memory of each kind of cache: arrays uint8 [B, n] for blocks, [slots, n] for
    each `SlotKind`. `settle` waits for the running step. `exchange`: memory with blocks for other
    engines; `layout`: properties that a peer's blocks must share with these.
    """

    def __init__(
        self,
        kinds: Sequence[Sequence[npt.NDArray[np.uint8]]],
        disk: DiskTier | None,
        settle: Callable[[], None],
        exchange: BlockExchange | None = None,
        layout: Mapping[str, str] | None = None,
    ) -> None:
        self._arrays = kinds
        self.exchange = exchange
        self._peers: Peers | None = None
        self.disk, self._settle = disk, settle
        self.sizes: Sequence[int] = [sum(array.shape[1] for array in arrays) for arrays in kinds]
        self.slots: Sequence[int] = [0] * len(kinds)
        self._done: deque[tuple[int, bool]] = deque()
        self._reads: queue.SimpleQueue[BlockCopy | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[BlockCopy, int] | None] = queue.SimpleQueue()
        self._gifts: queue.SimpleQueue[BlockCopy | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if exchange is not None:
            from slipstream.worker.tiers.peers import Peers  # it needs msgspec

            self._peers = Peers(layout or {}, self._rows, lambda *done: self._done.append(done))
            giver = threading.Thread(
                target=self._give_all, args=(exchange,), name="kv-gift", daemon=True
            )
            giver.start()
            self._threads.append(giver)
        if disk is not None:
            work = [self._read_all] * READERS + [self._write_all]
            readers = [
                threading.Thread(target=f, args=(disk,), name="kv-tier", daemon=True) for f in work
            ]
            for thread in readers:
                thread.start()
            self._threads += readers

    def on_disk(self, key: bytes) -> bool:
        return self.disk is not None and key in self.disk

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        if any(copy.target == "device" for copy in copies):
            self._settle()
        wanted: dict[str, list[BlockCopy]] = {}
        for copy in copies:
            if "peer" in (copy.source, copy.target) and not self.sizes[copy.kind]:
                self._done.append((copy.number, True))  # this rank has no such layers
            elif copy.source == "peer":
                wanted.setdefault(copy.address, []).append(copy)
            elif copy.target == "peer":
                self._reserve(copy)
            else:
                self._queue(copy)
        for address, own in wanted.items():
            assert self._peers is not None, "it has an exchange"
            self._peers.fetch(address, own)

    def finished(self) -> list[tuple[int, bool]]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def clear(self) -> None:
        if self.disk is not None:
            self.disk.clear()
        if self.exchange is not None:
            self.exchange.clear()

    def close(self) -> None:
        """Stop the threads. Running copies are finished within seconds; others are dropped."""
        if self._peers is not None:
            self._peers.close()
        for waiting in (self._reads, self._writes, self._gifts):
            while not waiting.empty():
                waiting.get()
        for _ in range(READERS):
            self._reads.put(None)
        self._writes.put(None)
        self._gifts.put(None)
        for thread in self._threads:
            thread.join(5.0)
        if self.disk is not None and not any(thread.is_alive() for thread in self._threads):
            self.disk.close()
        if self.exchange is not None:
            self.exchange.close()

    # --- Other engines ------------------------------------------------------------------------------------------------

    def _reserve(self, copy: BlockCopy) -> None:
        """Allocate a slot of the exchange at once, so that a peer that asks for the block waits for it."""
        assert self.exchange is not None
        if self.exchange.reserve(copy.key, copy.kind):
            self._give(copy)
        else:
            self._done.append((copy.number, copy.key in self.exchange))

    def _give(self, copy: BlockCopy) -> None:
        """Copy a block to the slot allocated for it."""
        self._gifts.put(copy)

    def _give_all(self, exchange: BlockExchange) -> None:
        while (copy := self._gifts.get()) is not None:
            ok = False
            try:
                ok = exchange.fill(copy.key, self._rows(copy))
            except Exception:
                _logger.exception("a block of KV cache could not be handed over")
            self._done.append((copy.number, ok))

    def _rows(self, copy: BlockCopy) -> list[npt.NDArray[np.uint8]]:
        return [array[copy.block] for array in self._arrays[copy.kind]]

    # --- The disk -----------------------------------------------------------------------------------------------------

    def _queue(self, copy: BlockCopy) -> None:
        """Queue a copy from or to the disk."""
        assert self.disk is not None
        if copy.source == "disk":
            self._reads.put(copy)
        else:
            self._writes.put((copy, self.disk.era))

    def _pieces(self, copy: BlockCopy) -> list[memoryview]:
        """The pieces of memory that a copy reads or writes, in the order of the file's bytes."""
        return [row.data for row in self._rows(copy)]

    def _read_all(self, disk: DiskTier) -> None:
        while (copy := self._reads.get()) is not None:
            self._note(disk, copy, None)

    def _write_all(self, disk: DiskTier) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (found := self._writes.get()) is not None:
            self._note(disk, *found)

    def _note(self, disk: DiskTier, copy: BlockCopy, era: int | None) -> None:
        """Write a block, or read it if `era` is None, and report the copy.

        The copy is reported even if it fails, because a request may wait for it.
        """
        ok = False
        try:
            pieces = self._pieces(copy)
            ok = disk.read(copy.key, pieces) if era is None else disk.write(copy.key, pieces, era)
        except Exception:
            _logger.exception("a block of KV cache could not be copied")
        self._done.append((copy.number, ok))


def block_arrays(caches: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
    """`HostBlockStore`'s arrays of NumPy caches [B, K, block_size, D].

    The memory layout may also be [B, K, D, block_size].
    """
    found = []
    for array in caches:
        array = array if array.flags.c_contiguous else array.swapaxes(2, 3)
        assert array.flags.c_contiguous
        found.append(array.reshape(len(array), -1).view(np.uint8))
    return found
