"""The runner of batches in this process: an `app` and a room of the test's instead of a server."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from slipstream.server.batches import runner as runner_module
from slipstream.server.batches.batches import Batch, Batches, BatchStore, _window
from slipstream.server.batches.files import FileStore
from slipstream.server.batches.runner import BatchRunner, EngineLineRunner, Journal, Work, check
from slipstream.server.http.errors import ApiError
from slipstream.server.http.keys import Key

URL = "/v1/completions"


def line(name: str, **body) -> bytes:
    about = {"custom_id": name, "method": "POST", "url": URL, "body": body}
    return json.dumps(about).encode() + b"\n"


class Runner:
    """A runner over a folder. `answer` is what the app says: (status, headers, record's error) by custom id; None: never."""

    def __init__(self, folder, answer=lambda name: (200, {}, None), room=100, keys=None):
        self.files = FileStore(folder, max_bytes=10_000)
        self.store = BatchStore(self.files)
        self.answer, self.room, self.asked, self.surplus = answer, room, [], 0
        self.gate = asyncio.Event()  # requests without an answer wait for it
        settings = SimpleNamespace(max_body_bytes=1000)
        self.state = SimpleNamespace(settings=settings, keys=keys)
        self.runner = BatchRunner(self.state, self.store, self.app, self)

    def look(self, running):
        surplus = running[len(running) - self.surplus :][::-1]
        return (0 if surplus else max(0, self.room - len(running))), surplus

    async def app(self, scope, receive, send):
        name = json.loads((await receive())["body"])["prompt"]
        self.asked.append((name, scope))
        given = self.answer(name)
        if given is None:
            await self.gate.wait()
            given = 200, {}, None
        if isinstance(given, Exception):
            raise given
        status, headers, error = given
        scope["record"] = SimpleNamespace(error=error)
        pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": b'{"id":"x"}'})

    @property
    def names(self):
        return [name for name, _ in self.asked]

    async def add(self, id_, names, owner="", **more):
        self.files.path(f"in-{id_}").write_bytes(b"".join(line(n, prompt=n) for n in names))
        batch = Batch(
            **{
                "id": id_, "owner": owner, "endpoint": URL, "input_file_id": f"in-{id_}",
                "completion_window": "1h", "metadata": None, "expires": int(time.time()) + 3600,
                "times": {"created_at": 1}, **more,
            }
        )  # fmt: skip
        await self.store.add(batch)

    async def step(self, times=1):
        """Runs one round of the loop, and the tasks of lines that are ready."""
        for _ in range(times):
            for batch in await self.store.open():
                await self.runner._look(batch)
            self.runner._adjust()
            for _ in range(20):
                await asyncio.sleep(0)
            for work in list(self.runner._works.values()):
                await self.runner._settle(work)

    async def run(self, id_, owner="", steps=30):
        for _ in range(steps):
            await self.step()
            batch = await self.store.get(owner, id_)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
        raise AssertionError(f"the batch is {batch.status}")

    def answers(self, file_id):
        return [json.loads(raw) for raw in self.files.path(file_id).read_bytes().splitlines()]


@pytest.fixture
def make(tmp_path):
    made = []

    def one(**more):
        made.append(Runner(tmp_path, **more))
        return made[-1]

    yield one
    for each in made:
        for work in each.runner._works.values():
            for task in work.running:
                task.cancel()
        each.files.close()


# --- Checking ----------------------------------------------------------------------------------------


def test_limits_of_lines_are_reached_and_not_passed(tmp_path, monkeypatch):
    path = tmp_path / "f"
    monkeypatch.setattr(runner_module, "MAX_LINES", 3)
    raw = line("a" * 512, prompt="x")
    path.write_bytes(b"\n  \n" + raw + b"\n" + line("b") + line("c"))
    assert check(path, URL, len(raw)) == (3, [])
    (error,) = check(path, URL, len(raw) - 1)[1]
    assert (error.code, error.line) == ("invalid_line", 3)
    path.write_bytes(line("a" * 513) + line("b"))
    assert [e.line for e in check(path, URL, 9999)[1]] == [1]
    path.write_bytes(b"".join(line(str(i)) for i in range(4)))
    assert [e.code for e in check(path, URL, 9999)[1]] == ["too_many_lines"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90m", 5400), ("24h", 86_400), ("7d", 604_800), ("168h", 604_800)],
)
def test_completion_windows_are_parsed_or_refused(text, seconds):
    assert _window(text) == seconds
    for wrong in ("0s", "8d", "604801s", "169h", "1w", "-1h", "h", "1.5h", "01h"):
        with pytest.raises(ApiError):
            _window(wrong)


def test_time_of_a_status_is_that_of_its_first():
    batch = Batch(
        id="b", owner="", endpoint=URL, input_file_id="f", completion_window="1h", metadata=None,
        expires=9, times={"created_at": 1, "finalizing_at": 2},
    )  # fmt: skip
    batch.output_file_id = batch.error_file_id = "not yet"
    batch.become("finalizing")
    told = batch.public()
    assert (told["finalizing_at"], told["output_file_id"], told["error_file_id"]) == (2, None, None)
    batch.become("completed")
    assert batch.public()["output_file_id"] == "not yet"


# --- Room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "requests", "more", "num_surplus"),
    [
        (0, 0, 4, 0),  # half of the sequences
        (3, 3, 1, 0),
        (4, 4, 0, 0),
        (6, 6, 0, 2),
        (0, 1, 2, 0),  # beside a client's request
        (3, 4, 0, 1),
    ],
)
def test_room_in_an_engine(running, requests, more, num_surplus):
    settings = SimpleNamespace(batch_max_concurrent=None, batch_beside=2)
    health = SimpleNamespace(ok=True)
    engine = SimpleNamespace(
        is_sleeping=False,
        health=lambda: health,
        config=SimpleNamespace(scheduling=SimpleNamespace(max_num_seqs=8)),
    )
    load = SimpleNamespace(num_requests=requests)
    state = SimpleNamespace(settings=settings, engine=engine, load=load, draining=False)
    scopes = [{"n": i} for i in range(running)]
    room = EngineLineRunner(state)
    assert room.look(scopes) == (more, scopes[running - num_surplus :][::-1])  # the newest first
    for thing, name in ((state, "draining"), (engine, "is_sleeping")):
        setattr(thing, name, True)
        assert room.look(scopes) == (0, scopes[::-1])
        setattr(thing, name, False)
    health.ok = False
    assert room.look(scopes) == (0, scopes[::-1])
    health.ok, settings.batch_max_concurrent = True, 1
    assert room.look([]) == (1, [])  # `batch_beside` is no more than that


# --- Lines --------------------------------------------------------------------------------------------


async def test_answers_go_by_their_status_and_errors_of_the_server_are_none(make):
    statuses = {"ok": 200, "bad": 400, "gone": 404, "broken": ValueError("x")}

    def answer(name):
        found = statuses[name]
        return found if isinstance(found, Exception) else (found, {"x-request-id": "r"}, None)

    server = make(answer=answer)
    await server.add("batch_1", statuses)
    batch = await server.run("batch_1")
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 4, 1, 3)
    (good,) = server.answers(batch.output_file_id)
    assert (good["custom_id"], good["error"]) == ("ok", None)
    assert good["response"] == {"status_code": 200, "request_id": "r", "body": {"id": "x"}}
    failed = {
        a["custom_id"]: a["response"]["status_code"] for a in server.answers(batch.error_file_id)
    }
    assert failed == {"bad": 400, "gone": 404, "broken": 500}
    assert all(scope["background"] for _, scope in server.asked)
    assert not list(server.files.content.glob("batch_1*")), "nothing is left beside its files"
    only = {"ok2": 200}
    statuses.update(only)
    await server.add("batch_2", only)
    assert (await server.run("batch_2")).error_file_id is None
    statuses["bad2"] = 400
    await server.add("batch_3", ["bad2"])
    batch = await server.run("batch_3")
    assert (batch.output_file_id, len(server.answers(batch.error_file_id))) == (None, 1)


@pytest.mark.parametrize("status", [429, 503])
async def test_refused_line_waits_as_long_as_it_is_told_and_runs_again(make, monkeypatch, status):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(runner_module, "time", clock)
    refusals = [{"retry-after": "7"}, {"retry-after": "soon"}, {"retry-after": "9999"}]
    server = make(
        answer=lambda name: (status, refusals.pop(0), None) if refusals else (200, {}, None)
    )
    await server.add("b", ["a"])
    await server.step(2)
    for pause in (7.0, 1.0, 60.0):
        count = len(server.asked)
        now[0] += pause - 0.01
        await server.step()
        assert len(server.asked) == count, "it waits"
        now[0] += 0.02
        await server.step()
        assert len(server.asked) == count + 1
    assert (await server.run("b")).completed == 1


async def test_line_that_was_cancelled_often_stays_and_the_others_make_way(make):
    server = make(answer=lambda name: None, room=3)
    await server.add("b", ["a", "b", "c"])
    await server.step(2)
    (work,) = server.runner._works.values()
    assert len(work.running) == 3
    work.cancels["b"] = 3
    server.surplus = 3
    await server.step()
    assert [one.line.custom_id for one in work.running.values()] == ["b"]
    assert work.cancels == {"a": 1, "b": 3, "c": 1}
    server.surplus = 0
    server.answer = lambda name: (200, {}, None)
    await server.step()
    assert sorted(server.names[3:]) == ["a", "c"]


async def test_batches_take_turns(make):
    server = make(room=1)
    for id_ in ("x", "y"):
        await server.add(id_, [f"{id_}{i}" for i in range(3)])
    await server.step(8)
    assert [name[0] for name in server.names] in (list("xyxyxy"), list("yxyxyx"))


async def test_line_whose_process_died_runs_alone_and_is_given_up_at_its_second_death(make):
    deaths = {"bad": 5, "unlucky": 1}

    def answer(name):
        left = deaths.get(name, 0)
        if left:
            deaths[name] -= 1
            return 503, {"retry-after": "0"}, "engine_dead"
        return 200, {}, None

    server = make(answer=answer)
    await server.add("b", ["fine", "bad", "unlucky", "last"])
    most, alone = [0], []
    adjust = server.runner._adjust

    def counting():
        adjust()
        running = [
            one.line.custom_id
            for work in server.runner._works.values()
            for one in work.running.values()
        ]
        most[0] = max(most[0], len(running))
        if {"bad", "unlucky"} & set(running) and most[0] >= 4 and len(server.asked) >= 4:
            alone.append(running)

    server.runner._adjust = counting
    batch = await server.run("b")
    assert (batch.completed, batch.failed) == (3, 1)
    (error,) = server.answers(batch.error_file_id)
    assert (error["custom_id"], error["response"]) == ("bad", None)
    assert "died 2 times" in error["error"]["message"]
    assert server.names.count("bad") == 2
    assert server.names.count("unlucky") == 2
    assert most[0] == 4
    assert all(len(running) == 1 for running in alone)


async def test_suspect_waits_until_nothing_else_runs(make):
    server = make(answer=lambda name: None if name == "slow" else (200, {}, None))
    await server.add("x", ["slow"])
    await server.step(2)
    Journal(server.files.path("y.begun"), set()).begin("bad")  # a process died with it
    await server.add("y", ["bad", "fine"])
    await server.step(3)
    assert server.names == ["slow"]
    server.gate.set()
    assert (await server.run("y")).completed == 2
    assert server.names == ["slow", "bad", "fine"]


@pytest.mark.parametrize(
    ("status", "then"),
    [("validating", "cancelling"), ("in_progress", "cancelling"), ("finalizing", "finalizing")],
)
async def test_batch_whose_files_are_being_written_is_not_cancelled_any_more(make, status, then):
    server = make()
    await server.add("b", ["a"], status=status)
    record = SimpleNamespace(owner="")
    request = SimpleNamespace(scope={"record": record}, path_params={"id": "b"})
    batches = Batches(SimpleNamespace(batches=server.store))
    assert json.loads((await batches.cancel(request)).body)["status"] == then
    await server.store.change("b", lambda batch: batch.become("completed"))
    with pytest.raises(ApiError, match="is completed"):
        await batches.cancel(request)


def test_journal_counts_deaths_of_lines_without_an_answer(tmp_path):
    path = tmp_path / "b.begun"
    journal = Journal(path, set())
    for name in ("a", "b", "c"):
        journal.begin(name)
    journal.died("a")
    journal.answered("b")
    again = Journal(path, {"b"})
    assert again.deaths == {"a": 1, "c": 1}
    again.begin("a")
    again.answered("a")
    assert again.deaths == {"c": 1}
    assert Journal(path, {"b", "a"}).deaths == {"c": 1}


async def test_suspect_that_is_put_back_stays_suspect(make):
    server = make()
    await server.add("b", ["a", "b", "c"])
    batch = await server.store.get("", "b")
    work = Work(batch, server.store)
    first = work.next()
    work.journal.begin(first.custom_id)
    work.put_back(first, died=True)
    assert [one.custom_id for one in work.suspects] == ["a"]
    work.put_back(work.suspects.popleft())  # cancelled for a client: it may still be the one
    assert [one.custom_id for one in work.suspects] == ["a"]
    second = (work.next(), work.next())[1]
    work.put_back(second)
    assert [one.custom_id for one in work.again] == ["b"]
    again = Work(batch, server.store)
    assert [one.custom_id for one in again.suspects] == ["a"]
    assert [again.next().custom_id for _ in range(3)] == ["a", "b", "c"]
    assert again.next() is None


async def test_answers_have_half_of_the_room_before_and_after_a_restart(make):
    server = make()
    await server.add("b", ["a", "b", "c"])
    batch = await server.store.get("", "b")
    work = Work(batch, server.store)
    big = {"custom_id": "a", "text": "x" * 2500}
    work.append("output", big)
    with pytest.raises(ApiError) as full:
        work.append("output", {**big, "custom_id": "b"})
    assert (full.value.status, full.value.code) == (413, "storage_full")
    again = Work(batch, server.store)
    assert again.num_completed == 1
    with pytest.raises(ApiError):
        again.append("error", {**big, "custom_id": "b"})


async def test_batch_whose_answers_have_no_room_fails_with_the_reason(make):
    server = make()
    server.files.max_bytes = 100
    await server.add("b", ["a"])
    batch = await server.run("b")
    assert batch.status == "failed"
    assert [error.code for error in batch.errors] == ["storage_failed"]


# --- Keys ----------------------------------------------------------------------------------------------


class Keys(dict):
    by_id = dict.get


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (Key(id="a"), "completed"),
        (Key(id="a", revoked=1.0), "failed"),
        (Key(id="a", expires=1.0), "failed"),
        (None, "failed"),
    ],
    ids=["active", "revoked", "expired", "gone"],
)
async def test_batch_runs_while_its_key_is_active(make, key, status):
    server = make(keys=Keys({"a": key, "other": Key(id="other")}))
    await server.add("b", ["1"], owner="a")
    batch = await server.run("b", owner="a")
    assert batch.status == status
    if status == "failed":
        assert [error.code for error in batch.errors] == ["key_gone"]
        assert not server.asked
    else:
        assert server.asked[0][1]["key"] is key


async def test_batch_of_a_key_does_not_run_on_a_server_without_keys(make):
    server = make()
    await server.add("b", ["1"], owner="a")
    assert (await server.run("b", owner="a")).status == "failed"


async def test_key_that_is_revoked_while_its_line_runs_fails_the_batch(make):
    server = make(answer=lambda name: (401, {}, None), keys=Keys({"a": Key(id="a")}))
    await server.add("b", ["1", "2"], owner="a")
    batch = await server.run("b", owner="a")
    assert (batch.status, batch.completed, batch.failed) == ("failed", 0, 0)
    assert [error.code for error in batch.errors] == ["key_gone"]


# --- The store -----------------------------------------------------------------------------------------


async def test_open_batches_are_the_oldest_first_and_old_ended_ones_are_forgotten(make):
    store = (server := make()).store
    for id_ in ("z", "a", "m"):
        await server.add(id_, ["1"])
    assert [batch.id for batch in await store.open()] == ["z", "a", "m"]
    for id_, at in (("z", 50), ("a", 150)):
        await store.change(
            id_, lambda b, at=at: (b.become("completed"), b.times.update(completed_at=at))
        )
    await store.forget_old(100)
    assert [bool(await store.get("", id_)) for id_ in ("z", "a", "m")] == [False, True, True]
