"""A server under test, with one of its protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx

from slipstream.conformance.protocols.base import Ask, Body, ParsedAnswer, Protocol, StreamEvent
from slipstream.conformance.registry import FailedError, RefusedError, expect

SHAPE_ERRORS = (KeyError, TypeError, IndexError, AttributeError, ValueError)
"""Errors raised by reading a body with an unexpected structure."""


class CheckedServer:
    """A server's address, and how to reach it."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key, self.timeout_s = api_key, timeout_s
        # One connection per request: a kept one may be closed while the next request begins;
        # clients retry that, but a check would count it as a fault.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(timeout=timeout_s, limits=limits, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.http.aclose()


@dataclass(frozen=True, slots=True)
class CheckSession:
    """A server, one of its protocols and a model, for one check. `concurrency` is the number of
    concurrent requests in checks of load; `context` is the model's context in tokens, if the server
    reports it."""

    endpoint: CheckedServer
    protocol: Protocol
    model: str
    concurrency: int = 32
    context: int | None = None

    def with_protocol(self, protocol: Protocol) -> CheckSession:
        return replace(self, protocol=protocol)

    def body(self, ask: Ask, *, stream: bool = False) -> Body:
        return self.protocol.body(ask, self.model, stream=stream)

    @property
    def headers(self) -> dict[str, str]:
        return self.protocol.headers(self.endpoint.api_key)

    async def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Send any request. `body` is JSON, or bytes that are sent unchanged."""
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.endpoint.http.request(
            method,
            self.endpoint.url + path,
            headers=(self.headers if headers is None else headers)
            | ({"content-type": "application/json"} if isinstance(body, bytes) else {}),
            **({} if body is None else given),
        )

    async def post(self, body: Any, path: str | None = None) -> httpx.Response:
        return await self.request("POST", path or self.protocol.path, body)

    async def whole(self, ask: Ask) -> ParsedAnswer:
        return self.read(await self.post(self.body(ask)))

    def read(self, reply: httpx.Response) -> ParsedAnswer:
        """Parse the answer from a response. RefusedError if it is an error, FailedError if its structure is wrong."""
        if reply.status_code != 200:
            raise self.refused(reply.status_code, reply.content)
        try:
            return self.protocol.read(reply.json())
        except SHAPE_ERRORS as error:
            raise FailedError(f"the answer's shape: {error!r} in {reply.text[:200]}") from None

    def refused(self, status: int, content: bytes) -> RefusedError:
        return RefusedError(status, content.decode(errors="replace"))

    @asynccontextmanager
    async def streaming(self, ask: Ask) -> AsyncIterator[httpx.Response]:
        """Context manager of a stream that has started. RefusedError if the response is an error."""
        http, url = self.endpoint.http, self.endpoint.url + self.protocol.path
        body = self.body(ask, stream=True)
        async with http.stream("POST", url, json=body, headers=self.headers) as reply:
            if reply.status_code != 200:
                raise self.refused(reply.status_code, await reply.aread())
            yield reply

    async def events(self, ask: Ask) -> list[StreamEvent]:
        async with self.streaming(ask) as reply:
            found = reply.headers.get("content-type", "")
            wanted = self.protocol.media_type
            expect(found.startswith(wanted), f"content-type is {found}, not {wanted}")
            events = self.protocol.read_events(await reply.aread())
        expect(events, "the stream is empty")
        return events

    async def streamed(self, ask: Ask) -> ParsedAnswer:
        events = await self.events(ask)
        try:
            return self.protocol.collect(events)
        except SHAPE_ERRORS as error:
            raise FailedError(f"the stream's shape: {error!r}") from None

    async def together(
        self, asks: Iterable[Ask], limit: int = 4
    ) -> list[ParsedAnswer | RefusedError]:
        """Send requests that are not streamed, at most `limit` at a time. A client error or 501 (RefusedError) is returned,
        not raised."""
        turn = asyncio.Semaphore(limit)

        async def one(ask: Ask) -> ParsedAnswer | RefusedError:
            async with turn:
                try:
                    return await self.whole(ask)
                except RefusedError as error:
                    if error.status >= 500 and error.status != 501:
                        raise
                    return error

        return list(await asyncio.gather(*(one(ask) for ask in asks)))
