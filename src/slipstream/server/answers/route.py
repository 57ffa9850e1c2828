"""The ASGI endpoint that runs an `Answer`: reads a body, applies limits, and sends the answer's output.

The status 200 is sent with the first delta, so an earlier failure has a status of its own. A later
failure is an error event, after which the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from slipstream.errors import RequestError, SlipstreamError
from slipstream.server.answers import generation
from slipstream.server.answers.generation import Answer
from slipstream.server.answers.hints import given_hints
from slipstream.server.http.decoding import decode
from slipstream.server.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ClientDisconnected,
    as_api_error,
    bad_request,
    shutting_down,
)
from slipstream.server.http.limits import admitted, in_flight, read_prompt_body
from slipstream.server.http.record import TOKENS_HEADER, RequestRecord
from slipstream.server.http.replies import JSON_HEADERS, send_whole
from slipstream.server.openai.models import served_model
from slipstream.server.state import ServerState

logger = logging.getLogger("slipstream.server")

_PROGRESS_S = 1.0
"""Interval of the progress reports to a fleet's gateway, for an answer that is not streamed."""


class Body(Protocol):
    """A decoded request body: OpenAI's, or another protocol's that `prepare` translates."""

    model: str | None

    def check(self) -> None:
        """Raise a 400 for what the schema cannot express."""

    def param(self, field: str | None) -> str | None:
        """Maps the field that an error names to the name that this request body has for it."""


@contextmanager
def renamed(param: Callable[[str | None], str | None]) -> Iterator[None]:
    """Context manager that renames the field of an error by `param`, for a body translated from
    another protocol."""
    try:
        yield
    except ApiError as error:
        error.param = param(error.param)
        raise
    except RequestError as error:
        error.field = param(error.field)
        raise


class GenerationRoute:
    """The ASGI endpoint for bodies of type `kind`; `prepare` makes an Answer of a body."""

    def __init__(
        self,
        state: ServerState,
        kind: type[Any],
        prepare: Callable[[ServerState, Any, RequestRecord], Awaitable[Answer]],
    ) -> None:
        self.state, self.kind, self.prepare = state, kind, prepare

    def read(self, raw: bytes, scope: Scope) -> Body:
        body: Body = decode(self.kind, raw)
        return body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        if state.draining:
            raise shutting_down()
        record = scope["record"]
        raw = await read_prompt_body(state, scope, receive)
        body = self.read(raw, scope)
        body.check()
        record.hints += given_hints(body)
        body.model = record.model = served_model(state, body.model)
        started = False
        try:
            async with in_flight(state, receive, record):
                with admitted(state, record, body.model):
                    answer = record.answer = await self.prepare(state, body, record)
                    answer.marks = answer.stream and scope.get("from_gateway", False)
                    answer.begun = scope.get("answer_token_ids", ())
                    if handover := scope.get("handover"):
                        answer.handover_from, cached = handover.split()
                        answer.num_cached_there = int(cached)
                    if scope.get("hands_over", False):
                        async with _reporting(answer, scope):
                            told = await answer.prefill()
                        await send_whole(send, told, JSON_HEADERS)
                        return
                    if answer.begun and not (answer.stream and len(answer.choices) == 1):
                        raise bad_request(
                            "only a stream of one choice can go on elsewhere", "answer_token_ids"
                        )
                    async with (
                        _reporting(answer, scope),
                        aclosing(answer.events(scope.get("write_chunk"))) as events,
                    ):
                        async for some in events:
                            if not started:
                                started = True
                                await send(
                                    {
                                        "type": "http.response.start",
                                        "status": 200,
                                        "headers": answer.headers,
                                    }
                                )
                            if some:
                                with state.metrics.stalls.waiting():
                                    await send(
                                        {
                                            "type": "http.response.body",
                                            "body": some,
                                            "more_body": True,
                                        }
                                    )
                last = answer.end() if answer.stream else answer.collected()
                if state.settings.audit_answers:
                    given = [answer.choices[i] for i in answer.choices_given()]
                    record.answers = ["".join(choice.text) for choice in given]
                    record.finish_reasons = [choice.finish_reason for choice in given]
        except Exception as exc:
            if isinstance(exc, RequestError):
                exc.field = body.param(exc.field)
            if not started:
                raise
            await _break_off(exc, answer, send)
            return
        # Sent after `in_flight` is left: a disconnect no longer matters.
        if not answer.stream:
            await send_whole(send, last, answer.whole_headers)
            return
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
        end = b":e %b\n" % record.token_counts if answer.marks else b""
        await send({"type": "http.response.body", "body": last + end, "more_body": False})


@asynccontextmanager
async def _reporting(answer: Answer, scope: Scope) -> AsyncGenerator[None, None]:
    """Send reports to a fleet's gateway while the code inside runs.

    An answer that is not streamed reports its progress. A streamed one shows that it is alive; its
    first byte ends that. A beam search has no progress before its end, so its reports only show
    that it runs.
    """
    write = scope.get("write_interim")
    if write is None or not scope.get("from_gateway", False):
        yield
        return

    async def show_life() -> None:
        while True:
            await asyncio.sleep(generation.PING_S)
            write(b"content-type", answer.media_type)

    async def report() -> None:
        reported = 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if answer.record.num_output_tokens > reported or answer.beams is not None:
                reported = answer.record.num_output_tokens
                write(TOKENS_HEADER, answer.record.token_counts)

    reporting = asyncio.create_task(show_life() if answer.stream else report())
    try:
        yield
    finally:
        reporting.cancel()


async def _break_off(exc: Exception, answer: Answer, send: Send) -> None:
    """End a stream that has begun, with an error event if the client is still connected."""
    record = answer.record
    if isinstance(exc, ClientDisconnected):
        record.status, record.error = CLIENT_CLOSED_REQUEST, "client_disconnected"
        return
    error = as_api_error(exc)
    record.status, record.error = error.status, error.code
    if not isinstance(exc, SlipstreamError) and error.status == 500:
        logger.exception("a stream broke off")
    await send({"type": "http.response.body", "body": answer.failure(error), "more_body": False})
