"""Decides how many replicas are wanted, from observations.

At every decision (each `interval_s`):

1. The request rate one cold start ahead is forecast (`forecast.py`), as an upper bound that holds
   with probability `share`.
2. Requests waiting at the gateway or in queues are added, as if they arrived within a cold start.
3. The planner's table (`fleet/scaling/capacity.py`) gives the number of replicas that serve this
   rate within the objectives.
4. More replicas are started at once. Fewer are wanted only after fewer were enough for `hold_s`,
   because restarting a replica costs a cold start, and not before `LEARNING` decisions, while
   little is known. "Enough" is measured with a higher bound (`CAUTION`), so that a random dip does
   not stop one of two or three replicas. A surplus within the fraction `SLACK` is not stopped.
5. `share` rises while fewer than `attainment` of the requests meet the objectives, and sinks slowly
   while all of them do.
6. Without requests for `idle_s` no replica is wanted if `min_replicas` is 0. The first request that
   waits at the gateway starts one.

A policy reads no clock and starts nothing: equal observations give equal numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.fleet.scaling.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservation:
    """State of a fleet over the last `interval_s` seconds. Arrivals and ends are counts of the
    interval; the other fields are current values.

    `kv_cache_usage` is the mean of the ready replicas. `cold_start_s` is the time of the latest
    starts, from wanted to ready."""

    at: float
    interval_s: float
    num_arrivals: int
    num_finished: int = 0
    num_met: int = 0  # finished within the objectives
    num_at_gateway: int = 0  # with no replica yet
    num_running: int = 0
    num_waiting: int = 0  # in the replicas' queues
    num_ready: int = 0
    num_starting: int = 0
    kv_cache_usage: float = 0.0
    cold_start_s: float | None = None

    @property
    def rate(self) -> float:
        return self.num_arrivals / self.interval_s

    @property
    def num_ongoing(self) -> int:
        return self.num_at_gateway + self.num_running + self.num_waiting


class Policy(Protocol):
    """A scaling policy. `name` is its name in tables."""

    @property
    def name(self) -> str: ...

    def decide(self, seen: FleetObservation) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Bounds of the number of replicas. `idle_s`: time without requests before scaling to zero, if
    `min_replicas` is 0."""

    min_replicas: int = 1
    max_replicas: int = 16
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ConfigError(
                f"min_replicas={self.min_replicas} and max_replicas={self.max_replicas}: need 0 ≤ min_replicas ≤ max_replicas, "
                "and max_replicas of 1 or more",
                field="min_replicas",
            )
        if self.idle_s <= 0:
            raise ConfigError(f"idle_s must be above 0, got {self.idle_s}", field="idle_s")

    def within(self, wanted: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, wanted))


LEARNING = 20
"""Decisions before the first scaling down."""

MIN_SHARE, MAX_SHARE = 0.45, 0.98
"""Bounds of `share`, the probability with which the forecast's upper bound holds."""

CAUTION = 0.2
"""Amount by which the bound's probability is higher when fewer replicas are considered."""


SLACK = 0.02
"""Maximum surplus, as a fraction of the replicas, that is not worth stopping. With a thousand
replicas noise moves a few up and down all the time."""


class Autoscaler:
    """Slipstream's scaling policy. `replicas_for` gives the smallest number of replicas that serve a rate
    (requests/s) within the objectives."""

    name = "slipstream"

    def __init__(
        self,
        replicas_for: Callable[[float], int],
        *,
        limits: ScalingLimits,
        interval_s: float = 10.0,
        cold_start_s: float = 60.0,
        hold_s: float = 60.0,
        attainment: float = 0.99,
    ) -> None:
        self.replicas_for, self.limits = replicas_for, limits
        self._interval_s, self._cold_start_s, self._hold_s = interval_s, cold_start_s, hold_s
        self._share = MIN_SHARE
        self._attainment = attainment
        self._forecast = Forecast(interval_s=interval_s, horizon_s=cold_start_s + interval_s)
        self._wanted: deque[tuple[float, int]] = deque()
        self._met: deque[tuple[int, int]] = deque(maxlen=max(1, round(120 / interval_s)))
        self._last_request: float | None = None
        self._decisions = 0

    @property
    def forecast(self) -> Forecast:
        return self._forecast

    @property
    def cold_start_s(self) -> float:
        return self._cold_start_s

    def expect_cold_start(self, seconds: float) -> None:
        """Set the measured cold start. A difference below a fifth is ignored, because bounds for
        another horizon must be learned again."""
        if abs(seconds - self._cold_start_s) > 0.2 * self._cold_start_s:
            self._cold_start_s = seconds
            self._forecast.look_ahead(seconds + self._interval_s)

    def decide(self, seen: FleetObservation) -> int:
        self._forecast.learn(seen.rate)
        usual, limits = seen.num_ready + seen.num_starting, self.limits
        if seen.num_arrivals or seen.num_ongoing or (usual and self._last_request is None):
            self._last_request = seen.at
        self._follow_quality(seen)
        if limits.min_replicas == 0 and (
            self._last_request is None or seen.at - self._last_request >= limits.idle_s
        ):
            self._wanted.clear()
            return 0
        # one request per replica that waits briefly is no queue
        behind = max(0, seen.num_at_gateway + seen.num_waiting - usual)
        late = behind / self._cold_start_s
        least = self.replicas_for(self._forecast.upper(self._share) + late)
        most = self.replicas_for(self._forecast.upper(min(MAX_SHARE, self._share + CAUTION)) + late)
        self._decisions += 1
        wanted = max(1, least, usual if self._decisions <= LEARNING else min(usual, most))
        self._wanted.append((seen.at, wanted))
        while self._wanted[0][0] <= seen.at - self._hold_s:
            self._wanted.popleft()
        found = max(number for _, number in self._wanted)
        if usual - int(SLACK * usual) <= found < usual:
            found = usual
        return limits.within(found)

    def _follow_quality(self, seen: FleetObservation) -> None:
        self._met.append((seen.num_finished, seen.num_met))
        finished, met = (sum(each) for each in zip(*self._met, strict=True))
        if finished >= 20 and met < self._attainment * finished:
            self._share = min(MAX_SHARE, self._share + 0.02)
        else:
            self._share = max(MIN_SHARE, self._share - 0.002)
