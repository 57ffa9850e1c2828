"""The beginning of a client's stream, and the signs of life sent until tokens arrive.

While a prompt is computed and between tokens, a client gets a sign of life every `PING_S` seconds,
as from a single server. The first one sends the status 200, so the gateway sends none before a
replica has accepted the request. From then on an error is an event, and signs continue while the
request waits for another replica.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import Send

from slipstream.server.answers import generation


class StreamStart:
    """Sends a stream's headers once, with the first sign of life or with the first tokens."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.media_type = b""  # the content type that the client was sent
        self.headers_sent = False
        self._sign: asyncio.Future[None] | None = None  # the last one
        self._shown = 0.0  # time.monotonic() of it

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Start the answer, unless a sign of life already has."""
        if not self.headers_sent:
            self.headers_sent, self.media_type = True, dict(headers).get(b"content-type", b"")
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def show_life(self, media_type: bytes) -> None:
        """Send a sign of life, unless the client has not read the last one."""
        if self._sign is None or self._sign.done():
            self._shown = time.monotonic()
            self._sign = asyncio.ensure_future(self._show_life(media_type))
            self._sign.add_done_callback(lambda sign: sign.cancelled() or sign.exception())

    def show_life_if_due(self) -> None:
        """Send a sign of life while no replica has the request, if one was sent before."""
        if self._sign is not None and time.monotonic() - self._shown >= generation.PING_S:
            self.show_life(self.media_type)

    async def settled(self) -> None:
        """Wait until the last sign is sent, because only one writer at a time may write to the client."""
        if self._sign is not None:
            await self._sign

    def cancel(self) -> None:
        """Abandon a sign that the client has not read."""
        if self._sign is not None:
            self._sign.cancel()

    async def _show_life(self, media_type: bytes) -> None:
        await self.start(generation.stream_headers(media_type))
        sign = generation.sign_of_life(media_type)
        await self._send({"type": "http.response.body", "body": sign, "more_body": True})
