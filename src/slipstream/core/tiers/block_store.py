"""Interface of the store of lower cache tiers, implemented by the worker, which performs the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.messages.tiers import BlockCopy


class DiskInfo(Protocol):
    num_bytes: int
    limit_bytes: int

    @property
    def is_writer(self) -> bool:
        """True if this engine may write to the disk tier."""


class ExchangeInfo(Protocol):
    """Memory from which other engines copy this engine's blocks (`worker/tiers/exchange.py`)."""

    limit_bytes: int
    num_expired: int
    num_evicted: int

    @property
    def num_bytes(self) -> int: ...


class BlockStore(Protocol):
    """The worker's side of the tiers: it carries out copies."""

    sizes: Sequence[int]  # bytes of a block, and of a slot of each `SlotKind`; 0: none are stored
    slots: Sequence[int]  # number of slots in host memory, by kind; 0 without a host tier

    @property
    def disk(self) -> DiskInfo | None:
        """The disk tier; None if there is none."""

    @property
    def exchange(self) -> ExchangeInfo | None:
        """The memory from which other engines copy blocks; None if this engine hands none over."""

    def on_disk(self, key: bytes) -> bool:
        """True if the disk probably has the block. The block may be gone when it is read."""

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        """Start copies. A copy from or to the device runs after all steps launched so far.

        A copy to a peer goes to the exchange, where peers can find it as soon as this returns.
        """

    def finished(self) -> list[tuple[int, bool]]:
        """Copies that ended since the last call, as (number, success)."""

    def clear(self) -> None:
        """Delete the contents of the disk tier, and of the exchange."""
