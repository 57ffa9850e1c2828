"""Admission policies: which waiting request joins the running ones next, and when.

1. `inflight`: whenever there is room (continuous batching). This is the default. If cached blocks are evicted
   by value, the cache is considered, too (`CacheAware`). The other two are baselines for benchmarks.
2. `static`: all requests that wait while the engine is idle form a batch. No request joins until
   all of them have ended.
3. `dynamic`: like `static`, but a batch starts only when it is full or its oldest request has
   waited for the window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from math import inf

from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.cache.prefix_cache import group_key
from slipstream.core.queue import WaitingQueue
from slipstream.core.request import Request

MAX_OVERTAKES = 32
"""Maximum number of requests that overtake one that waits for a resource, for a rank, or for room in the cache.

After that, no other request is admitted before it. Further choices of an admitted request don't count.
"""

COSTLY = 0.01
"""Fraction of the cache above which the blocks that a request lacks make it costly."""

RUNNING_SHARE = 1 / 3
"""Maximum fraction of the cache that running requests hold when a costly one joins them. The rest is for pausing
sessions."""

PATIENCE_S = 10.0
"""Seconds within which the return of a pausing session is worth waiting for; shorter waits of requests hardly count."""

MAX_TURNS = 4
"""Number of turns from which on a session's turns no longer change its rank."""

MAX_COMPARED, MAX_OWNERS = 256, 32
"""Maximum number of requests compared for a step, and of owners that share it equally."""

RECHECK_S = 0.05
"""Seconds after which a costly request is tried again, if no request comes or ends meanwhile."""


class InFlightPolicy:
    """Continuous batching: the next request joins whenever there is room."""

    def first(self, waiting: WaitingQueue, now: float) -> Request | None:
        """The request that joins next. None: none may now."""
        return waiting.first()

    def admits(self, request: Request, *, num_running: int, num_waiting: int, now: float) -> bool:
        """Return whether `request`, the first in the queue, may join now."""
        return True

    def is_crowded(self, waiting: WaitingQueue) -> bool:
        """Return whether the waiting requests need more blocks than running ones leave."""
        return False

    def admitted(self, request: Request) -> None: ...

    def finished(self, request: Request) -> None: ...

    def opens_at(self, oldest_arrival: float | None) -> float | None:
        """Time at which a batch starts without any other event; None if never."""
        return None


class CacheAware(InFlightPolicy):
    """Continuous batching that keeps the contexts of sessions in the cache.

    If sessions need more memory than the cache has, serving turns in order of arrival would evict the context of
    another session each time, whose next turn computes all of it again. So some sessions continue, and others wait:

    1. A request is *costly* if it lacks more than `COSTLY` of the cache's blocks, and would evict others for them.
       All others join in order.
    2. If the next in order is costly, its owner's other requests of equal priority are compared. Those that are not
       costly go first, then the one that has waited longest for what it lacks (highest response ratio next). In a
       session's n-th turn that time counts 1/n, up to `MAX_TURNS`, so that sessions progress equally.
    3. A costly one joins if nothing runs, if running requests then hold at most `RUNNING_SHARE` of the blocks, or if it
       evicts only what is not expected back within `PATIENCE_S`. Otherwise, the next owners' requests may join.
    4. The first in order is overtaken at most `MAX_OVERTAKES` times. Then, or when half of the time to its deadline
       has passed, it joins as soon as it fits. So the n-th in order waits for at most (`MAX_OVERTAKES` + 1) n others.

    Requests that were preempted, that share a prompt or have an adapter are not costly. Without evictions nothing is.
    """

    def __init__(self, kvs: Sequence[KVCacheManager]) -> None:
        self._kvs = kvs
        self._small = int(COSTLY * sum(kv.pool.num_usable for kv in kvs))
        self._head: Request | None = None  # the first in order, if it is costly
        self._closed_until, self._num_pushed = -inf, 0

    def first(self, waiting: WaitingQueue, now: float) -> Request | None:
        self._head = None
        head = waiting.first()
        if head is None or not self._is_costly(self._lacking(head)):
            return head
        self._head = head
        if self._is_due(head, now):
            return head
        if now < self._closed_until and waiting.num_pushed == self._num_pushed:
            return None
        heads = [x for x in waiting.heads(MAX_OWNERS) if x.order[0] == head.order[0]]
        for other in heads:
            best = self._best(waiting.beside(other, MAX_COMPARED // len(heads)), now)
            if best is not None:
                return best
        self._closed_until, self._num_pushed = now + RECHECK_S, waiting.num_pushed
        return None

    def is_crowded(self, waiting: WaitingQueue) -> bool:
        if self._head is not None:
            return True
        num_blocks = sum(len(r.block_keys) for r in islice(waiting, MAX_COMPARED))
        return num_blocks > sum(kv.pool.num_free for kv in self._kvs)

    def admitted(self, request: Request) -> None:
        head = self._head
        if head is request:
            self._head = None
        elif head is not None and request.spec.parent is None:
            head.num_overtaken += 1
        self._closed_until = -inf

    def finished(self, request: Request) -> None:
        if request is self._head:
            self._head = None
        self._closed_until = -inf

    def _best(self, requests: Sequence[Request], now: float) -> Request | None:
        """The owner's request that joins next. None if it must wait for memory."""
        found = None
        for request in requests:
            lacking = self._lacking(request)
            free = not self._is_costly(lacking) or self._is_due(request, now)
            ratio = 0.0 if free else self._urgency(request, now) / lacking
            merits = free, ratio, [-part for part in request.order], request, lacking
            if found is None or merits > found:
                found = merits
        if found is None:
            return None
        free, _, _, request, lacking = found
        return request if free or self._has_room(lacking) else None

    def _urgency(self, request: Request, now: float) -> float:
        """Seconds that a request has waited, weighted so that sessions progress equally: more for those with few turns."""
        assert request.session is not None
        num_turns = min(request.session.num_turns, MAX_TURNS)
        return (now - request.spec.arrival + PATIENCE_S) / num_turns

    def _lacking(self, request: Request) -> int:
        """Number of blocks of the request's tokens that are not cached. Cached blocks are always a prefix."""
        full, keys = request.kv.full, request.block_keys
        if full is None or request.session is None or request.num_preemptions:
            return 0
        if not request.kv.may_begin_cached(request):
            return len(keys)
        hit = 0
        for kv in self._kvs:
            lookup = kv.pool.lookup
            hit = max(
                hit, bisect_left(keys, True, key=lambda key: lookup(group_key(key, full)) is None)
            )
        return len(keys) - hit

    def _is_costly(self, lacking: int) -> bool:
        return lacking > self._small and all(
            kv.pool.num_blank(lacking) < lacking for kv in self._kvs
        )

    def _is_due(self, request: Request, now: float) -> bool:
        spec = request.spec
        return request.num_overtaken >= MAX_OVERTAKES or (
            spec.deadline is not None and now - spec.arrival >= spec.deadline - now
        )

    def _has_room(self, lacking: int) -> bool:
        return any(
            not kv.num_running
            or kv.pool.num_usable - kv.pool.num_free + lacking <= RUNNING_SHARE * kv.pool.num_usable
            or (
                kv.order is not None
                and kv.pool.num_blank(lacking) + kv.order.num_below(1 / PATIENCE_S) >= lacking
            )
            for kv in self._kvs
        )
