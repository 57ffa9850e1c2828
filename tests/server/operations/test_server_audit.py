"""The audit log: its chain, rotation, torn lines, full disks, several writers; feedback."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os

import httpx
import openai
import pytest

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.server.operations import audit as audit_module
from slipstream.server.operations.audit import AuditLog, ChainError, records, rotated
from tests.support.waiting import PATIENCE_S

ASK = {"model": "fake", "prompt": "a secret prompt", "max_tokens": 4}


def verified(capsys, *words):
    code = main(["audit", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def filled(path, count=20, **how):
    log = AuditLog(path, **how)
    for i in range(count):
        log.write("request", id=f"{i:032x}", status=200)
    log.close()
    return log


def test_requests_and_feedback(serve, tmp_path, capsys):
    path = tmp_path / "audit.log"
    server = serve(audit_log=str(path), api_keys=("right",))
    client = server.client(api_key="right")
    raw = client.completions.with_raw_response.create(**ASK)
    answer = raw.parse()
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    rated = {"request_id": answer.id, "rating": "down", "score": 0.2, "comment": "wrong city"}
    with server.http(headers={"authorization": "Bearer right"}) as http:
        assert (
            http.post("/v1/feedback", json=rated).json()["request_id"]
            == raw.headers["x-request-id"]
        )
        for bad in (
            {**rated, "request_id": "x"},
            {**rated, "rating": "so-so"},
            {**rated, "score": 2},
        ):
            assert http.post("/v1/feedback", json=bad).status_code == 400
        assert 'slipstream:feedback_total{rating="down"} 1.0' in http.get("/metrics").text
        http.get("/health")
    found = list(records(path))
    request = next(r for r in found if r["kind"] == "request")
    assert request["id"] == raw.headers["x-request-id"]
    assert (request["route"], request["status"], request["output_tokens"]) == (
        "/v1/completions",
        200,
        4,
    )
    assert (request["model"], len(request["key"])) == ("fake", 64)
    assert [r["status"] for r in found if r.get("error") == "invalid_api_key"] == [401]
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [r for r in found if r.get("route") == "/health"]

    code, told = verified(capsys, "verify", path)
    assert (code, told["lines"], told["head"]) == (0, len(found), found[-1]["hash"])
    shown = verified(capsys, "show", path, answer.id)[1]["records"]
    assert [r["kind"] for r in shown] == ["request", "feedback"]
    assert shown[1]["comment"] == "wrong city"


def test_prompts_by_choice(serve, tmp_path):
    path = tmp_path / "audit.log"
    server = serve(audit_log=str(path), audit_prompts=True)
    server.client().completions.create(**ASK)
    server.wait_for(
        lambda: any(r["kind"] == "request" for r in records(path)),
        "a line is written behind its answer",
    )
    (request,) = (r for r in records(path) if r["kind"] == "request")
    assert json.loads(request["body"])["prompt"] == "a secret prompt"


def test_feedback_needs_the_log(shared):
    answer = httpx.post(
        f"{shared.url}/v1/feedback",
        json={"request_id": "0" * 32, "rating": "up"},
        timeout=PATIENCE_S,
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "feedback_disabled")


CHANGES = {
    "a number": lambda lines: [
        *lines[:5],
        lines[5].replace(b'"status":200', b'"status":404'),
        *lines[6:],
    ],
    "a line out": lambda lines: [*lines[:5], *lines[6:]],
    "the first out": lambda lines: lines[1:],
    "two lines swapped": lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]],
    "a line twice": lambda lines: [*lines[:5], lines[5], *lines[5:]],
    "the last": lambda lines: [*lines[:-1], lines[-1].replace(b"200", b"201")],
    "garbage": lambda lines: [*lines[:5], b"garbage\n", *lines[5:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_breaks_the_chain(tmp_path, change):
    path = tmp_path / "a"
    filled(path)
    path.write_bytes(b"".join(CHANGES[change](path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ChainError):
        list(records(path))
    assert main(["audit", "verify", str(path)]) == 2
    AuditLog(path).close()  # a new start heals nothing
    with pytest.raises(ChainError):
        list(records(path))


def test_what_is_cut_off_shows_against_a_noted_hash(tmp_path, capsys):
    path = tmp_path / "a"
    filled(path)
    head = verified(capsys, "verify", path)[1]["head"]
    assert verified(capsys, "verify", path, "--expect", head)[0] == 0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]))
    assert verified(capsys, "verify", path)[0] == 0
    assert verified(capsys, "verify", path, "--expect", head)[0] == 2


def lines_off(path, count=3):
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, len(b"".join(lines[:-count])))


def replaced(path):
    copy = path.with_name("copy")
    copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    copy.replace(path)


CUTS = {
    "lines cut off": lines_off,
    "cut within a line": lambda path: os.truncate(path, path.stat().st_size - 200),
    "the end of the last line cut off": lambda path: os.truncate(path, path.stat().st_size - 30),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
    "replaced by a shorter file": replaced,
    "all rotated files deleted, too": lambda path: [p.unlink() for p in (*rotated(path), path)],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("max_bytes", [4096, 2**20])
@pytest.mark.parametrize("writes_on", [True, False])
def test_a_cut_under_a_running_server_is_written_down(
    tmp_path, cut, max_bytes, writes_on, capsys, caplog
):
    path = tmp_path / "a"
    log = AuditLog(path, max_bytes=max_bytes)
    for i in range(40):
        log.write("request", id=f"{i:032x}", status=200)
    before = list(records(path))[-1]
    CUTS[cut](path)
    for _ in range(3 if writes_on else 0):
        log.write("request", status=200)
    log.close()
    code = main(["audit", "verify", str(path)])
    told = capsys.readouterr().err
    assert code == 2
    assert f"number {before['seq']} with the hash {before['hash']}" in told
    assert "cut" in told
    assert [r for r in caplog.records if "was cut" in r.getMessage()]
    found = [json.loads(line) for line in path.read_bytes().splitlines() if b'"kind":"cut"' in line]
    assert [(r["seq"], r["previous"], r["expected"]) for r in found] == [
        (before["seq"] + 1, before["hash"], before["hash"])
    ]


def test_a_copy_of_the_whole_file_is_no_cut(tmp_path):
    path = tmp_path / "a"
    log = AuditLog(path)
    log.write("request", status=200)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    (tmp_path / "copy").replace(path)
    log.write("request", status=200)
    log.close()
    assert [r["kind"] for r in records(path)] == ["start", "request", "request"]


def test_a_front_end_notices_the_cut_of_what_another_wrote(tmp_path, capsys):
    path, shared = tmp_path / "a", tmp_path / "shared"
    shared.mkdir()
    one, other = (AuditLog(path, shared_dir=shared) for _ in range(2))
    for _ in range(5):
        other.write("request", status=200)
    other.close()
    lines_off(path)  # none of them is of `one`
    AuditLog(path, shared_dir=shared).close()  # a front end that takes the place of one that died
    one.write("request", status=200)
    one.close()
    assert main(["audit", "verify", str(path)]) == 2
    assert "cut" in capsys.readouterr().err
    assert path.read_bytes().count(b'"kind":"cut"') == 1


def test_front_ends_that_share_what_they_wrote_write_one_chain(tmp_path):
    path, shared = tmp_path / "a", tmp_path / "shared"
    shared.mkdir()
    logs = [AuditLog(path, max_bytes=4096, shared_dir=shared) for _ in range(3)]
    for i in range(60):
        logs[i % 3].write("request", id=f"{i:032x}")
    for log in logs:
        log.close()
    assert [r["kind"] for r in records(path)] == ["start"] * 3 + ["request"] * 60


def test_rotation_keeps_the_chain(tmp_path):
    path = tmp_path / "a"
    filled(path, 200, max_bytes=4096)
    parts = rotated(path)
    assert len(parts) > 5
    assert all(part.stat().st_size <= 4096 for part in (*parts, path))
    assert len(list(records(path))) == 201
    filled(path, 5, max_bytes=4096)
    assert len(list(records(path))) == 207
    parts[2].unlink()
    with pytest.raises(ChainError):
        list(records(path))


def test_a_new_file_that_cannot_be_made(tmp_path, monkeypatch):
    """The full one was renamed, and the disk has no place for the next."""
    path, full = tmp_path / "a", [False]
    log, real = AuditLog(path, max_bytes=4096), os.open

    def opening(name, *args):
        if full[0]:
            raise OSError(28, "No space left on device")
        return real(name, *args)

    monkeypatch.setattr(audit_module.os, "open", opening)
    full[0] = True
    for number in range(30):
        log.write("request", id=f"{number:0200}")
    assert log.refuses
    full[0] = False
    assert not log.refuses
    log.close()
    assert len(list(records(path))) == 31


def test_a_torn_line(tmp_path):
    path = tmp_path / "a"
    filled(path)
    whole = path.read_bytes()
    for cut in (1, 10, 70, 120):
        path.write_bytes(whole[:-cut])
        filled(path, 2)
        found = list(records(path))
        torn = (
            ["request"] if cut == 1 else ["torn"]
        )  # of the first only the end of the line is missing
        assert [r["kind"] for r in found[20:]] == [*torn, "start", "request", "request"]


def write(path, number):
    filled(path, 100, max_bytes=20_000)


def test_several_processes_write_one_chain(tmp_path):
    path, context = tmp_path / "a", multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(path, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sum(r["kind"] == "request" for r in records(path)) == 400


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be full: half of a line is written."""
    state, real = {"full": False}, os.write

    def write(fd, data):
        if state["full"] and b'"previous"' in data:
            return real(fd, data[: len(data) // 2])
        return real(fd, data)

    monkeypatch.setattr(audit_module.os, "write", write)
    return state


def test_a_full_disk_refuses(serve, tmp_path, disk):
    path = tmp_path / "a"
    server = serve(audit_log=str(path))
    client = server.client()
    disk["full"] = True
    client.completions.create(**ASK)  # its line could not be written
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (503, "audit_unavailable")
    with server.http() as http:
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
    disk["full"] = False
    client.completions.create(**ASK)

    def statuses():
        return [r["status"] for r in records(path) if r["kind"] == "request"]

    server.wait_for(
        lambda: len(statuses()) == 3, "what waited is not there"
    )  # a line comes behind its answer
    assert statuses() == [200, 503, 200]


def test_a_full_disk_may_lose_lines_and_counts_them(serve, tmp_path, disk, monkeypatch):
    monkeypatch.setattr(audit_module, "MAX_WAITING", 2)
    path = tmp_path / "a"
    server = serve(audit_log=str(path), audit_failure="serve")
    client = server.client()
    disk["full"] = True
    for _ in range(5):
        client.completions.create(**ASK)
    server.wait_for(
        lambda: server.state.metrics.responses["POST", "/v1/completions", 200] == 5,
        "an answer is not counted",
    )
    server.call(asyncio.sleep(0))  # a line is written behind its answer and its count
    disk["full"] = False
    client.completions.create(**ASK)
    client.completions.create(**ASK)
    server.wait_for(lambda: any(r["kind"] == "lost" for r in records(path)), "nothing is counted")
    assert [r["count"] for r in records(path) if r["kind"] == "lost"] == [3]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(serve, tmp_path):
    with pytest.raises(ConfigError, match="audit log"):
        serve(audit_log=str(tmp_path / "no" / "a"))
    with pytest.raises(ConfigError, match="audit_log"):
        serve(audit_prompts=True)
