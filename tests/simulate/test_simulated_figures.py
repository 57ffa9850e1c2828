"""Whole results of simulations of small loads, where a step takes 10 ms and 1 ms a token. They are lines of simulated.txt."""

import dataclasses
from pathlib import Path

import pytest

from slipstream.bench.load import Burst, ClosedLoop, Gamma, Poisson
from slipstream.costs.step_cost import HostCost
from slipstream.simulate.capacity import LatencyObjectives, find_capacity
from slipstream.simulate.simulator import Simulation, simulate
from slipstream.simulate.traffic import SessionWorkload, of_lengths
from tests.simulate.test_drafts import drafting
from tests.simulate.test_sessions import LOAD
from tests.simulate.test_simulator import Linear, engine, traffic

LINES = (Path(__file__).parent / "simulated.txt").read_text().splitlines()
MIXED = [(5 + 7 * i % 40, 1 + 5 * i % 19) for i in range(60)]
HOST = HostCost(step_s=0.004, request_s=0.02, ahead_s=0.003)
SESSIONS = SessionWorkload.agents(LOAD, 0)
SUMMARY = (
    "num_requests",
    "num_failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "wall_s",
    "goodput",
)
LIMITS = {"ttft_s": 0.2, "tpot_s": 0.03}


def run(load, made=None, lengths=MIXED, **how):
    return simulate(made or engine(), of_lengths("mixed", lengths).traffic(load, 60), **how)


def sessions(load, **how):
    large = {"max_model_len": 450, "num_blocks": 4000, "max_num_batched_tokens": 512}
    return simulate(engine(**large, **how), SESSIONS.traffic(load, 40))


def capacity(workload, **limits):
    large = {"max_model_len": 450, "num_blocks": 4000, "max_num_batched_tokens": 512}
    return find_capacity(
        engine(**large), workload, LatencyObjectives(limits=limits, attainment=0.9)
    )


CASES = {
    "burst": lambda: run(Burst()),
    "burst, exact": lambda: run(Burst(), exact=True),
    "poisson, objectives": lambda: run(Poisson(rate=20.0), objectives=LIMITS),
    "gamma": lambda: run(Gamma(rate=20.0, cv=3.0)),
    "users": lambda: run(ClosedLoop(concurrency=5)),
    "few sequences": lambda: run(Burst(), engine(max_num_seqs=3)),
    "few tokens": lambda: run(Burst(), engine(max_num_batched_tokens=8, max_num_seqs=8)),
    "few blocks": lambda: run(Burst(), engine(num_blocks=17)),
    "host": lambda: run(Poisson(rate=20.0), engine(Linear(HOST))),
    "host ahead": lambda: run(Poisson(rate=20.0), engine(Linear(HOST), run_ahead=8)),
    "a device ahead": lambda: run(Poisson(rate=20.0), engine(Linear(HOST), run_ahead=None)),
    "too long": lambda: run(Burst(), lengths=[(70, 4), (60, 9), (8, 8)]),
    "two replicas": lambda: run(Poisson(rate=40.0), num_replicas=2),
    "two replicas, least loaded": lambda: run(
        Poisson(rate=40.0), num_replicas=2, router="least-loaded"
    ),
    "drafts": lambda: simulate(
        drafting((0.8, 0.5, 0.3)), traffic((0, 10, 20), (0.1, 9, 20), users=2)
    ),
    "sessions": lambda: sessions(ClosedLoop(concurrency=3)),
    "sessions at random": lambda: sessions(Poisson(rate=2.0), max_num_seqs=2),
    "capacity": lambda: capacity(of_lengths("mixed", MIXED), **LIMITS),
    "capacity without objectives": lambda: capacity(of_lengths("mixed", MIXED)),
    "capacity of sessions": lambda: capacity(SESSIONS, tpot_s=0.018),
}


def shown(found):
    """`name number` of each figure that is not 0 or None, numbers to five digits."""
    rate = {} if isinstance(found, Simulation) else {"rate": found.rate}
    found = found if isinstance(found, Simulation) else found.run
    figures = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)[3:12]}
    summary, agents = found.summary, found.agents
    figures |= {name: getattr(summary, name) for name in SUMMARY}
    for name in ("ttft_s", "tpot_s", "worst_gap_s"):
        if (values := getattr(summary, name)) is not None:
            figures |= {f"{name}_p50": values.p50, f"{name}_p99": values.p99}
    if agents is not None:
        figures |= {"complete": agents.num_complete, "turns_per_minute": agents.turns_per_minute}
    return ", ".join(f"{name} {value:.5g}" for name, value in (rate | figures).items() if value)


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_gives_the_figures_of_the_table(name):
    (line,) = (line for line in LINES if line.startswith(f"{name}: "))
    assert f"{name}: {shown(CASES[name]())}" == line
