"""Figures of a gateway about its engines: sums that do not fall when a replica goes, and findings
of all replicas."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.fleet.detection import alerts
from slipstream.fleet.scaling.figures import summed
from slipstream.fleet.watch import FleetWatch
from slipstream.messages.stats import AdapterStats, EngineStats, ExpertBalance
from slipstream.server.operations.metrics import TOTALS
from tests.fleet.detection.test_alerts import receiver as receiver
from tests.fleet.running import fleet_of, version
from tests.fleet.stubs import stubbed, text_of

ONE = EngineStats(
    num_running=2, num_steps=10, kv_cache_usage=0.5, last_step_age_s=1.0, spec_accepted_by_position=(5, 3),
    expert_load=((0, (1, 2)),), prompt_tokens_total=100, adapters=AdapterStats(num_on_device=1, num_on_host=2, reads_total=3),
    expert_balance=ExpertBalance(moved_total=8, rank_imbalance=1.5),
)  # fmt: skip
OTHER = EngineStats(
    num_running=1,
    num_steps=5,
    kv_cache_usage=0.1,
    spec_accepted_by_position=(1, 1, 1),
    expert_load=((0, (1, 1)), (2, (4, 4))),
)


def test_figures_of_replicas_are_added_up():
    found = summed([ONE, OTHER], [ONE])
    assert (found.num_running, found.num_steps, found.prompt_tokens_total) == (3, 25, 200)
    assert (found.kv_cache_usage, found.last_step_age_s) == (pytest.approx(0.3), 1.0)
    assert found.spec_accepted_by_position == (11, 7, 1)
    assert found.expert_load == ((0, (3, 5)), (2, (4, 4)))
    assert (found.adapters.num_on_device, found.adapters.reads_total) == (1, 6)
    assert (found.expert_balance.moved_total, found.expert_balance.rank_imbalance) == (16, 1.5)
    assert summed([OTHER]) == OTHER
    assert {"num_steps", "prompt_tokens_total", "reads_total", "stored_blocks"}.issubset(TOTALS)


def scraped(fleet):
    with fleet.http() as http:
        text = http.get("/metrics").text
    return {
        (sample.name.removeprefix("slipstream:"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


MODEL = ("model_name", "tiny")


def test_totals_stay_when_a_replica_goes(tiny, tmp_path):
    with stubbed(fleet_of(version(tiny), router={"probe_s": 0}), tmp_path / "state") as (
        fleet,
        stubs,
    ):
        fleet.wait_serving(2)
        stubs[0].stats, stubs[1].stats = ONE, OTHER
        fleet.head.gateway.forwarder.num_hedged = 3
        fleet.wait_for(
            lambda: scraped(fleet)["engine_steps_total", MODEL] == 15, "the sum is another"
        )
        found = scraped(fleet)
        assert (found["engine_up", MODEL], found["num_requests_running", MODEL]) == (1, 3)
        states = [found["fleet_replicas", MODEL, ("state", s)] for s in ("serving", "draining")]
        assert states == [2, 0]
        assert found["fleet_events_total", ("event", "hedged")] == 3
        assert found["lora_adapter_reads_total", MODEL] == 3
        fleet.loop.call_soon_threadsafe(
            stubs[0]._gone.set
        )  # it is replaced by one that has counted nothing
        fleet.wait_for(lambda: len(stubs) == 3, "it was not replaced")
        fleet.wait_serving(2)
        found = scraped(fleet)
        assert (found["engine_steps_total", MODEL], found["num_requests_running", MODEL]) == (15, 1)
        with fleet.client() as client:
            text_of(client)
        assert scraped(fleet)["time_to_first_token_seconds_count", MODEL] == 1


def test_findings_of_all_replicas(tiny, tmp_path, monkeypatch, receiver):
    url, got, _ = receiver
    monkeypatch.setitem(FleetWatch.__init__.__kwdefaults__, "interval_s", 0.05)
    monkeypatch.setattr(alerts, "FIRST_WAIT_S", 0.01)
    wanted = fleet_of(
        version(tiny), router={"probe_s": 0, "silence_s": 2.0}, detect=True, alert_urls=[url]
    )
    with stubbed(wanted, tmp_path / "state") as (fleet, stubs):
        fleet.wait_serving(2)
        with fleet.http() as http:
            victim = next(m.id for m in fleet.members() if m.started is stubs[0])
            # Of the victim: on a loaded machine the other may be silent for a while, too.
            found = lambda: [
                f for f in http.get("/findings").json()["findings"] if f["replica"] == victim
            ]
            assert found() == http.get("/status.json").json()["findings"] == []
            stubs[0].silent = True
            fleet.wait_for(found, "nothing was found")
            (finding,) = found()
            assert (finding["signals"], finding["ended"]) == (["down"], None)
            assert scraped(fleet)["findings", ("cause", finding["cause"]), MODEL] >= 1
            stubs[0].silent = False
            fleet.wait_for(lambda: found()[0]["ended"], "it never ended")
        events = lambda: [alert["event"] for alert in got if alert["finding"]["replica"] == victim]
        fleet.wait_for(lambda: len(events()) == 2, "nobody was told")
        assert events() == ["began", "ended"]


def test_the_status_page_tells_of_replicas(tiny, tmp_path, monkeypatch):
    """The page has each replica's own state, also between tokens, and says which is being
    restarted."""
    with (
        stubbed(fleet_of(version(tiny), router={"probe_s": 0}), tmp_path / "state") as (
            fleet,
            stubs,
        ),
        fleet.http() as http,
    ):
        fleet.wait_serving(2)
        status = lambda: http.get("/status.json").json()
        stubs[0].stats, stubs[1].stats = ONE, OTHER
        stubs[0].metrics.itl.observe(0.004)
        fleet.wait_for(
            lambda: sorted(r["prompt_tokens"] for r in status()["replicas"]) == [0, 100],
            "they do not tell",
        )
        fleet.wait_for(
            lambda: sum(status()["latency"]["itl_s"]["counts"]) == 1, "nothing of tokens"
        )
        names = {m.id: m.started for m in fleet.members()}
        assert {r["name"] for r in status()["replicas"]} == set(names)
        gone = next(name for name, started in names.items() if started is stubs[0])
        go, backend = threading.Event(), fleet.head._backend
        start = backend.start

        async def held(spec, place):
            while not go.is_set():
                await asyncio.sleep(0.01)
            return await start(spec, place)

        monkeypatch.setattr(backend, "start", held)
        fleet.loop.call_soon_threadsafe(stubs[0]._gone.set)
        fleet.wait_for(
            lambda: {r["name"]: r["state"] for r in status()["replicas"]}.get(gone) == "starting",
            "it is not told",
        )
        (told,) = http.get("/fleet/status").json()["models"]["tiny"]
        assert told["starting"] == [gone]
        assert gone not in {r["id"] for r in told["replicas"]}
        go.set()
        fleet.wait_for(
            lambda: all(r["state"] == "ready" for r in status()["replicas"]), "it still starts"
        )
        assert http.get("/fleet/status").json()["models"]["tiny"][0]["starting"] == []


def test_nobody_looks_unless_asked(tiny, tmp_path):
    with (
        stubbed(fleet_of(version(tiny, replicas=1)), tmp_path / "state") as (fleet, _),
        fleet.http() as http,
    ):
        answer = http.get("/findings")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_detector")
        assert http.get("/status.json").json()["findings"] is None
