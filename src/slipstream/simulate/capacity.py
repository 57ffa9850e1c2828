"""Finds by simulation the load that an engine can serve within its latency objectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from slipstream.bench.load import ClosedLoop
from slipstream.bench.rates import RateSearch
from slipstream.costs.metrics import RequestTiming
from slipstream.simulate.simulator import SimulatedEngine, Simulation, simulate
from slipstream.simulate.traffic import SessionWorkload, Traffic, Workload

NUM_REQUESTS = 400
"""Minimum number of requests of a simulation."""

MAX_REQUESTS = 6000
ANSWERS = 8
"""Length of a simulation in mean answer times, up to `MAX_REQUESTS` requests, long enough for a
queue to build up."""

MAX_RUNS = 14
GROWS = 1.1
"""Minimum factor in turns per second for which doubling the sessions is worthwhile."""

KEEPS_UP = 0.85
"""Minimum ratio of the completion rate to the arrival rate at which a load counts as sustained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjectives:
    """Latency limits, and the fraction of requests that must meet all of them.

    `limits` maps a name (ttft_s, tpot_s, e2e_s) to seconds.
    """

    limits: dict[str, float]
    attainment: float

    def met_by(self, run: Simulation) -> bool:
        records = settled(run)
        return bool(records) and sum(
            r.meets(self.limits) for r in records
        ) >= self.attainment * len(records)

    def reached(self, run: Simulation) -> dict[str, float]:
        """Value of each objective that a fraction `attainment` of the requests meets, by name."""
        return {name: quantile(settled(run), name, self.attainment) for name in self.limits}


def settled(run: Simulation) -> tuple[RequestTiming, ...]:
    """Records without the first quarter and the last tenth, in order of sending.

    The first requests find an empty engine, and the last ones run while no more arrive.
    """
    count = len(run.records)
    return tuple(sorted(run.records, key=attrgetter("sent"))[count // 4 : count - count // 10])


def quantile(records: tuple[RequestTiming, ...], name: str, share: float) -> float:
    values = sorted(v for r in records if (v := getattr(r, name)) is not None)
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a capacity search.

    `rate` is in requests per second. It is None if even a single request at a time misses the
    objectives. `run` is the simulation at that rate; `alone` has one request at a time.
    """

    rate: float | None
    run: Simulation | None
    alone: Simulation


def run_alone(engine: SimulatedEngine, workload: Workload, *, seed: int = 0) -> Simulation:
    """Simulates requests one at a time, which gives the best possible latencies."""
    return simulate(
        engine, workload.traffic(ClosedLoop(concurrency=1), min(100, NUM_REQUESTS), seed=seed)
    )


def saturated(engine: SimulatedEngine, workload: Workload, *, seed: int = 0) -> Simulation:
    """Simulates as many concurrent users as the engine can run at once."""
    users = engine.scheduling.max_num_seqs
    return simulate(
        engine,
        workload.traffic(ClosedLoop(concurrency=users), max(NUM_REQUESTS, 3 * users), seed=seed),
    )


def keeps_up(run: Simulation, rate: float) -> bool:
    """Whether the queue stays bounded: requests are completed about as fast as they arrive.

    Requests that are open at the last arrival may take one more answer time.
    """
    count = run.summary.num_requests
    slowest = run.summary.e2e_s.p90 if run.summary.e2e_s is not None else 0.0
    return (count / rate) >= KEEPS_UP * (run.summary.wall_s - slowest)


def find_capacity(
    engine: SimulatedEngine,
    workload: Workload,
    objectives: LatencyObjectives,
    *,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Capacity:
    """Finds, to 5 %, the highest arrival rate at which the objectives hold and the queue stays
    bounded. For sessions it finds the number of concurrent ones (`most_sessions`)."""
    if isinstance(workload, SessionWorkload):
        return most_sessions(engine, workload, objectives, seed=seed, on_run=on_run)
    alone = run_alone(engine, workload, seed=seed)
    on_run()
    if not objectives.met_by(alone):
        return Capacity(rate=None, run=None, alone=alone)
    full = saturated(engine, workload, seed=seed).summary
    on_run()
    most = full.requests_per_s
    search, best = RateSearch(most / 2, MAX_RUNS), None
    while search.rate is not None:
        rate = search.rate
        run = (
            carried(engine, workload, objectives, rate, seed=seed, on_run=on_run)
            if rate <= 1.1 * most
            else None
        )
        best = run or best
        search.record(run is not None)
        if search.rate is not None and search.rate < most / 1000:
            break
    return Capacity(rate=search.best, run=best, alone=alone)


def most_sessions(
    engine: SimulatedEngine,
    workload: SessionWorkload,
    objectives: LatencyObjectives,
    *,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Capacity:
    """Double the number of concurrent sessions while the objectives hold and turns per second grow
    by `GROWS`. A session has no arrival rate, because it waits for its answers."""

    def run_of(users: int) -> tuple[float, Simulation]:
        traffic = workload.of_sessions(ClosedLoop(concurrency=users), users, seed=seed)
        on_run()
        run = simulate(engine, traffic, objectives=objectives.limits)
        return turns_per_s(traffic, run), run

    rate, alone = run_of(1)
    best = alone
    if not objectives.met_by(alone):
        return Capacity(rate=None, run=None, alone=alone)
    users = 2
    while users <= min(engine.scheduling.max_num_seqs, workload.most_sessions):
        found, run = run_of(users)
        if not objectives.met_by(run) or found < GROWS * rate:
            break
        rate, best, users = found, run, 2 * users
    return Capacity(rate=rate, run=best, alone=alone)


def turns_per_s(traffic: Traffic, run: Simulation) -> float:
    """Turns per second of all sessions together while all of them run. (Over the whole run the
    longest session would determine it.)"""
    assert traffic.turns is not None
    spans: dict[int, list[RequestTiming]] = {}
    for turn, record in zip(traffic.turns, run.records, strict=True):
        if record.ok:
            spans.setdefault(turn.session, []).append(record)
    return sum(
        len(done) / (max(r.last_token or 0.0 for r in done) - min(r.sent for r in done))
        for done in spans.values()
    )


def carried(
    engine: SimulatedEngine,
    workload: Workload,
    objectives: LatencyObjectives,
    rate: float,
    *,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Simulation | None:
    """Simulates `rate` and returns the run, or None if the objectives fail or the queue grows."""
    count = NUM_REQUESTS
    while True:
        run = simulate(
            engine, workload.at_rate(rate, count, seed=seed), objectives=objectives.limits
        )
        on_run()
        if not objectives.met_by(run) or not keeps_up(run, rate):
            return None
        enough = math.ceil(
            rate * ANSWERS * (run.summary.e2e_s.mean if run.summary.e2e_s is not None else 0.0)
        )
        if count >= min(MAX_REQUESTS, enough):
            return run
        count = min(MAX_REQUESTS, 2 * enough)


def with_limits(engine: SimulatedEngine, **limits: Any) -> SimulatedEngine:
    """Returns a copy of the engine with these scheduling limits changed."""
    return dataclasses.replace(engine, scheduling=dataclasses.replace(engine.scheduling, **limits))
