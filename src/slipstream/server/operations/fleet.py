"""The protocol between a replica and its fleet's gateway, enabled by `ServerSettings.fleet_key`.

The gateway sends `x-slipstream-fleet: KEY ID CREATED [OWNER [PRIORITY WEIGHT [=GROUP]]]` with each
request:

- KEY is the fleet's key. Without it only the probes are answered.
- ID and CREATED are the id and time that the answer has.
- OWNER is the owner of the API key, and may be empty.
- PRIORITY and WEIGHT are the key's. PRIORITY `-` leaves the priority to the request; `batch` marks
  a batch's request, which comes after all others.
- GROUP is the key's `share_prefixes`, quoted.

The gateway applies limits itself.

An answer's header `x-slipstream-tokens: PROMPT OUTPUT` has the number of tokens so far. While an
answer that is not streamed is written, interim responses (102) with that header follow as the
counts grow. A stream tells its content type so, every `PING_S` until it begins. An error's header
`x-slipstream-error-code` has its code, which not every protocol's shape has. A stream has marks, which
the gateway removes:

    events…
    :t 12 13        the events above are all the output of these tokens and those of earlier marks
    events…
    :e 5 40         the end, with the token counts; without it the stream broke off

POST /fleet/resume {"path", "body", "answer_token_ids"}: the answer of `path` to `body`, continued
after the tokens that another replica has generated. The output of those tokens is not sent again.

POST /fleet/prefill {"path", "body"}: computes the prompt of `body` alone and keeps its blocks for
other replicas. The answer {"address", "num_prompt_tokens", "num_cached_tokens"} says where they are. A
request with the header `x-slipstream-handover: ADDRESS CACHED` takes them from there. The tokens that
were computed for it elsewhere don't count as cached ones in its usage; CACHED do.

GET /fleet/events: messages in msgpack, each after its length in four bytes. They are the engine's
`CacheEvents`, and `ReplicaLoad` at least each second even if the engine hangs. The first
CacheEvents is complete. A reader that falls behind loses some and then gets a complete one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.engine.process.operation_messages import CacheEvents
from slipstream.engine.threads.fair_threads import client
from slipstream.errors import EngineError
from slipstream.messages.stats import EngineStats
from slipstream.server.http.auth import OPEN_ROUTES
from slipstream.server.http.decoding import register
from slipstream.server.http.errors import ApiError, bad_request, response_to
from slipstream.server.http.keys import Key
from slipstream.server.http.limits import own_receive, read_as
from slipstream.server.http.record import TOKENS_HEADER, RequestRecord
from slipstream.server.openai.protocol import TokenId
from slipstream.server.operations.health import canary_ok, is_ready
from slipstream.server.operations.metrics import MetricCounts
from slipstream.server.state import ServerState

HEADER = "x-slipstream-fleet"
HANDOVER_HEADER = "x-slipstream-handover"
BATCH = "batch"

_LOAD_S = 0.5
_UP_S = 5.0
"""Seconds without an answer after which an engine counts as down."""

_COUNTS_S = 2.0
_MAX_WAITING = 1000  # unread messages of a reader


class ReplicaLoad(msgspec.Struct, tag=True, kw_only=True):
    """The state of a replica. `stats` is None while its engine does not answer, for example during
    a long step; `is_up` is False if that lasts. `is_ready`: as /ready says. `counts` is set every few seconds."""

    stats: EngineStats | None
    is_up: bool
    is_ready: bool = True
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


class PrefillRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /fleet/prefill"""

    path: str
    body: msgspec.Raw


register(ResumeRequest)
register(PrefillRequest)


class FromGateway:
    """ASGI middleware that authenticates the gateway and reads the request's owner and priority
    from its header."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            key, *about = Headers(scope=scope).get(HEADER, "").split(" ")
            if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key):
                error = ApiError(
                    401, "this server answers only the gateway of its fleet", code="invalid_api_key"
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
                scope["handover"] = Headers(scope=scope).get(HANDOVER_HEADER, "")
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
    """Routes that only a fleet's gateway may call. `router()` returns the Starlette router of the
    public routes, to which resumed requests are passed."""

    async def resume(request: Request) -> Response:
        body = await read_as(ResumeRequest, request, state)
        if not body.answer_token_ids:
            raise bad_request(
                "answer_token_ids is empty; send the request to the route itself",
                "answer_token_ids",
            )
        own = {"answer_token_ids": body.answer_token_ids}
        return _Inner(body.path, body.body, own, router())

    async def prefill(request: Request) -> Response:
        body = await read_as(PrefillRequest, request, state)
        return _Inner(body.path, body.body, {"hands_over": True}, router())

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(state), media_type="application/octet-stream")

    return [
        Route("/fleet/resume", resume, methods=["POST"]),
        Route("/fleet/prefill", prefill, methods=["POST"]),
        Route("/fleet/events", events),
    ]


class _Inner(Response):
    """Response of another route to a body nested in the gateway's, with `own` added to its scope."""

    def __init__(self, path: str, body: msgspec.Raw, own: dict[str, Any], router: Router) -> None:
        self._path, self._body, self._own = path, body, own
        self._router, self.background = router, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytes(self._body)
        length = (b"content-length", str(len(body)).encode())
        headers = [
            length if name == b"content-length" else (name, value)
            for name, value in scope["headers"]
        ]
        path = self._path
        inner = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
            "path_params": {},
            **self._own,
        }
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
            if len(waiting) > _MAX_WAITING:  # the reader then gets the whole content again
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
        is_ready=is_ready(state),
        num_open=engine.num_requests,
        max_model_len=engine.config.model.max_model_len,
        canary_ok=canary_ok(state),
        counts=counts,
    )
