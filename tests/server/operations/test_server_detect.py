"""A server that looks at itself, with the detector of the fleet: a client that does not read is found, told, and over when
the client has gone. `doctor --fleet` reads real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from slipstream.cli.main import main
from slipstream.cli.serving import serve as command
from slipstream.fleet.detection import detector, signals
from slipstream.fleet.detection.doctor import examine
from slipstream.fleet.detection.server import ServerWatch
from tests.server.conftest import serving


@contextlib.contextmanager
def watched(server, watch):
    """`watch` runs on the server's loop."""
    server.state.watch = watch
    task = asyncio.run_coroutine_threadsafe(watch.run(server.state), server.loop)
    try:
        yield
    finally:
        task.cancel()


def quick_watch(monkeypatch):
    """A watch, and the list of what it has observed."""
    monkeypatch.setattr(signals, "WARM_UP", 10)
    watch, seen = ServerWatch(interval_s=0.02), []
    observe = watch._detector.observe
    monkeypatch.setattr(
        watch._detector,
        "observe",
        lambda observation: (seen.append(observation), observe(observation)),
    )
    return watch, seen


def test_text_that_nobody_reads_is_found_and_over(monkeypatch):
    watch, seen = quick_watch(monkeypatch)
    with serving() as server, watched(server, watch), server.http() as http:
        server.wait_for(lambda: len(seen) > 20, "it does not look")
        assert http.get("/findings").json() == {"findings": []}
        with server.state.metrics.stalls.waiting():  # as while a connection takes no more
            server.wait_for(lambda: watch.findings, "not found")
        server.wait_for(lambda: watch.findings[0]["ended"] is not None, "it does not end")
        (finding,) = http.get("/findings").json()["findings"]
        assert finding["cause"] == "slow_client"
        assert http.get("/status.json").json()["findings"] == [finding]


def test_findings_of_a_server_that_fell_asleep_end(monkeypatch):
    watch, seen = quick_watch(monkeypatch)
    with serving() as server, watched(server, watch):
        server.wait_for(lambda: len(seen) > 20, "it does not look")
        with server.state.metrics.stalls.waiting():
            server.wait_for(lambda: watch.findings, "not found")
            server.engine.is_sleeping = True
        monkeypatch.setattr(detector, "SILENT_S", 0.1)
        server.wait_for(lambda: watch.findings[0]["ended"] is not None, "it does not end")


def test_doctor_reads_servers(shared):
    visits, complaints = examine([shared.url, "http://127.0.0.1:9"], 0.2, None)
    assert visits[0].models == ("fake",)
    assert [(c.url, c.cause) for c in complaints] == [("http://127.0.0.1:9", "unreachable")]
    with serving(api_keys=("k",)) as server:
        assert examine([server.url], 0.1, "k")[1] == []
        (complaint,) = examine([server.url], 0.1, None)[1]
        assert "--api-key-file" in complaint.text
        server.engine.dead = True
        assert [c.cause for c in examine([server.url], 0.1, "k")[1]] == ["engine_down"]


def test_doctor_of_a_fleet_exits_with_1_if_a_server_is_missing(shared, capsys):
    assert main(["doctor", "--fleet", shared.url, "--for", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wrong"] == []
    assert main(["doctor", "--fleet", shared.url, "http://127.0.0.1:9", "--for", "0.1"]) == 1
    assert "unreachable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["serve", "--alert-url", "http://a/b"], "--detect"),
        (["serve", "--detect", "--alert-url", "ftp://a"], "http"),
        (["serve", "--detect", "--api-servers", "2"], "--api-servers 1"),
        (["doctor", "--api-key-file", "x"], "--fleet"),
        (["doctor", "--fleet", "nothing"], "http"),
        (["doctor", "--fleet", "http://a", "--for", "0"], "--for"),
    ],
)
def test_options_that_do_not_go_together(options, text, capsys):
    assert main(options) != 0
    assert text in capsys.readouterr().err


def test_river_is_loaded_only_with_detect():
    program = (
        f"import sys, {command.__name__}, slipstream.server.app; print('river' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"
