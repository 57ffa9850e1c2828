"""The gateway with replicas that hang, fail, are slow or wrong, and with clients that read slowly."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock
from unittest.mock import call as mock_call
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from slipstream.fleet.gateway import calls, forward, guard
from slipstream.fleet.gateway.forward import Forwarder
from slipstream.fleet.gateway.gateway import Gateway
from slipstream.fleet.gateway.members import Members
from slipstream.server.answers import generation
from slipstream.server.http.errors import ApiError
from tests.fleet.running import fleet_of, version
from tests.fleet.stubs import numbers, stubbed, text_of
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def start(tiny, tmp_path, request):
    """start(replicas, **router) is a fleet of stubs; start.shadow=… gives the version a second one that watches."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def made(replicas=2, *, others=(), settings=None, **router):
            router = {"probe_s": 0, "policy": "round_robin", **router}
            fleet = fleet_of(
                version(tiny, replicas=replicas),
                *(version(tiny, **other) for other in others),
                router=router,
            )
            fleet, stubs = stack.enter_context(
                stubbed(fleet, tmp_path / "state", **(settings or {}))
            )
            fleet.wait_serving(len(stubs))
            return fleet, stubs

        yield made


@pytest.mark.parametrize(
    ("code", "died", "gone"),
    [
        ("engine_dead", True, True),
        ("engine_killed", True, True),
        ("engine_down", False, True),
        ("queue_full", False, False),
    ],
)
def test_an_engine_that_is_down_is_gone_and_not_to_blame_but_did_not_die(code, died, gone):
    failure = forward.RetryElsewhere("it failed", code=code)
    assert (failure.died, failure.gone, failure.blame) == (died, gone, not gone)


@pytest.mark.parametrize(("code", "is_down"), [("engine_down", True), ("internal", False)])
def test_a_replica_whose_engine_is_down_is_passed_over_without_blame(code, is_down):
    replica, version = Mock(num_in_flight=0, num_suspects=0), Mock()
    call = SimpleNamespace(is_line=False, num_deaths=0)
    failed = forward.RetryElsewhere("it failed", code=code)
    calls.Opened(version, replica, Mock(), call).failed(failed)
    assert replica.set_ready.mock_calls == [mock_call(False)] * is_down
    assert bool(version.guard.failed.mock_calls) is not is_down


@pytest.mark.parametrize(("code", "tries"), [("engine_down", 9), ("internal", 2)])
def test_a_request_that_waits_for_engines_to_start_uses_none_of_its_tries(code, tries):
    retries = SimpleNamespace(most=1)
    members = Mock(fleet=SimpleNamespace(router=SimpleNamespace(retries=retries)))
    forwarder = forward.Forwarder(members, Mock())
    failed = forward.RetryElsewhere("it failed", code=code)
    forwarder._choose = AsyncMock(return_value=(Mock(num_in_flight=0, num_suspects=0), Mock()))
    forwarder._attempt = AsyncMock(side_effect=[failed] * 8 + [None])
    call = Mock(is_line=False, is_shadow=True, num_deaths=0, first_token_sent=False)
    call.scope = {"path": "/v1/models"}
    with contextlib.ExitStack() as ended:
        if code != "engine_down":
            ended.enter_context(pytest.raises(ApiError, match="it failed"))
        asyncio.run(forwarder.see_through(Mock(has_roles=False), call))
    assert forwarder._attempt.await_count == tries


def states(fleet):
    return {
        r["id"]: (r["state"], r["why"])
        for v in fleet.head.gateway.status()["models"]["tiny"]
        for r in v["replicas"]
    }


def of(fleet, stub):
    """The id of a stub's replica."""
    return next(m.id for m in fleet.members() if m.started is stub)


# --- Engines that die and start again below a replica that lives ---------------------------------------------------------


def num_waiting(fleet):
    return fleet.head.gateway.status()["models"]["tiny"][0]["waiting_at_gateway"]


@pytest.mark.parametrize("stream", [False, True])
def test_requests_wait_for_engines_that_start_again(start, stream):
    fleet, stubs = start()
    for stub in stubs:
        stub.engine_down()
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        ask = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
        answer = (
            pool.submit(text_of, client)
            if stream
            else pool.submit(lambda: client.completions.create(**ask).choices[0].text)
        )
        fleet.wait_for(lambda: num_waiting(fleet) == 1, "it does not wait")
        asked = sum(len(stub.asked) for stub in stubs)
        assert asked <= 2
        assert set(states(fleet).values()) == {("out", "not ready")}
        stubs[1].engine_up()
        assert answer.result(PATIENCE_S) == numbers()
        assert sum(len(stub.asked) for stub in stubs) == asked + 1
    fleet.wait_idle()


@pytest.mark.parametrize("code", ["engine_dead", "engine_killed"])
def test_engines_that_die_count_and_killed_ones_do_not_once_the_stream_went_on(start, code):
    fleet, stubs = start(3, retries={"share": 0.0, "most": 1})
    for stub in stubs:
        stub.engine_dies_after, stub.engine_code = 2, code
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(text_of, client)
        if code == "engine_dead":
            with pytest.raises(openai.APIError, match="2 replicas died"):
                answer.result(PATIENCE_S)
        else:
            fleet.wait_for(lambda: num_waiting(fleet) == 1, "the third does not die")
            stubs[0].engine_up()
            assert answer.result(PATIENCE_S) == numbers()
    assert sum(len(stub.asked) for stub in stubs) == (2 if code == "engine_dead" else 4)
    assert not any(stub.engine_dies_after is None and stub.is_ready for stub in stubs[1:])


def test_streams_of_an_engine_that_died_go_on_and_it_serves_as_soon_as_it_is_up(start):
    """Each of them lost it; these are no failures in a row, after which it would have a pause."""
    fleet, stubs = start()
    stubs[0].token_s, stubs[0].hang_at = 0.01, 3
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(text_of, client) for _ in range(12)]
        fleet.wait_for(lambda: len(stubs[0].asked) == 6, "not all are there")
        stubs[0].engine_dies_after = 3
        stubs[0].go.set()
        assert {answer.result(PATIENCE_S) for answer in answers} == {numbers()}
        stubs[0].engine_up()
        fleet.wait_for(
            lambda: {state for state, _ in states(fleet).values()} == {"serving"}, "it is left out"
        )


def test_a_slow_replica_is_better_than_none(start, monkeypatch):
    monkeypatch.setattr(guard, "FIRST_PAUSE_S", 30.0)
    fleet, stubs = start(queue_s=1.0)
    one, two = (of(fleet, stub) for stub in stubs)

    async def find_slow():
        own = fleet.head.members.models["tiny"][0].guard
        for id_, ttft_s in ((one, 0.1), (two, 9.0)):
            for i in range(guard.MIN_SEEN):  # one after the other, the last one now
                before = (guard.MIN_SEEN - 1 - i) * ttft_s
                own.answered(id_, ttft_s, 0.1, time.monotonic() - before)

    fleet.call(find_slow())
    assert states(fleet)[two][0] == "out"
    with fleet.client() as client:
        assert {text_of(client) for _ in range(4)} == {numbers()}
        assert not stubs[1].asked
        stubs[0].engine_down()
        assert {text_of(client) for _ in range(4)} == {numbers()}
        assert len(stubs[1].asked) == 4


# --- Requests that are lost in a replica that lives ----------------------------------------------------------------------


def test_a_request_without_a_first_token_goes_elsewhere(start):
    fleet, (one, _) = start(first_token_s=2)
    one.hang_at = 0
    with fleet.client() as client:
        for stream in (True, False):
            asked = len(one.asked)
            while len(one.asked) == asked:  # round robin: one of two comes to it
                if stream:
                    assert text_of(client) == numbers()
                else:
                    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
                    assert answer.choices[0].text == numbers()
            fleet.wait_for(
                lambda: all(r.cancelled for r in one.asked), "the hanging request was not given up"
            )
    fleet.wait_idle()


def test_a_stream_whose_tokens_stop_goes_on_elsewhere(start):
    fleet, stubs = start(next_token_s=3)
    stubs[0].hang_at = 3
    with fleet.client() as client:
        while not stubs[0].asked:
            assert text_of(client) == numbers()
    resumed = [r for r in stubs[1].asked if r.path == "/fleet/resume"]
    assert [r.json["answer_token_ids"] for r in resumed] == [[0, 1, 2]]
    fleet.wait_idle()


def test_a_whole_answer_that_stops_goes_elsewhere_and_a_long_one_does_not(start):
    """Nothing of it comes before its end, so the replica tells how far it is."""
    fleet, stubs = start(first_token_s=60, next_token_s=3)
    stubs[0].hang_at = 3
    with fleet.client() as client:
        while not stubs[0].asked:
            assert (
                client.completions.create(model="tiny", prompt="x", max_tokens=8).choices[0].text
                == numbers()
            )
        assert fleet.head.gateway.forwarder.num_failovers == 1
        for stub in stubs:
            stub.hang_at, stub.token_s = None, 0.25
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(client.completions.create, model="tiny", prompt="x", max_tokens=14)
                for _ in stubs
            ]
            assert [a.result().choices[0].text for a in asked] == [numbers(14)] * 2
    assert fleet.head.gateway.forwarder.num_failovers == 1


def test_a_replica_that_says_nothing_at_all_is_left_out(start):
    fleet, stubs = start(silence_s=3)
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        stubs[0].hang_at = 3
        answers = [pool.submit(text_of, client) for _ in range(4)]
        fleet.wait_for(lambda: stubs[0].asked, "nothing came to it")
        stubs[0].silent = True
        assert {a.result(PATIENCE_S) for a in answers} == {numbers()}
        assert states(fleet)[of(fleet, stubs[0])][0] == "silent"
        before = len(stubs[0].asked)
        assert text_of(client) == text_of(client) == numbers()
        assert len(stubs[0].asked) == before
        stubs[0].silent, stubs[0].hang_at = False, None
        fleet.wait_serving(2)
        fleet.wait_for(
            lambda: text_of(client) == numbers() and len(stubs[0].asked) > before,
            "it never came back",
        )
    fleet.wait_idle()


# --- Signs of life -------------------------------------------------------------------------------------------------------


def streamed(fleet, number=8):
    """Status and text of a stream."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": number, "stream": True}
    with fleet.http() as http:
        answer = http.post("/v1/completions", json=body)
    return answer.status_code, answer.text


def test_a_stream_shows_life_before_its_first_token_and_between_tokens(start, monkeypatch):
    monkeypatch.setattr(generation, "PING_S", 0.1)
    fleet, (stub,) = start(1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for hang_at in (0, 3):
            stub.hang_at, stub.shows_life = hang_at, hang_at == 0
            asked = len(stub.asked)
            found = pool.submit(streamed, fleet)
            fleet.wait_for(lambda n=asked: len(stub.asked) > n, "nothing came")
            time.sleep(0.4)
            fleet.loop.call_soon_threadsafe(stub.go.set)
            status, text = found.result(PATIENCE_S)
            first, *more = re.split(r"(?:: ping\n\n)+", text)
            assert (status, first.count("data: "), len(more)) == (200, hang_at, 1)
            said = re.findall(r'"text": "(.*?)"', text)
            assert "".join(said) == numbers()
            stub.go.clear()
    fleet.wait_idle()


def test_a_refusal_keeps_its_status_until_a_replica_has_taken_the_request(start, monkeypatch):
    monkeypatch.setattr(generation, "PING_S", 0.05)
    fleet, (stub,) = start(1)
    stub.status, stub.code, stub.delay_s = 400, "too_long", 0.3
    status, text = streamed(fleet)
    assert (status, json.loads(text)["error"]["message"]) == (400, "the stub fails")
    stub.shows_life = True
    status, text = streamed(fleet)
    assert status == 200
    assert text.startswith(": ping\n\ndata: ")
    assert json.loads(text.removeprefix(": ping\n\ndata: "))["error"]["code"] == "too_long"


OPENAI = {"message": "bad", "type": "server_error", "param": "prompt", "code": "disk_full"}


@pytest.mark.parametrize(
    ("path", "status", "refusal", "told"),
    [
        ("/v1/completions", 507, {"error": OPENAI}, OPENAI),
        ("/api/generate", 400, {"error": "num_ctx: too long"}, "num_ctx: too long"),
        (
            "/v1/messages",
            400,
            {"type": "error", "error": {"type": "x", "message": "prompt is too long"}},
            {"type": "invalid_request_error", "message": "prompt is too long"},
        ),
        (
            "/v1/completions",
            200,
            {"choices": []},
            {
                "message": "the replica did not stream",
                "type": "service_unavailable",
                "param": None,
                "code": "replica_failed",
            },
        ),
    ],
)
def test_an_error_after_a_sign_of_life_keeps_its_reason_and_breaks_no_stream(
    start, monkeypatch, path, status, refusal, told
):
    fleet, (stub,) = start(1, queue_s=0.2)

    async def answer(request, writer):
        kind = b"application/x-ndjson" if path.startswith("/api") else b"text/event-stream"
        writer.write(b"HTTP/1.1 102 Processing\r\ncontent-type: %b\r\n\r\n" % kind)
        stub._whole(writer, status, refusal, b"x-slipstream-error-code: disk_full\r\n")

    monkeypatch.setattr(stub, "_answer", answer)
    more = (
        {"prompt": "x"}
        if path != "/v1/messages"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    with fleet.http() as http:
        found = http.post(path, json={"model": "tiny", "max_tokens": 4, "stream": True, **more})
    assert found.status_code == 200
    assert "choices" not in found.text
    assert json.loads(found.text[found.text.index("{") :])["error"] == told
    assert fleet.head.gateway.forwarder.num_broken == 0


def test_the_code_of_an_error_without_one_in_its_shape_is_the_replicas():
    for code, blame in (("shutting_down", False), ("engine_down", False), ("internal", True)):
        answer = SimpleNamespace(status=503, headers=[(b"x-slipstream-error-code", code.encode())])
        failed = calls.refused(answer, b'{"error":"it is off"}')
        assert (failed.error.message, failed.error.code, failed.blame) == ("it is off", code, blame)


def test_a_request_that_waits_for_another_replica_shows_life_on(start, monkeypatch):
    monkeypatch.setattr(generation, "PING_S", 0.1)
    fleet, (stub,) = start(1, queue_s=1.5)
    stub.shows_life, stub.delay_s = True, 0.3
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(streamed, fleet)
        fleet.wait_for(lambda: stub.asked, "nothing came")
        stub.engine_down()
        status, text = found.result(PATIENCE_S)
    assert (status, text.count(": ping\n\n") >= 2) == (200, True)
    assert json.loads(text.rpartition("data: ")[2])["error"]["code"] == "no_replica"


def test_signs_of_life_do_not_keep_a_lost_request(start):
    fleet, (one, _) = start(first_token_s=2)
    one.hang_at, one.shows_life = 0, True
    while not one.asked:
        status, text = streamed(fleet)
    assert (status, text.count("data: "), text.startswith(": ping\n\n")) == (200, 9, True)


# --- Hedging -------------------------------------------------------------------------------------------------------------


def test_the_first_of_two_answers_is_taken(start):
    """The other request ends at once, not when the answer does."""
    fleet, stubs = start(hedging={"after_s": 0.2, "share": 1.0})
    for stub in stubs:
        stub.hang_at = 0
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(text_of, client)
        fleet.wait_for(lambda: any(stub.asked for stub in stubs), "nobody was asked")
        one, other = stubs if stubs[0].asked else reversed(stubs)
        fleet.wait_for(lambda: other.asked, "no second was asked")
        assert not one.asked[0].cancelled

        async def go():
            other.hang_at = 4
            other.go.set()
            other.go.clear()

        fleet.call(go())
        fleet.wait_for(lambda: one.asked[0].cancelled, "who lost goes on")
        assert not found.done()
        fleet.loop.call_soon_threadsafe(other.go.set)
        assert found.result(PATIENCE_S) == numbers()
    assert fleet.head.gateway.forwarder.num_hedged == 1
    assert fleet.head.gateway.forwarder.num_failovers == 0
    fleet.wait_idle()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_hedging_has_a_budget_and_survives_failures(start, share):
    fleet, (one, _) = start(hedging={"after_s": 0.1, "share": share})
    one.delay_s, one.status = 0.5, 500  # late, and then it fails
    with fleet.client() as client:
        while not one.asked:
            assert (
                client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
                .choices[0]
                .text
                == numbers()
            )
    hedged = fleet.head.gateway.forwarder.num_hedged  # the other one may be late, too
    assert (hedged > 0) == (share > 0)
    fleet.wait_idle()


# --- Shadows -------------------------------------------------------------------------------------------------------------

SHADOW = {"name": "v2", "replicas": 1, "share": 0, "shadow": 1.0}


def test_a_shadow_is_asked_and_never_heard(start):
    fleet, (one, shadow) = start(1, others=[SHADOW])
    shadow.lie = 1000
    with fleet.client() as client:
        assert (
            client.completions.create(model="tiny", prompt="Hello", max_tokens=8).choices[0].text
            == numbers()
        )
        assert text_of(client) == numbers()
        fleet.wait_for(lambda: len(shadow.asked) == 2, "the shadow was not asked")
        assert [r.json for r in shadow.asked] == [r.json for r in one.asked]
        ids = {r.headers["x-slipstream-fleet"].split(" ")[1] for r in (*shadow.asked, *one.asked)}
        assert len(ids) == 4
    fleet.wait_idle()
    assert sum(fleet.head.gateway.metrics.ttft.counts) == 1  # the client's stream
    assert sum(fleet.head.gateway.metrics.e2e.counts) == 2


def test_a_shadow_that_fails_or_hangs_costs_its_client_nothing(start, monkeypatch):
    monkeypatch.setattr(forward, "MAX_SHADOWS", 3)
    fleet, (_, shadow) = start(1, others=[SHADOW], retries={"share": 0.0})
    shadow.status = 500
    with fleet.client() as client:
        for _ in range(5):
            assert text_of(client) == numbers()
        fleet.wait_for(lambda: not fleet.head.gateway.forwarder.shadows, "a shadow goes on")
        shadow.status, shadow.hang_at = 200, 0
        fleet.wait_for(
            lambda: text_of(client) == numbers() and len(fleet.head.gateway.forwarder.shadows) == 3,
            "no shadows",
        )
        asked = len(shadow.asked)
        assert text_of(client) == text_of(client) == numbers()
        assert len(shadow.asked) == asked, "more shadows than may be"
        assert fleet.head.gateway.forwarder.num_unshadowed >= 2
        assert fleet.head.gateway.forwarder.num_failovers == 0
    fleet.loop.call_soon_threadsafe(shadow.go.set)
    fleet.wait_idle()


def test_a_client_that_leaves_takes_no_shadow_along(start):
    """The canary's answer is still read to its end and compared."""
    fleet, (one, shadow) = start(1, others=[SHADOW])
    one.hang_at = shadow.hang_at = 3
    with fleet.client() as client:
        stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, stream=True)
        next(iter(stream))
        stream.close()
    fleet.wait_for(lambda: one.asked[0].cancelled, "the client's own goes on")
    fleet.wait_for(lambda: shadow.asked, "the shadow was not asked")
    fleet.loop.call_soon_threadsafe(shadow.go.set)
    fleet.wait_for(lambda: not fleet.head.gateway.forwarder.shadows, "the shadow goes on")
    assert not shadow.asked[0].cancelled


# --- Who is taken out, and comes back -------------------------------------------------------------------------------------


def test_a_replica_that_fails_is_left_out_and_comes_back(start):
    fleet, stubs = start(3, retries={"share": 1.0})
    stubs[0].status = 500
    with fleet.client() as client:
        fleet.wait_for(
            lambda: text_of(client) == numbers() and states(fleet)[of(fleet, stubs[0])][0] == "out",
            "it is still asked",
        )
        stubs[0].status = 200
        before = len(stubs[0].asked)
        fleet.wait_for(
            lambda: text_of(client) == numbers() and len(stubs[0].asked) >= before + 3,
            "it never came back",
        )
    assert states(fleet)[of(fleet, stubs[0])] == ("serving", "")


def test_a_slow_replica_is_taken_out_and_comes_back(start):
    fleet, stubs = start(3)
    stubs[0].delay_s = 0.7
    with fleet.client() as client:

        def why():
            assert text_of(client) == numbers()
            return states(fleet)[of(fleet, stubs[0])][1]

        fleet.wait_for(lambda: re.match(r"slow: \d", why()), "it is still asked", 120)
        stubs[0].delay_s = 0.0
        before = len(stubs[0].asked)
        fleet.wait_for(
            lambda: not why() and len(stubs[0].asked) >= before + 12, "it never came back", 120
        )
    assert states(fleet)[of(fleet, stubs[0])] == ("serving", "")


def test_a_wrong_replica_is_taken_out_until_it_is_right(start):
    fleet, stubs = start(3, probe_s=2.0)
    stubs[0].lie = 1
    with fleet.client() as client:
        fleet.wait_for(
            lambda: states(fleet)[of(fleet, stubs[0])][1].startswith("wrong"), "it is still asked"
        )
        asks = lambda: sum(
            r.json.get("stream", False) for r in stubs[0].asked
        )  # probes are not streamed
        before = asks()
        until = (
            time.monotonic() + 1.9
        )  # longer than the pause after failures, and shorter than until the next probe
        while time.monotonic() < until:
            assert text_of(client) == numbers()
        assert asks() == before
        stubs[0].lie = 0
        fleet.wait_for(
            lambda: text_of(client) == numbers() and asks() >= before + 3, "it never came back"
        )


# --- Slow clients --------------------------------------------------------------------------------------------------------


def test_a_client_that_reads_slowly_fills_no_memory_and_harms_nobody(start):
    fleet, (stub,) = start(1)
    stub.endless = True
    address = urlsplit(fleet.url)
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 1}).encode()
    with socket.socket() as slow, fleet.client() as client:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address.hostname, address.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        fleet.wait_for(lambda: stub.num_written, "it never began")
        written, still = -1, 0
        while still < 10:  # until the replica could write no more for a second
            still = still + 1 if stub.num_written == written else 0
            written = stub.num_written
            assert written < 64 * 2**20, "the gateway takes whatever comes"
            time.sleep(0.1)
        stub.endless = False
        assert text_of(client) == numbers()
        got = 0
        while got < written:
            got += len(slow.recv(2**16))
    fleet.wait_idle()


# --- Clocks --------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing(start, monkeypatch):
    """Pauses, patience and queues are by a clock that only runs on."""
    fleet, stubs = start(2, retries={"share": 1.0}, first_token_s=30)
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    stubs[0].token_s = stubs[1].token_s = 0.05
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for seconds in (-86_400.0, 86_400.0, 0.0):
            asked = sum(len(stub.asked) for stub in stubs)
            answers = [pool.submit(text_of, client) for _ in range(4)]
            fleet.wait_for(
                lambda asked=asked: sum(len(stub.asked) for stub in stubs) > asked, "nothing began"
            )
            jump[0] = seconds
            assert {a.result(PATIENCE_S) for a in answers} == {numbers()}
    assert fleet.head.gateway.forwarder.num_failovers == 0
    assert {state for state, _ in states(fleet).values()} == {"serving"}


def test_errors_reach_the_client_when_nobody_else_can_answer(start):
    before = threading.active_count()  # other tests' servers may be up
    fleet, (stub,) = start(1, retries={"share": 1.0, "most": 1}, first_token_s=0.3, queue_s=20)
    stub.hang_at = 0
    with fleet.client() as client, pytest.raises(openai.APIStatusError) as failed:
        client.completions.create(model="tiny", prompt="x", max_tokens=8)
    assert (failed.value.status_code, failed.value.code) == (503, "replica_failed")
    assert threading.active_count() < before + 50


def test_a_stream_that_no_replica_carries_further_ends(start):
    """Tokens that came before the first failure are no progress of the second."""
    fleet, stubs = start(2, retries={"share": 1.0, "most": 2}, first_token_s=0.2, next_token_s=0.2)
    for stub in stubs:
        stub.hang_at = 4
    with fleet.client() as client, pytest.raises(openai.APIError):
        text_of(client)
    assert 3 <= sum(len(stub.asked) for stub in stubs) <= 6  # three, and those that were late


@pytest.mark.parametrize(("waiting", "code"), [(1, "no_replica"), (2, "too_many_waiting")])
def test_so_many_requests_wait_for_a_start(waiting, code):
    autoscale = SimpleNamespace(wait_s=0.0, max_waiting=2)
    version = SimpleNamespace(
        model="m",
        autoscale=autoscale,
        is_asleep=True,
        num_waiting=waiting,
        can_answer=False,
        guard=SimpleNamespace(slow=set),
    )
    router = SimpleNamespace(queue_s=1000.0)
    members = SimpleNamespace(fleet=SimpleNamespace(router=router))
    forwarder = SimpleNamespace(members=members, _decide=lambda *a: None)
    call = SimpleNamespace(tried=set(), is_line=False)
    with pytest.raises(ApiError) as refused:
        asyncio.run(Forwarder._choose(forwarder, version, call, None))
    assert (refused.value.code, version.num_waiting) == (code, waiting)


@pytest.mark.parametrize(("can_answer", "code"), [(True, "no_room"), (False, "no_replica")])
def test_a_batchs_line_yields_to_clients_and_waits_for_a_start(can_answer, code):
    guards = SimpleNamespace(next_change=lambda now: None)
    version = SimpleNamespace(
        model="m", autoscale=None, num_waiting=0, can_answer=can_answer, guard=guards
    )
    members = SimpleNamespace(fleet=SimpleNamespace(router=SimpleNamespace(queue_s=0.0)))
    forwarder = SimpleNamespace(members=members, _decide=lambda *a: None)
    call = SimpleNamespace(tried=set(), is_line=True)
    with pytest.raises(ApiError) as refused:
        asyncio.run(Forwarder._choose(forwarder, version, call, None))
    assert refused.value.code == code


def test_only_replicas_with_the_adapter_are_asked():
    replicas = {
        name: SimpleNamespace(id=name, adapters=own, heard=False)
        for name, own in (("a", {"x"}), ("b", set()))
    }
    asked = {}
    version = SimpleNamespace(
        has_roles=False,
        replicas=replicas,
        placing=SimpleNamespace(choose=lambda *a, **more: asked.update(more)),
    )
    own = {"only": None, "adapter": "x", "tokens": [1], "session": None, "prefix_salt": ""}
    call = SimpleNamespace(tried=set(), is_line=False, num_deaths=0, handover=None, **own)
    Forwarder._decide(SimpleNamespace(chains=lambda *a: []), version, call, 0.0)
    assert asked["exclude"] == {"b"}


def test_versions_are_chosen_by_their_shares_and_for_a_key_the_same():
    one, two = (
        SimpleNamespace(spec=SimpleNamespace(share=share), adapters=set(), can_answer=True)
        for share in (3.0, 1.0)
    )
    members = SimpleNamespace(models={"m": [one, two]})
    chosen = [Members.choose_version(members, "m", str(i)) for i in range(1000)]
    assert 0.2 < chosen.count(two) / 1000 < 0.3
    assert chosen[:9] == [Members.choose_version(members, "m", str(i)) for i in range(9)]
    two.can_answer = False
    assert Members.choose_version(members, "m", str(chosen.index(two))) is one


def test_a_gateway_that_drains_is_healthy_and_not_ready():
    state, members = SimpleNamespace(draining=True), SimpleNamespace(models={})
    draining = SimpleNamespace(state=state, members=members)
    Gateway.require_ready(draining, also_draining=True)
    with pytest.raises(ApiError) as refused:
        Gateway.require_ready(draining)
    assert refused.value.code == "shutting_down"


def test_the_root_names_what_the_fleet_serves(start):
    """The gateway answers `/` itself: a replica's own names its one model alone."""
    fleet, stubs = start()
    text = httpx.get(fleet.url, timeout=PATIENCE_S).text
    assert "serves tiny: OpenAI's API at /v1" in text
    assert not any(stub.asked for stub in stubs)
