"""The fleet of tests/fleet/test_fleet.py on Ray Serve: `pytest -m ray tests/fleet/test_ray.py`, which takes some minutes.

Ray is started on this machine with a small object store and without a dashboard, and is gone afterwards.
"""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import signal
import time

import msgspec
import psutil
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.config import check
from slipstream.fleet.scaling.capacity import FleetCapacity
from tests.fleet.running import ENGINE, RunningFleet, alive, fleet_of, version
from tests.fleet.test_fleet import HELLO, ask

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SERVER = "slipstream.fleet.replicas.replica"
MARK = "SLIPSTREAM_TEST_RUN"
"""A variable that Ray's processes inherit: it tells our servers from those of other fleets on this machine."""

START_S = 600.0
"""Ray alone took two minutes to start on a machine with ten times the load that it has cores for."""


@pytest.fixture(scope="module")
def fleet(tiny, tmp_path_factory):
    pytest.importorskip("ray", reason="the extra fleet is not installed")
    folder = tmp_path_factory.mktemp("ray") / "state"
    one = version(tiny, replicas={"min": 1, "max": 2}, resources={"cpus": 0.5})
    others = psutil.Process().children(
        recursive=True
    )  # of tests before, such as the one that ranks are forked from
    made = RunningFleet(
        fleet_of(one, backend="ray", router={"probe_s": 0}, drain_timeout_s=5),
        folder,
        start_s=START_S,
    )
    try:
        yield made
    finally:
        here = [
            process
            for process in psutil.Process().children(recursive=True)
            if process not in others
        ]
        made.stop()
        for process in here:
            made.wait_for(
                lambda p=process: not alive(p.pid) or p.status() == psutil.STATUS_ZOMBIE,
                f"{process} is left",
            )
        assert not folder.exists(), list(folder.iterdir())


@pytest.fixture(scope="module", autouse=True)
def mark():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, secrets.token_hex(8))
        yield


def servers():
    """The processes of this run's replicas, also of those whose parent is gone."""
    found = psutil.process_iter(["cmdline", "environ"])
    ours = (p for p in found if (p.info["environ"] or {}).get(MARK) == os.environ[MARK])
    return {p for p in ours if SERVER in " ".join(p.info["cmdline"] or ())}


@pytest.fixture
def two(fleet):
    """The fleet with two replicas."""
    assert fleet.call(fleet.head.scale("tiny/v1/main", 2), 300) == {
        "pool": "tiny/v1/main",
        "replicas": 2,
    }
    fleet.wait_for(lambda: serving(fleet) == 2, "not all serve", 180)
    return fleet


def serving(fleet):
    return sum(r.heard and not r.draining for r in fleet.head.members.all_replicas())


def test_a_wrong_setting_ends_the_start_and_leaves_nothing(tiny, tmp_path):
    """This test runs before the others, since a process can have one Ray."""
    before = servers()
    wrong = version(
        tiny, engine={**ENGINE, "max_model_len": 10**6}, replicas=1, resources={"cpus": 0.5}
    )
    with pytest.raises(ConfigError, match="max_model_len"):
        RunningFleet(fleet_of(wrong, backend="ray"), tmp_path / "state", start_s=START_S)
    assert servers() <= before


def test_the_autoscaler_scales_from_none_to_two_to_none(tiny, tmp_path):
    """The planner's capacity is replaced by one request a second of each replica: what is shown is what Ray does."""
    one = version(tiny, replicas={"min": 0, "max": 2}, resources={"cpus": 0.5})
    settings = {"objectives": {"ttft_s": 2.0}, "interval_s": 0.5, "hold_s": 4.0, "idle_s": 6.0}
    models = {"tiny": {"versions": [one], "autoscale": settings}}
    fleet = check(
        {
            "port": 0,
            "backend": "ray",
            "models": models,
            "router": {"probe_s": 0},
            "drain_timeout_s": 5,
        }
    )
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
    made = RunningFleet(fleet, tmp_path / "state", start_s=START_S)
    try:
        scaler = made.head.scaling.scalers["tiny/v1/main"]
        scaler.capacity.now, scaler.capacity._next = (
            FleetCapacity(((1, 1.0), (2, 2.0))),
            float("inf"),
        )
        change, changes = scaler.made, []
        scaler.made = lambda one: (changes.append(str(one)), change(one))
        with made.http() as http, concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert http.get("/health").status_code == 200
            assert not servers()
            assert (
                http.post("/v1/completions", json=body).status_code == 200
            )  # it waited at the gateway
            assert (
                changes[0] == "0 → 1: a request waits at the gateway"
            )  # the next may follow before the answer is here
            (first,) = made.head.members.all_replicas()
            asked, until = [], time.monotonic() + 180
            while serving(made) < 2:
                assert time.monotonic() < until, (
                    scaler.last,
                    scaler.status(made.head.scaling.now(scaler.spec), 0),
                )
                asked += [pool.submit(http.post, "/v1/completions", json=body) for _ in range(3)]
                time.sleep(0.5)
            assert first in made.head.members.all_replicas(), "the first was restarted"
            assert {a.result(180).status_code for a in asked} == {200}
            assert scaler.policy.cold_start_s != 60, "no start was measured"
            made.wait_for(
                lambda: not made.head.members.all_replicas() and not servers(), "they stay", 180
            )
            assert scaler.last.wanted == 0
            assert scaler.last.why == "no request for 6 s"
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json=body).status_code == 200  # and once more
    finally:
        made.stop()
    assert not (tmp_path / "state").exists()


def test_it_answers_as_with_processes(two):
    with two.client() as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(**HELLO)
        stream = client.chat.completions.create(**HELLO, stream=True)
        assert (
            "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
            == whole.choices[0].message.content
        )


def test_streams_of_a_killed_replica_go_on_elsewhere_and_serve_replaces_it(two):
    with two.client() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda i: ask(client, i), range(8)))
        before = two.head.gateway.forwarder.num_resumed
        asked = [pool.submit(ask, client, i) for i in range(8)]
        replicas = two.head.members.all_replicas()
        two.wait_for(
            lambda: (
                sum(r.num_in_flight for r in replicas) == 8
                and all(r.num_in_flight for r in replicas)
            ),
            "no load",
        )
        victim = replicas[0]
        port = int(victim.url.rpartition(":")[2])
        (process,) = [
            p
            for p in servers()
            if any(c.laddr.port == port for c in p.net_connections() if c.status == "LISTEN")
        ]
        os.kill(process.pid, signal.SIGKILL)
        found = [a.result(180) for a in asked]
    assert found == expected
    assert two.head.gateway.forwarder.num_resumed > before, "it was killed too late"
    two.wait_for(
        lambda: serving(two) == 2 and victim not in two.head.members.all_replicas(),
        "it was not replaced",
        180,
    )


def test_scaling_down_loses_nothing(two):
    with two.client() as client, concurrent.futures.ThreadPoolExecutor(6) as pool:
        before = {r.id for r in two.head.members.all_replicas()}
        asked = [pool.submit(ask, client, i) for i in range(6)]
        two.wait_for(lambda: two.head.gateway.state.in_flight, "no load")
        two.call(two.head.scale("tiny/v1/main", 1), 300)
        two.wait_for(lambda: serving(two) == 1, "it still has two", 180)
        assert {reason for _, reason in (a.result(120) for a in asked)} == {"length"}
        assert ask(client, 0)[1] == "length"
    (left,) = two.head.members.all_replicas()
    assert left.id in before, "it was restarted"
    with pytest.raises(ConfigError, match="from 1 to 2"):
        two.call(two.head.scale("tiny/v1/main", 3))


def test_a_rollout_changes_the_engine(two, tiny):
    old = {r.id for r in two.head.members.all_replicas()}
    engine = {**ENGINE, "max_num_seqs": 4}
    one = version(tiny, engine=engine, replicas={"min": 1, "max": 2}, resources={"cpus": 0.5})
    new = msgspec.structs.replace(two.head.fleet, models=fleet_of(one).models)
    with two.client() as client, concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, client, i) for i in range(2)]
        done = two.call(two.head.rollout(new), 300)
        assert {a.result(120)[1] for a in asked} == {"length"}
        two.wait_for(
            lambda: serving(two) >= 1 and not old & {r.id for r in two.head.members.all_replicas()},
            "old ones",
            180,
        )
        assert done["replaced"] >= 1
        assert ask(client, 1)[1] == "length"


def test_a_rollout_that_can_not_start_leaves_the_fleet_as_it_was(two, tiny):
    before = {r.id for r in two.head.members.all_replicas()}
    added = version(
        tiny,
        name="v2",
        engine={**ENGINE, "max_model_len": 10**6},
        replicas=1,
        resources={"cpus": 0.5},
    )
    versions = (*two.head.fleet.models["tiny"].versions, *fleet_of(added).models["tiny"].versions)
    models = {"tiny": msgspec.structs.replace(two.head.fleet.models["tiny"], versions=versions)}
    with pytest.raises(ConfigError, match=r"max_model_len.*fleet is unchanged"):
        two.call(two.head.rollout(msgspec.structs.replace(two.head.fleet, models=models)), 300)
    assert [v.name for v in two.head.members.models["tiny"]] == ["v1"]
    assert {r.id for r in two.head.members.all_replicas()} == before, "they were restarted"
    with two.client() as client:
        assert ask(client, 1)[1] == "length"
