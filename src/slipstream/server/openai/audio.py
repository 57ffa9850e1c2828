"""POST /v1/audio/transcriptions and /v1/audio/translations, as OpenAI's client uses them.

1. The body is a form with a file. The file is decoded in a thread.
2. The windows of a sound are requests to the engine, one after the other (`engine.audio.transcription`). Those of different
   requests share the engine's steps.
3. A stream has each token's text; if timestamps are generated, the text of each finished window.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from slipstream.engine.audio.formats import subtitles, verbose
from slipstream.engine.audio.segments import TranscriptionSegment
from slipstream.engine.audio.sound import decode_audio
from slipstream.engine.audio.transcription import (
    Task,
    Transcription,
    TranscriptionOptions,
    speech_of,
)
from slipstream.engine.process.streams import OutputStream
from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.errors import SlipstreamError
from slipstream.messages.finish_reason import FinishReason
from slipstream.outputs import PositionLogprobs
from slipstream.params.options import RequestOptions
from slipstream.server.answers.generation import effective_priority, encode
from slipstream.server.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    as_api_error,
    bad_request,
    shutting_down,
)
from slipstream.server.http.forms import read_form
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.limits import admitted, in_flight
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import JSON_HEADERS, send_whole
from slipstream.server.openai.models import served_model
from slipstream.server.state import ServerState

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"

Format: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS = get_args(Format)
STREAMED = ("json", "text")
FIELDS = (
    "file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream",
    "chunking_strategy", "include", "seed", "user",
)  # fmt: skip
MAX_FIELDS = 32
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_sounds = FairThreads("audio", 8, per_client=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """The checked form of a request."""

    data: bytes
    model: str | None
    response_format: Format
    stream: bool
    options: TranscriptionOptions
    granularities: frozenset[str]

    @classmethod
    async def read(cls, form: list[tuple[str, UploadFile | str]], task: Task) -> SpeechRequest:
        """Checks the form. ApiError (400) names a field that is unknown, duplicate, or has an unsupported value."""
        found, granularities = dict[str, Any](), list[str]()
        data: bytes | None = None
        for given, value in form:
            name = given.removesuffix("[]")
            if name not in FIELDS or (task == "translate" and name in ("language", "stream")):
                raise bad_request(f"unknown field {given[:100]!r}; there are {', '.join(FIELDS)}", given[:100])  # fmt: skip
            if name == "file":
                if not isinstance(value, UploadFile):
                    raise bad_request("file must be a file of the form, not a text", "file")
                if data is not None:
                    raise bad_request("file is there twice; send one file in a request", "file")
                data = await value.read()
            elif not isinstance(value, str):
                raise bad_request(f"{name} must be a text, and a file was sent", name)
            elif name == "timestamp_granularities":
                granularities.append(value)
            elif name in found:
                raise bad_request(f"{name} is there twice", name)
            else:
                found[name] = value
        if data is None:
            raise bad_request("file is missing: send it as multipart/form-data", "file")
        how = found.get("response_format", "json")
        if how not in FORMATS:
            raise bad_request(f"response_format={how[:100]!r} is none of {', '.join(FORMATS)}", "response_format")  # fmt: skip
        stream, seed = found.get("stream", "false").lower(), found.get("seed")
        for ok, name, why in (
            (not found.get("include"), "include", "is not supported; verbose_json has avg_logprob"),
            (
                found.get("chunking_strategy", "auto") == "auto",
                "chunking_strategy",
                "must be 'auto': windows begin at the times that the model writes",
            ),
            (
                set(granularities) <= {"segment", "word"},
                "timestamp_granularities",
                f": {granularities[:2]!r} are not 'segment' or 'word'",
            ),
            (
                not granularities or how == "verbose_json",
                "timestamp_granularities",
                "need response_format='verbose_json'",
            ),
            (stream in ("true", "false"), "stream", f"must be true or false, got {stream[:100]!r}"),
            (
                stream != "true" or how in STREAMED,
                "response_format",
                f"={how!r} can't be streamed; use {' or '.join(STREAMED)}",
            ),
            (
                seed is None or (seed.isascii() and seed.isdecimal() and len(seed) < 19),
                "seed",
                f"must be a whole number, got {str(seed)[:100]!r}",
            ),
        ):
            if not ok:
                raise bad_request(f"{name}{'' if why[0] in ':=' else ' '}{why}", name)
        options = TranscriptionOptions(
            task=task,
            language=found.get("language") or None,
            prompt=found.get("prompt", ""),
            temperature=_temperature(found.get("temperature", "0")),
            seed=None if seed is None else int(seed),
            timestamps=how not in STREAMED,
            details=how == "verbose_json",
            words="word" in granularities,
        )
        return cls(
            data=data,
            model=found.get("model"),
            response_format=how,
            stream=stream == "true",
            options=options,
            granularities=frozenset(granularities or ("segment",)),
        )


def _temperature(given: str) -> float:
    try:
        value = float(given or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise bad_request(f"temperature must be from 0 to 1, got {given[:100]!r}", "temperature")
    return value


class SpeechRoute:
    """The ASGI endpoint of a task."""

    def __init__(self, state: ServerState, task: Task) -> None:
        self.state, self.task = state, task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, record = self.state, scope["record"]
        if state.draining:
            raise shutting_down()
        settings = state.settings
        form = await read_form(
            Request(scope, receive),
            limit=settings.max_audio_bytes,
            option="--max-audio-bytes",
            fields="file and model",
            body_timeout_s=settings.body_timeout_s,
            max_fields=MAX_FIELDS,
        )
        try:
            body = await SpeechRequest.read(form, self.task)
        finally:
            for _, value in form:
                if isinstance(value, UploadFile):
                    await value.close()
        model = record.model = served_model(state, body.model, adapters=False)
        speech_of(state.engine.description)
        started = False
        try:
            async with in_flight(state, receive, record):
                with admitted(state, record, model):
                    made = await self._begun(body)
                    if not body.stream:
                        async with aclosing(self._windows(made, record)) as windows:
                            async for _ in windows:
                                pass
                    else:
                        async with aclosing(self._events(made, record)) as events:
                            async for event in events:
                                if not started:
                                    started = True
                                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})  # fmt: skip
                                await send({"type": "http.response.body", "body": event, "more_body": True})  # fmt: skip
        except Exception as exc:
            if not started:
                raise
            if isinstance(exc, ClientDisconnected):
                record.status, record.error = CLIENT_CLOSED_REQUEST, "client_disconnected"
                return
            error = as_api_error(exc)
            record.status, record.error = error.status, error.code
            if not isinstance(exc, SlipstreamError) and error.status == 500:
                raise
            last = b"data: " + error.body() + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        state.metrics.e2e.observe(time.monotonic() - record.start)
        if body.stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send_whole(send, *_whole(made, body, self.task))

    async def _begun(self, body: SpeechRequest) -> Transcription:
        engine, max_s = self.state.engine, self.state.settings.max_audio_seconds
        longest = engine.config.model.max_model_len

        def begin() -> Transcription:
            samples = decode_audio(body.data, max_s=max_s)
            return Transcription.begin(
                engine.description, engine.tokenizer, samples, body.options, longest
            )

        return await _sounds.run(begin, weight=len(body.data))

    async def _windows(
        self, made: Transcription, record: RequestRecord
    ) -> AsyncGenerator[tuple[list[int], list[TranscriptionSegment] | None], None]:
        """Runs the windows. Yields a window's tokens so far, and at its end its segments. Closing the generator cancels the
        request."""
        state, is_first = self.state, True
        while not made.is_done:
            prompt, sampling = await _sounds.run(made.next)
            sink = OutputStream()
            reserve = None if record.grant is None or not is_first else record.grant.reserve
            options = RequestOptions(
                priority=effective_priority(record, None),
                cache_salt=prefix_salt(record.key, None),
                reserve=reserve,
            )
            cancel = await state.engine.submit(prompt, sampling, sink, options)
            tokens, logprobs = list[int](), list[PositionLogprobs]()
            try:
                finished = False
                while not finished:
                    delta = await sink.get()
                    finished, output = delta.finished, delta.outputs[0] if delta.outputs else None
                    if output is None:
                        continue
                    if output.token_ids and record.ttft_s is None:
                        record.ttft_s = time.monotonic() - record.start
                        state.metrics.ttft.observe(record.ttft_s)
                    tokens += output.token_ids
                    logprobs += output.logprobs or ()
                    record.num_output_tokens += len(output.token_ids)
                    if not finished:
                        yield tokens, None
                    else:
                        reason = output.finish_reason or FinishReason.STOP
                        state.metrics.finished[FinishReason(reason)] += 1
                record.num_prompt_tokens += made.audio.num_states
            finally:
                cancel()
            is_first = False
            known = logprobs if made.options.details else None
            if (asked := made.question(tokens)) is None:
                yield tokens, made.take(tokens, known)
            else:  # time alignment takes milliseconds
                attention = await state.engine.attention_of(asked)
                yield tokens, await _sounds.run(partial(made.take, tokens, known, attention))

    async def _events(self, made: Transcription, record: RequestRecord) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Yields OpenAI's events: each piece of new text, and at the end the whole text."""
        sent, before = "", ""  # text sent so far; text of the finished windows
        async with aclosing(self._windows(made, record)) as windows:
            async for tokens, segments in windows:
                if segments is not None:
                    before = made.text
                    text = before
                elif made.writes_times:
                    continue
                else:
                    text = (before + made.beginning(tokens)).lstrip()
                    text = text.rstrip("\ufffd")  # an incomplete character
                    text = text.rstrip()  # the text must not end with a space
                if len(text) > len(sent) and text.startswith(sent):
                    new, sent = text[len(sent) :], text
                    yield _event({"type": "transcript.text.delta", "delta": new})
        yield _event({"type": "transcript.text.done", "text": made.text, "usage": _usage(made)})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _usage(made: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(made.duration_s)}


def _whole(made: Transcription, body: SpeechRequest, task: Task) -> tuple[bytes, Any]:
    """(the answer in the requested format, its headers)."""
    segments = made.segments
    match body.response_format:
        case "text":
            return (made.text + "\n").encode(), _TEXT
        case "srt" | "vtt" as kind:
            media = "application/x-subrip" if kind == "srt" else "text/vtt"
            head = ((b"content-type", f"{media}; charset=utf-8".encode()),)
            return subtitles(segments, kind).encode(), head
        case "verbose_json":
            own = made.language_name, made.duration_s, made.text, segments, body.granularities
            told = verbose(task, *own)
            return encode({**told, "usage": _usage(made)}), JSON_HEADERS
    return encode({"text": made.text, "usage": _usage(made)}), JSON_HEADERS
