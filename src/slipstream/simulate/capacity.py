"""The load that an engine carries within objectives, found by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.bench.load import ClosedLoop
from slipstream.bench.rates import RateSearch
from slipstream.costs.metrics import RequestRecord
from slipstream.simulate.simulator import SimulatedEngine, Simulation, simulate
from slipstream.simulate.traffic import Workload

NUM_REQUESTS = 400
"""Of a simulation at least."""

MOST_REQUESTS = 6000
ANSWERS = 8
"""Requests come for as long as so many of their answers take, if `MOST_REQUESTS` allow it: a queue needs time to show."""

MOST_RUNS = 14
KEEPS_UP = 0.85
"""A load is carried if so large a share of the rate at which requests come is answered until the last is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjectives:
    """`limits`: seconds by name (ttft_s, tpot_s, e2e_s). Such a share of the requests has to meet all of them."""

    limits: dict[str, float]
    attainment: float

    def met_by(self, run: Simulation) -> bool:
        records = settled(run)
        return bool(records) and sum(
            r.meets(self.limits) for r in records
        ) >= self.attainment * len(records)

    def reached(self, run: Simulation) -> dict[str, float]:
        """Of each objective the value that such a share of the requests meets."""
        return {name: quantile(settled(run), name, self.attainment) for name in self.limits}


def settled(run: Simulation) -> tuple[RequestRecord, ...]:
    """Without the first quarter of the requests, which find an empty engine, and the last tenth, which run while no more
    arrive."""
    count = len(run.records)
    return run.records[count // 4 : count - count // 10]


def quantile(records: tuple[RequestRecord, ...], name: str, share: float) -> float:
    values = sorted(v for r in records if (v := getattr(r, name)) is not None)
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """`rate`: requests a second; None if the objectives do not even hold for a request alone. `run` is at that rate; `alone`
    with one request at a time."""

    rate: float | None
    run: Simulation | None
    alone: Simulation


def run_alone(engine: SimulatedEngine, workload: Workload, *, seed: int = 0) -> Simulation:
    """Requests one by one: the best latencies that there are."""
    return simulate(
        engine, workload.traffic(ClosedLoop(concurrency=1), min(100, NUM_REQUESTS), seed=seed)
    )


def saturated(
    engine: SimulatedEngine, workload: Workload, *, count: int = NUM_REQUESTS, seed: int = 0
) -> Simulation:
    """As many users as the engine takes at once."""
    users = engine.scheduling.max_num_seqs
    return simulate(
        engine, workload.traffic(ClosedLoop(concurrency=users), max(count, 3 * users), seed=seed)
    )


def keeps_up(run: Simulation, rate: float) -> bool:
    """The queue does not grow for ever: requests were answered about as fast as they came. What is left when the last comes is
    allowed the time of one answer."""
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
    """The highest rate of arrivals at which the objectives hold and requests do not pile up, to 5 %."""
    alone = run_alone(engine, workload, seed=seed)
    on_run()
    if not objectives.met_by(alone):
        return Capacity(rate=None, run=None, alone=alone)
    full = saturated(engine, workload, seed=seed).summary
    on_run()
    most = full.requests_per_s
    search, best = RateSearch(most / 2, MOST_RUNS), None
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


def carried(
    engine: SimulatedEngine,
    workload: Workload,
    objectives: LatencyObjectives,
    rate: float,
    *,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Simulation | None:
    """The run at `rate`, if the objectives hold and requests do not pile up."""
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
        if count >= min(MOST_REQUESTS, enough):
            return run
        count = min(MOST_REQUESTS, 2 * enough)


def with_limits(engine: SimulatedEngine, **limits: Any) -> SimulatedEngine:
    """With other limits of its steps."""
    return dataclasses.replace(engine, scheduling=dataclasses.replace(engine.scheduling, **limits))
