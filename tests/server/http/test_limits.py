"""Bodies, requests in flight and the limits around them, with a `receive` and a state of the test's."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from slipstream.server.http import limits
from slipstream.server.http.errors import ApiError, ClientDisconnected, overloaded, shutting_down
from slipstream.server.http.keys import Key
from slipstream.server.http.limits import (
    admitted,
    counted,
    end_revoked,
    in_flight,
    limited,
    own_receive,
    read_body,
    read_prompt_body,
)
from slipstream.server.http.load import ServerLoad
from slipstream.server.http.rates import SharedLimiter
from slipstream.server.http.record import RequestRecord

KEY = Key(id="a", tokens_per_minute=100, models=("m",))


def a_state(**more):
    settings = SimpleNamespace(
        max_body_bytes=10, body_timeout_s=0.05, audit_prompts=False, max_concurrent_requests=2
    )
    board = ServerLoad()
    metrics = SimpleNamespace(limited=Counter())
    return SimpleNamespace(
        **{
            "settings": settings,
            "load": board,
            "in_flight": set(),
            "draining": False,
            "metrics": metrics,
            "limiter": SharedLimiter(clock=lambda: 5.5),
            **more,
        }
    )


def scope_of(*, length: bytes | None = None):
    headers = [] if length is None else [(b"content-length", length)]
    return {"type": "http", "headers": headers, "record": RequestRecord()}


def sends(*parts: bytes, then: str | None = None):
    """A `receive` that gives these parts of a body, and then `then` or nothing."""
    events = [
        {"type": "http.request", "body": part, "more_body": then is not None or i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    if then is not None:
        events.append({"type": then})

    async def receive():
        if not events:
            await asyncio.Event().wait()
        return events.pop(0)

    return receive


async def refused_body(receive, length: bytes | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await read_body(scope_of(length=length), receive, a_state().settings)
    return caught.value


async def test_body_of_the_limit_is_read_and_one_byte_more_is_refused():
    settings = a_state().settings
    for length in (None, b"10"):
        body = await read_body(scope_of(length=length), sends(b"12345", b"67890"), settings)
        assert body == b"1234567890"
    assert (await refused_body(sends(), b"11")).code == "request_too_large"  # nothing is read
    assert (await refused_body(sends(b"12345", b"678901"))).status == 413
    assert (await refused_body(sends(b"x"), b"1e1")).status == 400


async def test_body_that_does_not_come_is_a_timeout_that_ends_the_connection():
    late = await refused_body(sends())
    assert (late.status, late.code, late.headers) == (
        408,
        "request_timeout",
        {"connection": "close"},
    )


async def test_client_that_leaves_before_its_body_is_whole_is_no_request():
    with pytest.raises(ClientDisconnected):
        await read_body(scope_of(), sends(b"1", then="http.disconnect"), a_state().settings)


@pytest.mark.parametrize("audited", [False, True])
async def test_prompts_are_kept_only_if_the_audit_log_has_them(audited):
    state, scope = a_state(), scope_of()
    state.settings.audit_prompts = audited
    assert await read_prompt_body(state, scope, sends(b"\xff1")) == b"\xff1"
    assert scope["record"].body == ("\ufffd1" if audited else None)


async def test_own_request_gives_its_body_once():
    asked = own_receive(b"body", sends(b"next"))
    assert (await asked())["body"] == b"body"
    assert (await asked())["body"] == b"next"
    silent = own_receive(b"body")
    assert await silent() == {"type": "http.request", "body": b"body", "more_body": False}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(silent(), 0.01)


# --- In flight ----------------------------------------------------------------------------------


async def test_request_is_in_flight_until_its_block_ends_however():
    state = a_state()
    tasks = asyncio.all_tasks()
    async with in_flight(state, sends(), RequestRecord(key=KEY)):
        (exchange,) = state.in_flight
        assert exchange.key is KEY
        assert state.load.num_requests == 1
    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error):
            async with in_flight(state, sends(), RequestRecord()):
                raise error
    assert not state.in_flight
    assert state.load.num_requests == 0
    exchange.cancel(shutting_down())  # too late: the task goes on with something else
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks, "nobody watches for the disconnect any more"


async def test_no_more_requests_than_the_limit_and_none_while_draining():
    state = a_state()
    async with in_flight(state, sends(), RequestRecord()):
        async with in_flight(state, sends(), RequestRecord()):
            with pytest.raises(ApiError) as full:
                async with in_flight(state, sends(), RequestRecord()):
                    pass
        assert (full.value.status, full.value.code) == (429, "overloaded")
        async with in_flight(state, sends(), RequestRecord()):
            pass
        state.draining = True
        with pytest.raises(ApiError) as ending:
            async with in_flight(state, sends(), RequestRecord()):
                pass
    assert ending.value.status == 503


async def test_client_that_leaves_ends_the_work_and_the_task_lives_on():
    state = a_state()
    with pytest.raises(ClientDisconnected):
        async with in_flight(state, sends(b"more", then="http.disconnect"), RequestRecord()):
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0
    assert not state.in_flight


async def test_first_reason_of_a_cancel_is_the_one_told():
    state = a_state()

    async def cancelled_twice():
        async with in_flight(state, sends(), RequestRecord()):
            (exchange,) = state.in_flight
            exchange.cancel(shutting_down())
            exchange.cancel(ClientDisconnected())
            await asyncio.Event().wait()

    with pytest.raises(ApiError) as caught:
        await cancelled_twice()
    assert caught.value.status == 503
    assert asyncio.current_task().cancelling() == 0


async def test_requests_of_a_revoked_key_are_ended_and_others_are_not(monkeypatch):
    monkeypatch.setattr(limits, "LOOK_S", 0.0)
    told = []
    others = [SimpleNamespace(key=key, cancel=None) for key in (None, Key(id="b"))]
    ended = SimpleNamespace(key=KEY, cancel=told.append)
    keys = SimpleNamespace(may_change=True, is_active=lambda key: key.id != KEY.id)
    state = a_state(keys=keys, in_flight=[*others, ended])
    looking = asyncio.create_task(end_revoked(state))
    while not told:
        await asyncio.sleep(0)
    keys.may_change = False
    await looking
    assert told[0].status == 401


# --- Limits of a key ----------------------------------------------------------------------------


def left(state) -> int:
    """Tokens that the key has."""
    grant = state.limiter.admit(KEY)
    found = dict(grant.headers)
    grant.close(0)
    return int(found[b"x-ratelimit-remaining-tokens"])


def test_prompt_and_answer_of_a_request_are_what_it_used():
    state, record = a_state(), RequestRecord(key=KEY)

    def work():
        with admitted(state, record, "m"):
            record.grant.reserve(20, 60)
            record.num_prompt_tokens, record.num_output_tokens = 25, 5
            raise ValueError("work")

    with pytest.raises(ValueError, match="work"):
        work()
    assert record.model == "m"
    assert left(state) == 70


def test_model_that_the_key_may_not_use_takes_nothing():
    state = a_state()
    with pytest.raises(ApiError) as caught, admitted(state, RequestRecord(key=KEY), "other"):
        pass
    assert caught.value.status == 403
    assert not state.metrics.limited


def test_requests_over_a_limit_are_counted_by_its_kind_and_an_overloaded_server_is_none():
    state, record = a_state(), RequestRecord(key=KEY)
    with pytest.raises(ApiError), limited(state, record):
        record.grant.reserve(101, 0)
    assert state.metrics.limited == {"tokens": 1}
    with pytest.raises(ApiError), limited(state, RequestRecord(key=KEY)):
        raise overloaded("too many")
    assert state.metrics.limited == {"tokens": 1}


async def test_key_without_limits_has_no_grant_and_a_counted_route_runs_within_them():
    state, record = a_state(), RequestRecord(key=Key(id="b"))
    with limited(state, record):
        assert record.grant is None

    async def handler(request):
        return request.scope["record"].grant

    record = RequestRecord(key=KEY)
    assert await counted(state, handler)(SimpleNamespace(scope={"record": record})) is not None
