"""Consumers of the engine process's outputs: of a request's deltas, and of the vectors of one call's texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from slipstream.engine.output import merge
from slipstream.engine.requests.pooled import TextsAnswer
from slipstream.errors import EngineError
from slipstream.outputs import RequestOutput


class OutputStream:
    """Queue of one request's new output for its consumer. If a delta is still pending, later ones
    are merged into it."""

    on_token = None

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, delta: RequestOutput) -> None:
        self._pending = merge(self._pending, delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        pending, self._pending = self._pending, None
        return pending


@dataclass(frozen=True, slots=True)
class PendingTexts:
    """A request of texts, and the future of its caller, who may have left before the request ends."""

    answer: TextsAnswer
    done: asyncio.Future[None]

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The complete answer: the stream's deltas put together."""
    whole: RequestOutput | None = None
    async for delta in stream:
        whole = merge(whole, delta)
    if whole is None:
        raise EngineError("the stream ended without an answer")
    return whole
