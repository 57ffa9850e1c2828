"""Requests of which replicas die: few die of one, and the requests of others are answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json

import httpx
import openai
import pytest

from slipstream.fleet import head
from slipstream.fleet.gateway.forward import MAX_DEATHS
from slipstream.server.batches import runner as batch_runner
from tests.fleet import stubs as stubs_module
from tests.fleet.running import fleet_of, running, version
from tests.fleet.stubs import Stub, numbers, stubbed, text_of
from tests.server.batches.test_batch_deaths import check_ended, lines
from tests.server.batches.test_server_batches import begin, ended
from tests.support.poison import WORD, python_path
from tests.support.waiting import PATIENCE_S

CRASH, KILL = "was killed by signal 11 (SIGSEGV)", "was killed by signal 9 (SIGKILL)"


class MortalStub(Stub):
    """A stub that dies of a request with the word in it, after `dies_after` tokens."""

    how, dies_after, deaths = CRASH, 0, []

    async def ended(self):
        await super().ended()
        return self.how

    async def _answer(self, request, writer):
        if WORD.encode() not in request.body:
            await super()._answer(request, writer)
            return
        if self.dies_after:
            self.hang_at = self.dies_after + len(request.json.get("answer_token_ids", ()))
            answering = asyncio.create_task(super()._answer(request, writer))
            await asyncio.sleep(0.2)
            answering.cancel()
        self.deaths.append(self)
        await self.stop(0)
        raise ConnectionError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.05)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)


@pytest.fixture
def start(tiny, tmp_path, monkeypatch):
    from contextlib import ExitStack

    with ExitStack() as stack:

        def made(replicas, *, how=CRASH, dies_after=0, engine=None, router=None, **more):
            kind = type(
                "Mortal", (MortalStub,), {"how": how, "dies_after": dies_after, "deaths": []}
            )
            monkeypatch.setattr(stubs_module, "Stub", kind)
            own = version(tiny, replicas=replicas)
            own["engine"] = {**own["engine"], **(engine or {})}
            router = {"probe_s": 0, "policy": "round_robin", **(router or {})}
            fleet = fleet_of(own, router=router, **more)
            fleet, stubs = stack.enter_context(stubbed(fleet, tmp_path / "state"))
            fleet.wait_serving(replicas)
            return fleet, stubs, kind

        yield made


@pytest.mark.parametrize("how", [CRASH, KILL])
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_kills_replicas_is_sent_to_one_other(start, stream, how):
    fleet, _, kind = start(4, how=how)
    body = {"model": "tiny", "prompt": WORD, "stream": stream}
    with fleet.http() as http:
        for number in (1, 2):
            refused = http.post("/v1/completions", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "replica_failed")
            assert "2 replicas died" in error["message"]
            assert refused.headers["x-should-retry"] == "false"
            assert len(kind.deaths) == number * MAX_DEATHS
    fleet.wait_serving(4)


def test_client_does_not_send_again_what_kills_replicas(start):
    fleet, _, kind = start(3)
    with (
        openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=3) as client,
        pytest.raises(openai.InternalServerError, match="died"),
    ):
        client.completions.create(model="tiny", prompt=WORD)
    assert len(kind.deaths) == MAX_DEATHS


def test_request_on_a_connection_that_was_used_before_counts_as_there(start):
    """The replica that died refuses the next connection, but in most cases it had the request."""
    fleet, stubs, kind = start(4)
    with fleet.client() as client, fleet.http() as http:
        while not all(stub.asked for stub in stubs):
            text_of(client)
        assert (
            http.post("/v1/completions", json={"model": "tiny", "prompt": WORD}).status_code == 503
        )
    assert len(kind.deaths) == MAX_DEATHS


def test_stream_that_kills_replicas_after_some_tokens_ends_with_an_error(start):
    fleet, _, kind = start(4, dies_after=2)
    with fleet.client() as client, pytest.raises(openai.APIError) as broken:
        text_of(client, prompt=WORD)
    assert broken.value.code == "replica_failed"
    assert len(kind.deaths) == MAX_DEATHS


def test_stream_goes_on_however_often_its_replica_is_killed_from_outside(start):
    """Each replica carries it further, so the limit of retries begins anew."""
    one_retry = {"retries": {"share": 1.0, "most": 1}}
    fleet, _, kind = start(3, how=KILL, dies_after=2, router=one_retry)
    with fleet.client() as client:
        assert text_of(client, prompt=WORD) == numbers()
    assert len(kind.deaths) > MAX_DEATHS


def test_requests_beside_one_that_kills_replicas_are_answered(start):
    fleet, stubs, kind = start(2)
    for stub in stubs:
        stub.token_s = 0.1
    body = {"model": "tiny", "max_tokens": 8}
    with concurrent.futures.ThreadPoolExecutor(9) as pool:

        def ask(prompt, stream):
            answer = httpx.post(
                f"{fleet.url}/v1/completions",
                json={**body, "prompt": prompt, "stream": stream},
                timeout=PATIENCE_S,
            )
            return answer.status_code, "error" in answer.text

        others = [pool.submit(ask, "x", bool(i % 2)) for i in range(8)]
        fleet.wait_for(lambda: sum(len(s.asked) for s in stubs) >= 8, "they are not there")
        assert pool.submit(ask, WORD, False).result(PATIENCE_S) == (503, True)
        assert [other.result(PATIENCE_S) for other in others] == [(200, False)] * 8
    assert len(kind.deaths) == MAX_DEATHS


def test_lines_that_kill_replicas_get_errors_and_the_others_answers(start, tmp_path):
    fleet, _, kind = start(3, engine={"max_num_seqs": 8}, files_dir=str(tmp_path / "files"))
    with fleet.client() as client:
        batch = begin(client, lines(10, (1, 7), model="tiny"), "/v1/completions")
        check_ended(client, ended(client, batch), 10, (1, 7))
    assert len(kind.deaths) == 2 * MAX_DEATHS


def test_replica_that_dies_as_it_is_first_heard_is_replaced(start):
    fleet, stubs, _ = start(1)

    async def heard(stub):
        while not any(r.heard for r in fleet.head.members.all_replicas()):
            await asyncio.sleep(0)
        for replica in fleet.head.members.all_replicas():
            replica._set_heard(False)  # before whoever looks from time to time has seen it
        await stub.stop(0)

    fleet.call(stubs[0].stop(0))
    fleet.wait_for(lambda: len(stubs) == 2, "it does not start again")
    fleet.call(heard(stubs[1]))
    fleet.wait_for(lambda: len(stubs) == 3, "it does not start again")
    fleet.wait_serving(1)


def test_replica_that_dies_again_and_again_starts_later_each_time(start, monkeypatch):
    pauses = []

    class Recorded(head.Deaths):
        @property
        def pause_s(self):
            pauses.append(super().pause_s)
            return 0.0

    monkeypatch.setattr(head, "Deaths", Recorded)
    fleet, stubs, _ = start(1)
    for number in range(5):
        fleet.call(stubs[-1].stop(0))
        fleet.wait_for(lambda number=number: len(stubs) == number + 2, "it does not start again")
        fleet.wait_serving(1)
    assert pauses == [0, 0.5, 1, 2, 4]


@pytest.mark.slow
def test_request_kills_two_real_replicas_and_the_fleet_serves_on(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    fleet = fleet_of(version(tiny, replicas=2), router={"probe_s": 0})
    with running(fleet, tmp_path / "state") as made, made.http() as http:
        before = set(made.pids().values())
        body = {"model": "tiny", "prompt": WORD, "max_tokens": 3}
        refused = http.post("/v1/completions", content=json.dumps(body))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replica_failed")
        made.wait_serving(2)
        body["prompt"] = "x"
        assert http.post("/v1/completions", json=body).status_code == 200
        assert not before & set(made.pids().values())
        logs = [path.read_text() for path in (tmp_path / "state" / "logs").iterdir()]
        assert not any("internal error" in log for log in logs)
