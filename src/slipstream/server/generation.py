"""One path for every answer: deltas from the engine, streamed as server-sent events, or the same deltas collected.

An `Answer` says what to generate and how to write it; completions.py and chat.py each make one of a body.
`GenerationRoute` is the ASGI endpoint that runs it. A 200 is sent with the first delta, so whatever fails before it
has its own status; what fails after it is an error event, after which the stream ends without [DONE].

The engine tells an answer's prompts (`_Part`) what is new as it reads the message of a step. If the connection takes
more, that is written at once (`write_chunk` of the ASGI scope, see connection.py). Else, or under a server without it, it
is put together until the answer's task has sent what came before. So the task is woken for the first delta, for the end
and for a client that reads slowly, not for each token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from slipstream.engine.output import extend
from slipstream.errors import RequestError, SlipstreamError
from slipstream.server.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ClientDisconnected,
    as_api_error,
    bad_request,
    shutting_down,
)
from slipstream.server.limits import in_flight, read_body
from slipstream.server.models import served_model
from slipstream.server.protocol import Generation, decode
from slipstream.server.record import RequestRecord
from slipstream.server.state import ServerState
from slipstream.types import CompletionOutput, PositionLogprobs, Prompt, RequestOutput, SamplingParams

logger = logging.getLogger("slipstream.server")
encode = msgspec.json.Encoder().encode

Write: TypeAlias = Callable[[bytes], bool]
"""Writes a part of an answer's body at once, if it can be; else it says False and nothing is written."""


@dataclass(slots=True)
class Choice:
    """One of the answers so far. Text and log-probabilities are kept only if they are to be collected."""

    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
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
    is_plain: ClassVar[bool] = True  # events of text differ in nothing but the text

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
        self.state, self.body, self.sampling, self.record = state, body, sampling, record
        self.choices = [Choice() for _ in range(num_choices)]
        self.prompt_info = [PromptInfo() for _ in prompts]
        self.more_usage: dict[str, Any] = {}
        self.stream = bool(body.stream)
        options = body.stream_options
        self.continuous_usage = options is not None and options.continuous_usage_stats
        self.include_usage = options is not None and options.include_usage
        self.identity = {"id": self.id_prefix + record.id, "created": int(time.time()), "model": body.model}
        self._num_running = len(prompts)
        self._news = asyncio.Event()  # for the task: something waits to be sent, or all is there, or it failed
        self._untold: dict[int, CompletionOutput] = {}  # by choice: what waits for the task
        self._unwritten = b""  # the events before that
        self._error: Exception | None = None
        self._write: Write | None = None  # if nothing waits
        # The parts of a chunk that never change are encoded once.
        self.head = b"data: " + encode({"object": self.chunk_kind, **self.identity})[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        self.parts = [_Part(self, number, prompt) for number, prompt in enumerate(prompts)]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a stream."""
        return [(b"content-type", self.media_type), (b"cache-control", b"no-cache")]

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The events for a delta; none if it has nothing to say."""
        raise NotImplementedError

    def text_event(self, index: int, text: bytes) -> bytes:
        """The event of more text, encoded, in a choice that has begun."""
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        """A choice of the collected answer."""
        raise NotImplementedError

    def event(self, *choice: bytes) -> bytes:
        tail = b'],"usage":' + encode(self.usage()) + b"}\n\n" if self.continuous_usage else self.tail
        return b"".join((self.head, *choice, tail))

    def end(self) -> bytes:
        """What closes the stream, behind what was not sent yet."""
        events = self._take_events()
        usage = self.head + b'],"usage":' + encode(self.usage()) + b"}\n\n" if self.include_usage else b""
        return events + usage + b"data: [DONE]\n\n"

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
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(info.num_cached_tokens for info in self.prompt_info)},
            **self.more_usage,
        }
        if drafted := sum(choice.num_drafted for choice in self.choices):
            accepted = sum(choice.num_accepted for choice in self.choices)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            usage["completion_tokens_details"] = details
        return usage

    async def events(self, write: Write | None) -> AsyncGenerator[bytes, None]:
        """The events of a stream, but for those that `write` took and the last, which `end` has. Of an answer that is collected
        there are none, and this ends when it is complete. Closing it cancels what runs."""
        priority, cancels = self.body.priority or 0, []
        try:
            for part in self.parts:
                cancels.append(await self.state.engine.submit(part.prompt, self.sampling, part, priority=priority))
            while self._num_running:
                await self._news.wait()
                self._news.clear()
                while self._num_running and (self._unwritten or self._untold):
                    yield self._take_events()
                if self._error is not None:
                    raise self._error
                self._write = write  # nothing waits, so what comes next can be written as it comes
        finally:
            self._write = None
            for cancel in cancels:
                cancel()
        self.state.metrics.e2e.observe(time.monotonic() - self.record.start)

    def tell(self, outputs: list[CompletionOutput], *, finished: bool) -> None:
        """Pass on what is new; `finished`: it is the last of a prompt."""
        self._num_running -= finished
        if not self.stream:
            if not self._num_running:
                self._news.set()
        elif self._write is not None and self._num_running:
            self.send(b"".join(map(self.chunk, outputs)))
        else:
            self._write = None
            self._news.set()
            for new in outputs:
                if (untold := self._untold.setdefault(new.index, new)) is not new:
                    extend(untold, new)

    @property
    def can_write(self) -> bool:
        return self._write is not None

    def send(self, events: bytes) -> None:
        """Write at once, or leave it to the task if the client reads too slowly."""
        if events and (self._write is None or not self._write(events)):
            self._unwritten, self._write = events, None
            self._news.set()

    def fail(self, error: Exception) -> None:
        self._error, self._write = self._error or error, None
        self._news.set()

    def _take_events(self) -> bytes:
        untold, self._untold = self._untold, {}
        events, self._unwritten = [self._unwritten, *map(self.chunk, untold.values())], b""
        return b"".join(events)

    def note_prompt(self, info: PromptInfo, output: RequestOutput) -> None:
        if not info.token_ids:
            info.token_ids = output.prompt_token_ids
            self.record.num_prompt_tokens += len(info.token_ids)
        info.num_cached_tokens = max(info.num_cached_tokens, output.num_cached_tokens)
        info.logprobs = output.prompt_logprobs or info.logprobs

    def note(self, delta: CompletionOutput, now: float) -> None:
        choice, record, metrics = self.choices[delta.index], self.record, self.state.metrics
        choice.num_drafted += delta.num_drafted
        choice.num_accepted += delta.num_accepted
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
            choice.finish_reason = delta.finish_reason
            metrics.finished[delta.finish_reason] += 1
            if choice.num_tokens > 1:
                metrics.tpot.observe((choice.last_token - choice.first_token) / (choice.num_tokens - 1))


class _Part:
    """One prompt of an answer, and whom the engine tells what is new of it (a `Sink`)."""

    def __init__(self, answer: Answer, number: int, prompt: Prompt) -> None:
        self.answer, self.prompt = answer, prompt
        self.info = answer.prompt_info[number]
        self.first = number * answer.sampling.n
        self.choice = answer.choices[self.first]
        general = answer.sampling.n > 1 or answer.continuous_usage or answer.body.return_token_ids or not answer.is_plain
        self.on_token = None if general else self._on_token
        self.head, _, self.tail = (b"", b"", b"") if general else answer.text_event(self.first, b"\0").partition(b"\0")

    def put(self, delta: RequestOutput) -> None:
        answer, now = self.answer, time.monotonic()
        try:
            answer.note_prompt(self.info, delta)
            for new in delta.outputs:
                new.index += self.first
                answer.note(new, now)
            answer.tell(delta.outputs, finished=delta.finished)
        except Exception as error:  # of ours: the request fails, and no other
            answer.fail(error)

    def _on_token(self, token: int, text: str, now: float) -> None:
        """What `put` does with a delta of one token and nothing else."""
        answer, choice = self.answer, self.choice
        answer.state.metrics.itl.observe(now - choice.last_token)
        choice.last_token = now
        choice.num_tokens += 1
        answer.record.num_output_tokens += 1
        if not answer.stream:
            choice.text.append(text)
        elif not answer.can_write:
            answer.tell([CompletionOutput(self.first, text, [token])], finished=False)
        elif text:
            try:
                answer.send(self.head + encode(text) + self.tail)
            except Exception as error:  # as above
                answer.fail(error)

    def fail(self, error: Exception) -> None:
        self.answer.fail(error)


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
        body.model = served_model(state, body.model)
        record = scope["record"]
        started = False
        try:
            async with in_flight(state, receive):
                answer = await self.prepare(state, body, record)
                async with aclosing(answer.events(scope.get("write_chunk"))) as events:
                    async for some in events:
                        if not started:
                            started = True
                            await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
                        if some:
                            await send({"type": "http.response.body", "body": some, "more_body": True})
                last = answer.end() if answer.stream else answer.collected()
        except Exception as exc:
            if isinstance(exc, RequestError):
                exc.field = body.param(exc.field)
            if not started:
                raise
            await _break_off(exc, answer, send)
            return
        # Sent after `in_flight` is left: from here on a disconnect changes nothing.
        if not answer.stream:
            await send_json(send, last)
            return
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
        await send({"type": "http.response.body", "body": last, "more_body": False})


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
