"""Files, batches, the audit log and ratings at a fleet's gateway, with the official client."""

from __future__ import annotations

import json

import openai
import pytest

from slipstream.cli.main import main
from slipstream.fleet.config import check, read
from slipstream.server.batches import runner as batch_runner
from slipstream.server.operations.audit import records
from tests.fleet.running import fleet_of, running, version
from tests.fleet.stubs import numbers, stubbed, text_of
from tests.server.batches.test_server_batches import answers, ended, upload
from tests.support.waiting import wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.05)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)


@pytest.fixture
def start(tiny, tmp_path):
    from contextlib import ExitStack

    with ExitStack() as stack:

        def made(replicas=2, *, name="state", engine=None, **more):
            own = version(tiny, replicas=replicas)
            own["engine"] = {**own["engine"], **(engine or {})}
            more = {"files_dir": str(tmp_path / "files"), **more}
            fleet = fleet_of(own, router={"probe_s": 0, "policy": "least_loaded"}, **more)
            fleet, stubs = stack.enter_context(stubbed(fleet, tmp_path / name))
            fleet.wait_serving(replicas)
            return fleet, stubs

        yield made


def lines(count, **more):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, **more}
    made = [
        {"custom_id": f"line-{i}", "method": "POST", "url": COMPLETIONS, "body": body}
        for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in made).encode()


def begin(client, data):
    return client.batches.create(
        input_file_id=upload(client, data).id, endpoint=COMPLETIONS, completion_window="24h"
    )


def of_batches(stub):
    """Requests of a stub that came from lines."""
    return [r for r in stub.asked if r.headers["x-slipstream-fleet"].split(" ")[4:5] == ["batch"]]


def test_a_batch_runs_over_all_replicas(start):
    fleet, stubs = start(2, engine={"max_num_seqs": 4})
    for stub in stubs:
        stub.hang_at = 0
    with fleet.client() as client:
        batch = begin(client, lines(12))
        wait_for(
            lambda: [len(of_batches(stub)) for stub in stubs] == [2, 2],
            "half of its sequences at each replica",
        )
        for stub in stubs:
            stub.hang_at = None
            fleet.loop.call_soon_threadsafe(stub.go.set)
        found = ended(client, batch)
        assert (found.status, found.request_counts.completed) == ("completed", 12)
        told = {
            a["custom_id"]: a["response"]["body"]["choices"][0]["text"]
            for a in answers(client, found.output_file_id)
        }
    assert told == {f"line-{i}": numbers(4) for i in range(12)}
    assert sum(len(stub.asked) for stub in stubs) == 12, "each was asked once"


def test_lines_leave_the_replica_that_a_client_comes_to(start):
    """The lines go on at the other replica, which no client uses."""
    fleet, stubs = start(2, engine={"max_num_seqs": 4})
    for stub in stubs:
        stub.hang_at = 0
    with fleet.client() as client:
        batch = begin(client, lines(6))
        wait_for(lambda: [len(of_batches(stub)) for stub in stubs] == [2, 2], "they do not begin")
        stream = client.completions.with_streaming_response.create(
            model="tiny", prompt="y", max_tokens=8, stream=True
        )
        import threading

        client_done = threading.Event()

        def ask():
            with stream as answer:
                answer.read()
            client_done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        busy = wait_for(
            lambda: next((s for s in stubs if len(s.asked) > len(of_batches(s))), None),
            "it does not come",
        )
        other = next(stub for stub in stubs if stub is not busy)
        wait_for(
            lambda: all(r.cancelled for r in of_batches(busy)),
            "lines stay beside a client's request",
        )
        assert not any(r.cancelled for r in of_batches(other))
        number = len(of_batches(busy))
        other.hang_at = None
        fleet.loop.call_soon_threadsafe(other.go.set)
        found = ended(client, batch)
        assert found.request_counts.completed == 6
        assert len(of_batches(busy)) == number, "lines came to a replica with a client's request"
        assert not client_done.is_set()
        fleet.loop.call_soon_threadsafe(busy.go.set)
        thread.join()


def test_a_batch_goes_on_when_its_replica_dies(start):
    fleet, stubs = start(2, engine={"max_num_seqs": 4})
    victim, other = stubs
    victim.hang_at = 0
    with fleet.client() as client:
        batch = begin(client, lines(10))
        wait_for(lambda: len(of_batches(victim)) == 2, "it has no line")
        fleet.call(victim.stop(0))
        found = ended(client, batch)
    assert (found.request_counts.completed, found.request_counts.failed) == (10, 0)
    assert len(of_batches(other)) >= 2
    assert fleet.head.gateway.forwarder.num_failovers >= 2


def test_a_batch_outlives_the_head(start):
    """A line that has its answer is not asked again."""
    first, stubs = start(1, engine={"max_num_seqs": 2})
    with first.client() as client:
        stubs[0].token_s = 0.02
        batch = begin(client, lines(40))
        wait_for(
            lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3,
            "none is answered",
        )
    first.stop()
    done = len([r for r in of_batches(stubs[0]) if not r.cancelled])
    second, stubs = start(1, name="again", engine={"max_num_seqs": 2})
    with second.client() as client:
        found = ended(client, batch)
        assert found.request_counts.completed == 40
        assert {a["custom_id"] for a in answers(client, found.output_file_id)} == {
            f"line-{i}" for i in range(40)
        }
    assert len(of_batches(stubs[0])) <= 40 - 3
    assert done >= 3


def test_real_replicas_answer_a_batch_and_name_wrong_lines(tiny, tmp_path):
    """A wrong line is an error of its own, and lines come last in a replica's queue."""
    fleet = fleet_of(version(tiny, replicas=1), files_dir=str(tmp_path / "files"))
    with running(fleet, tmp_path / "state") as made, made.client() as client:
        data = lines(4, temperature=0) + lines(1, temperature=-1).replace(b"line-0", b"bad")
        found = ended(client, begin(client, data))
        assert (found.request_counts.completed, found.request_counts.failed) == (4, 1)
        (bad,) = answers(client, found.error_file_id)
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        said = (
            client.completions.create(model="tiny", prompt="x", max_tokens=4, temperature=0)
            .choices[0]
            .text
        )
        texts = {
            a["response"]["body"]["choices"][0]["text"]
            for a in answers(client, found.output_file_id)
        }
        assert texts == {said}


@pytest.mark.parametrize(
    ("path", "code", "field"),
    [
        ("/v1/files", "files_disabled", "files_dir"),
        ("/v1/batches/x", "files_disabled", "files_dir"),
        ("/v1/feedback", "feedback_disabled", "audit_log"),
    ],
)
def test_what_the_file_does_not_have(start, path, code, field):
    fleet, _ = start(1, files_dir=None)
    with fleet.http() as http:
        answer = http.request("POST" if "feedback" in path else "GET", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        assert field in answer.json()["error"]["message"]


def test_wrong_methods_and_routes(start):
    fleet, _ = start(1)
    with fleet.http() as http:
        wrong = http.put("/v1/files")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")
        assert http.get("/v1/files/a/b/c").json()["error"]["code"] == "unknown_route"


def test_the_audit_log_and_ratings(start, tmp_path, capsys):
    path = tmp_path / "audit.log"
    fleet, _ = start(2, audit_log=str(path), audit_prompts=True)
    with fleet.client() as client, fleet.http() as http:
        assert text_of(client) == numbers()
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt="secret", max_tokens=3
        )
        id_ = raw.headers["x-request-id"]
        rated = http.post("/v1/feedback", json={"request_id": id_, "rating": "up"})
        assert rated.json() == {"request_id": id_, "rating": "up"}
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", prompt="x")
    fleet.stop()
    asked = [r for r in records(path) if r["kind"] == "request" and r["route"] == COMPLETIONS]
    assert [r["status"] for r in asked] == [200, 200, 404]
    assert asked[1]["id"] == id_
    assert (
        asked[1]["model"],
        asked[1]["output_tokens"],
        json.loads(asked[1]["body"])["prompt"],
    ) == ("tiny", 3, "secret")
    assert [r["request"] for r in records(path) if r["kind"] == "feedback"] == [id_]
    assert main(["audit", "verify", str(path), "--json"]) == 0


def test_paths_are_below_the_file_s_folder(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "fleet.yaml"
    versions = (
        "[{name: a, model: ./own, engine: {lora_modules: {x: ./x}}}, {name: b, model: org/name}]"
    )
    file.write_text(
        f"keys_file: keys\nfiles_dir: ../batches\naudit_log: /var/a.log\nmodels: {{m: {{versions: {versions}}}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    found = read("conf/fleet.yaml")
    base = tmp_path / "conf"
    assert (found.keys_file, found.files_dir, found.audit_log) == (
        str(base / "keys"),
        str(base / "../batches"),
        "/var/a.log",
    )
    own, other = found.models["m"].versions
    assert (own.model, other.model) == (str(base / "own"), "org/name")
    assert own.engine["lora_modules"] == {"x": str(base / "x")}
    assert check(
        json.loads(json.dumps({"models": {"m": {"versions": [{"name": "a", "model": "./own"}]}}}))
    ).models["m"]
