"""The autoscaler's loop: with a clock and members of the test's, and once with real replicas from none to one to none."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.config import Autoscale, ScalingObjectives, check, pools
from slipstream.fleet.gateway.router import ReplicaState, Router
from slipstream.fleet.replicas.ray_replicas import RayReplicas
from slipstream.fleet.scaling import loop as scaling_module
from slipstream.fleet.scaling.capacity import FleetCapacity
from slipstream.fleet.scaling.loop import Scaling
from slipstream.fleet.scaling.room import Room, room_of
from slipstream.fleet.scaling.scaler import (
    Change,
    ColdStarts,
    PoolState,
    Scaler,
    Tally,
    _expected,
    make,
)
from slipstream.server.http.record import RequestRecord
from tests.fleet.running import ENGINE, fleet_of, running, version
from tests.fleet.stubs import stubbed
from tests.support.browser import Browser
from tests.support.waiting import PATIENCE_S

OBJECTIVES = ScalingObjectives(ttft_s=2.0, itl_s=0.1)
AUTOSCALE = {"objectives": {"ttft_s": 2.0, "itl_s": 0.1}}


def fleet_with(path, least, most, autoscale=AUTOSCALE, **more):
    one = version(path, replicas={"min": least, "max": most})
    return check(
        {
            "port": 0,
            "models": {"tiny": {"versions": [one], "autoscale": autoscale}},
            "drain_timeout_s": 20,
            **more,
        }
    )


class Capacity:
    """One request a second each."""

    def __init__(self):
        self.learnt = []

    def replicas_for(self, rate):
        return FleetCapacity(((1, 1.0), (2, 2.0))).replicas_for(rate)

    def learn(self, *lengths):
        self.learnt.append(lengths)

    def is_due(self, age):
        return False


def scaler_of(least, most, **settings):
    (spec,) = pools(fleet_with("x", least, most))
    return Scaler(spec, Autoscale(**{"cold_start_s": 20.0, **settings}), OBJECTIVES, Capacity())


class Clock:
    """Looks each second, at replicas that start at once."""

    def __init__(self, scaler, number):
        self.scaler, self.number, self.at, self.tally, self.changes = (
            scaler,
            number,
            0.0,
            Tally(),
            [],
        )

    def run(self, seconds, rate=0, **more):
        for _ in range(seconds):
            self.at += 1
            for _ in range(rate):
                self.tally.arrived()
            change = self.scaler.look(self.at, PoolState(num_ready=self.number, **more), self.tally)
            if change is not None:
                self.number = change.wanted
                self.scaler.made(change)
                self.changes.append(change)


def test_more_under_load_and_fewer_after():
    clock = Clock(scaler_of(1, 4), 1)
    clock.run(300, rate=3)
    assert clock.number >= 3
    assert clock.changes[0].wanted > 1
    assert "requests/s forecast" in clock.changes[0].why
    clock.run(600)
    assert clock.number == 1
    assert clock.changes[-1].why == "fewer were enough for 60 s"
    assert max(change.wanted for change in clock.changes) <= 4
    status = clock.scaler.status(PoolState(num_ready=1), clock.at)
    assert (status["ups"], status["downs"]) == (clock.scaler.num_up, clock.scaler.num_down)
    assert status["ups"] + status["downs"] == len(clock.changes)
    assert status["wanted"] == 1
    assert status["last"]["change"].endswith("fewer were enough for 60 s")
    again = Clock(scaler_of(1, 4), 1)
    again.run(300, rate=3)
    again.run(600)
    assert again.changes == clock.changes


def test_to_zero_and_back():
    clock = Clock(scaler_of(0, 2, idle_s=30.0), 1)
    clock.run(60)
    assert (clock.number, clock.changes[-1].why) == (0, "no request for 30 s")
    clock.run(3)
    assert clock.number == 0
    clock.tally.arrived()
    clock.run(1, num_at_gateway=1)
    assert (clock.number, clock.changes[-1].why) == (
        1,
        "a request waits at the gateway",
    )  # between two decisions
    clock.run(20)
    assert clock.number == 1
    clock.run(60)
    assert clock.number == 0


def test_one_that_starts_is_not_started_again():
    scaler = scaler_of(0, 2)
    for at in range(1, 9):
        assert scaler.look(float(at), PoolState(num_at_gateway=5, num_starting=1), Tally()) is None


def test_cold_starts_are_followed_unless_given():
    scaler = scaler_of(1, 2, cold_start_s=None)
    clock = Clock(scaler, 1)
    clock.run(50, rate=1, cold_start_s=31.0)
    assert scaler.policy.cold_start_s == 31.0
    assert scaler.policy.forecast.steps == 4
    clock.run(50, rate=1, cold_start_s=33.0)  # about the same: what was learnt stays
    assert scaler.policy.cold_start_s == 31.0
    given = scaler_of(1, 2)
    Clock(given, 1).run(50, cold_start_s=31.0)
    assert given.policy.cold_start_s == 20.0
    starts = ColdStarts()
    assert starts.median("p") is None
    for seconds in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        starts.add("p", seconds)
    assert starts.median("p") == 3.0


def record(ttft_s, tokens):
    return RequestRecord(ttft_s=ttft_s, num_prompt_tokens=7, num_output_tokens=tokens)


def test_what_meets_the_objectives():
    tally, learnt = Tally(), []
    tally.objectives, tally.learn = OBJECTIVES, lambda *lengths: learnt.append(lengths)
    for ttft_s, tokens, seconds, met in (
        (1.0, 11, 1.9, 1),
        (2.0, 11, 3.0, 1),  # just in time
        (2.1, 11, 2.2, 0),
        (1.0, 11, 2.05, 0),
        (1.0, 1, 9.0, 1),  # one token has no gaps
        (None, 11, 2.9, 1),
        (None, 11, 3.1, 0),
    ):
        tally.arrived()
        tally.ended(record(ttft_s, tokens), seconds, failed=False)
        assert tally.take() == (1, 1, met), (ttft_s, tokens, seconds)
    tally.ended(record(1.0, 11), 1.5, failed=True)
    assert tally.take() == (0, 1, 0)
    assert learnt == [(7, 11)] * 4 + [(7, 1)] + [(7, 11)] * 2


def test_a_change_that_can_not_be_made_now_is_made_later():
    orders, free = [], False

    def scale(spec, number):
        orders.append(number)
        return free

    waiting = SimpleNamespace(num_waiting=1, replicas={}, tally=Tally(), router=Router())
    members = SimpleNamespace(version=lambda model, name: waiting)
    scaling = Scaling(members, SimpleNamespace(), lambda spec: (0, 0), scale)
    scaler = scaler_of(0, 2)
    scaling.look(scaler, 1.0)
    assert (orders, scaler.last) == ([1], None)
    free = True
    scaling.look(scaler, 2.0)
    assert orders == [1, 1]
    assert scaler.num_up == 1


def test_decision_sees_what_came_since_the_last_one():
    """Requests before the first look do not count. A late look counts over the whole time since
    the one before."""
    scaler, tally, seen = scaler_of(1, 2, interval_s=10.0), Tally(), []
    scaler.policy.decide = lambda found: seen.append(found) or 1

    def look(at, arrivals):
        for _ in range(arrivals):
            tally.arrived()
        assert scaler.look(at, PoolState(num_ready=1), tally) is None

    for at, arrivals in ((5.0, 9), (14.9, 3), (15.0, 1), (44.0, 6), (53.9, 1), (54.0, 0)):
        look(at, arrivals)
    assert [(s.at, s.interval_s, s.num_arrivals) for s in seen] == [
        (15.0, 10.0, 4),
        (44.0, 29.0, 6),
        (54.0, 10.0, 1),
    ]


def test_first_request_wakes_as_many_as_the_fewest():
    for least, wanted in ((0, 1), (2, 2)):
        change = scaler_of(least, 4).look(1.0, PoolState(num_at_gateway=1), Tally())
        assert (change.before, change.wanted) == (0, wanted)


def test_lengths_are_learnt_of_answers_with_tokens():
    tally, learnt = Tally(), []
    tally.objectives, tally.learn = OBJECTIVES, lambda *lengths: learnt.append(lengths)
    for tokens in (0, 5):
        tally.ended(record(1.0, tokens), 1.2, failed=False)
    assert learnt == [(7, 5)]
    assert tally.take() == (0, 2, 2)


def test_expected_lengths_are_cut_to_half_the_context():
    requests = _expected(64).requests
    assert max(r.input_tokens for r in requests) == max(r.output_tokens for r in requests) == 32
    assert max(r.input_tokens for r in _expected(10**6).requests) > 32


class Shared:
    """Models a, b and c with up to two replicas each, in memory for two replicas. Replicas start at once, and end when told."""

    def __init__(self, **settings):
        data = {name: fleet_with("x", 0, 2, AUTOSCALE | settings) for name in "abc"}
        self.numbers, self.ending = dict.fromkeys(data, 0), dict.fromkeys(data, 0)
        self.versions = {
            name: SimpleNamespace(num_waiting=0, replicas={}, tally=Tally(), router=Router())
            for name in data
        }
        self.scalers = {}
        for name, fleet in data.items():
            (spec,) = pools(fleet)
            spec = dataclasses.replace(spec, model=name)
            settings = fleet.models["tiny"].autoscale
            self.scalers[name] = Scaler(spec, settings, OBJECTIVES, Capacity())
        members = SimpleNamespace(version=lambda model, _: self.versions[model])
        self.scaling = Scaling(
            members,
            SimpleNamespace(),
            lambda spec: (self.numbers[spec.model], 0),
            self.scale,
            lambda: {
                self.scalers[n].spec.key: self.numbers[n] + self.ending[n] for n in self.numbers
            },
        )
        self.scaling.scalers = {s.spec.key: s for s in self.scalers.values()}
        self.scaling.room = Room(250, {s.spec.key: 100 for s in self.scalers.values()})

    def scale(self, spec, number):
        self.ending[spec.model] += max(0, self.numbers[spec.model] - number)
        self.numbers[spec.model] = number
        return True

    def look(self, at, *asked, busy=()):
        """Models' names, each as often as it has replicas, after a look at all scalers. Requests wait at
        the gateway for `asked`, and the replicas of `busy` have some."""
        for name, version_ in self.versions.items():
            version_.num_waiting = asked.count(name)
            version_.router, version_.replicas = Router(), {}
            if name in busy:
                version_.router.add(ReplicaState(id=name, running=1, waiting=0))
                version_.replicas = {name: SimpleNamespace(id=name, heard=True, kv_cache_usage=0)}
        for scaler in self.scalers.values():
            self.scaling.look(scaler, at)
        return "".join(name * number for name, number in self.numbers.items())


def test_a_model_without_requests_makes_room_for_one_that_is_waited_for():
    shared = Shared()
    assert shared.look(1.0, "a") == "a"
    assert shared.look(2.0, "b", busy="a") == "ab"
    assert shared.look(3.0, busy="ab") == "ab"
    assert shared.look(3.5, busy="a") == "ab"
    # b was used longest ago, and its memory is free once its process has ended
    assert shared.look(4.0, "c") == "a"
    assert shared.look(4.1, "c") == "a"
    shared.ending["b"] = 0
    assert shared.look(4.2, "c") == "ac"
    assert "needs its memory" in shared.scalers["b"].last.why
    assert shared.scalers["a"].num_down == 0


def test_what_becomes_free_is_for_the_model_that_waits_longest():
    shared = Shared()
    shared.look(1.0, "a")
    shared.look(2.0, "b", busy="a")
    assert shared.look(3.0, "c", busy="b") == "b"
    shared.ending["a"] = 0
    for wish in (
        PoolState(),
        PoolState(num_at_gateway=1),
    ):  # a's policy wants it back; a request does
        change = Change(at=3.1, before=0, wanted=1, why="")
        assert not shared.scaling._has_room(shared.scalers["a"], change, wish)
    assert shared.look(3.2, "c", "a", busy="b") == "bc"
    assert shared.look(3.3, "a", busy="bc") == "bc"


def test_busy_models_make_room_after_patience_alone():
    shared = Shared()
    shared.look(1.0, "a")
    shared.look(2.0, "b", busy="a")
    assert shared.look(3.0, "c", busy="ab") == "ab"
    assert shared.look(7.9, "c", busy="ab") == "ab"
    assert shared.look(8.0, "c", busy="ab") in ("a", "b")  # one of them, not both
    shared.ending = dict.fromkeys("abc", 0)
    assert shared.look(8.1, "c", busy="ab").endswith("c")


def test_more_replicas_of_a_model_take_free_memory_alone():
    shared = Shared(interval_s=1.0)
    shared.look(1.0, "a")
    shared.look(2.0, "b", busy="a")
    for at in range(3, 60):  # a wants two, and nobody waits for b
        for _ in range(9):
            shared.versions["a"].tally.arrived()
        assert shared.look(float(at), *"aaa", busy="a") == "ab"
    assert shared.scalers["a"].policy.forecast.mean() > 2


async def test_scaler_of_a_pool_that_stays_as_it_is_stays(monkeypatch):
    made = []
    monkeypatch.setattr(
        scaling_module, "make", lambda *given: made.append(given) or Scaler(*given, Capacity())
    )
    scaling = Scaling(SimpleNamespace(), SimpleNamespace(), lambda spec: (0, 0), lambda *_: True)
    scaling.scalers = await scaling.make(fleet_with("x", 1, 2))
    (first,) = scaling.scalers.values()
    (again,) = (await scaling.make(fleet_with("x", 1, 2))).values()
    assert again is first
    for changed in (
        fleet_with("x", 1, 3),
        fleet_with("x", 1, 2, {**AUTOSCALE, "hold_s": 7.0}),
        fleet_with("x", 1, 2, {"objectives": {"ttft_s": 1.0, "itl_s": 0.1}}),
    ):
        (other,) = (await scaling.make(changed)).values()
        assert other is not first
    assert len(made) == 4


def test_state_of_a_pool_is_the_sum_of_the_replicas_that_were_heard():
    router = Router()
    for name, num_running, num_waiting in (("a", 3, 1), ("b", 4, 2), ("new", 9, 9)):
        router.add(ReplicaState(id=name, running=num_running, waiting=num_waiting))
    replicas = {
        name: SimpleNamespace(id=name, heard=name != "new", kv_cache_usage=usage)
        for name, usage in (("a", 0.2), ("b", 0.6), ("new", 1.0))
    }
    version_ = SimpleNamespace(num_waiting=5, replicas=replicas, router=router)
    found = [version_]
    members = SimpleNamespace(version=lambda model, name: found[0])
    scaling = Scaling(members, SimpleNamespace(), lambda spec: (2, 1), lambda *_: True)
    spec = scaler_of(1, 2).spec
    scaling.cold_starts.add(spec.key, 12.0)
    assert scaling.now(spec) == PoolState(
        num_at_gateway=5,
        num_running=7,
        num_waiting=3,
        num_ready=2,
        num_starting=1,
        kv_cache_usage=0.4,
        cold_start_s=12.0,
    )
    found[0] = None
    assert scaling.now(spec) == PoolState(num_ready=2, num_starting=1)


async def test_capacity_is_simulated_again_when_due_and_not_twice_at_once():
    begun, go = [], threading.Event()
    scaler = scaler_of(1, 2)
    scaler.capacity.is_due = lambda age: True
    scaler.capacity.refresh = lambda age: begun.append(age) or go.wait(PATIENCE_S)
    one = SimpleNamespace(num_waiting=0, replicas={}, router=Router(), tally=Tally())
    members = SimpleNamespace(version=lambda model, name: one)
    scaling = Scaling(members, SimpleNamespace(), lambda spec: (1, 0), lambda *_: True)
    for at in (1.0, 2.0, 3.0):
        if at == 3.0:
            go.set()
            await asyncio.gather(*scaling._refreshing.values())
        scaling.look(scaler, at)
    await asyncio.gather(*scaling._refreshing.values())
    assert begun == [0.0, 2.0]


def test_members_versions_count_for_their_own_scalers():
    scaled, plain = SimpleNamespace(tally=None), SimpleNamespace(tally=None)
    scaler = scaler_of(1, 2)
    members = SimpleNamespace(models={"tiny": [scaled, plain]}, version=lambda model, name: scaled)
    scaling = Scaling(members, SimpleNamespace(), lambda spec: (0, 0), lambda *_: True)
    scaling.take({scaler.spec.key: scaler})
    assert scaling.scalers == {scaler.spec.key: scaler}
    assert scaled.tally.objectives == OBJECTIVES
    assert scaled.tally.learn == scaler.capacity.learn
    assert plain.tally.objectives is None
    members.version = lambda model, name: None  # a rollout is taking it out
    scaling.take({scaler.spec.key: scaler})
    assert scaling.scalers == {}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"autoscale": {"objectives": {"ttft_s": 2}, "interval": 3}}, "autoscale"),
        ({"autoscale": {"objectives": {"ttft_s": 0}}}, "ttft_s"),
        ({"autoscale": {}}, "models.tiny.autoscale.objectives"),
        ({"least": 2}, "models.tiny.versions[0].replicas"),
    ],
)
def test_bad_settings_name_their_field(change, field):
    with pytest.raises(ConfigError) as refused:
        fleet_with("x", change.pop("least", 1), 2, **change)
    assert field in refused.value.field


@pytest.mark.parametrize(
    ("least", "more", "match"),
    [
        (1, {}, "min: 0"),
        (0, {"backend": "ray"}, "backend: processes"),
        (0, {"models_memory": 0}, ">= 1"),
    ],
)
def test_a_shared_memory_that_nothing_shares_is_refused(least, more, match):
    with pytest.raises(ConfigError, match=match) as refused:
        fleet_with("x", least, 2, **{"models_memory": 2**30, **more})
    assert refused.value.field == "models_memory"


def test_a_shared_memory_is_for_its_largest_model_at_least(tiny):
    fleet = fleet_with(tiny, 0, 2, models_memory=2**20)
    with pytest.raises(
        ConfigError,
        match=r"replica of tiny/v1/main needs [0-9]+ MiB, and .* 0 MiB, more than its 1 MiB",
    ) as e:
        room_of(fleet)
    assert e.value.field == "models_memory"


def test_a_shared_memory_has_room_for_those_that_always_run_and_any_other(tiny):
    def room(limit):
        one = {"engine": {**ENGINE, "kv_cache_bytes": 2**20}}
        models = {
            name: {
                "versions": [version(tiny, replicas={"min": least, "max": 2}, **one)],
                "autoscale": AUTOSCALE,
            }
            for name, least in (("always", 1), ("seldom", 0))
        }
        return room_of(check({"port": 0, "models": models, "models_memory": limit}))

    needed = sum(room(2**40).needs.values())
    assert room(needed).limit == needed
    with pytest.raises(ConfigError, match="models_memory: a replica of seldom/v1/main needs"):
        room(needed - 1)


@pytest.mark.parametrize(
    ("least", "memory", "given", "expected"),
    [
        (0, 2**20, {}, 2**17),
        (0, 2**20, {"kv_cache_bytes": 2**16}, 2**16),
        (1, 2**20, {}, None),
        (0, None, {}, None),
    ],
)
def test_a_model_that_may_have_no_replica_caches_in_an_eighth_of_the_shared_memory(
    least, memory, given, expected
):
    engine = {k: v for k, v in ENGINE.items() if k != "kv_cache_bytes"} | given
    replicas = ({"min": least, "max": 2}, {"min": 0, "max": 1})
    models = {
        name: {
            "versions": [version("x", engine=engine, replicas=own)],
            "autoscale": AUTOSCALE,
        }
        for name, own in zip(("one", "other"), replicas, strict=True)
    }
    shared = {} if memory is None else {"models_memory": memory}
    fleet = check({"port": 0, "models": models, **shared})
    assert pools(fleet)[0].args.kv_cache_bytes == expected


TWO = {"min": 1, "max": 2}


@pytest.mark.parametrize(
    ("versions", "field", "match", "more"),
    [
        ([version("x", pools=[{"name": "a", "replicas": TWO}, {"name": "b"}])], "versions[0].pools", "2 kinds", {}),
        ([version("x", engine={**ENGINE, "tensor_parallel_size": 2}, replicas=TWO)], "autoscale", "tensor_parallel_size", {}),
        ([version("x"), version("x", name="v2", share=0, replicas=TWO)], "versions[1].replicas", "no load", {}),
        ([version("x"), version("x", name="v2", replicas={"min": 0, "max": 2})], "versions[1].replicas", "only version", {}),
        (
            [version("x", replicas=TWO, resources={"gpus": 1})], "autoscale.device", "--gpu",
            {"backend": "ray", "ray_address": "auto"},
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_scaled_is_refused_by_name(versions, field, match, more):
    with pytest.raises(ConfigError, match=match) as refused:
        check({"models": {"tiny": {"versions": versions, "autoscale": AUTOSCALE}}, **more})
    assert refused.value.field == f"models.tiny.{field}"


def test_a_named_device_is_planned_for(tiny, monkeypatch):
    engines = []

    def capacity(engine, *given, **more):
        engines.append(engine)
        assert more["sizes"] == (1, 2)  # no larger fleet than there may be is simulated
        return Capacity()

    monkeypatch.setattr("slipstream.fleet.scaling.scaler.RecentCapacity", capacity)
    one = version(tiny, replicas=TWO, engine={"max_model_len": 256})
    (spec,) = pools(check({"models": {"tiny": {"versions": [one], "autoscale": AUTOSCALE}}}))
    with pytest.raises(ConfigError, match="no-such-card"):
        make(spec, Autoscale(device="no-such-card"), OBJECTIVES)
    for device in (None, "h200"):
        make(spec, Autoscale(device=device), OBJECTIVES)
    assert [engine.run_ahead is None for engine in engines] == [False, True]  # a CPU's, a GPU's


def test_each_version_is_scaled_by_its_own_requests(tiny, tmp_path, monkeypatch):
    """A version with a fixed number of replicas is not scaled."""
    capacity = Capacity()
    monkeypatch.setattr(scaling_module, "make", lambda *given: Scaler(*given, capacity))
    settings = {**AUTOSCALE, "interval_s": 1e6}
    versions = [
        version(tiny, share=3, replicas={"min": 1, "max": 3}),
        version(tiny, name="v2", share=1, replicas={"min": 1, "max": 3}),
        version(tiny, name="v3", share=4, replicas=1),
    ]
    fleet = check(
        {
            "port": 0,
            "models": {"tiny": {"versions": versions, "autoscale": settings}},
            "router": {"probe_s": 0},
        }
    )
    with stubbed(fleet, tmp_path / "state") as (made, stubs), made.client() as client:
        made.wait_serving(3)
        made.wait_for(
            lambda: all(s.began is not None for s in made.head.scaling.scalers.values()), "no look"
        )
        for _ in range(80):
            client.completions.create(model="tiny", prompt="Hello", max_tokens=2)
        told = asked_all(made)
        assert set(told) == {"tiny/v1/main", "tiny/v2/main"}
        assert [(one["model"], one["version"]) for one in told.values()] == [
            ("tiny", "v1"),
            ("tiny", "v2"),
        ]
        by_version = {v.name: v.tally.num_arrivals for v in made.head.members.models["tiny"]}
        assert by_version == {s.spec.version: len(s.asked) for s in stubs}
        assert sum(by_version.values()) == 80
        assert by_version["v1"] > by_version["v2"] > 0
        assert len(capacity.learnt) == by_version["v1"] + by_version["v2"]
        metrics = made.http().get("/metrics").text
        assert (
            'slipstream:autoscale_replicas{model_name="tiny",state="ready",version="v2"} 1.0'
            in metrics
        )


def test_objectives_that_no_replica_meets_are_refused(tiny):
    (spec,) = pools(fleet_with(tiny, 1, 2))
    with pytest.raises(ConfigError, match="even a request alone misses") as refused:
        make(spec, Autoscale(), ScalingObjectives(ttft_s=1e-6))
    assert refused.value.field == "models.tiny.autoscale.objectives"


def asked(fleet):
    return asked_all(fleet)["tiny/v1/main"]


@pytest.mark.slow
def test_none_to_one_to_none_with_real_replicas(tiny, tmp_path):
    settings = {**AUTOSCALE, "interval_s": 0.5, "idle_s": 4.0, "max_waiting": 3, "wait_s": 60.0}
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
    with running(fleet_with(tiny, 0, 2, settings), tmp_path / "state") as fleet:
        with fleet.http() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert fleet.pids() == {}

            async def ask_many():
                async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE_S) as many:
                    return await asyncio.gather(
                        *(many.post("/v1/completions", json=body) for _ in range(5))
                    )

            answers = asyncio.run(ask_many())
            assert sorted(a.status_code for a in answers) == [200] * 3 + [503] * 2
            refused = next(a for a in answers if a.status_code == 503)
            assert refused.json()["error"]["code"] == "too_many_waiting"
            assert refused.headers["retry-after"]
            status = asked(fleet)
            assert (status["ready"], status["ups"]) == (1, 1)
            assert status["last"]["change"] == "0 → 1: a request waits at the gateway"
            fleet.wait_for(lambda: asked(fleet)["downs"] == 1 and not fleet.members(), "it stays")
            assert asked(fleet)["last"]["change"] == "1 → 0: no request for 4 s"
            assert asked(fleet)["cold_start_s"] < 60  # measured
            told = http.get("/metrics").text
            assert (
                'slipstream:autoscale_changes_total{direction="down",model_name="tiny",version="v1"} 1.0'
                in told
            )
            assert (
                'slipstream:autoscale_replicas{model_name="tiny",state="ready",version="v1"} 0.0'
                in told
            )
            assert http.get("/status.json").json()["autoscale"]["tiny/v1/main"]["max"] == 2
            shown = [
                sys.executable,
                "-m",
                "slipstream",
                "fleet",
                "status",
                "--state-dir",
                str(tmp_path / "state"),
            ]
            text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
            assert "tiny v1 autoscaler: 0 ready, 0 starting, 0 wanted (0 to 2)" in text
            with Browser.start(tmp_path) as browser:
                browser.visit(fleet.url + "/status", width=390, height=844)
                browser.wait_for(
                    "return !document.getElementById('main').hidden", "the page shows nothing"
                )
                text = browser.run("return document.getElementById('scaling').innerText")
                assert "tiny v1: 0 ready, 0 starting, 0 wanted (0 to 2)" in text
                assert "1 → 0: no request for 4 s" in text
                assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
                assert browser.errors() == []
            began = time.monotonic()
            assert http.post("/v1/completions", json=body).status_code == 200  # and once more
            print(f"woken and answered after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_two_models_in_memory_for_one_are_swapped(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_module, "make", lambda *given: Scaler(*given, Capacity()))
    settings = {**AUTOSCALE, "interval_s": 0.5, "wait_s": 60.0}
    one = version(tiny, replicas={"min": 0, "max": 1})
    fleet = check(
        {
            "port": 0,
            "models": {name: {"versions": [one], "autoscale": settings} for name in "ab"},
            "models_memory": 2**30,
            "drain_timeout_s": 20,
        }
    )
    need = max(room_of(fleet).needs.values())
    fleet = msgspec.structs.replace(fleet, models_memory=need * 3 // 2)
    with running(fleet, tmp_path / "state") as ran, ran.http() as http:
        for name in "aba":
            body = {"model": name, "prompt": "Hello", "max_tokens": 8}
            answer = http.post("/v1/completions", json=body, timeout=PATIENCE_S)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert [m.id.split("/")[0] for m in ran.members()] == [name]
        told = asked_all(ran)["a/v1/main"]
        assert (told["ups"], told["downs"]) == (2, 1)
        assert asked_all(ran)["b/v1/main"]["last"]["change"] == "1 → 0: a/v1/main needs its memory"


@pytest.mark.slow
def test_a_request_is_told_when_none_starts_in_time(tiny, tmp_path):
    settings = {**AUTOSCALE, "wait_s": 0.2}
    with (
        running(fleet_with(tiny, 0, 1, settings), tmp_path / "state") as fleet,
        fleet.http() as http,
    ):
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


@pytest.mark.slow
def test_a_rollout_keeps_the_number(tiny, tmp_path):
    def fleet_of_engine(**more):
        return fleet_of(version(tiny, replicas={"min": 1, "max": 3}, engine={**ENGINE, **more}))

    with running(fleet_of_engine(), tmp_path / "state") as fleet:
        assert asked_all(fleet) == {}  # off by default
        with pytest.raises(ConfigError, match="it has tiny/v1/main"):
            fleet.call(fleet.head.scale("tiny", 2))
        with pytest.raises(ConfigError, match=r"from 1 to 3 .*fleet rollout"):
            fleet.call(fleet.head.scale("tiny/v1/main", 4))
        fleet.call(fleet.head.scale("tiny/v1/main", 2))
        fleet.wait_serving(2)
        assert fleet.call(fleet.head.rollout(fleet_of_engine(max_num_seqs=4)), 120) == {
            "replaced": 2,
            "started": 0,
            "ended": 0,
        }
        fleet.wait_serving(2)


def asked_all(fleet):
    async def told():
        return fleet.head.gateway.status()["autoscale"]

    return fleet.call(told())


def test_more_replicas_than_are_wanted_count_as_ready_up_to_that_number():
    spec = SimpleNamespace(key="a")
    one = SimpleNamespace(spec=spec, heard=True, draining=False)
    for number, wanted, found in ((2, 1, (1, 0)), (1, 3, (1, 2)), (0, 0, (0, 0))):
        followed = dict.fromkeys(range(number), one)
        pool = SimpleNamespace(_counts={"a": wanted}, followed=followed)
        assert RayReplicas.numbers_of(pool, spec) == found
