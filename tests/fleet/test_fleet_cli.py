"""`slipstream fleet` as a user has it, in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import yaml

from slipstream.cli.main import main
from slipstream.cli.serving.fleet import COUNTED
from slipstream.errors import ConfigError
from slipstream.fleet import head
from slipstream.fleet.config import check, pools, read
from slipstream.fleet.replicas.processes import START_NICE, ReplicaProcesses
from tests.fleet.running import ENGINE, alive, fleet_of, version
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def up(tiny, tmp_path):
    """A fleet's process, and where it serves. A replica may be silent for as long as a test takes."""
    file, versions = tmp_path / "fleet.yaml", [version(tiny, replicas=1)]
    router = {"silence_s": 600, "first_token_s": 600, "next_token_s": 600, "probe_s": 0}
    models = {"tiny": {"versions": versions}}
    file.write_text(
        yaml.safe_dump({"port": 0, "drain_timeout_s": 300, "router": router, "models": models})
    )
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "fleet",
        "up",
        str(file),
        "--state-dir",
        str(tmp_path / "state"),
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, json.loads(process.stdout.readline())["url"].removesuffix("/v1")
        finally:
            process.kill()


@contextlib.contextmanager
def stopped(up, url):
    """(replica's process, stream) of a request that can't end before its replica is continued."""
    with open(f"/proc/{up.pid}/task/{up.pid}/children") as children:
        (pid,) = map(int, children.read().split())
    body = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 900,
        "n": 8,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as stream:
        parts = stream.iter_text()
        next(parts)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid, parts
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def order(tmp_path, *words):
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "fleet",
        *words,
        "--state-dir",
        str(tmp_path / "state"),
        "--json",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_draining(url):
    wait_for(
        lambda: httpx.get(url + "/ready", timeout=PATIENCE_S).status_code == 503,
        "it does not drain",
    )


def test_down_waits_for_requests_and_processes(up, tmp_path):
    process, url = up
    with stopped(process, url) as (replica, parts):
        down = order(tmp_path, "down")
        wait_draining(url)
        assert down.poll() is None
        os.kill(replica, signal.SIGCONT)
        assert "[DONE]" in "".join(parts), "the request was cut off"
        out, _ = down.communicate(timeout=PATIENCE_S)
        assert not alive(replica), "it was back before the replica had ended"
    told = json.loads(out)
    assert (down.returncode, told["replicas"], told["finished"], told["cut"]) == (0, 1, 1, 0)
    assert process.wait(PATIENCE_S) == 0
    assert not (tmp_path / "state").exists()
    again = order(tmp_path, "down")
    _, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode != 0
    assert "no fleet runs" in err


def test_down_now_says_what_was_cut_off(up, tmp_path):
    process, url = up
    with stopped(process, url) as (replica, parts):
        down = order(tmp_path, "down", "--now")
        assert "shutting_down" in "".join(parts)
        os.kill(replica, signal.SIGCONT)
        told = json.loads(down.communicate(timeout=PATIENCE_S)[0])
    assert (told["finished"], told["cut"]) == (0, 1)
    assert process.wait(PATIENCE_S) == 0


def test_down_of_a_head_that_is_killed_meanwhile(up, tmp_path):
    process, url = up
    with stopped(process, url) as (replica, _):
        down = order(tmp_path, "down")
        wait_draining(url)
        process.kill()
        _, err = down.communicate(timeout=PATIENCE_S)
    assert down.returncode != 0
    assert "was killed" in err
    wait_for(lambda: not alive(replica), "its replica was left behind")


@pytest.fixture
def head_says(tmp_path, capsys):
    """Output of an order when the head answers with these messages and closes."""

    def run(words, *messages):
        folder = tmp_path / "state"
        folder.mkdir(exist_ok=True)
        (folder / "control").unlink(missing_ok=True)

        def answer(listener):
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                stream.readline()
                stream.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "control"))
            listener.listen()
            thread = threading.Thread(target=answer, args=(listener,))
            thread.start()
            assert main(["fleet", *words, "--state-dir", str(folder)]) == 0
            thread.join(PATIENCE_S)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("number", "replica", "request_"),
    [(1, "1 replica", "1 request"), (2, "2 replicas", "2 requests")],
)
def test_one_and_many(head_says, tmp_path, tiny, number, replica, request_):
    out = head_says(["scale", "m/v/main", str(number)], {"pool": "m/v/main", "replicas": number})
    assert out == f"m/v/main will have {replica}\n"
    begun = {"pid": 1, "within_s": 60, "in_flight": number}
    out = head_says(["down"], begun, {"replicas": number, "finished": number, "cut": number})
    assert out.splitlines() == [
        f"waiting for {request_}, 60 s at most",
        f"the fleet has ended: {replica}, {request_} came to their end, {request_} were cut off",
    ]
    (file := tmp_path / "fleet.yaml").write_text(
        yaml.safe_dump({"models": {"tiny": {"versions": [version(tiny)]}}})
    )
    out = head_says(["rollout", str(file)], {"replaced": number, "started": 0, "ended": 0})
    assert out == f"{replica} replaced, 0 started, 0 ended\n"
    one = {
        "name": "v",
        "share": 1,
        "waiting_at_gateway": 0,
        "replicas": [],
        "starting": ["m/v/main/1"],
    }
    out = head_says(
        ["status"],
        {
            "models": {"m": [one]},
            "autoscale": {},
            "counts": {**dict.fromkeys(COUNTED, 0), "failovers": number, "resumed": number},
        },
    )
    plural = "s" * (number > 1)
    failovers = f"{number} failover{plural}, {number} stream{plural} resumed on another replica"
    assert out.splitlines() == [
        "m v: share 1, 0 waiting at the gateway",
        "  m/v/main/1 starting",
        failovers,
    ]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"prot": 8000}, "fleet.yaml", "did you mean 'port'?"),
        ({"slow_factor": 2}, "fleet.yaml", "it stands in router"),
        ({"router": {"retries": {"shre": 1}}}, "router.retries", "did you mean 'share'?"),
        ({"tls": {"ca": "a", "cert": "b"}}, "tls", "there are ca, certificate, key"),
        ({"port": 9000, "grpc_port": 9000}, "grpc_port", "give gRPC another port"),
        ({"audit_prompts": True}, "audit_log", "only with audit_log"),
        ({"batch_beside": 1}, "batch_beside", "only with files_dir"),
        ({"backend": "kubernetes"}, "backend", "it is one of processes, ray"),
        ({"router": {"policy": "random"}}, "router.policy", "round_robin"),
    ],
)
def test_unknown_fields_of_a_fleet_are_named(tiny, change, field, said):
    with pytest.raises(ConfigError) as wrong:
        fleet_of(version(tiny), **change)
    assert said in wrong.value.message
    assert field in (wrong.value.field, wrong.value.message.split(":")[0])


@pytest.mark.parametrize(("one", "where", "said"), [
    ({"modle": "x"}, "models.a.b.versions[0]", "did you mean 'model'?"),
    ({"model": "x", "replicas": {"mn": 1, "max": 2}}, "models.a.b.versions[0].replicas",
        "did you mean 'min'?"),
    ({"model": "x", "max_model_len": 3}, "models.a.b.versions[0]", "no field 'max_model_len'"),
    ({"model": "x", "engine": {"max_modellen": 3}}, "models.a.b.versions[0].engine",
        "did you mean 'max_model_len'?"),
    ({"model": "x", "engine": {"num_threads": "4"}}, "models.a.b.versions[0].engine",
        "num_threads must be int or None"),
    ({"model": "x", "server": {"max_body_bytes": 1.5}}, "models.a.b.versions[0].server",
        "must be int, got 1.5"),
    ({"model": "x", "server": {"allowed_media_hosts": "a.example"}},
        "models.a.b.versions[0].server", "a list of texts"),
    ({"model": "x", "server": {"max_body_byte": 3}}, "models.a.b.versions[0].server",
        "did you mean 'max_body_bytes'?"),
])  # fmt: skip
def test_unknown_fields_of_a_version(one, where, said):
    with pytest.raises(ConfigError) as wrong:
        check(
            {
                "models": {
                    "good": {"versions": [{"name": "v", "model": "x"}]},
                    "a.b": {"versions": [{"name": "v", **one}]},
                }
            }
        )
    assert wrong.value.message.startswith(where + ":")
    assert said in wrong.value.message


def test_a_home_folder_that_is_not_known(tiny, tmp_path):
    (tmp_path / "fleet.yaml").write_text(
        yaml.safe_dump(
            {"keys_file": "~no-such-user/keys", "models": {"tiny": {"versions": [version(tiny)]}}}
        )
    )
    with pytest.raises(
        ConfigError, match="keys_file: the home folder of ~no-such-user/keys is not known"
    ):
        read(tmp_path / "fleet.yaml")


def test_files_that_cannot_be_read(tiny, tmp_path, capsys):
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path / "empty.yaml")
    (tmp_path / "odd.yaml").write_text("port: 1\nmodels: [\n")
    with pytest.raises(ConfigError, match="line 3, column 1: not YAML") as wrong:
        read(tmp_path / "odd.yaml")
    assert "\n" not in wrong.value.message
    with pytest.raises(ConfigError, match="No such file or directory") as wrong:
        read(tmp_path / "none.yaml")
    assert "Errno" not in wrong.value.message
    assert main(["serve", str(tiny), "--api-key-file", "/nope"]) == 2
    said = capsys.readouterr().err
    assert "/nope" in said
    assert "one key a line" in said
    assert "Errno" not in said


@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_a_wrong_setting_is_told_before_anything_starts(tiny, tmp_path, backend, monkeypatch):
    """Ray takes ten seconds to start, and Serve tries a failing replica again and again."""
    fleet = fleet_of(version(tiny, engine={**ENGINE, "max_model_len": 10**6}), backend=backend)
    with pytest.raises(ConfigError, match="max_model_len") as wrong:
        head.check_engines(fleet)
    assert wrong.value.field == "max_model_len"
    assert wrong.value.message.startswith("tiny/v1/main: ")
    missing = fleet_of(version(tmp_path / "nowhere"), backend=backend)
    with pytest.raises(Exception, match="nowhere"):
        head.check_engines(missing)
    head.check_engines(fleet_of(version(tiny), backend=backend))


def test_a_cluster_s_devices_are_its_own(tiny):
    fleet = fleet_of(
        version(tiny, engine={**ENGINE, "device": "cuda:7"}), backend="ray", ray_address="auto"
    )
    head.check_engines(fleet)


def share(pid):
    """The niceness of a process's session; None where the kernel has none."""
    try:
        with open(f"/proc/{pid}/autogroup") as file:
            return int(file.read().split()[-1])
    except FileNotFoundError:
        return None


async def test_a_start_beside_others_is_gentle(tiny, tmp_path):
    """The replica has its whole share of the processor once it serves."""
    (spec,) = pools(fleet_of(version(tiny)))
    processes = ReplicaProcesses(str(tmp_path), "key", None, lambda key: str(tmp_path / "log"), 1.0)
    try:
        first = await processes.start(spec, 0)
        starting = asyncio.create_task(processes.start(spec, 1))
        seen = set()
        while not starting.done():
            seen |= {
                share(r.process.pid)
                for r in processes._running
                if r is not first and r.process.returncode is None
            }
            await asyncio.sleep(0.01)
        second = starting.result()
        supported = share(first.process.pid) is not None
        assert (START_NICE in seen) == supported
        assert {share(first.process.pid), share(second.process.pid)} == (
            {0} if supported else {None}
        )
    finally:
        await processes.close()
