"""The request rate that a number of replicas serves within the objectives, by the planner's
simulator.

The simulator runs fleets of a few sizes with the least-loaded router. Its requests have the lengths
seen lately and arrive independently. Between the sizes the rate per replica is interpolated. It
grows with the number of replicas: a burst for one replica is shared by many."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.bench.load import Poisson
from slipstream.errors import ConfigError
from slipstream.simulate.capacity import LatencyObjectives, find_capacity, keeps_up
from slipstream.simulate.simulator import SimulatedEngine, simulate
from slipstream.simulate.traffic import TrafficRequest, Workload

_logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16)
REQUESTS = 600
"""Requests in a simulation per replica, up to `MAX_REQUESTS` in all."""

MAX_REQUESTS = 4000
PRECISION = 1.04


@dataclass(frozen=True, slots=True)
class FleetCapacity:
    """Simulated capacities. `rates`: (number of replicas, requests/s), ascending."""

    rates: tuple[tuple[int, float], ...]

    def rate(self, number: int) -> float:
        """Requests/s of this many replicas. Beyond the largest simulated number it grows in
        proportion."""
        if number <= 0:
            return 0.0
        below = max((r for r in self.rates if r[0] <= number), default=self.rates[0])
        above = min((r for r in self.rates if r[0] >= number), default=self.rates[-1])
        if below[0] == above[0]:
            return below[1] / below[0] * number
        share = (number - below[0]) / (above[0] - below[0])
        each = below[1] / below[0] * (1 - share) + above[1] / above[0] * share
        return each * number

    def replicas_for(self, rate: float) -> int:
        """The smallest number of replicas that serves `rate`."""
        number = 0
        while self.rate(number) < rate:
            number += max(1, math.floor((rate - self.rate(number)) / max(self.rate(16), 1e-9) * 8))
        while number > 0 and self.rate(number - 1) >= rate:
            number -= 1
        return number


class RecentCapacity:
    """Capacity for requests like the last `RECENT` finished ones; `prior` until the first
    simulation. A simulation runs after `FIRST_S`, then whenever the time since the start has
    doubled, and at least every `EVERY_S`. It takes a few seconds, so a server calls `refresh` in a
    thread."""

    RECENT, FEWEST, FIRST_S, EVERY_S = 2000, 100, 60.0, 600.0

    def __init__(
        self,
        engine: SimulatedEngine,
        prior: Workload,
        objectives: LatencyObjectives,
        *,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._engine, self._objectives, self._sizes = engine, objectives, sizes
        self._lengths: deque[TrafficRequest] = deque(maxlen=self.RECENT)
        self._next = self.FIRST_S
        self.now = fleet_capacity(engine, prior, objectives, sizes=sizes)

    def replicas_for(self, rate: float) -> int:
        return self.now.replicas_for(rate)

    def learn(self, input_tokens: int, output_tokens: int) -> None:
        """Record the lengths of a finished request."""
        self._lengths.append(TrafficRequest(0.0, input_tokens, max(1, output_tokens)))

    def is_due(self, at: float) -> bool:
        return at >= self._next and len(self._lengths) >= self.FEWEST

    def refresh(self, at: float) -> None:
        """Simulate again if due. If the objectives can't be met with the recent lengths, the
        capacity is unchanged."""
        if not self.is_due(at):
            return
        self._next = at + min(max(at, self.FIRST_S), self.EVERY_S)
        try:
            recent = Workload(name="recent", requests=tuple(self._lengths))
            self.now = fleet_capacity(self._engine, recent, self._objectives, sizes=self._sizes)
        except ConfigError as error:
            _logger.warning("the capacity stays as it was: %s", error)


def fleet_capacity(
    engine: SimulatedEngine,
    workload: Workload,
    objectives: LatencyObjectives,
    *,
    sizes: Sequence[int] = SIZES,
) -> FleetCapacity:
    """Simulate the capacity. ConfigError if even a single request misses the objectives."""
    # use the lengths, not the recorded arrival times
    users = dataclasses.replace(workload, recorded=False)
    one = find_capacity(engine, users, objectives)
    if one.rate is None:
        reached = ", ".join(f"{k}={v:.3g}" for k, v in objectives.reached(one.alone).items())
        raise ConfigError(
            f"even a request alone misses the objectives: it reaches {reached}", field="slo"
        )
    rates = [(1, one.rate)]
    for number in sizes:
        if number == 1:
            continue
        count = min(MAX_REQUESTS, REQUESTS * number)
        # the rate per replica does not fall with more replicas
        low = rates[-1][1] / rates[-1][0] * number
        rate = best = low
        while True:
            rate *= PRECISION
            traffic = users.traffic(Poisson(rate=rate), count)
            run = simulate(
                engine,
                traffic,
                num_replicas=number,
                router="least-loaded",
                objectives=objectives.limits,
            )
            if not objectives.met_by(run) or not keeps_up(run, rate):
                break
            best = rate
        rates.append((number, best))
    return FleetCapacity(tuple(rates))
