"""/v1/files and /v1/batches with the official client, unmodified; idle capacity, restarts, damage, owners."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from starlette.datastructures import UploadFile

from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.server.batches import files as files_module
from slipstream.server.batches import runner as batch_runner
from slipstream.server.batches.files import FileStore
from slipstream.server.batches.runner import check, repaired
from slipstream.server.http.errors import ApiError
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S, wait_for

CHAT = "/v1/chat/completions"
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def lines(count, url=CHAT, body=BODY, **more):
    made = [
        {"custom_id": f"line-{i}", "method": "POST", "url": url, "body": {**body, **more}}
        for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in made).encode()


def upload(client, data, **more):
    return client.files.create(file=("in.jsonl", data), purpose="batch", **more)


def begin(client, data, endpoint=CHAT, window="24h"):
    return client.batches.create(
        input_file_id=upload(client, data).id, endpoint=endpoint, completion_window=window
    )


def ended(client, batch):
    def look():
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return wait_for(look, lambda: client.batches.retrieve(batch.id))


def answers(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.fixture
def client(serve, tmp_path):
    return serve(files_dir=str(tmp_path / "files")).client()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.05)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)


# --- Files --------------------------------------------------------------------------------------------------------------


def test_files_are_stored_listed_and_expire(client):
    first = upload(client, b"one\n")
    second = upload(client, b"second\n", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (first.bytes, first.filename, first.purpose, first.status) == (
        4,
        "in.jsonl",
        "batch",
        "processed",
    )
    assert second.expires_at - second.created_at == 3600
    assert [f.id for f in client.files.list()] == [second.id, first.id]
    assert [f.id for f in client.files.list(limit=1, order="asc")] == [
        first.id,
        second.id,
    ]  # the client asks for each page
    assert [f.id for f in client.files.list(purpose="batch_output")] == []
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).content == b"one\n"
    assert client.files.delete(first.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            gone(first.id)
        assert caught.value.code == "file_not_found"


def test_big_file_goes_through_the_disk(client):
    data = os.urandom(5 * 2**20)
    file = upload(client, data)
    assert client.files.content(file.id).content == data


@pytest.mark.parametrize(("fields", "param"), [
    ({"data": {"purpose": "batch"}}, "file"),
    ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": "batch", "odd": "1"}, "files": {"file": b"x"}}, "odd"),
    ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file"),
    ({"data": {"purpose": "batch", "expires_after[anchor]": "x"}, "files": {"file": b"x"}},
        "expires_after.anchor"),
    ({"data": {"purpose": "batch", "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "1"}, "files": {"file": b"x"}}, "expires_after.seconds"),
    ({"json": {}}, "file"),
    ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, "file"),
])  # fmt: skip
def test_wrong_uploads_name_the_field(client, fields, param):
    answer = httpx.post(f"{client.base_url}files", **fields, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_bounds_of_files(serve, tmp_path):
    client = serve(files_dir=str(tmp_path), max_files_bytes=10_000, max_file_bytes=6_000).client()
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 80_000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    upload(client, b"x" * 6_000)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 6_000)
    assert caught.value.code == "storage_full"
    assert [p.suffix for p in (tmp_path / "content").iterdir()] == [""], (
        "nothing is left of what was refused"
    )


async def test_uploads_at_once_share_the_room(tmp_path):
    store = FileStore(tmp_path, max_bytes=200_000)

    async def add(owner):
        return await store.add(
            owner, "a", "batch", UploadFile(io.BytesIO(b"x" * 80_000), size=80_000), 3600
        )

    found = await asyncio.gather(*(add(owner) for owner in "aabbc"), return_exceptions=True)
    assert sum(isinstance(one, ApiError) and one.code == "storage_full" for one in found) == 3
    assert len(list(store.content.iterdir())) == 2
    used = await store.used("d")
    with (
        store.arrival("d", (0, 0)) as first,
        store.arrival("e", (0, 0)) as second,
        store.arrival("e", used) as third,
    ):
        first(150_000)
        second(60_000)
        second(165_000)
        with pytest.raises(ApiError):
            third(166_000)
        with pytest.raises(ApiError):
            first(180_000)
    assert not store._arriving
    store.close()


def test_off_without_a_folder(serve):
    client = serve().client()
    for call in (client.files.list, client.batches.list):
        with pytest.raises(openai.PermissionDeniedError, match="--files-dir"):
            call()


# --- Batches ------------------------------------------------------------------------------------------------------------


def test_a_batch_is_completed_in_its_window(client):
    data = lines(5) + lines(1, temperature=-1).replace(b"line-0", b"bad")
    batch = client.batches.create(
        input_file_id=upload(client, data).id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"job": "night"},
    )
    assert batch.object == "batch"
    assert batch.expires_at == batch.created_at + 86_400
    found = ended(client, batch)
    assert found.status == "completed"
    assert found.metadata == {"job": "night"}
    assert found.completed_at
    assert (
        found.request_counts.total,
        found.request_counts.completed,
        found.request_counts.failed,
    ) == (6, 5, 1)
    good = {answer["custom_id"]: answer for answer in answers(client, found.output_file_id)}
    assert set(good) == {f"line-{i}" for i in range(5)}
    response = good["line-0"]["response"]
    assert response["status_code"] == 200
    assert len(response["request_id"]) == 32
    assert good["line-0"]["error"] is None
    assert response["body"]["choices"][0]["message"]["content"]
    (bad,) = answers(client, found.error_file_id)
    assert bad["custom_id"] == "bad"
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(found.output_file_id).purpose == "batch_output"
    assert [b.id for b in client.batches.list(limit=10)] == [batch.id]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 3}),
        ("/v1/embeddings", {"model": "fake", "input": "hi"}),
        ("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 3}),
    ],
)
def test_batches_of_every_endpoint_are_answered(client, endpoint, body):
    found = ended(client, begin(client, lines(3, endpoint, body), endpoint))
    assert found.request_counts.completed == 3
    assert all(
        answer["response"]["body"]["object"] for answer in answers(client, found.output_file_id)
    )


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"\n\n", "empty_file", None),
        (b"not json\n", "invalid_line", 1),
        (lines(2) + lines(1), "invalid_line", 3),
        (lines(1) + lines(1, "/v1/completions").replace(b"line-0", b"other"), "invalid_line", 2),
        (lines(1, stream=True), "invalid_line", 1),
        (
            b'{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}',
            "invalid_line",
            1,
        ),
        (
            b'{"custom_id": "", "method": "POST", "url": "/v1/chat/completions", "body": {}}',
            "invalid_line",
            1,
        ),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": []}',
            "invalid_line",
            1,
        ),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}, "x": 1}',
            "invalid_line",
            1,
        ),
        (b"\xff\xfe\n", "invalid_line", 1),
    ],
)
def test_bad_files_fail_whole(client, data, code, number):
    found = ended(client, begin(client, data))
    assert found.status == "failed"
    assert found.failed_at
    assert found.output_file_id is None
    assert (found.errors.data[0].code, found.errors.data[0].line) == (code, number), found.errors


def test_errors_are_bounded(tmp_path):
    (tmp_path / "f").write_bytes(b"x\n" * 100_000)
    assert len(check(tmp_path / "f", CHAT, 1000)[1]) == 100


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"extra_body": {"odd": 1}}, "odd"),
    ],
)
def test_wrong_batches_name_the_field(client, change, param):
    asked = {
        "input_file_id": upload(client, b"x").id,
        "endpoint": CHAT,
        "completion_window": "24h",
        **change,
    }
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**asked)
    assert caught.value.param == param


def test_cancel_keeps_what_is_there(serve, tmp_path):
    client = serve(
        FakeEngine(delay_s=0.05), files_dir=str(tmp_path), batch_max_concurrent=1
    ).client()
    batch = begin(client, lines(200))  # 40 s, longer than what is asked meanwhile
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    wait_for(
        lambda: client.batches.retrieve(batch.id).request_counts.completed, "no line is answered"
    )
    assert client.batches.cancel(batch.id).status == "cancelling"
    found = ended(client, batch)
    assert found.status == "cancelled"
    assert found.cancelled_at >= found.cancelling_at
    assert 0 < found.request_counts.completed < 200
    assert len(answers(client, found.output_file_id)) == found.request_counts.completed
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_an_expired_batch_keeps_the_answers_it_has(serve, tmp_path, monkeypatch):
    late = [0.0]
    monkeypatch.setattr(
        batch_runner,
        "time",
        SimpleNamespace(time=lambda: time.time() + late[0], monotonic=time.monotonic),
    )
    client = serve(
        FakeEngine(delay_s=0.1), files_dir=str(tmp_path), batch_max_concurrent=1
    ).client()
    batch = begin(client, lines(100), window="3600s")  # 40 s, longer than what is asked meanwhile
    wait_for(
        lambda: client.batches.retrieve(batch.id).request_counts.completed, "no line is answered"
    )
    late[0] = 3600.0
    found = ended(client, batch)
    assert found.status == "expired"
    assert found.expired_at
    done, left = answers(client, found.output_file_id), answers(client, found.error_file_id)
    assert done
    assert len(done) + len(left) == 100
    assert {answer["error"]["code"] for answer in left} == {"batch_expired"}


def test_in_idle_capacity_only(serve, tmp_path):
    """No line runs while a client's request does, and lines under way stop for it."""
    engine = FakeEngine(delay_s=1000.0, max_model_len=10**6)
    server = serve(engine, files_dir=str(tmp_path))
    client = server.client()
    batch = begin(client, lines(40, max_tokens=20))
    server.wait_for(lambda: engine.running >= 4, "lines do not run at once")
    engine.delay_s = 0.005  # the first lines, which would take for ever, make way
    online = {
        "model": "fake",
        "prompt": "online",
        "max_tokens": 10**5,
        "stream": True,
    }  # it does not end by itself
    with client.completions.create(**online) as stream:
        next(stream)
        server.wait_for(lambda: engine.running == 1, "lines do not make way")
        for _ in range(20):
            assert next(stream).choices[0].finish_reason is None
            assert engine.running == 1, "only the client's"
    assert ended(client, batch).request_counts.completed == 40
    batch_priorities = {priority for prompt, _, priority in engine.seen if prompt != "online"}
    assert batch_priorities == {2**31 - 1}
    server.wait_idle()


def test_a_busy_server_still_works_off_a_batch(serve, tmp_path):
    engine = FakeEngine(delay_s=0.01)
    client = serve(engine, files_dir=str(tmp_path), batch_max_concurrent=2).client()
    batch = begin(client, lines(2, max_tokens=60))  # 0.6 s each
    until = time.monotonic() + PATIENCE_S
    while client.batches.retrieve(batch.id).status != "completed":
        client.completions.create(
            model="fake", prompt="online", max_tokens=10
        )  # 0.1 s, again and again
        time.sleep(0.1)
        assert time.monotonic() < until


def test_server_errors_are_no_answers(serve, tmp_path):
    """Lines wait while the engine is down."""
    engine = FakeEngine()
    server = serve(engine, files_dir=str(tmp_path))
    client = server.client()
    engine.stuck = "stuck"
    batch = begin(client, lines(3))
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it does not begin")
    time.sleep(0.2)
    assert client.batches.retrieve(batch.id).request_counts.failed == 0
    engine.stuck = ""
    assert ended(client, batch).request_counts.completed == 3


def test_another_keys_batches_and_files_are_not_found(serve, tmp_path, capsys):
    file, made = tmp_path / "keys.json", []
    for _ in range(2):
        main(
            [
                "keys",
                "add",
                str(file),
                "--json",
                "--requests-per-minute=200",
                "--tokens-per-day=100000",
            ]
        )
        made.append(json.loads(capsys.readouterr().out)["key"])
    server = serve(files_dir=str(tmp_path / "files"), keys_file=str(file))
    ann, bob = (server.client(api_key=key) for key in made)
    batch = begin(ann, lines(4))
    assert ended(ann, batch).request_counts.completed == 4
    for call in (
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.files.content(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not list(bob.files.list())
    assert not list(bob.batches.list())
    with pytest.raises(openai.BadRequestError):
        bob.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    assert server.engine.shares[-1].owner == made[0].split("-")[1]

    server.engine.stuck = "stuck"
    late = begin(bob, lines(2))
    wait_for(lambda: bob.batches.retrieve(late.id).status == "in_progress", "it does not begin")
    main(["keys", "revoke", str(file), made[1].split("-")[1]])
    server.state.keys._file._looked = 0.0
    server.engine.stuck = ""
    owner = made[1].split("-")[1]

    def status():
        return server.call(server.state.batches.get(owner, late.id)).status

    wait_for(lambda: status() == "failed", "it goes on")


def test_a_full_disk_fails_the_batch_and_says_so(serve, tmp_path, monkeypatch):
    server = serve(files_dir=str(tmp_path))
    client = server.client()
    real = os.write
    monkeypatch.setattr(
        batch_runner.os,
        "write",
        lambda fd, data: real(fd, data) if b"custom_id" not in data else full(),
    )

    def full():
        raise OSError(28, "No space left on device")

    found = ended(client, begin(client, lines(3)))
    assert found.status == "failed"
    assert found.errors.data[0].code == "storage_failed"
    assert "No space" in found.errors.data[0].message


def test_a_full_disk_refuses_a_file_and_keeps_nothing_of_it(serve, tmp_path, monkeypatch):
    server = serve(files_dir=str(tmp_path))
    client = server.client()
    real, full = os.fsync, [True]

    def fsync(fd):
        if full[0]:
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(files_module.os, "fsync", fsync)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"one\n")
    assert (refused.value.status_code, refused.value.code) == (507, "disk_full")
    full[0] = False
    kept = upload(client, b"one\n")
    server.call(
        server.state.files.database.run(
            lambda db: db.execute("pragma max_page_count = 1").fetchone()
        )
    )
    for _ in range(200):  # until the pages that it has are full
        try:
            kept = upload(client, b"two\n", expires_after={"anchor": "created_at", "seconds": 3600})
        except openai.APIStatusError as error:
            refused = error
            break
    assert (refused.status_code, refused.code) == (507, "disk_full")
    listed = [f.id for f in client.files.list()]
    assert listed[0] == kept.id
    assert sorted(path.name for path in (tmp_path / "content").iterdir()) == sorted(listed)
    assert client.files.content(kept.id).content


# --- Restarts -----------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "out"
    whole = b'{"custom_id":"a","response":{}}\n{"custom_id":"b"}\n'
    for torn in (b"", b'{"custom_id":"c"', b'{"custom_id":"c"}', b"\0\0\0\n", b'{"no":1}\n'):
        path.write_bytes(whole + torn)
        assert repaired(path) == {"a", "b"}
        assert path.read_bytes() == whole
    assert repaired(tmp_path / "none") == set()


def test_a_restart_goes_on(serve, tmp_path):
    folder = str(tmp_path)
    server = serve(
        FakeEngine(delay_s=0.1), files_dir=folder, batch_max_concurrent=2, drain_timeout_s=0
    )
    batch = begin(server.client(), lines(60))  # 12 s, longer than until it is stopped
    server.wait_for(lambda: server.engine.started > 6, "no lines run")
    server.begin_stop()
    server.join()
    (part,) = (tmp_path / "content").glob("*.output")
    kept = part.read_bytes()
    part.write_bytes(kept + b'{"custom_id":"line-59","resp')  # torn
    server = serve(files_dir=folder)
    found = ended(server.client(), batch)
    assert found.request_counts.completed == 60
    told = answers(server.client(), found.output_file_id)
    assert sorted(a["custom_id"] for a in told) == sorted(f"line-{i}" for i in range(60)), (
        "each once"
    )
    assert server.engine.started == 60 - len(kept.splitlines()), (
        "what was answered is not asked again"
    )


@pytest.mark.slow
def test_kill_9_with_the_real_engine(tiny_path, tmp_path):
    """The command is killed in the midst of a batch and started again, with two front ends."""
    data = lines(
        40,
        "/v1/completions",
        {"model": "tiny", "prompt": "hello", "max_tokens": 30, "ignore_eos": True},
    )
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(tiny_path),
        "--port=0",
        "--json",
        "--device=cpu",
    ]
    command += [
        "--served-model-name=tiny",
        f"--files-dir={tmp_path}",
        "--max-model-len=256",
        "--num-threads=1",
    ]
    command += [
        "--kv-cache-bytes=64MiB",
        "--dtype=float32",
        "--batch-max-concurrent=2",
        "--api-servers=2",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def start():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        return process, openai.OpenAI(
            base_url=json.loads(process.stdout.readline())["url"], api_key="none"
        )

    process, client = start()
    batch = begin(client, data, "/v1/completions")
    wait_for(
        lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5,
        "no lines are answered",
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process, client = start()
    try:
        found = ended(client, batch)
        told = answers(client, found.output_file_id)
        assert sorted(a["custom_id"] for a in told) == sorted(f"line-{i}" for i in range(40))
        assert all(a["response"]["body"]["usage"]["completion_tokens"] == 30 for a in told)
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_upload_of_a_stream(client):
    file = client.files.create(file=io.BytesIO(lines(1)), purpose="batch")
    assert file.filename
    assert file.bytes == len(lines(1))


def test_a_line_whose_schema_is_too_deep_is_a_400_and_the_others_go_on(tiny_path, tmp_path):
    """The real engine's check: llguidance would overflow its stack, and end the server at each start."""
    from slipstream.engine.async_llm import AsyncLLM
    from tests.server.conftest import serving

    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    deep = {"$ref": "#/$defs/d0", "$defs": {**defs, "d3000": {"type": "string"}}}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    data = lines(1, "/v1/completions", body, guided_json=deep)
    data += lines(1, "/v1/completions", body).replace(b"line-0", b"line-1")
    args = EngineArgs(model=str(tiny_path), dtype="float32", device="cpu", num_threads=1)
    settings = {"files_dir": str(tmp_path / "files"), "served_model_names": ("tiny",)}
    with (
        serving(start=lambda: AsyncLLM.start(args), **settings) as server,
        server.client() as client,
    ):
        batch = ended(client, begin(client, data, "/v1/completions"))
        assert (batch.status, batch.request_counts.failed) == ("completed", 1)
        [failed] = answers(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("line-0", 400)
        assert "deeper than 400" in failed["response"]["body"]["error"]["message"]
        assert len(answers(client, batch.output_file_id)) == 1
