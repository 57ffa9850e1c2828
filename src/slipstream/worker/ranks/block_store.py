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
from functools import partial

from slipstream.messages.tiers import BlockCopy
from slipstream.worker.ranks.messages import (
    ClearTiers,
    CopyBlocks,
    RankExchange,
    RankTiers,
    ReportTiers,
    ToRank,
)


@dataclass(slots=True)
class RankDisks:
    """The disk tiers of all ranks together."""

    num_bytes: int
    limit_bytes: int
    is_writer: bool


class RankBlockStore:
    """The `BlockStore` of several ranks. Each rank copies its own part of a block, and a copy has
    ended when all ranks have made it. `latest` has each rank's tiers at the start, by its number; `send`
    sends to these ranks, `next_report` takes a rank's next report if it has come, and `wait_for`
    waits until a function finds something."""

    def __init__(
        self,
        send: Callable[[ToRank], None],
        next_report: Callable[[int], RankTiers | None],
        wait_for: Callable[[Callable[[], RankTiers | None]], RankTiers],
        latest: Mapping[int, RankTiers],
    ) -> None:
        self._send, self._next_report, self._wait_for = send, next_report, wait_for
        self._latest = dict(latest)
        found = [*latest.values()]
        self.sizes: Sequence[int] = [
            sum(of_ranks) for of_ranks in zip(*(own.sizes for own in found), strict=True)
        ]
        self.slots: Sequence[int] = found[0].slots  # of all ranks
        self._keys = set(found[0].keys).intersection(*(own.keys for own in found[1:]))
        self._copies: dict[int, BlockCopy] = {}  # copies in progress
        self._came = Counter[int]()  # ranks that have made a copy
        self._failed: set[int] = set()
        self._done: list[tuple[int, bool]] = []
        self._asked = Counter[int]()  # requested reports that have not arrived, by rank

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

    @property
    def exchange(self) -> RankExchange | None:
        """Sums of the ranks' last reports; of blocks lost, the largest number of a rank."""
        own = [tiers.exchange for tiers in self._latest.values() if tiers.exchange is not None]
        if not own:
            return None
        return RankExchange(
            sum(part.num_bytes for part in own),
            sum(part.limit_bytes for part in own),
            max(part.num_expired for part in own),
            max(part.num_evicted for part in own),
        )

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._copies.update((copy.number, copy) for copy in copies)
            self._send(CopyBlocks(list(copies)))
        if any(copy.target == "peer" for copy in copies):
            self._await_ranks()  # each then has a slot for each block

    def finished(self) -> list[tuple[int, bool]]:
        for rank in self._latest:
            while (report := self._next_report(rank)) is not None:
                self._read(rank, report)
        if self._copies and not self._asked.total():
            self._ask()
        done, self._done = self._done, []
        return done

    def _await_ranks(self) -> None:
        """Wait until all ranks have done what they were sent."""
        self._ask()
        for rank in self._latest:
            while self._asked[rank]:
                self._read(rank, self._wait_for(partial(self._next_report, rank)))

    def _ask(self) -> None:
        self._asked.update(self._latest.keys())
        self._send(ReportTiers())

    def _read(self, rank: int, report: RankTiers) -> None:
        self._latest[rank] = report
        self._asked[rank] -= 1
        for number, ok in report.done:
            self._came[number] += 1
            if not ok:
                self._failed.add(number)
            if self._came[number] == len(self._latest):
                self._done.append((number, self._end(number)))

    def clear(self) -> None:
        self._keys.clear()
        self._send(ClearTiers())
        if self.exchange is not None:
            self._await_ranks()  # no engine gets a block that this one has forgotten

    def _end(self, number: int) -> bool:
        copy, ok = self._copies.pop(number), number not in self._failed
        del self._came[number]
        self._failed.discard(number)
        if copy.target == "disk" and ok:
            self._keys.add(copy.key)
        elif copy.source == "disk" and not ok:
            self._keys.discard(copy.key)
        return ok
