"""Consumers of the engine process's outputs: for a request's deltas, and for the vectors of one call's texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from slipstream.engine.output import merge
from slipstream.engine.requests.pooled import TextsAnswer
from slipstream.errors import EngineError
from slipstream.outputs import RequestOutput


class OutputStream:
    """Queue of one request's output for its consumer. While a delta is pending, later ones are merged into it."""

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
    """A request of texts, and the future on which its caller waits; the caller may have left."""

    answer: TextsAnswer
    done: asyncio.Future[None]

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The complete answer: all deltas of the stream merged."""
    whole: RequestOutput | None = None
    async for delta in stream:
        whole = merge(whole, delta)
    if whole is None:
        raise EngineError("the stream ended without an answer")
    return whole
