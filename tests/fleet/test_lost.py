"""Real processes that stop or die: a replica that hangs as a whole, an engine that hangs in a living server, a lost head."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from slipstream.fleet.config import check
from tests.fleet.running import ENGINE, alive, fleet_of, running, version
from tests.fleet.test_fleet import ask
from tests.support.waiting import PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("which", ["replica", "engine"])
def test_a_replica_that_is_stopped_costs_no_answer(tiny, tmp_path, which):
    """SIGSTOP: no connection breaks. The text is the same, and the replica is back when it goes on."""
    router = {
        "silence_s": 3,
        "first_token_s": 3,
        "next_token_s": 3,
        "probe_s": 0,
        "retries": {"share": 1.0},
    }
    with (
        running(fleet_of(version(tiny), router=router), tmp_path / "state") as fleet,
        fleet.client() as client,
    ):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            expected = list(pool.map(lambda i: ask(client, i), range(6)))
            asked = [pool.submit(ask, client, i) for i in range(6)]
            fleet.wait_for(
                lambda: all(r.num_in_flight for r in fleet.head.members.all_replicas()),
                "one has nothing",
            )
            victim = fleet.members()[0]
            process = psutil.Process(victim.started.process.pid)
            if which == "engine":
                (process,) = [
                    p for p in process.children() if "resource_tracker" not in " ".join(p.cmdline())
                ]
            process.suspend()
            try:
                assert [a.result(PATIENCE_S) for a in asked] == expected
                assert (
                    client.completions.create(model="tiny", prompt="x", max_tokens=3)
                    .choices[0]
                    .finish_reason
                    == "length"
                )
            finally:
                process.resume()
        assert fleet.head.gateway.forwarder.num_failovers
        assert fleet.head.gateway.forwarder.num_broken == 0
        fleet.wait_serving(2)
        assert victim.started.process.pid in fleet.pids().values(), "it was replaced"


@pytest.mark.slow
def test_a_lost_head_leaves_no_process_and_is_started_again(tiny, tmp_path):
    state, file = tmp_path / "state", tmp_path / "fleet.yaml"
    fleet = {
        "port": 0,
        "models": {
            "tiny": {
                "versions": [{"name": "v1", "model": str(tiny), "engine": ENGINE, "replicas": 2}]
            }
        },
    }
    check(fleet)
    file.write_text(json.dumps(fleet))

    def up(*words):
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "fleet",
            "up",
            *words,
            "--state-dir",
            str(state),
            "--json",
        ]
        log = open(tmp_path / "log", "ab")  # noqa: SIM115
        head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        lines = []
        for line in head.stdout:
            lines.append(line)
            if line.rstrip() == "}" or line.rstrip().endswith("}"):
                break
        return head, json.loads("".join(lines))

    head, told = up(str(file))
    try:
        replicas = psutil.Process(head.pid).children(recursive=True)
        assert len(replicas) >= 4
        assert (
            httpx.get(told["url"] + "/models", timeout=PATIENCE_S).json()["data"][0]["id"] == "tiny"
        )
        head.send_signal(signal.SIGKILL)
        head.wait()
        until = time.monotonic() + PATIENCE_S
        while any(
            alive(p.pid) and p.status() != psutil.STATUS_ZOMBIE for p in replicas if p.is_running()
        ):
            assert time.monotonic() < until, "a replica outlives its head"
            time.sleep(0.05)
        again, told = up()
        try:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
            answer = httpx.post(told["url"] + "/completions", json=body, timeout=PATIENCE_S)
            assert (answer.status_code, told["replicas"]) == (200, 2)
        finally:
            again.send_signal(signal.SIGTERM)
            assert again.wait(PATIENCE_S) == 0
    finally:
        if head.poll() is None:
            os.kill(head.pid, signal.SIGKILL)
    assert not state.exists()
