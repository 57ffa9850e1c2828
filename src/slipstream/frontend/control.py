"""The messages between the supervisor and a front end: msgpack over a pair of Unix sockets without a name.

To a front end: Setup, EngineDied, GetCounts, Totals, Drain. To the supervisor: Listen, Serving, Failed, HaveCounts, GetTotals.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from slipstream.config import EngineArgs
from slipstream.server.operations.metrics import MetricCounts
from slipstream.server.state import ServerSettings


class FrontEndSetup(msgspec.Struct, tag=True):
    """The first message. Of two `engines`, the second shortens prompts; `shortens` says that the first does."""

    number: int  # id of this process, never reused
    slot: int  # index of this front end, from 0
    engines: list[EngineArgs]
    settings: ServerSettings
    shortens: bool


class EngineDied(msgspec.Struct, tag=True):
    engine: int  # index in Setup.engines
    reason: str
    final: bool


class GetCounts(msgspec.Struct, tag=True):
    pass


class Totals(msgspec.Struct, tag=True):
    """Answer to GetTotals: the counts of all front ends, including those that have ended."""

    counts: list[MetricCounts]


class Drain(msgspec.Struct, tag=True):
    """Order to end when all requests have; if repeated: to end now."""


class Listen(msgspec.Struct, tag=True):
    """The front end waits at `path` for the engine to connect."""

    engine: int
    path: str


class FrontEndServing(msgspec.Struct, tag=True):
    pass


class FrontEndFailed(msgspec.Struct, tag=True):
    """The front end could not start."""

    error: str
    message: str
    field: str | None


class HaveCounts(msgspec.Struct, tag=True):
    counts: MetricCounts


class GetTotals(msgspec.Struct, tag=True):
    counts: MetricCounts  # its own


ToFrontEnd: TypeAlias = FrontEndSetup | EngineDied | GetCounts | Totals | Drain
ToSupervisor: TypeAlias = Listen | FrontEndServing | FrontEndFailed | HaveCounts | GetTotals

T = TypeVar("T")


class Channel(Generic[T]):
    """One end of the pair, on which messages of the type T arrive."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any
    ) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> Channel[T]:
        return cls(*await asyncio.open_unix_connection(sock=end), kind)

    def send(self, message: ToFrontEnd | ToSupervisor) -> None:
        """Send without waiting. A message to a process that has ended is lost."""
        if not self._writer.is_closing():  # uvloop raises in a write to a closed transport
            data = self._encoder.encode(message)
            self._writer.write(len(data).to_bytes(4) + data)

    async def receive(self) -> T | None:
        """The next message; None when the other end is closed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(4))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()

    async def flush(self) -> None:
        """Wait until all that was sent has been written."""
        self.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
