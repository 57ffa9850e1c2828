"""Forecast, policy, other rules, and the replay: it is the step-level simulator, with replicas that come and go."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bench.load import Poisson
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.fleet.scaling.autoscaler import (
    LEARNING,
    Autoscaler,
    FleetObservation,
    ScalingLimits,
)
from slipstream.fleet.scaling.baselines import Enova, Fixed, Planned, RayServe
from slipstream.fleet.scaling.capacity import FleetCapacity, fleet_capacity
from slipstream.fleet.scaling.forecast import Forecast
from slipstream.fleet.scaling.replay import ColdStart, FleetReplay
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import TrafficRequest, parse_workload
from slipstream.spec.description import read_spec
from tests.costs.specs import CONFIGS

LIMITS = {"ttft_s": 2.0, "tpot_s": 0.1}


def seen(at, arrivals=0, **more):
    return FleetObservation(at=at, interval_s=10.0, num_arrivals=arrivals, **more)


def poisson(rng, mean):
    """Knuth's."""
    count, product, least = -1, 1.0, math.exp(-mean)
    while product > least:
        count, product = count + 1, product * rng.random()
    return count


def test_forecast_is_better_than_naive_and_its_bound_holds():
    rng, forecast = random.Random(0), Forecast(interval_s=10.0, horizon_s=60.0)
    rates = [5 + 3 * math.sin(i / 60) for i in range(1000)]
    counts = [poisson(rng, 10 * r) / 10 for r in rates]
    ours, naive, held = [], [], []
    for i, count in enumerate(counts[:-6]):
        forecast.learn(count)
        came = statistics.fmean(counts[i + 4 : i + 7])
        if i > 100:
            ours.append(abs(forecast.mean() - came))
            naive.append(abs(count - came))
            held.append(came <= forecast.upper(0.9))
    assert statistics.fmean(ours) < 0.85 * statistics.fmean(naive)
    assert 0.84 < statistics.fmean(held) < 0.98


def test_forecast_knows_yesterday():
    """A step that comes at the same time each day is foreseen."""
    forecast = Forecast(interval_s=600.0, horizon_s=1200.0)
    day = [20.0 if i >= 72 else 2.0 for i in range(144)]
    for rate in day * 4 + day[:71]:
        forecast.learn(rate)
    assert forecast.mean() > 10


def test_capacity_table():
    table = FleetCapacity(((1, 1.0), (2, 2.2), (4, 4.8)))
    assert [table.replicas_for(r) for r in (0.0, 0.5, 1.0, 1.1, 2.2, 3.0, 4.8, 9.6, 100.0)] == [
        0,
        1,
        1,
        2,
        2,
        3,
        4,
        8,
        84,
    ]
    assert table.rate(0) == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 300), st.integers(0, 20)),
        min_size=1,
        max_size=60,
    )
)
def test_the_policy_stays_within_its_limits(steps):
    policy = Autoscaler(
        lambda rate: math.ceil(rate), limits=ScalingLimits(min_replicas=2, max_replicas=9)
    )
    for i, (arrivals, waiting, ready) in enumerate(steps):
        assert (
            2 <= policy.decide(seen(10.0 * i, arrivals, num_waiting=waiting, num_ready=ready)) <= 9
        )


def test_to_zero_and_back():
    policy = Autoscaler(
        lambda rate: math.ceil(rate),
        limits=ScalingLimits(min_replicas=0, idle_s=120.0),
        hold_s=60.0,
    )
    wanted = [policy.decide(seen(10.0 * i, 10 if i < 30 else 0, num_ready=1)) for i in range(60)]
    assert wanted[29] >= 1
    assert wanted[-1] == 0
    assert policy.decide(seen(600.0, 1, num_at_gateway=1)) >= 1


def test_none_before_the_first_request():
    policy = Autoscaler(
        lambda rate: math.ceil(rate), limits=ScalingLimits(min_replicas=0, idle_s=120.0)
    )
    assert [policy.decide(seen(10.0 * i, 0)) for i in range(3)] == [0, 0, 0]
    assert policy.decide(seen(30.0, 0, num_at_gateway=1)) == 1
    running = Autoscaler(
        lambda rate: math.ceil(rate), limits=ScalingLimits(min_replicas=0, idle_s=120.0)
    )
    assert [running.decide(seen(60.0 * i, 0, num_ready=1)) for i in range(3)] == [
        1,
        1,
        0,
    ]  # those that are there wait as long


def test_fewer_only_after_the_hold():
    policy = Autoscaler(
        lambda rate: math.ceil(rate), limits=ScalingLimits(), hold_s=100.0, cold_start_s=10.0
    )
    wanted = [policy.decide(seen(10.0 * i, 50 if i < 40 else 10, num_ready=5)) for i in range(80)]
    most = wanted[39]
    fell = next(i for i in range(40, 80) if wanted[i] < most)
    assert fell >= 48
    assert wanted[-1] < most


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_dip_that_may_be_chance_ends_no_replica(seed):
    """A minute and a half of a little less than three replicas carry; then a load that clearly needs fewer."""
    rng, ready, wanted = random.Random(seed), 3, []
    policy = Autoscaler(
        lambda rate: math.ceil(rate / 2), limits=ScalingLimits(), cold_start_s=40.0, hold_s=30.0
    )
    for i in range(220):
        rate = 3.6 if 120 <= i < 129 else 5.0 if i < 170 else 1.2
        wanted.append(policy.decide(seen(10.0 * i, poisson(rng, 10 * rate), num_ready=ready)))
        ready = wanted[-1]
    assert min(wanted[30:170]) == 3
    assert wanted[-1] == 1


@pytest.mark.parametrize(
    "shares", [{"share": 0.0}, {"share": 0.7, "keep_share": 0.6}, {"keep_share": 1.0}]
)
def test_shares_that_make_no_sense(shares):
    with pytest.raises(ConfigError, match="share"):
        Autoscaler(math.ceil, limits=ScalingLimits(), **shares)


@pytest.mark.parametrize(
    "limits", [{"min_replicas": -1}, {"min_replicas": 5, "max_replicas": 4}, {"idle_s": 0.0}]
)
def test_limits_that_make_no_sense(limits):
    with pytest.raises(ConfigError):
        ScalingLimits(**limits)


def test_enovas_rule():
    rule = Enova(ScalingLimits(), max_num_seqs=100)
    busy = [
        rule.decide(seen(10.0 * i, 20, num_ready=2, num_waiting=60, num_finished=10))
        for i in range(1, 20)
    ]
    assert busy[:16] == [2] * 16  # three whole minutes first
    assert max(busy) == 4  # twice as many come as are answered
    rule = Enova(ScalingLimits(), max_num_seqs=100)
    idle = [
        rule.decide(seen(10.0 * i, 1, num_ready=4, num_running=1, kv_cache_usage=0.02))
        for i in range(1, 30)
    ]
    assert min(idle) == 2


def test_ray_serves_rule():
    rule = RayServe(ScalingLimits(max_replicas=16))
    wanted = [rule.decide(seen(10.0 * i, num_ready=1, num_running=8)) for i in range(10)]
    assert wanted[:3] == [1, 1, 1]
    assert wanted[-1] == 4  # of two each
    wanted = [rule.decide(seen(100.0 + 10 * i, num_ready=4)) for i in range(70)]
    assert wanted[55] == 4  # ten minutes
    assert wanted[-1] == 1


@pytest.fixture(scope="module")
def engine():
    folder = CONFIGS / "llama-3-8b"
    settings_of = EngineArgs(model=str(folder), quantization="fp8")
    return plan_engine(settings_of, read_spec(folder), find_device("l4")).simulated


@pytest.fixture(scope="module")
def requests():
    return parse_workload("uniform:50-400/10-60").traffic(Poisson(rate=4.0), 300).requests


def replay(engine, requests, policy, **more):
    how = {"objectives": LIMITS, "cold_start": ColdStart(mean_s=20.0), "initial": 1, **more}
    return FleetReplay(engine, requests, policy, **how).run()


def test_a_fleet_that_does_not_scale_is_the_planners_simulator(engine, requests):
    found = replay(engine, requests, Fixed(3), initial=3)
    workload = parse_workload("uniform:50-400/10-60")
    assert (
        found.records
        == simulate(
            engine, workload.traffic(Poisson(rate=4.0), 300), num_replicas=3, router="least-loaded"
        ).records
    )
    assert found.replica_hours == pytest.approx(
        3 * max(r.last_token for r in found.records) / 3600, rel=0.01
    )


def test_scale_to_zero_queues_at_the_gateway(engine):
    requests = [TrafficRequest(t, 100, 10) for t in (1.0, 2.0, 900.0)]
    policy = Autoscaler(
        lambda rate: math.ceil(rate),
        limits=ScalingLimits(min_replicas=0, idle_s=100.0),
        cold_start_s=20.0,
    )
    found = replay(
        engine, requests, policy, initial=0, cold_start=ColdStart(mean_s=20.0, spread=0.0)
    )
    assert found.num_started == 2  # and none in between
    assert found.most_at_gateway == 2
    assert all(r.error is None for r in found.records)
    assert all(20.0 < r.ttft_s < 35.0 for r in found.records)
    assert found.replica_hours < 400 / 3600


def test_a_plan_is_there_in_time_and_drains(engine, requests):
    plan = Planned([(0.0, 1), (30.0, 4), (60.0, 2)], ahead_s=30.0)
    found = replay(engine, requests, plan, cold_start=ColdStart(mean_s=20.0, spread=0.0))
    by_time = {at: ready for at, ready, _, _ in found.timeline}
    assert (by_time[30.0], by_time[80.0]) == (4, 2)
    assert all(r.error is None and r.output_tokens for r in found.records)
    again = replay(engine, requests, plan, cold_start=ColdStart(mean_s=20.0, spread=0.0))
    assert replace(again, seconds=0.0) == replace(found, seconds=0.0)


@pytest.mark.slow
def test_capacity_grows_with_the_fleet(engine):
    workload = parse_workload("uniform:50-400/10-60")
    table = fleet_capacity(
        engine, workload, LatencyObjectives(limits=LIMITS, attainment=0.99), sizes=(1, 2, 4)
    )
    each = [rate / number for number, rate in table.rates]
    assert each == sorted(each)
    with pytest.raises(ConfigError, match="request alone"):
        fleet_capacity(
            engine, workload, LatencyObjectives(limits={"ttft_s": 1e-4}, attainment=0.99)
        )


def grown(policy, seconds, **more):
    return [policy.decide(seen(10.0 * i, 10, num_ready=1, **more)) for i in range(seconds)]


def test_queue_at_the_gateway_wants_more_replicas_than_none():
    made = [
        Autoscaler(lambda rate: math.ceil(rate), limits=ScalingLimits(max_replicas=50))
        for _ in range(3)
    ]
    calm, gateway, replicas = (
        grown(policy, 30, **more)[-1]
        for policy, more in zip(
            made, ({}, {"num_at_gateway": 600}, {"num_waiting": 600}), strict=True
        )
    )
    assert gateway >= calm + 8  # 600 requests within a cold start of 60 s are 10 a second more
    assert gateway == replicas


def test_no_replica_goes_before_enough_was_learned():
    policy = Autoscaler(
        lambda rate: max(1, math.ceil(rate)), limits=ScalingLimits(), hold_s=10.0, cold_start_s=10.0
    )
    wanted = [policy.decide(seen(10.0 * i, 1, num_ready=5)) for i in range(LEARNING + 10)]
    assert wanted[:LEARNING] == [5] * LEARNING
    assert wanted[-1] < 5
