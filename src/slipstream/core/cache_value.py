"""Eviction of cached blocks by value: what a block saves when its session comes back, times the chance that it does.

1. A *session* is a chain of requests, each of which extends the prompt of the one before. It is found by the keys of the
   prompt's last blocks, so no client has to name it. Between two requests it pauses.
2. `Pauses` counts how many pauses reached each age and how many ended there, in buckets of doubling length, for each kind of
   pause: of requests with tools and without, after the first turn or a later one. A session has a pace of its own: if its
   pauses were half as long as others', the next is expected to be, too, as far as sessions were seen to keep their pace.
3. The *rate* of a session is the highest value, over all horizons, of the chance that it returns by then, divided by the
   time that it is expected to be kept until then (a Gittins index). So a session that usually returns after ten seconds
   is worth more at the age of eight seconds than at the age of sixty. Before anything is learned the rate falls with
   age, as under LRU.
4. The *value* of a run of blocks is the rate of its session, times the cost of computing one of its tokens, times the weight of
   the client's hints. A deep token costs more, because it attends to more tokens.
5. A `Run` is a part of a chain whose blocks are held by the same requests. Runs form a tree. Only a run without runs below it
   is evicted, the last block first: a block is of no use without the blocks before it.
6. A run that several sessions begin with has a session of its own, whose pauses are the times between its uses.

A hint changes the order alone. Every block that no request holds can be evicted. An operation takes constant time
per block, and logarithmic time per change of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import exp, frexp, log
from typing import TYPE_CHECKING, Literal, TypeAlias

from slipstream.types import NO_HINTS, CacheHints

if TYPE_CHECKING:
    from slipstream.core.block_pool import BlockPool

EDGES = (0.0, *(0.5 * 2.0**i for i in range(19)))
"""Ages in seconds at which the buckets of a pause begin, and the end of the last one (a day and a half)."""

NUM_BUCKETS = len(EDGES) - 1
WIDTHS = tuple(EDGES[i + 1] - EDGES[i] for i in range(NUM_BUCKETS))

FIRST_HAZARD, FIRST_WEIGHT = 0.1, 4.0
"""Chance that a pause ends in a bucket, before anything is known, and the number of pauses that this guess counts as."""

FIRST_HAZARDS = (FIRST_HAZARD,) * NUM_BUCKETS

RATES_AGE = 64
"""Number of buckets that pauses of a kind reach until its rates are computed again."""

MEMORY, OWN_MEMORY = 1024.0, 8
"""Number of pauses of a kind after which its counts are halved, and of a session's last pauses that make its pace."""

FIRST_SLOPE, SLOPE_WEIGHT = 0.5, 8.0
"""Share of a session's pace that its next pause is expected to keep, before any is known, and the weight of this guess."""

STEP, MIN_STEP_S = 1.19, 2.0
"""Factor of its age after which a session with cached blocks gets a new value, and the least such age in seconds."""

MAX_SESSIONS = 32768
"""Maximum number of pausing sessions that are remembered. The one that has paused longest is forgotten first."""

MAX_NAMES = 4096
"""Maximum number of names (`prompt_cache_key`) whose pauses are remembered."""

IN_USE = 1e9
"""Rate of a session with a request that waits or runs."""

HINTED = 4.0
"""Weight of a session within the time to live that its client asked for."""

Kind: TypeAlias = Literal[
    "text", "call", "later text", "later call", "shared", "passed", "used", "rest"
]
KINDS: tuple[Kind, ...] = (
    "text",
    "call",
    "later text",
    "later call",
    "shared",  # a beginning of several sessions
    "passed",  # blocks behind a window, and earlier states
    "used",  # the same, after a request began there
    "rest",  # the end of a chain that its session did not go on from
)


class OwnPace:
    """Average of a session's last pauses, as the logarithm of seconds."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def deviation(self, mean: float) -> float:
        """Difference from the kind's mean; less while few pauses are known."""
        return (self.mean - mean) * self.count / (self.count + 2)


class Pauses:
    """Pauses of a kind: how many reached each bucket and how many ended in it, and how far sessions keep their pace."""

    __slots__ = ("_age", "_rates", "count", "ended", "mean", "products", "reached", "squares")

    def __init__(self) -> None:
        self._age, self._rates = RATES_AGE, [0.0]
        self.reached, self.ended = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self.count, self.mean = 0, 0.0
        # of deviations: the sums of (before times now) and of (before squared)
        self.products = self.squares = 0.0

    def reach(self, bucket: int) -> None:
        self._age += 1
        self.reached[bucket] += 1
        if self.reached[bucket] > MEMORY:
            self.reached = [n / 2 for n in self.reached]
            self.ended = [n / 2 for n in self.ended]

    def end(self, bucket: int, seconds: float, pace: OwnPace) -> None:
        """Count a pause that ended in a bucket, and learn the session's pace."""
        self.ended[bucket] += 1
        length = log(max(seconds, EDGES[1] / 2))
        if pace.count:
            before = pace.deviation(self.mean)
            self.products = 0.99 * self.products + before * (length - self.mean)
            self.squares = 0.99 * self.squares + before * before
        self.count = min(self.count + 1, 256)
        self.mean += (length - self.mean) / self.count
        pace.count = min(pace.count + 1, OWN_MEMORY)
        pace.mean += (length - pace.mean) / pace.count

    @property
    def slope(self) -> float:
        """Share of the deviation of a session's pauses that its next one is expected to have."""
        known = self.products + FIRST_SLOPE * SLOPE_WEIGHT
        return min(1.5, max(0.0, known / (self.squares + SLOPE_WEIGHT)))

    def rates(self) -> Sequence[float]:
        """`rate` by bucket, up to `RATES_AGE` pauses old."""
        if self._age >= RATES_AGE:
            self._age = 0
            hazards = [
                (ended + FIRST_HAZARD * FIRST_WEIGHT) / (reached + FIRST_WEIGHT)
                for ended, reached in zip(self.ended, self.reached, strict=True)
            ]
            self._rates = [*(rate(hazards, i) for i in range(NUM_BUCKETS)), 0.0]
        return self._rates

    def rate_at(self, age: float, pace: OwnPace) -> float:
        """Rate of a session of that pace. If its pauses are half as long as others', it is at half the age as they are."""
        slower = 1.0
        if pace.count:
            slower = exp(pace.deviation(self.mean) * self.slope)
        at = age / slower
        i = 0 if at < EDGES[1] else min(frexp(at)[1] + 1, NUM_BUCKETS - 1)
        rates = self.rates()
        within = min(1.0, (at - EDGES[i]) / WIDTHS[i])
        return (rates[i] + (rates[i + 1] - rates[i]) * within) / slower


def rate(hazards: Sequence[float], bucket: int) -> float:
    """Returns per second of keeping, at the best horizon from the beginning of `bucket` on."""
    best = chance = seconds = 0.0
    alive = 1.0
    for i in range(bucket, NUM_BUCKETS):
        hazard = hazards[i]
        chance += alive * hazard
        seconds += alive * WIDTHS[i] * (1 - hazard / 2)
        alive *= 1 - hazard
        if chance > best * seconds:
            best = chance / seconds
    return best


class Session:
    """One conversation, or whatever else the blocks of some runs wait for."""

    __slots__ = (
        "bucket",
        "due",
        "ends",
        "hints",
        "idle_since",
        "kind",
        "mark",
        "num_open",
        "num_turns",
        "pace",
        "runs",
    )

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.pace = OwnPace()
        self.idle_since, self.bucket = 0.0, 0
        self.num_open = 0  # requests that wait or run
        self.num_turns = 0
        self.runs: dict[Run, None] = {}
        self.hints: CacheHints = NO_HINTS
        self.due: tuple[float, int, Session] | None = None  # its entry among the timers
        self.ends: tuple[bytes, ...] = ()  # keys by which the next request is recognised
        self.mark: Run | None = None  # the state that its next request goes on from


class Run:
    """Cached blocks of consecutive positions, with the same holders."""

    __slots__ = (
        "above",
        "blocks",
        "entry",
        "num_below",
        "num_free",
        "order",
        "session",
        "start",
        "writer",
    )

    def __init__(
        self, order: ValueOrder, session: Session, above: Run | None, start: int, writer: str = ""
    ) -> None:
        self.order = order
        self.session: Session | None = session  # None after everything was forgotten
        session.runs[self] = None
        self.above = above
        if above is not None:
            above.num_below += 1
        self.start = start  # tokens before the first block
        self.blocks: list[int] = []
        self.num_below: int = 0
        self.num_free: int = 0
        self.writer = writer  # id of the request that extends it
        self.entry: tuple[float, int, Run] | Literal[True] | None = None
        """Entry in the heap. True: the run is about to get one."""


class Sessions:
    """All sessions of one cache, and what was learned of their pauses.

    `attention_tokens` is the depth at which attention costs as much as the rest of a token.
    """

    def __init__(self, clock: Callable[[], float], attention_tokens: float) -> None:
        self.clock, self.attention_tokens = clock, attention_tokens
        self._kinds = {kind: Pauses() for kind in KINDS}
        self._by_end: dict[bytes, Session] = {}
        self._named: dict[
            tuple[str, str], OwnPace
        ] = {}  # by salt and name; the most recently used name last
        self.timers: list[tuple[float, int, Session]] = []
        self._number = 0
        self.idle: dict[
            Session, None
        ] = {}  # sessions that pause, the one that has paused longest first

    # --- Requests -----------------------------------------------------------------------------------------------------

    def arrived(self, keys: Sequence[bytes], hints: CacheHints, salt: str = "") -> Session:
        """Return the session of a request that begins with the blocks of `keys`. It is in use from now on."""
        self.tick()
        by_end = self._by_end
        session = (
            next((by_end[key] for key in reversed(keys) if key in by_end), None) if by_end else None
        )
        if session is None:
            session = Session("text")
        if hints.session:
            session.pace = self._of_name((salt, hints.session))
        session.hints = hints
        session.num_turns += 1
        self.open(session)
        return session

    def ended(
        self,
        session: Session,
        keys: list[bytes],
        num_shared: int,
        num_prompt_blocks: int,
    ) -> None:
        """Begin a pause of a session, one of whose requests has ended. Others begin with its first `num_shared` blocks."""
        self.tick()
        first = max(num_shared, num_prompt_blocks - 2)
        ends = (*keys[first:num_prompt_blocks], *keys[num_prompt_blocks:][-1:])
        self._forget_ends(session)
        session.ends = ends
        for end in ends:
            self._by_end[end] = session
        kinds: tuple[Kind, Kind] = (
            ("call", "later call") if session.hints.calls else ("text", "later text")
        )
        self.close(session, kinds[session.num_turns > 1])

    def _of_name(self, name: tuple[str, str]) -> OwnPace:
        self._named[name] = pace = self._named.pop(name, None) or OwnPace()
        if len(self._named) > MAX_NAMES:
            del self._named[next(iter(self._named))]
        return pace

    def _forget_ends(self, session: Session) -> None:
        for end in session.ends:
            if self._by_end.get(end) is session:
                del self._by_end[end]
        session.ends = ()

    # --- Pauses -------------------------------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """End the session's pause, if it pauses: something uses it."""
        session.num_open += 1
        if session.num_open > 1:
            return
        if session.due is not None:
            session.due = None
            del self.idle[session]
            seconds = self.clock() - session.idle_since
            self._kinds[session.kind].end(session.bucket, seconds, session.pace)
        self._changed(session)

    def used(self, session: Session) -> None:
        """End the session's pause: others go on from its end."""
        if not session.num_open:
            self.open(session)
            session.num_open = 0

    def close(self, session: Session, kind: Kind) -> None:
        """End one use of a session. The last one begins a pause of the given kind."""
        session.num_open -= 1
        if session.num_open:
            return
        session.kind, session.idle_since, session.bucket = kind, self.clock(), 0
        self._kinds[kind].reach(0)
        self.idle[session] = None
        if len(self.idle) > MAX_SESSIONS:
            self._forget(next(iter(self.idle)))
        self._wait(session)
        self._changed(session)

    def pausing(self, kind: Kind) -> Session:
        """A session that is not in use."""
        session = Session(kind)
        session.num_open = 1
        self.close(session, kind)
        return session

    def _wait(self, session: Session) -> None:
        """Set the timer for the session's next value."""
        now = self.clock()
        age = max(now - session.idle_since, MIN_STEP_S)
        after = EDGES[session.bucket + 1]
        if session.runs:
            after = min(after, age * STEP)
        ttl_s = session.hints.ttl_s
        if ttl_s is not None and age < ttl_s < after:
            after = ttl_s
        at = session.idle_since + after
        self._number += 1
        session.due = at, self._number, session
        heappush(self.timers, session.due)

    def tick(self) -> None:
        """Let sessions get older."""
        timers, now = self.timers, self.clock()
        while timers and timers[0][0] <= now:
            due = heappop(timers)
            session = due[2]
            if session.due is not due:
                continue
            while (
                session.bucket < NUM_BUCKETS
                and session.idle_since + EDGES[session.bucket + 1] <= now
            ):
                session.bucket += 1
                if session.bucket < NUM_BUCKETS:
                    self._kinds[session.kind].reach(session.bucket)
            if session.bucket < NUM_BUCKETS:
                self._wait(session)
                self._changed(session)
            else:
                self._forget(session)
        if len(timers) > 64 + 4 * len(self.idle):
            timers[:] = [due for due in timers if due[2].due is due]
            heapify(timers)

    def _forget(self, session: Session) -> None:
        """Stop to expect a session."""
        session.due = None
        self.idle.pop(session, None)
        self._forget_ends(session)
        self._changed(session)

    def _changed(self, session: Session) -> None:
        for run in session.runs:
            run.order.revalue(run)

    def rate_of(self, session: Session) -> float:
        """Rate of returns of a session, with the weight of its hints."""
        if session.num_open:
            return IN_USE
        hints = session.hints
        if hints.ends:
            return 0.0
        if session.due is None:
            return FIRST_HAZARD / WIDTHS[-1] * hints.weight
        age = self.clock() - session.idle_since
        found = self._kinds[session.kind].rate_at(age, session.pace)
        lives = hints.ttl_s is not None and age < hints.ttl_s
        return found * hints.weight * (HINTED if lives else 1.0)


class ValueOrder:
    """The free cached blocks of a pool, by value.

    `is_whole`: a block stands for the whole chain before it, as a state does.
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

    def add(self, block: int) -> None:
        """Take in a cached block that nobody holds any more."""
        run = self._owners[block]
        if run is None:
            self._loose[block] = None
            return
        run.num_free += 1
        if run.entry is None:
            self.revalue(run)

    def remove(self, block: int) -> None:
        """Give out a free block to a holder."""
        run = self._owners[block]
        if run is None:
            del self._loose[block]
        else:
            run.num_free -= 1

    def take(self, count: int) -> list[int]:
        """Take the blocks that are worth least. There must be as many."""
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
                if self._fresh:  # runs that were above others before
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
            taken += reversed(ends)
            if not run.blocks:
                self._end(run)
                if self._fresh:
                    self._refresh()
        return taken

    def discard(self, block: int) -> None:
        """Forget a block that is held, or was removed; it is cached no more."""
        run = self._owners[block]
        if run is not None:
            self._leave(run, block)

    def forget_all(self) -> None:
        """Let go of all runs. Their free blocks are the next to be taken."""
        for run in {run for run in self._owners if run is not None}:
            if run.session is not None:
                run.session.runs.pop(run, None)
            run.blocks, run.above, run.session, run.entry = [], None, None, None
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
        """Find the run that ends with the last of `blocks`, the cached beginning of a request's chain.

        Runs are split where the chain leaves them. Returns that run, and the sessions of the runs on the way that
        others begin with as well, with the number of their blocks: they are in use now, and the caller closes them.
        """
        above: Run | None = None
        shared: dict[Session, None] = {}
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
            run = None  # everything was forgotten
        if run is None or run.num_below or run.writer != writer:
            run = self._new(session, run, index, writer)
        self._owners[block] = run
        run.blocks.append(block)
        return run

    def apart(self, session: Session, blocks: Iterable[int], depth: int) -> Run:
        """Move blocks to a run that depends on no other. `depth` is the number of tokens up to its end."""
        run = Run(self, session, None, depth)
        for block in blocks:
            self._give(run, block)
        return run

    def aside(self, block: int, run: Run | None, depth: int) -> Run:
        """Move a block that its request has passed to `run`, or to a new one. Used ones stay together."""
        if run is None or run.session is None:
            run = Run(self, self.sessions.pausing("passed"), None, depth)
        owner = self._owners[block]
        if owner is None or owner.session is None or owner.session.kind != "used":
            self._give(run, block)
        return run

    def demote(self, run: Run) -> None:
        """Let a run pause that its session has no more use for."""
        if run.session is not None:
            self._move(run, self.sessions.pausing("passed"))

    def touch(self, blocks: Iterable[int], depth: int) -> None:
        """Note that a request begins with passed blocks."""
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
        depth = run.start + len(run.blocks) * self._size
        cost = 1 + depth / 2 / self.sessions.attention_tokens
        return self.sessions.rate_of(session) * cost * (depth if self._is_whole else 1)

    def _session(self, block: int) -> Session | None:
        run = self._owners[block]
        return None if run is None else run.session

    def _new(self, session: Session, above: Run | None, index: int, writer: str = "") -> Run:
        return Run(self, session, above, index * self._size, writer)

    def _give(self, run: Run, block: int) -> None:
        """Move a block to a run."""
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
        """Note that `session` leaves a chain before `rest`, after that share of its run.

        If it has most of the run, the chain has gone on, mostly with another end than it had.
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
        """Let a run wait for another session."""
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
        """Note that `above` has one run less below it."""
        if above is not None:
            above.num_below -= 1
            if not above.num_below and above.num_free:
                self.revalue(above)

    def _loosen(self) -> None:
        """Let go of all free blocks: copies to the tiers hold the blocks at the ends of their runs."""
        counts = self._ref_counts
        found = {run for run in self._owners if run is not None and run.num_free}
        for run in sorted(found, key=lambda run: run.start):  # the last is taken first
            for block in run.blocks:
                if not counts[block]:
                    self._owners[block] = None
                    self._loose[block] = None
            run.blocks, run.num_free = [block for block in run.blocks if counts[block]], 0
            if not run.blocks:
                self._end(run)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        counts = self._ref_counts
        runs = {run for run in self._owners if run is not None}
        for run in runs:
            assert run.session is not None
            assert run in run.session.runs
            assert all(self._owners[block] is run for block in run.blocks)
            assert run.num_free == sum(not counts[block] for block in run.blocks)
            assert run.num_below == sum(other.above is run for other in runs)
            assert run.above is None or run.above in runs or run.above.session is None
            assert (
                not run.num_free or run.num_below or run.entry is not None or counts[run.blocks[-1]]
            )
        assert sum(len(run.blocks) for run in runs) == sum(run is not None for run in self._owners)
        assert all(self._owners[block] is None and not counts[block] for block in self._loose)
