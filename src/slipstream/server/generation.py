"""One path for every answer: deltas from the engine, streamed as server-sent events, or the same deltas collected.

An `Answer` says what to generate and how to write it; completions.py and chat.py each make one of a body.
`GenerationRoute` is the ASGI endpoint that runs it. A 200 is sent with the first delta, so whatever fails before it
has its own status; what fails after it is an error event, after which the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import msgspec
from starlette.types import Receive, Scope, Send

from slipstream.errors import EngineError, RequestError, SlipstreamError
from slipstream.server.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ClientDisconnected,
    as_api_error,
    bad_request,
    shutting_down,
)
from slipstream.server.limits import in_flight, read_body
from slipstream.server.models import require_model
from slipstream.server.protocol import Generation, decode
from slipstream.server.record import RequestRecord
from slipstream.server.state import ServerState
from slipstream.types import CompletionOutput, FinishReason, PositionLogprobs, Prompt, RequestOutput, SamplingParams

logger = logging.getLogger("slipstream.server")
encode = msgspec.json.Encoder().encode

@dataclass(slots=True)
class Choice:
    """One of the answers so far. Text and log-probabilities are kept only if they are to be collected."""

    num_tokens: int = 0
    first_token: float = 0.0  # time.monotonic()
    last_token: float = 0.0
    finish_reason: str | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # if they are asked for
    begun: bool = False  # whether a chunk was written; that and the next belong to Answer.chunk
    num_chars: int = 0
    strips_space: bool = False  # whether the next token's space does not show


@dataclass(slots=True)
class PromptInfo:
    """What the engine says about one prompt."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    logprobs: list[PositionLogprobs | None] | None = None


class Answer:
    """What one body asks for, how far it is, and how it is written. Choices are numbered prompt by prompt, n for
    each."""

    kind: ClassVar[str]  # OpenAI's `object`
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"  # of a stream

    def __init__(
        self,
        state: ServerState,
        body: Generation,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        record: RequestRecord,
    ) -> None:
        num_choices = len(prompts) * sampling.n
        if num_choices > (limit := state.settings.max_choices_per_request):
            raise bad_request(f"prompts times n is {num_choices}; this server takes at most {limit}", "n")
        self.state, self.body, self.prompts, self.sampling, self.record = state, body, prompts, sampling, record
        self.choices = [Choice() for _ in range(num_choices)]
        self.prompt_info = [PromptInfo() for _ in prompts]
        self.more_usage: dict[str, Any] = {}
        self.stream = bool(body.stream)
        options = body.stream_options
        self.continuous_usage = options is not None and options.continuous_usage_stats
        self.include_usage = options is not None and options.include_usage
        self.identity = {"id": self.id_prefix + record.id, "created": int(time.time()), "model": body.model}
        # The parts of a chunk that never change are encoded once.
        self.head = b"data: " + encode({"object": self.chunk_kind, **self.identity})[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The events for a delta; none if it has nothing to say."""
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        """A choice of the collected answer."""
        raise NotImplementedError

    def event(self, *choice: bytes) -> bytes:
        tail = b'],"usage":' + encode(self.usage()) + b"}\n\n" if self.continuous_usage else self.tail
        return b"".join((self.head, *choice, tail))

    def end(self) -> bytes:
        """What closes the stream."""
        usage = self.head + b'],"usage":' + encode(self.usage()) + b"}\n\n" if self.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream in place of `end`."""
        return b"data: " + error.body() + b"\n\n"

    def collected(self) -> bytes:
        choices = [self.choice(i) for i in range(len(self.choices))]
        return encode({"object": self.kind, **self.identity, "choices": choices, "usage": self.usage(), **self.beside()})

    def beside(self) -> dict[str, Any]:
        """What else the collected answer holds."""
        return {}

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.record.num_prompt_tokens, self.record.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(info.num_cached_tokens for info in self.prompt_info)},
            **self.more_usage,
        }

    async def deltas(self) -> AsyncGenerator[list[CompletionOutput], None]:
        """What the engine has to say, renumbered, counted and, if it is to be collected, kept."""
        engine, n = self.state.engine, self.sampling.n
        priority = self.body.priority or 0
        streams = [engine.generate(prompt, self.sampling, priority=priority) for prompt in self.prompts]
        async with aclosing(merge(streams)) as outputs:
            async for number, output in outputs:
                self._note_prompt(self.prompt_info[number], output)
                now = time.monotonic()
                for delta in output.outputs:
                    delta.index += number * n
                    self._note(delta, now)
                yield output.outputs
        self.state.metrics.e2e.observe(time.monotonic() - self.record.start)

    def _note_prompt(self, info: PromptInfo, output: RequestOutput) -> None:
        if not info.token_ids:
            info.token_ids = output.prompt_token_ids
            self.record.num_prompt_tokens += len(info.token_ids)
        info.num_cached_tokens = max(info.num_cached_tokens, output.num_cached_tokens)
        info.logprobs = output.prompt_logprobs or info.logprobs

    def _note(self, delta: CompletionOutput, now: float) -> None:
        choice, record, metrics = self.choices[delta.index], self.record, self.state.metrics
        if delta.token_ids:
            if choice.num_tokens:
                metrics.itl.observe(now - choice.last_token)
            else:
                choice.first_token = now
            if record.ttft_s is None:
                record.ttft_s = now - record.start
                metrics.ttft.observe(record.ttft_s)
            choice.last_token = now
            choice.num_tokens += len(delta.token_ids)
            record.num_output_tokens += len(delta.token_ids)
        if not self.stream:
            choice.text.append(delta.text)
            choice.logprobs += delta.logprobs or ()
            if self.body.return_token_ids:
                choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            if delta.finish_reason == FinishReason.ERROR:
                raise EngineError(f"the engine failed: {delta.stop_reason}")
            choice.finish_reason = delta.finish_reason
            metrics.finished[delta.finish_reason] += 1
            if choice.num_tokens > 1:
                metrics.tpot.observe((choice.last_token - choice.first_token) / (choice.num_tokens - 1))


async def merge(
    streams: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What comes from any of `streams`, with its number. The first error ends them all; so does closing this.

    While nobody asks, no more outputs wait here than there are streams, besides one in the hand of each: what a slow
    client has not read stays with the engine, which puts it together, as it does for one stream.
    """
    if len(streams) == 1:
        async with _closing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncIterator[RequestOutput]) -> None:
        last: Exception | None = None
        try:
            async with _closing(stream):
                async for output in stream:
                    await queue.put((number, output))
        except Exception as exc:
            last = exc
        await queue.put((number, last))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _closing(stream: AsyncIterator[RequestOutput]) -> aclosing[AsyncGenerator[RequestOutput, None]]:
    """Closing the engine's stream is what cancels a request, so it must never be left to the garbage collector."""
    return aclosing(cast("AsyncGenerator[RequestOutput, None]", stream))


class GenerationRoute:
    """The ASGI endpoint for bodies of `kind`, of which `prepare` makes an Answer."""

    def __init__(
        self,
        state: ServerState,
        kind: type[Generation],
        prepare: Callable[[ServerState, Any, RequestRecord], Awaitable[Answer]],
    ) -> None:
        self.state, self.kind, self.prepare = state, kind, prepare

    def read(self, raw: bytes) -> Generation:
        return decode(self.kind, raw)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        if state.draining:
            raise shutting_down()
        body = self.read(await read_body(scope, receive, state.settings))
        body.check()
        require_model(state, body.model)
        record = scope["record"]
        started = False
        try:
            async with in_flight(state, receive):
                answer = await self.prepare(state, body, record)
                async with aclosing(answer.deltas()) as deltas:
                    async for outputs in deltas:
                        if not answer.stream:
                            continue
                        events = b"".join(map(answer.chunk, outputs))
                        if not started:
                            started = True
                            headers = [(b"content-type", answer.media_type), (b"cache-control", b"no-cache")]
                            await send({"type": "http.response.start", "status": 200, "headers": headers})
                        if events:
                            await send({"type": "http.response.body", "body": events, "more_body": True})
        except Exception as exc:
            if isinstance(exc, RequestError):
                exc.field = body.param(exc.field)
            if not started:
                raise
            await _break_off(exc, answer, send)
            return
        # Sent after `in_flight` is left: from here on a disconnect changes nothing.
        if answer.stream:
            await send({"type": "http.response.body", "body": answer.end(), "more_body": False})
        else:
            await send_json(send, answer.collected())


async def _break_off(exc: Exception, answer: Answer, send: Send) -> None:
    """Ends a stream that has begun: with an error event, if there is somebody to read it."""
    record = answer.record
    if isinstance(exc, ClientDisconnected):
        record.status, record.error = CLIENT_CLOSED_REQUEST, "client_disconnected"
        return
    error = as_api_error(exc)
    record.status, record.error = error.status, error.code
    if not isinstance(exc, SlipstreamError) and error.status == 500:
        logger.exception("a stream broke off")
    await send({"type": "http.response.body", "body": answer.failure(error), "more_body": False})


async def send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
