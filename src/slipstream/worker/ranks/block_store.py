"""Tiers below the devices' caches of several ranks: each rank stores its part of every block. No torch.

Where each request belongs to one rank, each of these has a store; over a pipeline that is the store of one rank of every
stage. All ranks of a store get the same copies, in order with the steps. A copy is done when all have made it, and is good
if it is good on all. A block counts as stored on disk if all ranks had it at the start, or have written it since. That one
rank has removed its file is noticed when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.messages.tiers import BlockCopy
from slipstream.worker.ranks.mailbox import Mailbox
from slipstream.worker.ranks.messages import ClearTiers, CopyBlocks, RankTiers, ReportTiers, ToRank


@dataclass(slots=True)
class RankDisks:
    """The disk tiers of all ranks together."""

    num_bytes: int
    limit_bytes: int
    is_writer: bool


class RankBlockStore:
    """The `BlockStore` of several ranks. Each rank copies its own part of a block, and a copy has
    ended when all ranks have made it. `latest` has each rank's tiers at the start, by its number; `send`
    sends to these ranks."""

    exchange = None  # not supported with ranks

    def __init__(
        self, send: Callable[[ToRank], None], mail: Mailbox, latest: Mapping[int, RankTiers]
    ) -> None:
        self._send, self._mail, self._latest = send, mail, dict(latest)
        found = [*latest.values()]
        self.sizes: Sequence[int] = [
            sum(of_ranks) for of_ranks in zip(*(own.sizes for own in found), strict=True)
        ]
        self.slots: Sequence[int] = found[0].slots  # of all ranks
        self._keys = set(found[0].keys).intersection(*(own.keys for own in found[1:]))
        self._copies: dict[int, BlockCopy] = {}  # copies in progress
        self._came = Counter[int]()  # ranks that have made a copy
        self._failed: set[int] = set()
        self._asked = 0  # number of requested reports that have not arrived

    @property
    def disk(self) -> RankDisks | None:
        own = self._latest.values()
        if not all(tiers.limit_bytes for tiers in own):
            return None
        return RankDisks(
            sum(tiers.num_bytes for tiers in own),
            sum(tiers.limit_bytes for tiers in own),
            all(tiers.is_writer for tiers in own),
        )

    def on_disk(self, key: bytes) -> bool:
        return key in self._keys

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._copies.update((copy.number, copy) for copy in copies)
            self._send(CopyBlocks(list(copies)))

    def finished(self) -> list[tuple[int, bool]]:
        done: list[tuple[int, bool]] = []
        for rank in self._latest:
            while (report := self._mail.next_tiers(rank)) is not None:
                self._latest[rank] = report
                self._asked -= 1
                for number, ok in report.done:
                    self._came[number] += 1
                    if not ok:
                        self._failed.add(number)
                    if self._came[number] == len(self._latest):
                        done.append((number, self._end(number)))
        if self._copies and not self._asked:
            self._asked = len(self._latest)
            self._send(ReportTiers())
        return done

    def clear(self) -> None:
        self._keys.clear()
        self._send(ClearTiers())

    def _end(self, number: int) -> bool:
        copy, ok = self._copies.pop(number), number not in self._failed
        del self._came[number]
        self._failed.discard(number)
        if copy.target == "disk" and ok:
            self._keys.add(copy.key)
        elif copy.source == "disk" and not ok:
            self._keys.discard(copy.key)
        return ok
