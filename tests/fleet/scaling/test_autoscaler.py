"""Forecast, policy, and the replay: it is the step-level simulator, with replicas that come and go."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bench.load import Poisson
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.fleet.scaling import capacity
from slipstream.fleet.scaling.autoscaler import (
    LEARNING,
    MAX_SHARE,
    Autoscaler,
    FleetObservation,
    ScalingLimits,
)
from slipstream.fleet.scaling.capacity import FleetCapacity, RecentCapacity, fleet_capacity
from slipstream.fleet.scaling.forecast import SPEEDS, Forecast, _Holt
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import TrafficRequest, parse_workload
from slipstream.spec.description import read_spec
from tests.costs.specs import CONFIGS
from tests.fleet.replay import ColdStart, FleetReplay

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


def test_a_capacity_table_gives_replicas_for_a_rate():
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
    assert table.rate(3) == pytest.approx(3 * (1.1 + 1.2) / 2)  # between those of 2 and of 4


def test_capacity_is_simulated_again_after_twice_the_time(monkeypatch):
    made = []
    monkeypatch.setattr(capacity, "fleet_capacity", lambda *a, **k: made.append(a) or len(made))
    recent = RecentCapacity(None, None, None)
    for _ in range(RecentCapacity.FEWEST):
        recent.learn(5, 5)
    due = [at for at in range(0, 3000, 10) if recent.is_due(at) and recent.refresh(at) is None]
    assert due == [60, 120, 240, 480, 960, 1560, 2160, 2760]
    assert recent.now == len(made) == 9


def test_larger_fleets_are_simulated_with_more_requests_and_carry_as_much_each(monkeypatch):
    asked = []
    monkeypatch.setattr(capacity, "find_capacity", lambda *_: SimpleNamespace(rate=2.0))
    monkeypatch.setattr(
        capacity,
        "simulate",
        lambda engine, traffic, num_replicas, **_: asked.append(
            (num_replicas, len(traffic.requests))
        ),
    )
    missed = SimpleNamespace(limits={}, met_by=lambda run: False)
    workload = parse_workload("uniform:50-400/10-60")
    table = fleet_capacity(None, workload, missed, sizes=(1, 2, 16))
    assert asked == [(2, 2 * capacity.REQUESTS), (16, capacity.MAX_REQUESTS)]
    assert table.rates == ((1, 2.0), (2, 4.0), (16, 32.0))


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
    "limits", [{"min_replicas": -1}, {"min_replicas": 5, "max_replicas": 4}, {"idle_s": 0.0}]
)
def test_limits_that_make_no_sense(limits):
    with pytest.raises(ConfigError):
        ScalingLimits(**limits)


class Fixed:
    def __init__(self, number):
        self.number, self.name = number, f"fixed {number}"

    def decide(self, seen):
        return self.number


class Planned:
    """A forecast by plan: (begin, number of replicas) in order of time. A larger number is wanted
    `ahead_s` before its begin, so that replicas are there in time; a smaller one at its begin and
    not before."""

    name = "oracle"

    def __init__(self, plan, *, ahead_s):
        self._times, self._numbers = [at for at, _ in plan], [number for _, number in plan]
        self._ahead_s = ahead_s

    def decide(self, seen):
        first = max(0, bisect_right(self._times, seen.at) - 1)
        last = bisect_right(self._times, seen.at + self._ahead_s)
        return max(self._numbers[first : max(last, first + 1)])


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


# --- The policy's terms, one at a time ----------------------------------------------------------


class Asked(Autoscaler):
    """Keeps the rates that replicas were asked for: (the fewest for, the most for) of each decision."""

    def __init__(self, **settings):
        self.rates = []
        settings = {"limits": ScalingLimits(max_replicas=99), **settings}
        super().__init__(lambda rate: self.rates.append(rate) or math.ceil(rate), **settings)

    def least_and_most(self):
        return self.rates[-2:]


@pytest.mark.parametrize(
    ("state", "late"),
    [
        ({}, 0.0),
        ({"num_at_gateway": 60}, 1.0),
        ({"num_at_gateway": 30, "num_waiting": 30}, 1.0),
        ({"num_running": 60}, 0.0),
        ({"num_at_gateway": 60, "num_ready": 3}, 0.95),  # one that waits on each is no queue
        ({"num_at_gateway": 60, "num_ready": 1, "num_starting": 2}, 0.95),
        ({"num_at_gateway": 3, "num_ready": 3}, 0.0),
    ],
)
def test_what_waits_is_to_be_answered_within_a_cold_start(state, late):
    calm, asked = Asked(cold_start_s=60.0), Asked(cold_start_s=60.0)
    calm.decide(seen(0.0, 100))
    asked.decide(seen(0.0, 100, **state))
    for usual, more in zip(calm.least_and_most(), asked.least_and_most(), strict=True):
        assert more == pytest.approx(usual + late)


def test_fewer_replicas_must_carry_a_higher_bound():
    policy = Asked()
    policy.decide(seen(0.0, 100))
    forecast = policy.forecast
    assert policy.least_and_most() == [forecast.upper(0.45), forecast.upper(0.65)]
    assert policy.least_and_most()[0] < policy.least_and_most()[1]


def bound_after(*met):
    """The share that the least number of replicas carries, after intervals of (finished, met)."""
    policy = Asked()
    for i, (finished, well) in enumerate(met):
        policy.decide(seen(10.0 * i, 100, num_finished=finished, num_met=well))
    least, _ = policy.least_and_most()
    return (
        next(n for n in range(450, 981) if policy.forecast.upper(n / 1000) >= least - 1e-9) / 1000
    )


def test_bound_rises_while_objectives_are_missed_and_sinks_slowly_after():
    assert bound_after((100, 99)) == pytest.approx(0.45)
    assert bound_after((100, 98)) == pytest.approx(0.47)
    assert bound_after((19, 0)) == pytest.approx(0.45)  # too few to say anything
    assert bound_after((10, 9), (10, 9)) == pytest.approx(0.47)
    assert bound_after(*[(100, 0)] * 2, *[(1000000, 1000000)] * 3) == pytest.approx(0.484)
    assert bound_after((100, 98), *[(1000000, 1000000)] * 9) == pytest.approx(0.452)
    # what is two minutes ago does not count
    assert bound_after((100, 98), *[(0, 0)] * 11) == pytest.approx(0.47 + 11 * 0.02)
    assert bound_after((100, 98), *[(0, 0)] * 12) == pytest.approx(0.47 + 11 * 0.02 - 0.002)


def test_no_bound_is_above_the_highest():
    policy = Asked()
    for i in range(40):
        policy.decide(seen(10.0 * i, 100, num_finished=100))
    least, most = policy.least_and_most()
    assert least == most == policy.forecast.upper(MAX_SHARE)


def test_measured_cold_start_moves_the_horizon_unless_it_is_about_the_same():
    policy = Asked(cold_start_s=50.0)
    assert policy.forecast.steps == 6  # the cold start, and the interval until the next decision
    for seconds, kept, steps in (
        (59.0, 50.0, 6),
        (41.0, 50.0, 6),
        (61.0, 61.0, 7),
        (30.0, 30.0, 4),
    ):
        policy.expect_cold_start(seconds)
        assert (policy.cold_start_s, policy.forecast.steps) == (kept, steps)


def test_decision_of_the_hold_ends_with_the_hold():
    policy = Autoscaler(
        lambda rate: 5 if len(calls) < 2 else 1, limits=ScalingLimits(), hold_s=30.0
    )
    calls = []
    wanted = []
    for i in range(5):
        wanted.append(policy.decide(seen(10.0 * i, 1)))
        calls += [i, i]
    assert wanted == [5, 5, 5, 1, 1]


@pytest.mark.parametrize(
    "state",
    [{"num_at_gateway": 1}, {"num_running": 1}, {"num_waiting": 1}, {"arrivals": 1}],
    ids=str,
)
def test_replica_with_requests_is_not_idle(state):
    limits = ScalingLimits(min_replicas=0, idle_s=20.0)
    policy = Autoscaler(lambda rate: 0, limits=limits, hold_s=10.0)
    assert [policy.decide(seen(10.0 * i, **state)) for i in range(6)] == [1] * 6
    idle = [policy.decide(seen(60.0 + 10.0 * i)) for i in range(3)]
    assert idle == [1, 0, 0]  # 20 s after the last request, at 50 s
    assert policy.decide(seen(90.0, 1)) == 1


def test_wanted_before_the_idle_end_is_forgotten():
    needed = [8]
    limits = ScalingLimits(min_replicas=0, idle_s=20.0)
    policy = Autoscaler(lambda rate: needed[0], limits=limits, hold_s=1000.0)
    assert policy.decide(seen(0.0, 80)) == 8
    assert policy.decide(seen(30.0)) == 0
    needed[0] = 2
    assert policy.decide(seen(40.0, num_at_gateway=1)) == 2


# --- The forecast's terms -----------------------------------------------------------------------


def of_rates(rates, *, interval_s=10.0, horizon_s=60.0):
    forecast = Forecast(interval_s=interval_s, horizon_s=horizon_s)
    for rate in rates:
        forecast.learn(rate)
    return forecast


def test_forecast_of_a_steady_rate_is_that_rate():
    forecast = of_rates([4.0] * 50)
    assert forecast.mean() == pytest.approx(4.0)
    assert forecast.upper(0.9) == pytest.approx(4.0)


def test_trend_is_damped():
    """The last slope, continued with less and less of it: Gardner and McKenzie's sum."""
    holt = _Holt(1.0, 1.0)
    holt.learn(0.0)
    holt.learn(1.0)
    assert holt.ahead(3) == pytest.approx(1.0 + 0.95 + 0.95**2 + 0.95**3)
    holt.learn(0.0)
    assert holt.ahead(9) == 0.0  # no rate is below 0
    holt = _Holt(0.5, 0.1)  # the level moves by a half, the trend by a tenth of that
    holt.learn(0.0)
    holt.learn(10.0)
    assert holt.ahead(1) == pytest.approx(5.0 + 0.95 * 0.5)


def test_method_that_was_off_the_least_forecasts():
    alternating = of_rates([0.0, 10.0] * 100, horizon_s=30.0)
    assert SPEEDS[alternating.best][0] < 0.2  # the naive one is always wrong
    rising = of_rates([float(i) for i in range(100)], horizon_s=20.0)
    assert SPEEDS[rising.best] == (1.0, 0.0) or SPEEDS[rising.best][1] > 0
    jumped = of_rates([1.0] * 100 + [50.0] * 100, horizon_s=20.0)
    assert jumped.mean() == pytest.approx(50.0, rel=0.05)


def test_bound_before_enough_errors_is_that_of_independent_users():
    forecast = of_rates([9.0] * 8)
    noise = 3.0 / math.sqrt(6 / 2 * 10.0)  # over half of the horizon's six intervals
    for share, deviations in ((0.5, 0.0), (0.841344746, 1.0), (0.158655254, -1.0)):
        assert forecast.upper(share) == pytest.approx(9.0 + deviations * noise)


def test_bound_after_is_a_quantile_of_how_far_forecasts_were_too_low():
    forecast = of_rates([4.0] * 8, horizon_s=10.0)
    forecast._short.extend(range(1, 20 - len(forecast._short)))
    errors = sorted(forecast._short)
    assert len(errors) == 19
    for share in (0.05, 0.5, 0.93, 0.999):
        place = min(math.ceil(20 * share), 19) - 1
        assert forecast.upper(share) == pytest.approx(4.0 + 2.0 * errors[place])


def test_errors_are_of_the_second_half_of_the_horizon_and_relative_to_its_noise():
    forecast = of_rates([4.0] * 4, horizon_s=40.0)
    for rate in (0.0, 0.0, 7.0, 9.0):
        forecast.learn(rate)
    # the forecast of 4.0 four intervals ago met a mean of 8.0 over the last two
    assert forecast._short[-1] == pytest.approx((8.0 - 4.0) / math.sqrt(4.0))


def test_another_horizon_forgets_errors_and_the_same_one_keeps_them():
    forecast = of_rates([1.0, 5.0] * 20)
    before = forecast.upper(0.9)
    forecast.look_ahead(61.0)
    assert forecast.upper(0.9) == before
    forecast.look_ahead(80.0)
    assert not forecast._short
    assert forecast.mean() == 0.0  # until the next count
    forecast.learn(3.0)
    assert forecast.steps == 8
    assert forecast.mean() > 0


def test_yesterday_is_moved_to_todays_level():
    """A day of 4 counts whose level is 20 higher than that of the day before."""
    forecast = of_rates([0.0, 8.0, 0.0, 0.0, 20.0], interval_s=21600.0, horizon_s=21600.0)
    assert forecast._as_yesterday() == pytest.approx(8.0 + forecast._levels[-1])
    assert of_rates([1.0] * 4, interval_s=21600.0, horizon_s=21600.0)._as_yesterday() == 0.0
