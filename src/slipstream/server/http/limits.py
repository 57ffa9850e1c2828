"""Limits that protect clients from each other.

Bodies are bounded in size and time, and requests in flight in number. An `Exchange` cancels the
engine's work at once when a client disconnects or a time limit is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias, TypeVar

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from slipstream.server.http.auth import check_model
from slipstream.server.http.decoding import decode
from slipstream.server.http.errors import (
    ApiError,
    ClientDisconnected,
    bad_request,
    overloaded,
    revoked_key,
    shutting_down,
)
from slipstream.server.http.keys import LOOK_S, Key
from slipstream.server.http.record import RequestRecord
from slipstream.server.state import ServerSettings, ServerState

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
T = TypeVar("T", bound=Struct)


async def read_body(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    """Reads the whole body. ApiError (413) as soon as it is known to be too long, or 408 if it
    takes too long."""
    limit = settings.max_body_bytes
    why = f"the body is longer than the {limit} bytes this server takes (--max-body-bytes)"
    too_long = ApiError(413, why, code="request_too_large")
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal():
        raise bad_request("content-length is not a number")
    if int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += event.get("body", b"")
                if len(body) > limit:
                    raise too_long
                if not event.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message = f"no whole body within {settings.body_timeout_s:g} s"
        raise ApiError(
            408, message, code="request_timeout", headers={"connection": "close"}
        ) from None


def own_receive(body: bytes, then: Receive | None = None) -> Receive:
    """The `receive` of a request that the server sends to itself: the body, then results of `then`.
    Without `then` it waits after the body; the sender ends the request by cancelling it."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given and then is not None:
            return await then()
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def read_prompt_body(state: ServerState, scope: Scope, receive: Receive) -> bytes:
    """The body of a generating request. With `audit_prompts` it is also recorded for the audit log."""
    raw = await read_body(scope, receive, state.settings)
    if state.settings.audit_prompts:
        scope["record"].body = raw.decode("utf-8", "replace")
    return raw


async def read_as(kind: type[T], request: Request, state: ServerState) -> T:
    """The body of a request, decoded as `kind`. Raises what `read_body` and `decode` raise."""
    return decode(kind, await read_body(request.scope, request.receive, state.settings))


class Exchange:
    """A request in progress: its task, its key, and the reason if it was cancelled."""

    __slots__ = ("key", "over", "reason", "task")

    def __init__(self, task: asyncio.Task[None], key: Key | None) -> None:
        self.task, self.key = task, key
        self.reason: Exception | None = None
        self.over = False

    def cancel(self, reason: Exception) -> None:
        if not self.over and self.reason is None:
            self.reason = reason
            self.task.cancel()


@asynccontextmanager
async def in_flight(
    state: ServerState, receive: Receive, record: RequestRecord
) -> AsyncIterator[None]:
    """Context manager that cancels its body when the client disconnects.

    Raises ClientDisconnected, or the reason given to `Exchange.cancel`. A separate task waits for
    the disconnect, so that watching costs nothing per token.
    """
    if state.draining:
        raise shutting_down()
    limit = state.settings.max_concurrent_requests
    if not state.load.begin_request(limit):
        raise overloaded(
            f"{limit} requests are in flight, as many as this server takes; try again later"
        )
    task = asyncio.current_task()
    assert task is not None
    exchange = Exchange(task, record.key)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.cancel(ClientDisconnected())

    watcher = asyncio.create_task(watch())
    state.in_flight.add(exchange)
    try:
        yield
    except asyncio.CancelledError:
        if exchange.reason is None:
            raise
        task.uncancel()
        raise exchange.reason from None
    finally:
        exchange.over = True
        watcher.cancel()
        state.in_flight.discard(exchange)
        state.load.end_request()


async def end_revoked(state: ServerState) -> None:
    """Cancel requests whose key was revoked, expired or removed from the file. Runs as long as the
    server."""
    while state.keys.may_change:
        await asyncio.sleep(LOOK_S)
        for exchange in tuple(state.in_flight):
            if exchange.key is not None and not state.keys.is_active(exchange.key):
                exchange.cancel(revoked_key())


@contextmanager
def admitted(state: ServerState, record: RequestRecord, model: str | None) -> Iterator[None]:
    """Context manager that applies the limits of the request's key. ApiError (403, 429) if it may
    not run."""
    record.model = model
    check_model(record.key, model)
    with limited(state, record):
        yield


def counted(state: ServerState, handler: Handler) -> Handler:
    """Wraps a route that doesn't use the model, so that its requests count for their key's limits."""

    async def within_limits(request: Request) -> Response:
        with limited(state, request.scope["record"]):
            return await handler(request)

    return within_limits


@contextmanager
def limited(state: ServerState, record: RequestRecord) -> Iterator[None]:
    """Context manager that applies the key's limits without checking the model; see `admitted`.
    Within another `limited` of the same request it does nothing, so a request counts once."""
    key = record.key
    if key is None or not key.is_limited or record.is_limited:
        yield
        return
    record.is_limited = True
    try:
        grant = record.grant = state.limiter.admit(key, background=record.background)
        try:
            yield
        finally:
            grant.close(record.num_prompt_tokens + record.num_output_tokens)
    except ApiError as error:
        if error.status == 429 and error.code != "overloaded":
            state.metrics.limited[error.kind] += 1
        raise
    finally:
        record.is_limited = False
