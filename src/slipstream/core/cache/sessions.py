"""Sessions of the prefix cache, and statistics of their pauses.

1. A *session* is a chain of requests, each of which extends the prompt of the one before. It is found by the keys of the
   prompt's last blocks, so no client has to name it. Between two requests it pauses.
2. `Pauses` counts how many pauses reached each age and how many ended there, in buckets of doubling length, for each kind of
   pause: after requests with or without tools, after the first or a later turn. Each later turn is also counted separately,
   to learn after how many turns sessions end. A session has its own pace: if its pauses were half as long as others', the
   next is expected to be so, too, to the degree that sessions were observed to keep their pace.
3. The *rate* of a session is the highest value, over all horizons, of the chance that it returns by then, divided by the
   time that it is expected to be kept until then (a Gittins index). So a session that usually returns after ten seconds has
   a higher rate after eight seconds than after sixty. Without statistics the rate falls with age, as under LRU.
4. A session is *returning* once it has paused for half of the time that its pace lets expect. With tiers below
   the device its blocks are then loaded again (`core/tiers/returning.py`).

`core/cache/cache_value.py` evicts blocks by these rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import exp, frexp, inf, log
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from slipstream.core.cache.prefix_cache import KEY_BYTES
from slipstream.params.cache_hints import NO_HINTS, CacheHints

if TYPE_CHECKING:
    from slipstream.core.cache.cache_value import Run

EDGES = (0.0, *(0.5 * 2.0**i for i in range(19)))
"""Ages in seconds at which the buckets of a pause begin, and the end of the last one (a day and a half)."""

NUM_BUCKETS = len(EDGES) - 1
WIDTHS = tuple(EDGES[i + 1] - EDGES[i] for i in range(NUM_BUCKETS))

FIRST_HAZARD, FIRST_WEIGHT = 0.1, 4.0
"""(prior probability that a pause ends in a bucket, number of pauses that this prior counts as)."""

RATES_AGE = 8
"""Number of bucket entries of pauses after which their rates are computed again; 8 times as many for a whole kind."""

MAX_TURN = 32
"""Number of turns that are counted separately."""

MEMORY = 1024.0
"""Number of pauses of a kind after which its counts are halved."""

OWN_MEMORY = 8
"""Number of a session's latest pauses that determine its pace."""

FIRST_SLOPE, SLOPE_WEIGHT = 0.5, 8.0
"""(prior fraction of a session's pace that its next pause keeps, number of pauses that this prior counts as)."""

STEP, MIN_STEP_S = 1.19, 2.0
"""(growth factor of a pausing session's age after which its blocks are valued again, minimum age in seconds)."""

MAX_SESSIONS = 32768
"""Maximum number of pausing sessions that are stored. The one that has paused longest is dropped first."""

MAX_NAMES = 4096
"""Maximum number of names (`prompt_cache_key`) for which pauses are stored."""

RETURNING, RETRY, MAX_WAIT = 0.5, 1.25, 2.0
"""(fraction of the expected pause after which a session's blocks are first loaded again, factor between attempts, fraction
of the last attempt)."""

MIN_PAUSES = 4
"""Minimum number of pauses of a kind from which the next one's length is predicted."""

MAX_KEYS = 1 << 20
"""Maximum number of block keys of pausing sessions that are stored, 16 bytes each."""

IN_USE = 1e9
"""Rate of a session with a waiting or running request: above all others."""

HINTED = 4.0
"""Factor of a session's rate within the time to live that its client requested."""

Kind: TypeAlias = Literal[
    "text", "call", "later text", "later call", "shared", "passed", "used", "rest"
]
"""Kinds of pauses. "text", "call": after a first turn, without and with tool calls. "later": after other
turns. "shared": a prefix of several sessions. "passed": blocks that left a window, and earlier states.
"used": those, after a request began there. "rest": the end of a chain that its session did not continue."""


@dataclass(slots=True)
class OwnPace:
    """Average of a session's last pauses, as the logarithm of seconds."""

    count: int = 0
    mean: float = 0.0

    def deviation(self, mean: float) -> float:
        """Difference from the mean of sessions of its kind, shrunk while few pauses are known."""
        return (self.mean - mean) * self.count / (self.count + 2)


class Pauses:
    """Statistics of one kind of pause: the number that reached each time bucket and that ended in it, and how constant
    each session's pauses are. Pauses after a certain turn are also counted in `of`, which is used while few are known."""

    def __init__(self, of: Pauses | None = None) -> None:
        self.of = of
        self._age, self._rates = RATES_AGE, [0.0]
        # buckets; `_seen`: the kind's number at the last computation of rates
        self.num_reached = self._seen = 0
        self.reached, self.ended = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self.count, self.mean = 0, 0.0
        # of deviations: sums of (previous × current) and of (previous squared)
        self.products = self.squares = 0.0

    def reach(self, bucket: int) -> None:
        self._age += 1
        self.num_reached += 1
        self.reached[bucket] += 1
        if self.reached[bucket] > MEMORY:
            self.reached = [n / 2 for n in self.reached]
            self.ended = [n / 2 for n in self.ended]
        if self.of is not None:
            self.of.reach(bucket)

    def end(self, bucket: int, seconds: float, pace: OwnPace) -> None:
        """Count a pause that ended in a bucket, and learn the session's pace."""
        self.ended[bucket] += 1
        if self.of is not None:
            self.of.end(bucket, seconds, pace)
            return
        length = log(max(seconds, EDGES[1] / 2))
        if pace.count:
            before = pace.deviation(self.mean)
            self.products = 0.99 * self.products + before * (length - self.mean)
            self.squares = 0.99 * self.squares + before * before
        self.count = min(self.count + 1, 256)
        self.mean += (length - self.mean) / self.count
        pace.count = min(pace.count + 1, OWN_MEMORY)
        pace.mean += (length - pace.mean) / pace.count

    def length(self, pace: OwnPace) -> float | None:
        """Seconds that a session of that pace is expected to pause. None: too few pauses are known."""
        if self.count < MIN_PAUSES:
            return None
        return exp(self.mean + pace.deviation(self.mean) * self.slope)

    @property
    def slope(self) -> float:
        """Regression slope of a session's deviations: the fraction that its next pause is expected to keep."""
        known = self.products + FIRST_SLOPE * SLOPE_WEIGHT
        return min(1.5, max(0.0, known / (self.squares + SLOPE_WEIGHT)))

    def rates(self) -> Sequence[float]:
        """`rate` by bucket, up to `RATES_AGE` old."""
        known = 0 if self.of is None else self.of.num_reached
        if self._age >= RATES_AGE or known - self._seen >= 8 * RATES_AGE:
            self._age, self._seen, hazards = 0, known, self.hazards()
            self._rates = [*(rate(hazards, i) for i in range(NUM_BUCKETS)), 0.0]
        return self._rates

    def hazards(self) -> list[float]:
        """Probability, for each bucket, that a pause which reaches it ends there."""
        first = [FIRST_HAZARD] * NUM_BUCKETS if self.of is None else self.of.hazards()
        counts = zip(self.ended, self.reached, first, strict=True)
        return [(n + h * FIRST_WEIGHT) / (total + FIRST_WEIGHT) for n, total, h in counts]

    def rate_at(self, age: float, pace: OwnPace) -> float:
        """Rate of a session with this pace. If its pauses are half as long as others', its age counts twice."""
        slower, kind = 1.0, self.of or self
        if pace.count:
            slower = exp(pace.deviation(kind.mean) * kind.slope)
        at = age / slower
        i = 0 if at < EDGES[1] else min(frexp(at)[1] + 1, NUM_BUCKETS - 1)
        rates = self.rates()
        within = min(1.0, (at - EDGES[i]) / WIDTHS[i])
        return (rates[i] + (rates[i + 1] - rates[i]) * within) / slower


def rate(hazards: Sequence[float], bucket: int) -> float:
    """Expected returns per second of keeping blocks, maximized over the horizons from the start of `bucket` on."""
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


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """A conversation, or another reason why cached runs of blocks may be used again."""

    kind: Kind
    pauses: Pauses = field(init=False)  # among which its own is counted
    pace: OwnPace = field(default_factory=OwnPace)
    idle_since: float = 0.0
    bucket: int = 0
    num_open: int = 0  # requests that wait or run
    num_turns: int = 0
    runs: dict[Run, None] = field(default_factory=dict)
    hints: CacheHints = NO_HINTS
    kept: tuple[tuple[float, float], ...] = ()  # (tokens, seconds) that hints ask to keep
    due: tuple[float, int, Session] | None = None  # its entry among the timers
    ends: tuple[bytes, ...] = ()  # keys by which the next request is recognized
    mark: Run | None = None  # the state from which its next request continues
    keys: bytes = b""  # concatenated keys of its blocks, while they may be loaded again
    returns_at: float = 0.0  # ages of the next and the last attempt
    returns_by: float = 0.0
    prefetched: tuple[int, int] = (0, 0)  # tokens that were brought back: from, to
    rank: int = 0  # where its last request ran, of ranks with requests of their own


class Sessions:
    """All sessions of one cache, and the statistics of their pauses.

    `attention_tokens` is the depth at which attention costs as much as the rest of a token.
    """

    def __init__(self, clock: Callable[[], float], attention_tokens: float) -> None:
        self.clock, self.attention_tokens = clock, attention_tokens
        self._kinds = {kind: Pauses() for kind in get_args(Kind)}
        later: tuple[Kind, ...] = ("later text", "later call")
        self._later = {k: [Pauses(self._kinds[k]) for _ in range(MAX_TURN)] for k in later}
        self._by_end: dict[bytes, Session] = {}
        # by salt and name; the most recently used name last
        self._named: dict[tuple[str, str], OwnPace] = {}
        self.timers: list[tuple[float, int, Session]] = []
        self._number = 0
        # pausing sessions, the one that has paused longest first
        self.idle: dict[Session, None] = {}
        self.keeps_keys = False  # for `returning`
        self._num_keys = 0
        self.returning: list[Session] = []
        """Pausing sessions with keys that will return soon. The reader empties the list."""

    # --- Requests -----------------------------------------------------------------------------------------------------

    def arrived(self, keys: Sequence[bytes], hints: CacheHints, salt: str = "") -> Session:
        """Return the session of a request that begins with the blocks of `keys`. It is in use from now on."""
        self.tick()
        by_end = self._by_end
        session = next((by_end[key] for key in reversed(keys) if key in by_end), None)
        session = session or Session("text")
        if hints.session:
            session.pace = self._of_name((salt, hints.session))
        session.hints = hints
        if not session.num_open:  # several requests may continue one end
            session.num_turns += 1
        self.open(session)
        return session

    def ended(
        self,
        session: Session,
        keys: list[bytes],
        num_shared: int,
        num_prompt_blocks: int,
        calls: bool = False,
    ) -> None:
        """End a session's request; after its last one the session pauses. Its first `num_shared` blocks are
        shared with other sessions. `calls`: the answer called a tool, so its result will follow."""
        self.tick()
        first = max(num_shared, num_prompt_blocks - 2)
        ends = (*keys[first:num_prompt_blocks], *keys[num_prompt_blocks:][-1:])
        self._forget_ends(session)
        session.ends = ends
        for end in ends:
            self._by_end[end] = session
        kinds: tuple[Kind, Kind] = ("call", "later call") if calls else ("text", "later text")
        kind = kinds[session.num_turns > 1]
        session.prefetched = 0, 0
        if self.keeps_keys and session.num_open == 1 and not session.hints.ends:
            self._expect(session, kind, keys)
        self.close(session, kind)

    def _expect(self, session: Session, kind: Kind, keys: Sequence[bytes]) -> None:
        """Store the keys of a session's blocks until it returns, if its pace allows a prediction."""
        length = self._kinds[kind].length(session.pace)
        if length is not None and self._num_keys + len(keys) <= MAX_KEYS:
            session.keys = b"".join(keys)
            session.returns_at, session.returns_by = RETURNING * length, MAX_WAIT * length
            self._num_keys += len(keys)

    def drop_keys(self, session: Session) -> None:
        """Stop loading a session's blocks from the tiers."""
        self._num_keys -= len(session.keys) // KEY_BYTES
        session.keys = b""

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
        """End the session's pause, if it is pausing, because something uses it."""
        session.num_open += 1
        if session.num_open > 1:
            return
        if session.due is not None:
            session.due = None
            self.drop_keys(session)
            del self.idle[session]
            seconds = self.clock() - session.idle_since
            session.pauses.end(session.bucket, seconds, session.pace)
        self._changed(session)

    def used(self, session: Session) -> None:
        """End the session's pause, because a request continues its prefix."""
        if not session.num_open:
            self.open(session)
            session.num_open = 0

    def close(self, session: Session, kind: Kind) -> None:
        """End one use of a session. The last one begins a pause of the given kind."""
        session.num_open -= 1
        if session.num_open:
            return
        session.kind, session.idle_since, session.bucket = kind, self.clock(), 0
        later, turn = self._later.get(kind), min(session.num_turns, MAX_TURN)
        session.pauses = later[turn - 1] if later else self._kinds[kind]
        session.pauses.reach(0)
        self.idle[session] = None
        if len(self.idle) > MAX_SESSIONS:
            self._forget(next(iter(self.idle)))
        self._wait(session)
        self._changed(session)

    def pausing(self, kind: Kind) -> Session:
        """Makes a session that is not in use."""
        session = Session(kind)
        session.num_open = 1
        self.close(session, kind)
        return session

    def _wait(self, session: Session) -> None:
        """Set the timer for the session's next valuation."""
        now = self.clock()
        age = max(now - session.idle_since, MIN_STEP_S)
        after = EDGES[session.bucket + 1]
        if session.runs:
            after = min(after, age * STEP)
        after = min((s for _, s in session.kept if age < s < after), default=after)
        if session.keys:
            after = min(after, session.returns_at)
        at = session.idle_since + after
        self._number += 1
        session.due = at, self._number, session
        heappush(self.timers, session.due)

    def tick(self) -> None:
        """Advance the sessions' ages."""
        timers, now = self.timers, self.clock()
        while timers and timers[0][0] <= now:
            due = heappop(timers)
            session = due[2]
            if session.due is not due:
                continue
            since = session.idle_since
            while session.bucket < NUM_BUCKETS and since + EDGES[session.bucket + 1] <= now:
                session.bucket += 1
                if session.bucket < NUM_BUCKETS:
                    session.pauses.reach(session.bucket)
            if session.keys and since + session.returns_at <= now:
                self.returning.append(session)
                session.returns_at = max(now - since, EDGES[1]) * RETRY
                if session.returns_at > session.returns_by:
                    session.returns_at = inf
            if session.bucket < NUM_BUCKETS:
                self._wait(session)
                self._changed(session)
            else:
                self._forget(session)
        if len(timers) > 64 + 4 * len(self.idle):
            timers[:] = [due for due in timers if due[2].due is due]
            heapify(timers)

    def _forget(self, session: Session) -> None:
        """Assume that a session does not return any more."""
        session.due = None
        self.drop_keys(session)
        self.idle.pop(session, None)
        self._forget_ends(session)
        self._changed(session)

    def _changed(self, session: Session) -> None:
        for run in session.runs:
            run.order.revalue(run)

    def rate_of(self, session: Session, depth: float = inf) -> float:
        """Rate of returns of a session, multiplied by the weight of its hints for blocks that end at position `depth`."""
        if session.num_open:
            return IN_USE
        hints = session.hints
        if hints.ends:
            return 0.0
        if session.due is None:
            return FIRST_HAZARD / WIDTHS[-1] * hints.weight
        age = self.clock() - session.idle_since
        found = session.pauses.rate_at(age, session.pace)
        lives = any(depth <= end and age < seconds for end, seconds in session.kept)
        return found * hints.weight * (HINTED if lives else 1.0)
