"""Eviction of cached blocks by value: the time a block saves when its session returns, times the chance that it does.

1. The *value* of a run of blocks is the rate of its session (`core/cache/sessions.py`), times the cost of computing one of its
   tokens, times the weight of the client's hints. A deep token costs more, because it attends to more tokens.
2. A `Run` is a part of a chain whose blocks are held by the same requests. Runs form a tree. Only a run without runs below it
   is evicted, the last block first: a block is of no use without the blocks before it.
3. A run that several sessions begin with has a session of its own, whose pauses are the times between its uses.

A hint only changes the order. Every block that no request holds can be evicted. An operation takes constant time per
block, and logarithmic time per change of a session.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from slipstream.core.cache.sessions import Session, Sessions

if TYPE_CHECKING:
    from slipstream.core.cache.block_pool import BlockPool


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """Cached blocks of consecutive positions, with the same holders."""

    order: ValueOrder
    session: Session | None  # None after the cache was emptied
    above: Run | None
    start: int  # tokens before the first block
    writer: str = ""  # id of the request that extends it
    blocks: array[int] = field(default_factory=lambda: array("i"))
    num_below: int = 0
    num_free: int = 0
    entry: tuple[float, int, Run] | Literal[True] | None = None
    """Entry in the heap. True: the run is about to be added."""

    def __post_init__(self) -> None:
        if self.session is not None:
            self.session.runs[self] = None
        if self.above is not None:
            self.above.num_below += 1


class ValueOrder:
    """The free cached blocks of a pool, by value.

    `is_whole`: a block can be used without the blocks before it, like a recurrent state.
    """

    def __init__(
        self, sessions: Sessions, pool: BlockPool, block_size: int, *, is_whole: bool = False
    ) -> None:
        self.sessions, self._size, self._is_whole = sessions, block_size, is_whole
        self._owners: list[Run | None] = [None] * pool.num_blocks
        self._ref_counts = pool.ref_counts
        self._loose: dict[int, None] = {}  # free blocks of no run
        self._fresh: list[Run] = []  # runs that need a new value
        self._heap: list[tuple[float, int, Run]] = []
        self._number = 0

    # --- What the pool calls ------------------------------------------------------------------------------------------

    def add(self, blocks: Sequence[int]) -> None:
        """Add cached blocks that have lost their last holder."""
        for run, same in self._by_run(blocks):
            if run is None:
                self._loose.update(dict.fromkeys(same))
                continue
            run.num_free += len(same)
            if run.entry is None:
                self.revalue(run)

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove blocks from the order, because a request or a copy holds them now."""
        for run, same in self._by_run(blocks):
            if run is None:
                for block in same:
                    del self._loose[block]
            else:
                run.num_free -= len(same)

    def _by_run(self, blocks: Sequence[int]) -> Iterable[tuple[Run | None, Sequence[int]]]:
        """Group neighbouring blocks by run; without a loop for a run's first blocks, in order or reversed."""
        if isinstance(blocks, array) and blocks:
            for same in (blocks, blocks[::-1]):
                run = self._owners[same[0]]
                if run is not None and run.blocks[: len(same)] == same:
                    return ((run, blocks),)
        own = self._owners.__getitem__
        return ((run, [*same]) for run, same in groupby(blocks, own))

    def take(self, count: int) -> list[int]:
        """Take the `count` blocks with the lowest value. There must be as many."""
        taken: list[int] = []
        timers = self.sessions.timers
        if self._fresh or (timers and timers[0][0] <= self.sessions.clock()):
            self._refresh()
        heap, owners, counts = self._heap, self._owners, self._ref_counts
        while len(taken) < count:
            if self._loose:
                taken.append(self._loose.popitem()[0])
                continue
            if not heap:
                if self._fresh:  # runs that had runs below them before
                    self._refresh()
                    continue
                self._loosen()
                assert self._loose, "take() beyond the free blocks"
                continue
            entry = heap[0]
            run = entry[2]
            if run.entry is not entry or run.num_below or counts[run.blocks[-1]]:
                if run.entry is entry:
                    run.entry = None
                heappop(heap)
                continue
            wanted = count - len(taken) if run.num_free == len(run.blocks) else 1
            ends = run.blocks[-wanted:]
            del run.blocks[-wanted:]
            run.num_free -= len(ends)
            for block in ends:
                owners[block] = None
            taken.extend(reversed(ends))
            if not run.blocks:
                self._end(run)
                if self._fresh:
                    self._refresh()
        return taken

    def following(self, block: int) -> Sequence[int]:
        """A cached block and the blocks after it in its chain, as far as known."""
        run = self._owners[block]
        return (block,) if run is None or run.blocks[0] != block else run.blocks

    def discard(self, block: int) -> None:
        """Forget a block that is held, or was removed; it is cached no more."""
        run = self._owners[block]
        if run is not None:
            self._leave(run, block)

    def forget_all(self) -> None:
        """Forget all runs. Their free blocks are the next to be evicted."""
        for run in {run for run in self._owners if run is not None}:
            if run.session is not None:
                run.session.runs.pop(run, None)
            run.blocks, run.above, run.session, run.entry = array("i"), None, None, None
            run.num_below = run.num_free = 0
        for block, owner in enumerate(self._owners):
            if owner is not None:
                self._owners[block] = None
                if not self._ref_counts[block]:
                    self._loose[block] = None
        self._heap, self._fresh = [], []

    # --- Chains -------------------------------------------------------------------------------------------------------

    def enter(
        self, blocks: Sequence[int], session: Session, writer: str
    ) -> tuple[Run | None, list[Session], int]:
        """Find the run that ends with the last of `blocks`, the cached prefix of a request's chain.

        Runs are split where the chain leaves them. Returns that run, and the sessions of the runs on the way that
        several sessions share, with their number of blocks: they are in use now, and the caller closes them.
        """
        above: Run | None = None
        shared: dict[Session, None] = {}
        blocks = blocks if isinstance(blocks, array) else array("i", blocks)
        i = num_shared = 0
        while i < len(blocks):
            known = self._owners[blocks[i]]
            if known is None:
                run, end = self._new(session, above, i), i
                while end < len(blocks) and self._owners[blocks[end]] is None:
                    self._give(run, blocks[end])
                    end += 1
            elif known.blocks[0] != blocks[i]:
                self._split(known, known.blocks.index(blocks[i]))
                continue
            else:
                run = known
                end = min(len(blocks), i + len(run.blocks))
                if run.blocks[: end - i] != blocks[i:end]:
                    end = next(j for j in range(i, end) if run.blocks[j - i] != blocks[j])
                if end - i < len(run.blocks):
                    rest, run = run, self._split(run, end - i)
                    self._branch(rest, session, (end - i) / (end - i + len(rest.blocks)))
                if run.above is not above:
                    self._put_below(run, above, i)
                if run.session is not session:
                    if run.session is None or run.session.kind != "shared":
                        self._move(run, Session("shared"))
                    assert run.session is not None
                    shared[run.session] = None
                    num_shared = end
            above, i = run, end
        if above is not None:
            is_free = not (above.writer or above.num_below) and above.session is session
            above.writer = writer if is_free else ""
        for each in shared:
            self.sessions.open(each)
        return above, list(shared), num_shared

    def extend(self, run: Run | None, session: Session, writer: str, block: int, index: int) -> Run:
        """Append a newly cached block to a chain whose last run is `run`. Returns the run of the block."""
        if run is not None and run.session is None:
            run = None  # the cache was emptied
        if run is None or run.num_below or run.writer != writer:
            run = self._new(session, run, index, writer)
        self._owners[block] = run
        run.blocks.append(block)
        return run

    def apart(self, session: Session, blocks: Iterable[int], depth: int) -> Run:
        """Move blocks to a new run that depends on no other. It ends after `depth` tokens."""
        run = Run(self, session, None, depth)
        for block in blocks:
            self._give(run, block)
        return run

    def aside(self, block: int, run: Run | None, depth: int) -> Run:
        """Move a block that its request has left behind to `run`, or to a new one. Used ones stay together."""
        if run is None or run.session is None:
            run = Run(self, self.sessions.pausing("passed"), None, depth)
        owner = self._owners[block]
        if owner is None or owner.session is None or owner.session.kind != "used":
            self._give(run, block)
        return run

    def part(self, session: Session) -> None:
        """Split a session's runs at the ends of the prefixes that it wants kept."""
        for end, _ in session.kept:
            for run in [*session.runs]:
                index = (end - run.start) / self._size
                if run.order is self and 0 < index < len(run.blocks):
                    self._split(run, int(index))

    def demote(self, run: Run) -> None:
        """Count a run that its session no longer uses among the pausing ones."""
        if run.session is not None:
            self._move(run, self.sessions.pausing("passed"))

    def touch(self, blocks: Iterable[int], depth: int) -> None:
        """Record that a request begins with `blocks`, of which `depth` tokens are cached.

        Those that their sessions no longer used are valued as used again."""
        used = [
            b
            for b in blocks
            if (s := self._session(b)) is not None and s.kind in ("passed", "used")
        ]
        for session in {self._session(block): None for block in used}:
            if session is not None:
                self.sessions.used(session)
        if used:
            self.apart(self.sessions.pausing("used"), used, depth)

    # --- Runs ---------------------------------------------------------------------------------------------------------

    def revalue(self, run: Run) -> None:
        if run.entry is not True:
            run.entry = True
            self._fresh.append(run)

    def _refresh(self) -> None:
        self.sessions.tick()
        fresh, self._fresh = self._fresh, []
        for run in fresh:
            run.entry = None
            if run.num_free and not run.num_below and run.session is not None:
                self._number += 1
                run.entry = self._value(run, run.session), self._number, run
                heappush(self._heap, run.entry)
        if len(self._heap) > 64 + 2 * len(self._owners):
            self._heap[:] = [entry for entry in self._heap if entry[2].entry is entry]
            heapify(self._heap)

    def _value(self, run: Run, session: Session) -> float:
        return self.value_of(session, run.start + len(run.blocks) * self._size)

    def value_of(self, session: Session, depth: int) -> float:
        """Value of a session's blocks that end at position `depth`, in tokens."""
        cost = 1 + depth / 2 / self.sessions.attention_tokens
        return self.sessions.rate_of(session, depth) * cost * (depth if self._is_whole else 1)

    def num_below(self, value: float) -> int:
        """Number of free blocks whose value is below `value`, not counting some that come later in the order."""
        self._refresh()
        counts, found = self._ref_counts, len(self._loose)
        for entry in self._heap:
            run = entry[2]
            if entry[0] < value and run.entry is entry and not run.num_below:
                found += 0 if counts[run.blocks[-1]] else run.num_free
        return found

    def _session(self, block: int) -> Session | None:
        run = self._owners[block]
        return None if run is None else run.session

    def _new(self, session: Session, above: Run | None, index: int, writer: str = "") -> Run:
        return Run(self, session, above, index * self._size, writer)

    def _give(self, run: Run, block: int) -> None:
        """Add a block to a run, and remove it from its own."""
        old = self._owners[block]
        if old is not None:
            if not self._ref_counts[block]:
                old.num_free -= 1
            self._leave(old, block)
        self._owners[block] = run
        run.blocks.append(block)
        if not self._ref_counts[block]:
            self._loose.pop(block, None)
            run.num_free += 1
            if run.entry is None:
                self.revalue(run)

    def _leave(self, run: Run, block: int) -> None:
        self._owners[block] = None
        if run.blocks[-1] == block:
            run.blocks.pop()
        else:
            run.blocks.remove(block)
        if not run.blocks:
            self._end(run)
        elif run.num_free and not run.num_below and run.entry is None:
            self.revalue(run)  # a block that was held may have been the last

    def _split(self, run: Run, index: int) -> Run:
        """Cut a run before block `index`. Returns the new upper part; requests that extend the run go on with the lower."""
        assert run.session is not None
        upper = Run(self, run.session, None, run.start)
        upper.above, run.above, upper.num_below = run.above, upper, 1
        run.start += index * self._size
        upper.blocks, run.blocks = run.blocks[:index], run.blocks[index:]
        for block in upper.blocks:
            self._owners[block] = upper
        upper.num_free = sum(not self._ref_counts[block] for block in upper.blocks)
        run.num_free -= upper.num_free
        return upper

    def _branch(self, rest: Run, session: Session, share: float) -> None:
        """Record that `session` leaves a chain before `rest`, after the fraction `share` of its run.

        If it shares most of the run, it continues the same conversation with a changed end.
        """
        other = rest.session
        if not rest.num_free or other is None or other.kind in ("shared", "rest"):
            return
        if other is not session:
            if share < 0.5 or other.num_open:
                return
            self.sessions.used(other)
            session.num_turns += 1
        self._move(rest, self.sessions.pausing("rest"))

    def _put_below(self, run: Run, above: Run | None, index: int) -> None:
        old, run.above = run.above, above
        run.start = index * self._size
        if above is not None:
            above.num_below += 1
        self._left(old)

    def _move(self, run: Run, session: Session) -> None:
        """Assign a run to another session."""
        if run.session is not None:
            run.session.runs.pop(run, None)
        run.session = session
        session.runs[run] = None
        self.revalue(run)

    def _end(self, run: Run) -> None:
        """Remove a run without blocks."""
        run.entry = None
        if run.session is not None:
            run.session.runs.pop(run, None)
        run.session = None
        above, run.above = run.above, None
        self._left(above)

    def _left(self, above: Run | None) -> None:
        """Record that `above` has one run less below it."""
        if above is not None:
            above.num_below -= 1
            if not above.num_below and above.num_free:
                self.revalue(above)

    def _loosen(self) -> None:
        """Remove all free blocks from their runs, because copies to the tiers hold the blocks at the runs' ends."""
        counts = self._ref_counts
        found = {run for run in self._owners if run is not None and run.num_free}
        for run in sorted(found, key=lambda run: run.start):  # the last one is evicted first
            for block in run.blocks:
                if not counts[block]:
                    self._owners[block] = None
                    self._loose[block] = None
            run.blocks, run.num_free = array("i", filter(counts.__getitem__, run.blocks)), 0
            if not run.blocks:
                self._end(run)
