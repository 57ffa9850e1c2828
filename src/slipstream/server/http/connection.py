"""One HTTP/1.1 connection: uvicorn's parser with limits, and fast detection of disconnected
clients.

1. A request's head has at most `MAX_HEADER_BYTES` and `HEAD_TIMEOUT_S`. A bad one is answered with
   an error in OpenAI's shape.
2. When the connection is lost, the running exchange and all queued after it (pipelining) are
   cancelled. uvicorn alone cancels only the last one, and does not read the socket while requests
   are queued.
3. A client that has closed only its sending side still gets its answer. A FIN alone does not
   distinguish it from a client that is gone. So we send an interim response (100 Continue, which
   every HTTP/1.1 client must skip): a socket that is gone replies with a reset. A FIN while an
   answer is streamed, or from HTTP/1.0, always counts as gone.
4. A body that nobody will read (413, 401, …) is not waited for. The answer says `connection:
   close`, further input is discarded for `LINGER_S` so that the client can read the answer, then
   the connection is closed.
5. A client that reads nothing for `WRITE_IDLE_S` counts as gone.
6. `write_chunk` of the scope writes a part of an answer at once, without waking the answer's task.
   Before an answer begins, `write_interim` sends an interim response (102) with a header.
7. `Upgrade` is ignored and the request answered (RFC 9110 7.8). CONNECT gets 400. Trailer fields
   are dropped.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slipstream.server.http.errors import bad_request

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 256
HEAD_TIMEOUT_S = 30.0
LINGER_S = 1.0
WRITE_IDLE_S = 120.0
"""Maximum seconds in which a client reads nothing of waiting data before the connection and its
request are ended."""

SMALL_BODY = 64 * 1024
"""Maximum bytes of an unread body that are read to reuse the connection."""

_UPGRADE_FIELDS = (b"upgrade", b"http2-settings")
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_SLOWEST_LOOK_S = 0.25
_HUNG_UP = select.POLLERR | select.POLLHUP
# Linux: a FIN has arrived, perhaps after data that we have not read.
_PEER_DONE = getattr(select, "POLLRDHUP", 0)


_INVALID = bad_request(
    "not a valid HTTP request, headers that are too long, or too many requests sent at once",
    code="invalid_http",
)


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    body = _INVALID.body()
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Outlet:
    """The transport of a request/response cycle, which closes the connection gracefully.

    The first write, a response's head, is joined with what follows in the same turn of the event
    loop: one packet and one system call instead of two.
    """

    __slots__ = ("_close", "_first", "_loop", "_transport", "is_closing")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        close: Callable[[], None],
    ) -> None:
        self._loop, self._transport, self._close = loop, transport, close
        self._first: bytes | None = None  # empty after it was sent
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._first is None:
            self._first = data
            self._loop.call_soon(self._flush)
        elif self._first:
            self._first, data = b"", self._first + data
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._close()

    def _flush(self) -> None:
        if self._first and not self.is_closing():
            self._transport.write(self._first)
        self._first = b""


class Connection(HttpToolsProtocol):
    _header_bytes = 0
    _in_head = False
    _half_closed = False
    _discards = False
    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _look_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None

    # --- Callbacks of the socket -------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse `data`. A head with an upgrade is parsed again without it, by a new parser, because
        llhttp would skip the body."""
        self._unset_keepalive_if_required()
        while not self._discards and self.parser is not None:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(o for o in options if o.lower() not in _UPGRADE_FIELDS)
            if name not in _UPGRADE_FIELDS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep our side of the connection open."""
        if self.scheme == "https" or not self._may_probe():
            return False
        self._half_closed = True
        self.transport.write(_INTERIM)
        self._look_again()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for timer in (self._head_timer, self._look_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _watch_reader(self, waiting: int) -> None:
        """Close the connection if the client reads none of `waiting` bytes within `WRITE_IDLE_S`.
        No data are added meanwhile, because writing is paused."""

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= waiting:
                self.transport.abort()
            else:
                self._watch_reader(now)

        self._idle_timer = self.loop.call_later(WRITE_IDLE_S, look)

    # --- Callbacks of the parser -------------------------------------------------------

    def on_message_begin(self) -> None:
        self._header_bytes, self._in_head = 0, True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._bound(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header field. Trailer fields are dropped: they must not authenticate or route
        (RFC 9110 6.5.1)."""
        self._bound(len(name) + len(value))
        if b"\r" in value or b"\n" in value:
            raise ValueError("a line break in a field")
        if self._in_head:
            super().on_header(name, value)

    def _bound(self, length: int) -> None:
        self._header_bytes += length
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too long")  # the parser converts it to `send_400_response`

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("CONNECT")
            return  # `data_received` parses this head again, without the upgrade
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = _Outlet(self.loop, self.transport, lambda: self._close_after(cycle))  # type: ignore[assignment]
        cycle.scope["unread_body"] = lambda: _unread(cycle)  # type: ignore[typeddict-unknown-key]
        cycle.scope["write_chunk"] = partial(_write_chunk, cycle)  # type: ignore[typeddict-unknown-key]
        cycle.scope["write_interim"] = partial(_write_interim, cycle)  # type: ignore[typeddict-unknown-key]
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        if self.pipeline:
            self._look_again()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer unparsable input, after earlier answers. If it interrupts an answer, close the
        connection."""
        running, cycle = self._running, self.cycle
        if running is not None and not running.response_complete:
            if self.pipeline and self.pipeline[0][0] is cycle and cycle.more_body:
                self.pipeline[0] = (cycle, _refuse)
                self._discards = True
                return
            if cycle is not running or not cycle.more_body or cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True  # its task ends without writing
            cycle.message_event.set()
        body = _INVALID.body()
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._linger()

    # --- Requests ----------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._half_closed and (not self.pipeline or self.pipeline[-1][0].more_body):
            self.transport.close()
        super().on_response_complete()
        if self.cycle.more_body and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _close_after(self, cycle: RequestResponseCycle) -> None:
        """Close the connection after `cycle`, the last one: at once, or when the client has had
        time to read its answer."""
        if cycle.more_body and cycle.response_complete:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._discards = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    # --- Has the client gone? ----------------------------------------------------------

    def _may_probe(self) -> bool:
        """Whether an interim response may be sent: the request is complete, unanswered, and
        HTTP/1.1."""
        cycle = self._running
        return (
            cycle is not None
            and not cycle.more_body
            and not cycle.response_started
            and cycle.scope["http_version"] == "1.1"
        )

    def _look_again(self, delay: float = 0.01) -> None:
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(delay, self._look, delay)

    def _look(self, delay: float) -> None:
        """Check by the socket's state whether the peer is still connected; the transport is not
        reading now, so it would not notice."""
        self._look_timer = None
        cycle = self._running
        if cycle is None or cycle.response_complete or not (self._half_closed or self.pipeline):
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _PEER_DONE)
        events = next((found for _, found in poll.poll(0)), 0)
        if events & _HUNG_UP or (
            events & _PEER_DONE and not self._half_closed and not self._may_probe()
        ):
            self.transport.abort()
            return
        # A FIN can be stuck after data that we have no space to read: then probe again and again.
        stuck = self.flow.read_paused and delay == _SLOWEST_LOOK_S
        if not self._half_closed and self._may_probe() and (events & _PEER_DONE or stuck):
            self._half_closed = bool(events & _PEER_DONE)
            self.transport.write(_INTERIM)
        self._look_again(min(2 * delay, _SLOWEST_LOOK_S))


def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a part of a chunked body at once. False if `send` would wait, or the body is not
    chunked."""
    if (
        cycle.flow.write_paused
        or cycle.disconnected
        or not cycle.chunked_encoding
        or cycle.response_complete
    ):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def _write_interim(cycle: RequestResponseCycle, name: bytes, value: bytes) -> None:
    if not (cycle.disconnected or cycle.response_started or cycle.flow.write_paused):
        cycle.transport.write(b"HTTP/1.1 102 Processing\r\n%b: %b\r\n\r\n" % (name, value))


def _unread(cycle: RequestResponseCycle) -> bool:
    """Whether the rest of the body is missing and won't be read."""
    if not cycle.more_body:
        return False
    length = dict(cycle.scope["headers"]).get(b"content-length", b"")
    return not length.isdigit() or int(length) > SMALL_BODY
