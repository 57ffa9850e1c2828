"""Any endpoint with OpenAI's `/v1/completions` or `/v1/chat/completions`, over HTTP/1.1 with
server-sent events.

Received data costs one callback per connection: no task is woken until the answer has ended, so
that one process can read tens of thousands of tokens per second. Connections stay open for later
requests. A request fails if the endpoint breaks off, answers with an error, or sends an error
event."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from slipstream.bench.load import MeasuredAnswer
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError, EngineError, EngineOverloadedError

MAX_EVENT_BYTES = 16 * 2**20
CONNECT_S = 30.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and options of an endpoint.

    `ignore_eos` is an extension of vLLM and Slipstream; without it answers may be shorter.
    `send_text` sends a prompt's text if it has one; otherwise token ids are sent, which OpenAI's
    API allows as well. `token_ids` asks for the answer's token ids, an extension of the same two."""

    url: str
    model: str = ""
    api_key: str | None = None
    ignore_eos: bool = True
    send_text: bool = False
    token_ids: bool = False
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"url={self.url!r} must begin with http:// or https:// and name a host", field="url"
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": "openai",
            "url": self.url,
            "model": self.model,
            "ignore_eos": self.ignore_eos,
        }


class ListedModel(msgspec.Struct, frozen=True):
    """A model in the endpoint's list. `vocab_size` is given by Slipstream and llama.cpp (`meta`)
    only, `max_model_len` by Slipstream and vLLM."""

    class Meta(msgspec.Struct, frozen=True):
        n_vocab: int | None = None

    id: str
    vocab_size: int | None = None
    max_model_len: int | None = None
    meta: Meta | None = None

    @property
    def num_token_ids(self) -> int | None:
        return self.vocab_size or (None if self.meta is None else self.meta.n_vocab)


class _ModelList(msgspec.Struct):
    data: list[ListedModel]


class OpenAIEndpoint:
    """A `StreamingEngine` that sends requests to an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        self.endpoint = endpoint
        self._host = str(parts.hostname)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        key = f"authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n{key}"
        # an IP address after the first connection: names are looked up once
        self._address = self._host
        self._idle: list[_Connection] = []

    async def served_models(self) -> list[ListedModel]:
        """The models that the endpoint serves. EngineError if it does not answer correctly."""
        try:
            status, body = await self._exchange("GET", "/models", b"", None, CONNECT_S)
            if status != 200:
                raise _refusal(status, body)
            return msgspec.json.decode(body, type=_ModelList).data
        except (EngineError, OSError, TimeoutError, ValueError) as error:
            url = f"{self.endpoint.url.rstrip('/').removesuffix('/v1')}/v1/models"
            if isinstance(error, ConnectionRefusedError):
                hint = "start one with `slipstream serve`, or correct its address"
                raise EngineError(
                    f"no server listens at {self._host}:{self._port}; {hint}"
                ) from error
            raise EngineError(
                f"{url} does not answer like OpenAI's API: {type(error).__name__}: {error}"
            ) from error

    async def ask(self, request: BenchRequest, answer: MeasuredAnswer, /) -> None:
        endpoint = self.endpoint
        path, what = "/completions", "prompt"
        given: Any = request.prompt_token_ids
        if request.messages is not None:
            path, what, given = "/chat/completions", "messages", request.messages
        elif endpoint.send_text and request.prompt:
            given = request.prompt
        body: dict[str, Any] = {
            "model": endpoint.model,
            what: given,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint.ignore_eos:
            body["ignore_eos"] = True
        if endpoint.token_ids and request.messages is None:
            body["return_token_ids"] = True
        events = Events(answer)
        status, refusal = await self._exchange(
            "POST", path, msgspec.json.encode(body), events, endpoint.timeout_s
        )
        if status != 200:
            raise _refusal(status, refusal)
        if not events.ended:
            raise EngineError("the stream ended without [DONE]")

    async def _exchange(
        self, method: str, path: str, body: bytes, events: Events | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request and read its response: (status, body). The body is empty if `events` read it."""
        of_body = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        )
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{of_body}\r\n"
        async with asyncio.timeout(timeout_s):
            while True:
                old = bool(self._idle)
                connection = self._idle.pop() if old else await self._connect()
                try:
                    await connection.exchange(head.encode() + body, events)
                except (
                    ConnectionResetError
                ):  # nothing was received: a server may close an idle connection
                    if not old:
                        raise
                    continue
                finally:
                    if connection.reusable:
                        self._idle.append(connection)
                    else:
                        connection.close()
                return connection.status, bytes(connection.body)

    async def connect(self) -> None:
        """Open a connection for the first request."""
        self._idle.append(await self._connect())

    async def _connect(self) -> _Connection:
        name = self._host if self._tls else None
        async with asyncio.timeout(CONNECT_S):
            transport, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._address, self._port, ssl=self._tls, server_hostname=name
            )
        self._address = transport.get_extra_info("peername", (self._address,))[0]
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()


def _refusal(status: int, body: bytes) -> EngineError:
    kind = EngineOverloadedError if status in (429, 503) else EngineError
    return kind(f"HTTP {status}: {body[:500].decode(errors='replace')}")


class _Connection(asyncio.Protocol):
    """A connection with one request at a time. The parser calls the `on_…` methods."""

    def __init__(self) -> None:
        self.status, self.body = 0, bytearray()
        self.reusable = False  # the last answer was complete, and the server keeps the connection
        self._events: Events | None = None
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    async def exchange(self, data: bytes, events: Events | None) -> None:
        """Send a request, and return when its answer is complete. ConnectionResetError if nothing
        of an answer arrived."""
        self.status, self.reusable, self._events = 0, False, events
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self.body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            return
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(EngineError(f"no HTTP answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._events is not None and self._events.ended:
            self._end(None)  # an answer may last until the server closes the connection
        elif self.status:
            self._end(EngineError("the server broke off its answer"))
        else:
            self._end(ConnectionResetError("the server closed the connection without an answer"))

    def _end(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._events is None or self.status != 200:
            self.body += body
            return
        try:
            self._events.feed(body, self._now)
        except EngineError as error:
            self._end(error)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._end(None)


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _StreamedChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None  # of a chat
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    choices: tuple[_StreamedChoice, ...] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Events:
    """Reads an answer's server-sent events into `answer`, however the bytes are cut."""

    def __init__(self, answer: MeasuredAnswer) -> None:
        self.answer = answer
        self.ended = False  # [DONE] has arrived
        self._split = Splitter()

    def feed(self, chunk: bytes, now: float) -> None:
        """Read the data that arrived at `now`. EngineError for an error event, or for an event that
        is not in the API."""
        answer = self.answer
        for data in self._split.feed(chunk):
            if data == b"[DONE]":
                self.ended = True
                return
            try:
                event = _decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise EngineError(f"not an event of OpenAI's API: {data[:200]!r} ({exc})") from exc
            if (error := event.error) is not None:
                raise EngineError(
                    str(error.get("message", error) if isinstance(error, dict) else error)
                )
            for choice in event.choices or ():
                if choice.delta is not None:
                    self._read_delta(choice.delta, now)
                    break
                if answer.keeps and choice.token_ids:  # tokens need not have a text
                    answer.token_ids += choice.token_ids
                    answer.add(now, len(choice.token_ids))
                    break
                if choice.text:
                    answer.add(now, 1)
                    break
            if (usage := event.usage) is not None:
                answer.usage = usage.prompt_tokens, usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    answer.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
                    answer.counts_cached = True

    def _read_delta(self, delta: _Delta, now: float) -> None:
        answer = self.answer
        reasoning = delta.reasoning_content or delta.reasoning
        if delta.content or reasoning:
            answer.add(now, 1)
            if answer.keeps:
                answer.text.append(delta.content or "")
                answer.reasoning.append(reasoning or "")


class Splitter:
    """Splits bytes into the data of server-sent events. Lines end with LF, CR LF or CR; other
    fields are ignored.

    Bytes are split, not text, because text may contain characters that count as line ends
    elsewhere."""

    def __init__(self) -> None:
        self._rest, self._data = b"", list[bytes]()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes."""
        whole, cut = self._rest + chunk, b""
        if len(whole) > MAX_EVENT_BYTES:
            raise EngineError("an event is longer than 16 MiB")
        if b"\r" in whole:
            # A CR at the end may be half of a CR LF: it is held back until more has arrived.
            whole, cut = (whole[:-1], b"\r") if whole.endswith(b"\r") else (whole, b"")
            whole = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, tail = whole.split(b"\n")
        self._rest = tail + cut
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
