"""The protocol between a replica and its fleet's gateway. It is on with `ServerSettings.fleet_key`.

The gateway sends `x-slipstream-fleet: KEY ID CREATED [OWNER [PRIORITY WEIGHT [=GROUP]]]` with each request: the id and time
that the answer bears, the owner of the API key, and the key's priority and weight (PRIORITY `-`: as the request says; `batch`:
it is a batch's, behind all others). OWNER may be empty. GROUP is the key's `share_prefixes`, quoted. Limits are held at the
gateway. Without the fleet's KEY only the probes are answered.

An answer's header `x-slipstream-tokens: PROMPT OUTPUT` says how many tokens there are so far. While a whole answer is being
written, interim responses (102) with that header come when there are more. A stream of text has marks, which the gateway takes
out:

    events…
    :t 12 13        the events above are all that these tokens (and those of the marks before) bring
    events…
    :e 5 40         the end, and the tokens of prompt and answer; without it the stream broke off

POST /fleet/resume {"path", "body", "answer_token_ids"}: what `path` answers to `body`, behind the tokens that another replica
has written. The output of those tokens is not sent again.

GET /fleet/events: messages of msgpack, each behind its length in four bytes: `CacheEvents` of the engine, and `ReplicaLoad` at
least each second, whatever the engine does. The first CacheEvents is whole. A reader that falls behind loses some and gets a
whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.engine.core_process import CacheEvents
from slipstream.engine.fair_threads import client
from slipstream.errors import EngineError
from slipstream.server.http.auth import OPEN_ROUTES
from slipstream.server.http.errors import ApiError, bad_request, response_to
from slipstream.server.http.keys import Key
from slipstream.server.http.limits import own_receive, read_as
from slipstream.server.http.record import TOKENS_HEADER, RequestRecord
from slipstream.server.openai.protocol import TokenId, register
from slipstream.server.operations.metrics import MetricCounts
from slipstream.server.state import ServerState
from slipstream.stats import EngineStats

HEADER = "x-slipstream-fleet"
BATCH = "batch"

_LOAD_S = 0.5
_UP_S = 5.0
"""An engine that has not answered for so long is down, or hangs."""

_COUNTS_S = 2.0
_MAX_WAITING = 1000  # news that a reader has not taken


class ReplicaLoad(msgspec.Struct, tag=True, kw_only=True):
    """How a replica is. `stats` is None while its engine does not answer, as in the midst of a long step; `is_up` is False if
    that has lasted. `counts` come every few seconds."""

    stats: EngineStats | None
    is_up: bool
    num_open: int  # sequences of open requests
    max_model_len: int
    canary_ok: bool | None = None
    counts: MetricCounts | None = None


FromReplica: TypeAlias = CacheEvents | ReplicaLoad


class ResumeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /fleet/resume"""

    path: str
    body: msgspec.Raw
    answer_token_ids: list[TokenId]


register(ResumeRequest)


class FromGateway:
    """ASGI middleware: authenticates the fleet's gateway, and takes the request's owner and priority from its header."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            key, *about = Headers(scope=scope).get(HEADER, "").split(" ")
            if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key):
                error = ApiError(
                    401,
                    "this server answers to the gateway of its fleet only",
                    code="invalid_api_key",
                )
                scope["record"].error = error.code
                await response_to(scope, error)(scope, receive, send)
                return
            record = scope["record"]
            if len(about) >= 2:
                record.id, record.created = about[0], int(about[1])
                record.key = _key(*about[2:])
                client.set(record.owner or client.get())
                record.background = about[3:4] == [BATCH]
                scope["from_gateway"] = True
                send = _with_tokens(record, send)
        await self.app(scope, receive, send)


def _key(
    owner: str = "", priority: str = "-", weight: str = "1", group: str | None = None
) -> Key | None:
    """The key that asked at the gateway, without its limits."""
    if not owner:
        return None
    return Key(
        id=unquote(owner),
        priority=None if priority in ("-", BATCH) else int(priority),
        weight=float(weight),
        share_prefixes=None if group is None else unquote(group.removeprefix("=")),
    )


def _with_tokens(record: RequestRecord, send: Send) -> Send:
    async def send_with_tokens(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (TOKENS_HEADER, record.token_counts)]
        await send(message)

    return send_with_tokens


def routes(state: ServerState, router: Callable[[], Router]) -> list[Route]:
    """`router` gives that of the app's own routes."""

    async def resume(request: Request) -> Response:
        body = await read_as(ResumeRequest, request, state)
        if not body.answer_token_ids:
            raise bad_request("no token was written; ask the route itself", "answer_token_ids")
        return _Resumed(body, router())

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(state), media_type="application/octet-stream")

    return [Route("/fleet/resume", resume, methods=["POST"]), Route("/fleet/events", events)]


class _Resumed(Response):
    def __init__(self, wanted: ResumeRequest, router: Router) -> None:
        self._wanted, self._router, self.background = wanted, router, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytes(self._wanted.body)
        length = (b"content-length", str(len(body)).encode())
        headers = [
            length if name == b"content-length" else (name, value)
            for name, value in scope["headers"]
        ]
        path = self._wanted.path
        inner = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
            "path_params": {},
        }
        inner["answer_token_ids"] = self._wanted.answer_token_ids
        await self._router(inner, own_receive(body, receive), send)


async def _events(state: ServerState) -> AsyncIterator[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    waiting: deque[FromReplica] = deque()
    came = asyncio.Event()

    def take(event: CacheEvents) -> None:
        waiting.append(event)
        came.set()

    async def send_load() -> None:
        asking: asyncio.Task[EngineStats] | None = None
        answered, counted = time.monotonic(), 0.0
        try:
            while True:
                asking = asking or asyncio.ensure_future(state.engine.stats())
                await asyncio.wait([asking], timeout=_LOAD_S)
                stats, now = None, time.monotonic()
                if asking.done():
                    with contextlib.suppress(EngineError):
                        stats, answered = asking.result(), now
                    asking = None
                counts = state.metrics.counts() if now - counted >= _COUNTS_S else None
                counted = counted if counts is None else now
                waiting.append(_load(state, stats, is_up=now - answered < _UP_S, counts=counts))
                came.set()
                await asyncio.sleep(_LOAD_S if asking is None else 0)
        finally:
            if asking is not None:
                asking.cancel()

    end = state.engine.watch_cache(take)
    sending = asyncio.create_task(send_load())
    try:
        while True:
            await came.wait()
            came.clear()
            if len(waiting) > _MAX_WAITING:  # everything is sent again
                waiting.clear()
                end()
                end = state.engine.watch_cache(take)
                continue
            parts = []
            while waiting:
                message = encode(waiting.popleft())
                parts += [len(message).to_bytes(4, "little"), message]
            yield b"".join(parts)
    finally:
        sending.cancel()
        end()


def _load(
    state: ServerState, stats: EngineStats | None, *, is_up: bool, counts: MetricCounts | None
) -> ReplicaLoad:
    engine = state.engine
    return ReplicaLoad(
        stats=stats,
        is_up=is_up,
        num_open=engine.num_requests,
        max_model_len=engine.config.model.max_model_len,
        canary_ok=None if engine.canary is None else engine.canary.ok,
        counts=counts,
    )
