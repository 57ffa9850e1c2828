"""Other autoscalers' rules, to compare with: ENOVA's as its code has it, Ray Serve's defaults, a fixed fleet, a given plan.

ENOVA (Huang et al. 2024; `enova/algo/service.py` of Emerging-AI/ENOVA at df5dacb, its defaults): looked at every 30 s, by the
minute. Up, if 50 requests or more were pending in each of the last three minutes, to ⌈new ÷ answered requests × replicas⌉.
Down to half, if the cache was used to 10 % and a tenth of `max_num_seqs` ran, at most, in each of them.

Ray Serve (2.x, `AutoscalingConfig`): ⌈ongoing requests ÷ `target_ongoing_requests`⌉, a mean of 30 s, applied when it was above
what there is for `upscale_delay_s`, or below for `downscale_delay_s`.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from slipstream.fleet.scaling.autoscaler import FleetObservation, ScalingLimits


class Fixed:
    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"fixed {number}"

    def decide(self, seen: FleetObservation) -> int:
        return self.number


class Planned:
    """As many as a plan says: (from when, how many) in order of time. `ahead_s` earlier than that they are wanted, so that they
    are there in time; fewer are wanted when it says so, and not before."""

    name = "oracle"

    def __init__(self, plan: Sequence[tuple[float, int]], *, ahead_s: float) -> None:
        self._times, self._numbers = [at for at, _ in plan], [number for _, number in plan]
        self._ahead_s = ahead_s

    def decide(self, seen: FleetObservation) -> int:
        first = max(0, bisect_right(self._times, seen.at) - 1)
        last = bisect_right(self._times, seen.at + self._ahead_s)
        return max(self._numbers[first : max(last, first + 1)])


class Enova:
    name = "ENOVA's rule"
    EVERY_S, MINUTE_S, MINUTES = 30.0, 60.0, 3
    PENDING, CACHE, RUNNING = 50.0, 0.10, 0.1

    def __init__(self, limits: ScalingLimits, *, max_num_seqs: int) -> None:
        self._limits, self._max_num_seqs = limits, max_num_seqs
        self._seen: deque[FleetObservation] = deque()
        self._wanted: int | None = None
        self._next = 0.0

    def decide(self, seen: FleetObservation) -> int:
        there = seen.num_ready + seen.num_starting
        if self._wanted is None:
            self._wanted = max(1, there)
        self._seen.append(seen)
        while self._seen[0].at <= seen.at - self.MINUTES * self.MINUTE_S:
            self._seen.popleft()
        whole = seen.at - self._seen[0].at + seen.interval_s >= self.MINUTES * self.MINUTE_S - 1e-6
        if seen.at >= self._next and whole and seen.num_starting == 0:  # it looks at tasks that run
            self._next = seen.at + self.EVERY_S
            self._wanted = self._limits.within(max(1, self._look(seen)))
        return self._wanted

    def _look(self, seen: FleetObservation) -> int:
        minutes = [
            [o for o in self._seen if i * self.MINUTE_S <= seen.at - o.at < (i + 1) * self.MINUTE_S]
            for i in range(self.MINUTES)
        ]
        there = max(1, seen.num_ready)
        if all(
            statistics.fmean(o.num_waiting + o.num_at_gateway for o in m) >= self.PENDING
            for m in minutes
        ):
            new = max(sum(o.num_arrivals for o in m) for m in minutes)
            answered = max(1, max(sum(o.num_finished for o in m) for m in minutes))
            return max(there, math.ceil(new / answered * there))
        idle = all(
            statistics.fmean(o.kv_cache_usage for o in m) <= self.CACHE for m in minutes
        ) and all(
            statistics.fmean(o.num_running for o in m) / there <= self.RUNNING * self._max_num_seqs
            for m in minutes
        )
        return math.ceil(there / 2) if idle and there > 1 else there


class RayServe:
    """With the defaults; `target` is what a user may set."""

    UP_S, DOWN_S, LOOK_BACK_S = 30.0, 600.0, 30.0

    def __init__(self, limits: ScalingLimits, *, target: float = 2.0) -> None:
        self.name = f"Ray Serve, target {target:g}"
        self._limits, self._target = limits, target
        self._ongoing: deque[tuple[float, int]] = deque()
        self._wanted: int | None = None
        self._since: tuple[int, float] = (
            0,
            0.0,
        )  # the direction that is wished for, and since when

    def decide(self, seen: FleetObservation) -> int:
        if self._wanted is None:
            self._wanted = self._limits.within(seen.num_ready + seen.num_starting)
        self._ongoing.append((seen.at, seen.num_ongoing))
        while self._ongoing[0][0] <= seen.at - self.LOOK_BACK_S:
            self._ongoing.popleft()
        wished = self._limits.within(
            math.ceil(statistics.fmean(n for _, n in self._ongoing) / self._target)
        )
        direction = (wished > self._wanted) - (wished < self._wanted)
        if direction != self._since[0]:
            self._since = (direction, seen.at)
        waited = seen.at - self._since[1]
        if direction and waited >= (self.UP_S if direction > 0 else self.DOWN_S):
            self._wanted = wished
            self._since = (0, seen.at)
        return self._wanted
