"""Choice of the admission policy, and the policies `static` and `dynamic`, baselines for benchmarks in which a new batch
waits for the end of the last one."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config import SchedulingConfig
from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.policy import CacheAware, InFlightPolicy
from slipstream.core.request import Request


class Batched(InFlightPolicy):
    """Policies `static` (window 0) and `dynamic`.

    A batch accepts requests until it is full or a request does not fit. It is then closed until its
    last member has ended. A preempted member may join again. Forks and beams of a member may join,
    too.
    """

    def __init__(self, max_num_seqs: int, window_s: float) -> None:
        self.max_num_seqs = max_num_seqs
        self.window_s = window_s
        self._members: set[str] = set()  # members that have not ended
        self._joined = 0
        self._formed_at: float | None = None

    def admits(self, request: Request, *, num_running: int, num_waiting: int, now: float) -> bool:
        if request.request_id in self._members or request.spec.parent in self._members:
            return True
        if self._members and not num_running:
            return True  # only preempted members are left, and they are queued after this request
        if not self._members:
            if num_waiting < self.max_num_seqs and now < request.spec.arrival + self.window_s:
                return False
            self._joined, self._formed_at = 0, now
        # Requests that waited when the batch was formed join it. Later ones wait for the next
        # batch.
        assert self._formed_at is not None
        return self._joined < self.max_num_seqs and request.spec.arrival <= self._formed_at

    def admitted(self, request: Request) -> None:
        if request.request_id not in self._members:
            self._members.add(request.request_id)
            self._joined += 1

    def finished(self, request: Request) -> None:
        self._members.discard(request.request_id)

    def opens_at(self, oldest_arrival: float | None) -> float | None:
        if self._members or oldest_arrival is None or not self.window_s:
            return None
        return oldest_arrival + self.window_s


def make_policy(config: SchedulingConfig, kvs: Sequence[KVCacheManager]) -> InFlightPolicy:
    """Make the policy named in the settings. With tiers it does not spare contexts, which can be loaded again."""
    if config.policy == "inflight":
        by_value = all(kv.order is not None and kv.tiers is None for kv in kvs)
        return CacheAware(kvs) if by_value else InFlightPolicy()
    return Batched(
        config.max_num_seqs, config.batch_window_s if config.policy == "dynamic" else 0.0
    )
