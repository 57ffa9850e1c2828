"""The gateway's connections to one replica: HTTP/1.1, kept open, read as data arrives.

Each request uses one connection exclusively. Parts are forwarded without being joined. The socket
is not read while the receiver is full, so a slow client slows its replica's answer down, and no
buffer grows."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, cast
from urllib.parse import urlsplit

import httptools

_MAX_WAITING = 64 * 1024  # bytes of an answer waiting for the receiver
_MAX_IDLE = 256


OnInterim: TypeAlias = Callable[[list[tuple[bytes, bytes]]], None]
Sink: TypeAlias = Callable[[bytes], bool]
"""Receives a part of an answer as it arrives, without a task in between. Returns False if it accepts no more for now."""


class UpstreamError(Exception):
    """The replica could not be reached, or its answer broke off. `sent`: the replica may have
    received the request."""

    def __init__(self, why: str, *, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class UpstreamConnection(asyncio.Protocol):
    """One connection, and the answer that is being read on it."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser: httptools.HttpResponseParser
        self._chunks: deque[bytes] = deque()
        self._num_waiting = 0
        self._paused = self._closed = self._keeps_alive = False
        self._ended = True  # no request is under way
        self._news: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._heard = 0.0  # loop time of the last data received
        self.on_interim: OnInterim | None = None
        self.is_fresh = True  # no request was sent on it before

    # --- From the socket ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of it
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended:  # no request is open
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
            self._closed = True
        self._heard = self._loop.time()
        if self._sink is not None and self._chunks and not (self._ended or self._closed):
            if self._sink(self._taken()):
                return
            self._sink = None
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._pool.lost(self)
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # lower codes are interim answers, which don't count
            self.status = status
        else:
            if self.on_interim is not None:
                self.on_interim(self.headers)
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_waiting += len(body)
        if self._num_waiting > _MAX_WAITING and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self._ended = self.status != 0
        # after the message the parser no longer knows this
        self._keeps_alive = self._parser.should_keep_alive()

    # --- To the gateway --------------------------------------------------------------------------------------------------

    def begin(self, request: list[bytes], on_interim: OnInterim | None = None) -> None:
        self.on_interim = on_interim
        self._parser = httptools.HttpResponseParser(self)
        self.status, self._ended = 0, False
        self.headers.clear()
        self.transport.write(b"".join(request))

    async def head(self) -> None:
        """Wait for the status and headers. UpstreamError if they do not come."""
        while not self.status:
            if self._closed:
                raise UpstreamError("the connection was lost before an answer")
            await self._wait()

    async def read(self) -> bytes | None:
        """Data received since the last call; None at the end. UpstreamError if the answer broke
        off."""
        while not self._chunks:
            if self._ended:
                return None
            if self._closed:
                raise UpstreamError("the connection broke during the answer")
            await self._wait()
        return self._taken()

    def _taken(self) -> bytes:
        """Return the buffered data and empty the buffer."""
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._num_waiting = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    async def pour(
        self, sink: Sink, silence_s: float, on_silence: Callable[[], None], each_s: float
    ) -> None:
        """Pass data to `sink` until it accepts no more or the answer is complete; the next `read`
        tells which. While nothing arrives, `on_silence` is called every `each_s` seconds.
        TimeoutError if nothing arrives for `silence_s`."""
        if self._chunks:
            return
        self._sink, self._heard = sink, self._loop.time()
        called = self._heard
        try:
            while self._sink is not None and not (self._ended or self._closed):
                try:
                    next_call = max(self._heard, called) + each_s
                    async with asyncio.timeout_at(min(self._heard + silence_s, next_call)):
                        await self._wait()
                except TimeoutError:  # the limit was set before the last part arrived
                    now = self._loop.time()
                    if self._heard + silence_s <= now:
                        raise
                    if max(self._heard, called) + each_s <= now:
                        called = now
                        on_silence()
        finally:
            self._sink = None

    async def read_all(self) -> bytes:
        parts = []
        while (data := await self.read()) is not None:
            parts.append(data)
        return b"".join(parts)

    def done(self) -> None:
        """End the exchange. The connection is kept if the answer was read to its end. Otherwise it
        is closed, which cancels the request."""
        if self._ended and not self._closed and not self._chunks and self._keeps_alive:
            self.is_fresh = False
            self._pool.keep(self)
        else:
            self._closed = True
            self.transport.abort()

    @property
    def is_closed(self) -> bool:
        return self._closed or self.transport.is_closing()

    async def _wait(self) -> None:
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class ConnectionPool:
    """Open connections to `url`."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, *, connect_s: float = 2.0) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host = parts.hostname
        self.port = parts.port
        self._tls = tls
        self._connect_s = connect_s
        self._host_line = f"host: {parts.netloc}\r\n".encode()
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()

    async def ask(
        self,
        method: bytes,
        path: bytes,
        headers: list[bytes],
        body: bytes = b"",
        *,
        fresh: bool = False,
        on_interim: OnInterim | None = None,
    ) -> UpstreamConnection:
        """Send a request and return the connection when the answer's head has arrived. `headers`
        are complete lines. `on_interim` gets the headers of interim answers (1xx). The caller must
        call `done`. Raises UpstreamError."""
        length = b"content-length: %d\r\n" % len(body) if body or method != b"GET" else b""
        request = [
            b"%b %b HTTP/1.1\r\n" % (method, path),
            self._host_line,
            *headers,
            length,
            b"\r\n",
            body,
        ]
        was_lost = False
        while True:
            try:
                answer = await self._connection(fresh=fresh)
            except UpstreamError as error:
                # a replica that answered a moment ago may have died of the request
                error.sent = was_lost
                raise
            try:
                answer.begin(request, on_interim)
                await answer.head()
                return answer
            except UpstreamError:
                answer.done()
                if answer.is_fresh:
                    raise
                fresh = was_lost = True  # it was idle: usually the replica closed it while we wrote
            except BaseException:
                answer.done()
                raise

    async def _connection(self, *, fresh: bool) -> UpstreamConnection:
        while self._idle and not fresh:
            answer = self._idle.pop()
            if not answer.is_closed:
                return answer
        try:
            async with asyncio.timeout(self._connect_s):
                _, answer = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self),
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname="replica" if self._tls else None,
                )
        except (OSError, TimeoutError) as error:
            why = f"no connection: {error or 'it took too long'}"
            raise UpstreamError(why, sent=False) from None
        self._open.add(answer)
        return answer

    def keep(self, answer: UpstreamConnection) -> None:
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(answer)
        else:
            answer.transport.abort()

    def lost(self, answer: UpstreamConnection) -> None:
        self._open.discard(answer)
        with contextlib.suppress(ValueError):
            self._idle.remove(answer)

    def close(self) -> None:
        for answer in tuple(self._open):
            answer.transport.abort()
        self._idle.clear()
