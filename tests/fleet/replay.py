"""Replay of a fleet that scales, on a virtual clock: the planner's step-level replicas, a gateway
that queues, and a policy.

Each replica is a `simulate.simulator.SimulatedReplica`: the engine's own scheduler, block pool and
prefix cache with predicted step times, not a fluid or calibrated model. This module adds:

1. A replica is ready one cold start after it is wanted. It is paid for from then until its last
   answer ended.
2. Requests go to the ready replica with the fewest open ones. If none is ready, they wait at the
   gateway. Their time to first token counts from their arrival.
3. To scale down, starting replicas are cancelled first; then the ones with the fewest open requests
   drain."""

from __future__ import annotations

import gc
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.costs.metrics import RequestTiming
from slipstream.fleet.scaling.autoscaler import FleetObservation, Policy
from slipstream.simulate.simulator import SimulatedEngine, SimulatedReplica
from slipstream.simulate.traffic import TrafficRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """Seconds from when a replica is wanted until it is ready, uniform in `mean_s` ± `spread` ·
    `mean_s`."""

    mean_s: float
    spread: float = 0.2

    def draw(self, rng: random.Random) -> float:
        return self.mean_s * rng.uniform(1 - self.spread, 1 + self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a replay. `goodput`: share of all requests that met the objectives. `replica_hours`
    include starting and draining. `timeline`: (time, ready, starting, wanted) at each decision."""

    policy: str
    goodput: float
    replica_hours: float
    num_started: int
    most_replicas: int
    ttft_p99_s: float
    most_at_gateway: int
    timeline: tuple[tuple[float, int, int, int], ...]
    records: tuple[RequestTiming, ...]
    seconds: float  # processor time of the replay


class _Place:
    """A replica of the fleet, from when it was wanted."""

    def __init__(self, replica: SimulatedReplica, wanted_at: float, ready_at: float) -> None:
        self.replica, self.wanted_at, self.ready_at = replica, wanted_at, ready_at
        self.is_ready = self.is_draining = False


class FleetReplay:
    """One replay. `run` is called once. `on_end` is called with each request when its answer ends."""

    def __init__(
        self,
        engine: SimulatedEngine,
        requests: Sequence[TrafficRequest],
        policy: Policy,
        *,
        objectives: dict[str, float],
        cold_start: ColdStart,
        initial: int = 1,
        interval_s: float = 10.0,
        seed: int = 0,
        on_end: Callable[[TrafficRequest], None] = lambda request: None,
    ) -> None:
        if not any(r.prefix for r in requests):
            engine = replace(engine, cache=replace(engine.cache, enable_prefix_caching=False))
        self._engine, self._requests, self._policy = engine, requests, policy
        self._objectives, self._cold_start, self._interval_s = objectives, cold_start, interval_s
        self._rng = random.Random(seed)
        self._notify_end = on_end
        self._places: list[_Place] = []
        self._gateway: deque[int] = deque()
        self._records: dict[int, RequestTiming] = {}
        self._paid_s = 0.0
        self._num_started = self._most = self._most_at_gateway = 0
        self._finished = self._met = self._arrived = 0
        self._last_cold_start: float | None = None
        self._timeline: list[tuple[float, int, int, int]] = []
        for _ in range(initial):
            self._start(0.0, 0.0)

    def run(self) -> Replayed:
        began = time.process_time()
        was_on = gc.isenabled()
        gc.disable()  # it would scan all requests again and again, and they form no cycles
        try:
            self._run()
        finally:
            if was_on:
                gc.enable()
        records = tuple(self._records[i] for i in range(len(self._requests)))
        ttft = sorted(r.ttft_s if r.ttft_s is not None else math.inf for r in records)
        return Replayed(
            policy=self._policy.name,
            goodput=sum(r.meets(self._objectives) for r in records) / len(records),
            replica_hours=self._paid_s / 3600,
            num_started=self._num_started,
            most_replicas=self._most,
            ttft_p99_s=ttft[math.ceil(0.99 * len(ttft)) - 1],
            most_at_gateway=self._most_at_gateway,
            timeline=tuple(self._timeline),
            records=records,
            seconds=time.process_time() - began,
        )

    def _run(self) -> None:
        requests, upcoming, decision = self._requests, 0, self._interval_s
        while len(self._records) < len(requests):
            at = min(
                requests[upcoming].arrival if upcoming < len(requests) else math.inf,
                decision,
                min((p.ready_at for p in self._places if not p.is_ready), default=math.inf),
            )
            self._step_until(at)
            for place in self._places:
                if not place.is_ready and place.ready_at <= at:
                    self._ready(place)
            while upcoming < len(requests) and requests[upcoming].arrival <= at:
                self._arrived += 1
                self._send(upcoming)
                upcoming += 1
            if at >= decision:
                self._decide(decision)
                decision += self._interval_s
        end = max([self._requests[-1].arrival, *(p.replica.now for p in self._places)])
        for place in self._places:
            self._paid_s += max(0.0, end - place.wanted_at)

    def _step_until(self, at: float) -> None:
        for place in self._places:  # replicas are independent of each other
            replica = place.replica
            while replica.can_step and replica.now < at:
                replica.step()

    def _send(self, index: int) -> None:
        ready = [p for p in self._places if p.is_ready and not p.is_draining]
        if not ready:
            self._gateway.append(index)
            self._most_at_gateway = max(self._most_at_gateway, len(self._gateway))
            return
        min(ready, key=lambda p: p.replica.num_open).replica.add(
            index, self._requests[index].arrival
        )

    def _ready(self, place: _Place) -> None:
        place.is_ready = True
        place.replica.now = place.ready_at
        self._last_cold_start = place.ready_at - place.wanted_at
        waiting, self._gateway = self._gateway, deque()
        for index in waiting:
            # The replica computes from now on, even if the request arrived earlier.
            place.replica.add(index, self._requests[index].arrival)
            place.replica.now = max(place.replica.now, place.ready_at)

    def _start(self, at: float, cold_start_s: float) -> None:
        replica = SimulatedReplica(self._engine, self._requests, self._on_end, exact=False)
        replica.records = self._records
        place = _Place(replica, at, at + cold_start_s)
        self._places.append(place)
        if not cold_start_s:
            place.is_ready = True
        else:
            self._num_started += 1
        self._most = max(self._most, sum(not p.is_draining for p in self._places))

    def _stop(self, place: _Place, at: float) -> None:
        self._places.remove(place)
        self._paid_s += at - place.wanted_at

    def _on_end(self, index: int, at: float) -> None:
        self._finished += 1
        self._met += self._records[index].meets(self._objectives)
        self._notify_end(self._requests[index])

    def _decide(self, at: float) -> None:
        for place in [p for p in self._places if p.is_draining and not p.replica.can_step]:
            self._stop(place, max(place.replica.now, place.wanted_at))
        active = [p for p in self._places if not p.is_draining]
        ready = [p for p in active if p.is_ready]
        stats = [p.replica.scheduler.stats() for p in self._places if p.is_ready]
        wanted = self._policy.decide(
            FleetObservation(
                at=at, interval_s=self._interval_s, num_arrivals=self._arrived, num_finished=self._finished, num_met=self._met,
                num_at_gateway=len(self._gateway), num_running=sum(s.num_running for s in stats),
                num_waiting=sum(s.num_waiting for s in stats), num_ready=len(ready), num_starting=len(active) - len(ready),
                kv_cache_usage=sum(s.kv_cache_usage for s in stats) / len(stats) if stats else 0.0,
                cold_start_s=self._last_cold_start,
            )
        )  # fmt: skip
        self._arrived = self._finished = self._met = 0
        self._timeline.append((at, len(ready), len(active) - len(ready), wanted))
        for _ in range(wanted - len(active)):
            draining = [p for p in self._places if p.is_draining]
            if draining:  # it arrived before
                max(draining, key=lambda p: p.replica.num_open).is_draining = False
            else:
                self._start(at, self._cold_start.draw(self._rng))
        surplus = len(active) - wanted
        for place in sorted(active, key=lambda p: (p.is_ready, p.replica.num_open, p.wanted_at))[
            : max(0, surplus)
        ]:
            if place.is_ready and place.replica.can_step:
                place.is_draining = True
            else:
                self._stop(place, at)
