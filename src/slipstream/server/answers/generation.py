"""One path for every answer: deltas from the engine, streamed as server-sent events or collected.

An `Answer` says what to generate and how to format it. completions.py and chat.py each create one
from a body. `GenerationRoute` (route.py) is the ASGI endpoint that runs it.

Each prompt of an answer (`_PromptAnswer`) receives new output while the engine's message is read:

1. If the connection is writable, the events are written at once (`write_chunk` of the ASGI scope,
   see connection.py).
2. Otherwise, or on a server without `write_chunk`, they are queued for the answer's task.

So the task only wakes for the first delta, for the end and for slow clients, not for each token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import msgspec

from slipstream.engine.output import extend, extend_runs
from slipstream.engine.requests.best_of import mean_logprob
from slipstream.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from slipstream.params.options import RequestOptions, Share
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams
from slipstream.server.answers.beams import named_as_in_body
from slipstream.server.answers.cache_hints import Breakpoints, cache_hints
from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import JSON_HEADERS
from slipstream.server.openai.models import served_model
from slipstream.server.openai.protocol import GenerationRequest
from slipstream.server.state import ServerState

encode = msgspec.json.Encoder().encode

BATCH_PRIORITY = 2**31 - 1
"""Priority of a batch's requests: the lowest. A body's own priority is always a smaller number."""

PING_S = 15.0
"""Maximum seconds of silence in a stream. Clients and proxies drop connections that are silent for 60 s or longer."""

Write: TypeAlias = Callable[[bytes], bool]
"""Writes a part of an answer's body at once. Returns False, without writing, if the connection is
not ready."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer so far. Log-probabilities are stored only for unstreamed answers,
    text also for the audit log (`keeps_text`)."""

    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    first_token: float = 0.0  # time.monotonic()
    last_token: float = 0.0
    finish_reason: str | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # if the body has `return_token_ids`
    # (version of the weights, number of tokens), if weights may change
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    # a chunk was written; this and the next two fields are managed by Answer.chunk
    begun: bool = False
    num_chars: int = 0
    strips_space: bool = False  # the next token's leading space is dropped


@dataclass(slots=True)
class PromptInfo:
    """Facts about one prompt, reported by the engine."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    logprobs: list[PositionLogprobs | None] | None = None


class Answer:
    """The answer to one request body: its parameters, progress and format. Choices are numbered
    prompt by prompt, `num_drawn` for each."""

    kind: ClassVar[str]  # OpenAI's `object`
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"  # media type of a stream
    whole_headers: Sequence[tuple[bytes, bytes]] = JSON_HEADERS
    call_tokens: tuple[int, ...] = ()  # see `CacheHints`, as the next field
    breakpoints: Breakpoints = ()
    ends_with_context = False  # max_tokens was reduced to the rest of the context
    is_plain: ClassVar[bool] = True  # events with more text differ only in the text

    def __init__(
        self,
        state: ServerState,
        body: GenerationRequest,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        record: RequestRecord,
        beams: BeamSearchParams | None = None,
    ) -> None:
        """Checks the number of choices. `beams`: the answers come from a beam search instead of
        sampling."""
        self.beams = beams
        # Choices sampled for each prompt; the answer has the best `sampling.n` of them.
        self.num_drawn = sampling.num_drawn
        num_choices = len(prompts) * self.num_drawn
        if num_choices > (limit := state.settings.max_choices_per_request):
            raise bad_request(
                f"prompts times n is {num_choices}; this server takes at most {limit}", "n"
            )
        self.state, self.body, self.sampling, self.record = state, body, sampling, record
        self.choices = [Choice() for _ in range(num_choices)]
        self.prompt_info = [PromptInfo() for _ in prompts]
        self.more_usage: dict[str, Any] = {}
        # None: reasoning is not separated from the answer
        self.num_reasoning_tokens: int | None = None
        self.stream = bool(body.stream)
        self.keeps_text = not self.stream or state.settings.audit_answers
        options = body.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = (
            options is not None
            and options.continuous_usage_stats
            and options.include_usage is not False
        )
        self.identity = {
            "id": self.id_prefix + record.id,
            "created": record.created,
            "model": body.model,
            "system_fingerprint": state.fingerprint,
        }
        self._num_running = len(prompts)
        # Wakes the task: data wait to be sent, or the answer is complete, or it failed.
        self._news = asyncio.Event()
        self._unsent: dict[int, CompletionOutput] = {}  # by choice: deltas that the task must send
        self._unwritten = b""  # events that precede those deltas
        self._error: Exception | None = None
        self._write: Write | None = None  # None while the task has data to send
        # Tokens of an answer that began on another replica. Their events were already sent.
        self.begun: Sequence[int] = ()
        # address of the replica that computed the prompt, and its number of cached tokens
        self.handover_from, self.num_cached_there = "", 0
        self._replays = False  # the tokens of `begun` are being replayed
        # whether to write marks for a fleet's gateway (`server.operations.fleet`)
        self.marks = False
        self.unmarked: list[int] = []  # tokens since the last mark
        # The constant parts of a chunk are encoded once.
        self.head = (
            b"data: " + encode({"object": self.chunk_kind, **self.identity})[:-1] + b',"choices":['
        )
        self.tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        self.parts = [_PromptAnswer(self, number, prompt) for number, prompt in enumerate(prompts)]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a stream."""
        return stream_headers(self.media_type)

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The events of a delta; empty if there is nothing to send."""
        raise NotImplementedError

    def text_event(self, index: int, text: bytes) -> bytes:
        """The event for more text (JSON-encoded) in a choice that has begun."""
        raise NotImplementedError

    def versions(self, index: int) -> bytes:
        """The versions of the weights that produced a choice's tokens, for its last event. Empty if weights can't change."""
        if not self.state.settings.enable_weight_updates:
            return b""
        return b',"weight_versions":' + encode(self.choices[index].weight_versions)

    def choice(self, index: int) -> dict[str, Any]:
        """One choice of the unstreamed answer, as JSON."""
        raise NotImplementedError

    def event(self, *choice: bytes, num_before: int = 0) -> bytes:
        """Makes the event of a delta. `num_before`: tokens that are already counted but sent after
        this event."""
        tail = self.tail
        if self.continuous_usage:
            usage = self.usage()
            usage["completion_tokens"] -= num_before
            usage["total_tokens"] -= num_before
            tail = b'],"usage":' + encode(usage) + b"}\n\n"
        return b"".join((self.head, *choice, tail))

    def end(self) -> bytes:
        """The last events of a stream: those not yet sent, usage, [DONE]."""
        events = self._take_events()
        usage = (
            self.head + b'],"usage":' + encode(self.usage()) + b"}\n\n"
            if self.include_usage
            else b""
        )
        return events + usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream after a failure, instead of `end`."""
        return b"data: " + error.body() + b"\n\n"

    def collected(self) -> bytes:
        given = self.choices_given()
        choices = [{**self.choice(i), "index": index} for index, i in enumerate(given)]
        if self.state.settings.enable_weight_updates:
            for i, choice in zip(given, choices, strict=True):
                choice["weight_versions"] = self.choices[i].weight_versions
        return encode(
            {
                "object": self.kind,
                **self.identity,
                "choices": choices,
                "usage": self.usage(),
                **self.extra_fields(),
            }
        )

    def choices_given(self) -> list[int]:
        """Numbers of the choices in the unstreamed answer, prompt by prompt. With `best_of`: each
        prompt's best ones, best first."""
        if self.sampling.best_of is None:
            return list(range(len(self.choices)))
        drawn = [
            range(first, first + self.num_drawn)
            for first in range(0, len(self.choices), self.num_drawn)
        ]
        ranked = [
            sorted(some, key=lambda i: -mean_logprob(self.choices[i].logprobs)) for some in drawn
        ]
        return [i for some in ranked for i in some[: self.sampling.n]]

    def extra_fields(self) -> dict[str, Any]:
        """Additional fields of the unstreamed answer."""
        return {}

    @property
    def num_written_tokens(self) -> int:
        """Number of prompt tokens written to the prefix cache, which stores whole blocks."""
        cache = self.state.engine.config.cache
        if not cache.enable_prefix_caching:
            return 0
        size = cache.block_size
        return sum(
            max(0, len(info.token_ids) // size * size - info.num_cached_tokens)
            for info in self.prompt_info
        )

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.record.num_prompt_tokens, self.record.num_output_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(info.num_cached_tokens for info in self.prompt_info),
                "cache_write_tokens": self.num_written_tokens,
            },
            **self.more_usage,
        }
        details: dict[str, int] = {}
        if self.num_reasoning_tokens is not None:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        if drafted := sum(choice.num_drafted for choice in self.choices):
            accepted = sum(choice.num_accepted for choice in self.choices)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafted - accepted
        if details:
            usage["completion_tokens_details"] = details
        return usage

    async def events(self, write: Write | None) -> AsyncGenerator[bytes, None]:
        """Submit the prompts, and yield those events of a stream that `write` could not write.

        The last events come from `end`. An unstreamed answer yields nothing; the generator ends
        when it is complete. Closing the generator cancels running requests.
        """
        cancels = []
        options = self._options()
        submit = self.state.engine.submit
        try:
            if self.beams is not None:
                await self._search(self.beams, options)
            for part in self.parts if self.beams is None else ():
                self._replays = bool(self.begun)
                cancels.append(await submit(part.prompt, self.sampling, part, options))
                self._replays = False
            # A fleet's gateway takes a replica's first bytes as its first token: see `_reporting`.
            patience = PING_S if self.stream and not self.marks else None
            while self._num_running:
                try:
                    async with asyncio.timeout(patience):
                        await self._news.wait()
                except TimeoutError:
                    self._write = None  # later events wait
                    yield sign_of_life(self.media_type)
                    continue
                self._news.clear()
                while self._num_running and (self._unwritten or self._unsent):
                    yield self._take_events(mark=True)
                if self._error is not None:
                    raise self._error
                self._write = write  # nothing waits, so the next delta can be written at once
        finally:
            self._write = None
            for cancel in cancels:
                cancel()
        metrics = self.state.metrics
        metrics.e2e.observe(time.monotonic() - self.record.start)
        metrics.prompt_length.observe(self.record.num_prompt_tokens)
        metrics.answer_length.observe(self.record.num_output_tokens)

    async def prefill(self) -> bytes:
        """Computes only the prompt, whose blocks another replica will copy. Returns where they are.

        The other replica samples the first token, with all options of the body.
        """
        handover = self.state.engine.config.cache.handover
        if handover is None or len(self.parts) != 1:
            raise bad_request("only one prompt can be handed over, with kv_handover_address")
        first = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            truncate_prompt_tokens=self.sampling.truncate_prompt_tokens,
            truncation_side=self.sampling.truncation_side,
        )
        sink = _Prefilled()
        options = dataclasses.replace(self._options(), hands_over=True, handover_from="")
        cancel = await self.state.engine.submit(self.parts[0].prompt, first, sink, options)
        try:
            delta = await sink.done
        finally:
            cancel()
        self.record.num_prompt_tokens = num_tokens = len(delta.prompt_token_ids)
        cached = delta.num_cached_tokens
        return encode(
            {
                "address": handover.address,
                "num_prompt_tokens": num_tokens,
                "num_cached_tokens": cached,
            }
        )

    def _options(self) -> RequestOptions:
        # Raises 404 for an adapter that was unloaded after the body was read.
        served_model(self.state, self.body.model)
        key, grant = self.record.key, self.record.grant
        priority = effective_priority(self.record, self.body.priority)
        return RequestOptions(
            priority=priority,
            cache_hints=cache_hints(self.body, priority, self.call_tokens, self.breakpoints),
            cache_salt=prefix_salt(key, self.body.cache_salt),
            lora_request=self.state.engine.adapters.get(self.body.model or ""),
            share=None if key is None else Share(key.id, key.weight),
            client="" if self.sampling.structured_outputs is None else self.record.client,
            reserve=None if grant is None else grant.reserve,
            answer_token_ids=self.begun,
            handover_from=self.handover_from,
        )

    async def _search(self, beams: BeamSearchParams, options: RequestOptions) -> None:
        """Run the beam searches of all prompts and store their answers. An error of one cancels the
        others."""
        begin, cut = self.state.engine.beam_search, self.sampling.truncate_prompt_tokens
        searches = [
            asyncio.ensure_future(begin(part.prompt, beams, options, truncate_prompt_tokens=cut))
            for part in self.parts
        ]
        try:
            with named_as_in_body():
                found = await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
        for part, output in zip(self.parts, found, strict=True):
            prompt = output.prompt_token_ids
            own = [
                CompletionOutput(
                    i, s.text or "", s.tokens[len(prompt) :], finish_reason=s.finish_reason
                )
                for i, s in enumerate(output.sequences)
            ]
            part.put(
                RequestOutput(
                    self.record.id, output.prompt, prompt, own, True, None, output.num_cached_tokens
                )
            )

    def push(self, outputs: list[CompletionOutput], *, finished: bool) -> None:
        """Process new output. `finished`: it is the last output of a prompt."""
        self._num_running -= finished
        if self._replays:
            for new in outputs:
                self.chunk(new)
            self.unmarked.clear()
            if finished:
                self._news.set()
        elif not self.stream:
            if not self._num_running:
                self._news.set()
        elif self._write is not None and self._num_running:
            self.send(b"".join([*map(self.chunk, outputs), self.mark()]))
        else:
            self._write = None
            self._news.set()
            for new in outputs:
                if (unsent := self._unsent.setdefault(new.index, new)) is not new:
                    extend(unsent, new)

    @property
    def can_write(self) -> bool:
        return self._write is not None

    def send(self, events: bytes) -> None:
        """Write events at once, or queue them for the task if the client reads too slowly."""
        if events and (self._write is None or not self._write(events)):
            self._unwritten, self._write = events, None
            self._news.set()

    def fail(self, error: Exception) -> None:
        self._error, self._write = self._error or error, None
        self._news.set()

    def _take_events(self, *, mark: bool = False) -> bytes:
        unsent, self._unsent = self._unsent, {}
        events, self._unwritten = [self._unwritten, *map(self.chunk, unsent.values())], b""
        return b"".join([*events, self.mark()] if mark else events)

    def mark(self) -> bytes:
        """A line of the stream for the gateway: the tokens whose text was sent since the last such
        line. Empty if `marks` is off."""
        if not self.marks:
            return b""
        unmarked, self.unmarked = self.unmarked, []
        return b":t %b\n" % b" ".join([b"%d" % token for token in unmarked])

    def note_prompt(self, info: PromptInfo, output: RequestOutput) -> None:
        if not info.token_ids:
            info.token_ids = output.prompt_token_ids
            self.record.num_prompt_tokens += len(info.token_ids)
        cached = max(output.num_cached_tokens, self.num_cached_there)
        info.num_cached_tokens = max(info.num_cached_tokens, cached)
        info.logprobs = output.prompt_logprobs or info.logprobs

    def note(self, delta: CompletionOutput, now: float) -> None:
        choice, record, metrics = self.choices[delta.index], self.record, self.state.metrics
        choice.num_drafted += delta.num_drafted
        choice.num_accepted += delta.num_accepted
        if delta.token_ids:
            if self.marks:
                self.unmarked += delta.token_ids
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
        if self.state.settings.enable_weight_updates:
            # single tokens since the last delta were produced by the same weights
            told, runs = sum(n for _, n in choice.weight_versions), choice.weight_versions
            if runs and (single := choice.num_tokens - len(delta.token_ids) - told):
                extend_runs(runs, [(runs[-1][0], single)])
            extend_runs(runs, delta.weight_versions)
        if self.keeps_text:
            choice.text.append(delta.text)
        if not self.stream:
            choice.logprobs += delta.logprobs or ()
            if self.body.return_token_ids:
                choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            metrics.finished[delta.finish_reason] += 1
            if choice.num_tokens > 1:
                metrics.tpot.observe(
                    (choice.last_token - choice.first_token) / (choice.num_tokens - 1)
                )


def stream_headers(media_type: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", media_type), (b"cache-control", b"no-cache")]


def sign_of_life(media_type: bytes) -> bytes:
    """Bytes of a stream that clients' parsers ignore: a comment, or a space before a line of JSON."""
    return b": ping\n\n" if b"event-stream" in media_type else b" "


class _PromptAnswer:
    """One prompt of an answer: the `Sink` that receives its output from the engine."""

    def __init__(self, answer: Answer, number: int, prompt: Prompt) -> None:
        self.answer, self.prompt = answer, prompt
        self.info = answer.prompt_info[number]
        self.first = number * answer.num_drawn
        self.choice = answer.choices[self.first]
        general = (
            answer.num_drawn > 1
            or answer.continuous_usage
            or answer.body.return_token_ids
            or not answer.is_plain
        )
        self.on_token = None if general else self._on_token
        self.head, _, self.tail = (
            (b"", b"", b"") if general else answer.text_event(self.first, b"\0").partition(b"\0")
        )

    def put(self, delta: RequestOutput) -> None:
        answer, now = self.answer, time.monotonic()
        try:
            answer.note_prompt(self.info, delta)
            for new in delta.outputs:
                new.index += self.first
                answer.note(new, now)
            answer.push(delta.outputs, finished=delta.finished)
        except Exception as error:  # a bug of ours fails only this request
            answer.fail(error)

    def _on_token(self, token: int, text: str, now: float) -> None:
        """The fast path of `put` for a delta that is one token and nothing else."""
        answer, choice = self.answer, self.choice
        answer.state.metrics.itl.observe(now - choice.last_token)
        choice.last_token = now
        choice.num_tokens += 1
        answer.record.num_output_tokens += 1
        if answer.marks:
            answer.unmarked.append(token)
        if answer.keeps_text:
            choice.text.append(text)
        if not answer.stream:
            return
        if not answer.can_write:
            answer.push([CompletionOutput(self.first, text, [token])], finished=False)
        elif text:
            try:
                answer.send(self.head + encode(text) + self.tail + answer.mark())
            except Exception as error:  # as above
                answer.fail(error)

    def fail(self, error: Exception) -> None:
        self.answer.fail(error)


class _Prefilled:
    """A `Sink` that waits for the end of a request that only computes its prompt."""

    on_token = None

    def __init__(self) -> None:
        self.done: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()

    def put(self, delta: RequestOutput) -> None:
        if delta.finished and not self.done.done():
            self.done.set_result(delta)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def effective_priority(record: RequestRecord, asked: int | None) -> int:
    """The priority of a request, within its key's limit. A batch's requests have the lowest."""
    if record.background:
        return BATCH_PRIORITY
    if record.key is None or record.key.priority is None:
        return asked or 0
    return record.key.priority if asked is None else max(asked, record.key.priority)
