"""The simulated fleet: nothing is lost, equal settings give equal results, hits near the bound, and
no replica is taken out or started for noise."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from slipstream.bench.load import Poisson
from slipstream.cli.main import main
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.fleet.config import PoolSpec, Routing, ScalingObjectives, check, pools
from slipstream.fleet.gateway.guard import LARGE, MIN_SEEN, ReplicaGuard
from slipstream.fleet.scaling import capacity
from slipstream.fleet.scaling.autoscaler import Autoscaler, FleetObservation, ScalingLimits
from slipstream.fleet.scaling.capacity import FleetCapacity
from slipstream.fleet.simulation import study
from slipstream.fleet.simulation.report import most_reversals
from slipstream.fleet.simulation.run import FleetSimulation
from slipstream.fleet.simulation.study import FleetLoad, simulate_fleet
from slipstream.fleet.simulation.traffic import EndlessCache, fleet_traffic
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import SimulatedEngine, simulate
from slipstream.simulate.traffic import TrafficRequest, Workload, parse_workload
from slipstream.spec.description import read_spec
from tests.costs.specs import CONFIGS

MODEL = str(CONFIGS / "llama-3.2-1b")
ENGINE = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 32768}


def fleet(replicas: object = 4, **more):
    version = {"name": "v1", "model": MODEL, "replicas": replicas, "engine": ENGINE}
    model = {"versions": [version], **more.pop("model", {})}
    return check({"models": {"chat": model}, "objectives": {"ttft_s": 2.0, "itl_s": 0.1}, **more})


def engine_and_pool() -> tuple[SimulatedEngine, PoolSpec]:
    (spec,) = pools(fleet())
    engine = plan_engine(spec.args, read_spec(Path(MODEL)), find_device("h200")).simulated
    return engine, spec


def conversations(number: int = 40, turns: int = 6) -> Workload:
    """Turns of conversations that each begin with all of the turn before. The first block is of
    all. A turn comes 20 s after the one before."""
    requests = []
    for turn in range(turns):
        for who in range(number):
            blocks = (0, *(1 + 1000 * who + i for i in range(4 * (turn + 1))))
            arrival = turn * 20.0 + who * 20.0 / number
            requests.append(TrafficRequest(arrival, 512 * len(blocks) + 100, 50, blocks))
    return Workload(name="conversations", requests=tuple(requests), recorded=True)


BOUND = sum(1 + 4 * turn for turn in range(1, 6)) * 512 + 512
"""Tokens of a conversation of six turns that a cache without end has, the first block included."""


def run(workload, rate, number, *, replicas=4, copies=None, seed=0, gateways=1, **router):
    engine, spec = engine_and_pool()
    traffic = fleet_traffic(workload, [rate], number, copies=copies, seed=seed)
    simulation = FleetSimulation(
        engine,
        traffic,
        spec,
        Routing(**router),
        num_replicas=replicas,
        num_gateways=gateways,
        objectives=ScalingObjectives(ttft_s=2.0),
        seed=seed,
    )
    return simulation.run()


def without_times(found):
    return dataclasses.replace(found, wall_s=0.0, processor_s=0.0, gateway={}, gateway_busy=0.0)


def test_no_request_is_lost_and_equal_seeds_give_equal_results():
    first, second = (run(conversations(), 12.0, 240, gateways=2) for _ in range(2))
    assert without_times(first) == without_times(second)
    assert first.finished == first.requests == 240
    assert first.output_tokens == 240 * 50
    assert without_times(run(conversations(), 12.0, 240, gateways=2, seed=1)) != without_times(
        first
    )


def test_the_bound_is_what_a_cache_without_end_has():
    traffic = fleet_traffic(conversations(), [12.0], 240)
    traffic = dataclasses.replace(traffic, rows=np.arange(240))  # no copy begins in its middle
    endless = EndlessCache(traffic)
    assert (
        sum(map(endless.take, range(240))) == 40 * BOUND - 512
    )  # nobody had the first block first


def test_router_hits_within_five_points_of_the_bound_and_round_robin_does_not():
    load = (conversations(), 12.0, 2400)
    found = run(*load, copies=10, replicas=3)  # turns come around every 400 requests
    assert found.hit_share_bound > 0.6
    assert found.hit_share > found.hit_share_bound - 0.05
    assert found.hit_share_predicted == pytest.approx(found.hit_share, abs=0.02)
    in_turn = run(*load, copies=10, replicas=3, policy="round_robin")
    assert in_turn.hit_share < found.hit_share_bound - 0.15
    assert in_turn.hit_share_bound == found.hit_share_bound


def test_copies_have_prefixes_of_their_own_but_for_the_common_one():
    traffic = fleet_traffic(conversations(), [24.0], 480, copies=2)
    by_row: dict[int, list[list[bytes]]] = {}
    for i in range(len(traffic)):
        by_row.setdefault(int(traffic.rows[i]), []).append(traffic.keys(i))
    for one, other in by_row.values():
        assert one[0] == other[0]
        assert not set(one[1:]) & set(other[1:])


def test_rates_hold_one_after_the_other():
    traffic = fleet_traffic(parse_workload("fixed:100/10"), [10.0, 30.0], 4000)
    assert traffic.duration_s == pytest.approx(200.0)
    first = int((traffic.times < 100.0).sum())
    assert first == pytest.approx(1000, abs=120)


def test_coarse_replica_is_near_the_step_by_step_simulator():
    """Throughput and latencies under requests of many lengths that arrive at random."""
    engine, spec = engine_and_pool()
    workload = parse_workload("uniform:200-6000/20-400", seed=3)
    traffic = fleet_traffic(workload, [8.0], 400)
    found = FleetSimulation(engine, traffic, spec, Routing(), num_replicas=1).run()
    requests = tuple(
        workload.requests[row]._replace(arrival=float(at))
        for row, at in zip(traffic.rows, traffic.times, strict=True)
    )
    exact = simulate(engine, dataclasses.replace(workload.traffic(Poisson(rate=8.0), 1), requests=requests))  # fmt: skip
    assert found.simulated_s == pytest.approx(exact.summary.wall_s, rel=0.02)
    assert found.ttft_s.p50 == pytest.approx(exact.summary.ttft_s.p50, rel=0.15)
    assert found.ttft_s.p99 == pytest.approx(exact.summary.ttft_s.p99, rel=0.25)
    assert found.tpot_s.p50 == pytest.approx(exact.summary.tpot_s.p50, rel=0.1)


def test_a_long_prompt_takes_no_replica_out():
    """One in a hundred is of 30,000 tokens: late everywhere, and no replica is slow."""
    lengths = [(200, 20)] * 99 + [(30_000, 20)]
    workload = Workload(name="tail", requests=tuple(TrafficRequest(0.0, *x) for x in lengths))
    found = run(workload, 100.0, 3000, replicas=3)
    assert found.finished == 3000
    assert found.taken_out == 0


def test_requests_that_fit_no_replica_are_refused():
    workload = Workload(name="long", requests=(TrafficRequest(0.0, 32_700, 100),))
    found = run(workload, 10.0, 5)
    assert (found.finished, found.refused) == (0, 5)


def decisions(rate: float, start: int, hours: float = 1.0, noise: float = 1.0):
    """Numbers wanted under a constant rate, with arrivals of `noise` times Poisson's variance."""
    table = FleetCapacity(((1, 8.0), (16, 160.0)))
    limits = ScalingLimits(max_replicas=3000)
    policy = Autoscaler(table.replicas_for, limits=limits, cold_start_s=60.0)
    rng, here, found = np.random.default_rng(0), start, []
    for i in range(int(hours * 360)):
        count = round(rng.normal(rate * 10, math.sqrt(rate * 10 * noise)))
        here = policy.decide(
            FleetObservation(at=10.0 * i, interval_s=10.0, num_arrivals=count, num_ready=here)
        )
        found.append((10.0 * i, here))
    return found


@pytest.mark.parametrize("noise", [1.0, 5.0, 50.0])
def test_autoscaler_of_a_thousand_replicas_has_no_reversals_under_constant_load(noise):
    found = decisions(10_000.0, 1000, noise=noise)
    assert most_reversals(found, math.inf) == 0
    assert all(990 <= number <= 1030 for _, number in found)


def test_autoscaler_of_a_thousand_replicas_follows_a_load_that_halves():
    assert decisions(5_000.0, 1000)[-1][1] == pytest.approx(500, rel=0.03)


def test_reversals_are_counted_within_a_window():
    ups = [(10.0 * i, 5 + i % 2) for i in range(10)]
    assert most_reversals(ups, 1000.0) == 8
    assert most_reversals(ups, 20.0) == 3
    assert most_reversals([(10.0 * i, i) for i in range(10)], 1000.0) == 0


@pytest.mark.parametrize(("given", "taken"), [(None, "a100"), ("h200", "h200")])
def test_without_a_gpu_the_one_of_the_autoscaler_is_simulated(monkeypatch, given, taken):
    seen = []

    def engine(spec, gpu):
        seen.append(gpu)
        raise ConfigError("enough")

    monkeypatch.setattr(study, "_engine", engine)
    file = fleet({"min": 1, "max": 2}, model={"autoscale": {"device": "a100"}})
    with pytest.raises(ConfigError, match="enough"):
        simulate_fleet(file, FleetLoad(rates=(1.0,), num_requests=10, gpu=given))
    assert seen == [taken]


def test_scaled_fleet_grows_with_the_load_and_loses_nothing(monkeypatch):
    known = FleetCapacity(((1, 30.0),))
    monkeypatch.setattr(capacity, "fleet_capacity", lambda *_, **__: known)
    file = fleet({"min": 1, "max": 12}, model={"autoscale": {"interval_s": 1.0, "hold_s": 5.0}})
    load = FleetLoad(
        rates=(20.0, 200.0),
        num_requests=3000,
        workload="fixed:4000/20",
        gpu="h200",
        cold_start_s=3.0,
    )
    found = simulate_fleet(file, load).figures
    assert found.finished == 3000
    assert found.most_replicas > 2
    assert found.scaler.ups >= 1
    assert found.scaler.most_reversals <= 1


def test_guard_of_a_large_fleet_has_the_medians_of_all():
    """Medians are up to `MEDIANS_S` old, and a replica that is slow is still found."""
    guard = ReplicaGuard(4.0)
    for i in range(LARGE + 8):
        guard.add(f"r{i}")
        for _ in range(MIN_SEEN):
            guard.answered(f"r{i}", 0.1, 0.1, 0.0)
    now = 0.0
    while not guard.out(now) and now < 60.0:
        guard.answered("r0", 2.0, 0.1, now := now + 2.0)
    assert guard.out(now) == {"r0"}
    assert guard.next_change(now) is not None


def test_simulate_prints_figures_and_names_what_it_can_not_do(tmp_path, capsys):
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps({"models": {"chat": {"versions": [
        {"name": "v1", "model": MODEL, "replicas": 2, "engine": ENGINE}]}}}))  # fmt: skip
    words = ["fleet", "simulate", str(path), "--gpu", "h200", "--rate", "20"]
    small = ["--requests", "200", "--workload", "fixed:500/10"]
    assert main([*words, *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 200
    assert main([*words, *small]) == 0
    shown = capsys.readouterr().out
    assert "prefix hits" in shown
    assert "times; all replicas are alike, and none is slow" in shown
    assert main([*words, *small, "--cold-start", "3"]) != 0
    assert "autoscale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"copies": 1}, "copies"),
        ({"model": "other"}, "model"),
        ({"rates": (0.0,)}, "rate"),
        ({"gateways": 0}, "gateways"),
    ],
)
def test_load_that_can_not_be_is_refused_by_name(change, field):
    load = FleetLoad(**{"rates": (10.0,), "gpu": "h200", "num_requests": 10, **change})
    with pytest.raises(ConfigError) as refused:
        simulate_fleet(fleet(), load)
    assert refused.value.field == field


def test_a_replica_of_stages_is_refused_by_name():
    replica = {"name": "v1", "model": MODEL, "engine": {**ENGINE, "pipeline_parallel_size": 2}}
    staged = check({"models": {"chat": {"versions": [replica]}}})
    with pytest.raises(ConfigError) as refused:
        simulate_fleet(staged, FleetLoad(rates=(10.0,), gpu="h200", num_requests=10))
    assert refused.value.field == "pipeline_parallel_size"
