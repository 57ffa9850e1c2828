"""A front end: `python -m slipstream.frontend.process CONTROL LISTENER LOAD FOLDER`.

The arguments are three file descriptors, and the folder for sockets. A front end is a server like one that is alone, but:

    1. Its engine core is one that the supervisor started.
    2. It takes connections from a socket that others share, and counts requests with them.
    3. It ends when the supervisor says so, or when its standard input closes, so it never outlives the supervisor.
"""

from __future__ import annotations

import asyncio
import mmap
import signal
import socket
import sys
import threading

import uvloop

from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.context import Shortener
from slipstream.engine.process.core_client import CoreLink
from slipstream.engine.process.core_process import end_with_parent
from slipstream.engine.process.core_start import CoreSource
from slipstream.errors import EngineDeadError, SlipstreamError
from slipstream.frontend.control import (
    Channel,
    Drain,
    EngineDied,
    FrontEndFailed,
    FrontEndServing,
    FrontEndSetup,
    GetCounts,
    GetTotals,
    HaveCounts,
    Listen,
    ToFrontEnd,
    Totals,
)
from slipstream.server.http.load import ServerLoad
from slipstream.server.operations.metrics import MetricCounts
from slipstream.server.run import Server, configure_logging, make_server, settle


class EngineStaysDownError(EngineDeadError):
    """The supervisor will not start the engine again."""


class AttachedLink(CoreLink):
    """A link to one of the supervisor's engine cores. The supervisor gives the core our `path`, and reports the core's death to
    us."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._death: EngineDeadError | None = None

    def death(self) -> EngineDeadError | None:
        return self._death

    def die(self, message: EngineDied) -> None:
        self._death = (EngineStaysDownError if message.final else EngineDeadError)(message.reason)


class FrontEnd:
    def __init__(self, channel: Channel[ToFrontEnd], setup: FrontEndSetup, folder: str) -> None:
        self._channel, self._setup, self._folder = channel, setup, folder
        self._links: dict[int, AttachedLink] = {}  # by engine: the newest
        self._num_links = 0
        self._waiters: list[asyncio.Future[list[MetricCounts]]] = []
        self._server: Server | None = None

    async def run(self, listener: socket.socket, load: ServerLoad) -> None:
        reading = asyncio.create_task(self._read())
        engines: list[AsyncLLM] = []
        try:
            for index, args in enumerate(self._setup.engines):
                engines.append(await AsyncLLM.start(args, source=self._source(index)))
            shortener = Shortener(engines[-1]) if self._setup.shortens else None
            server = make_server(engines[0], self._setup.settings, shortener)
            server.state.load, server.state.totals = load, self._totals
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._server = server
            settle()
            self._channel.send(FrontEndServing())
            await serving
        finally:
            reading.cancel()
            for engine in engines:
                await engine.shutdown()

    def _source(self, index: int) -> CoreSource:
        async def connect() -> CoreLink:
            self._num_links += 1
            path = f"{self._folder}/{self._setup.number}.{self._num_links}"
            link = self._links[index] = AttachedLink(path)
            self._channel.send(Listen(index, path))
            return link

        def pause(deaths: int, error: Exception) -> float | None:
            if isinstance(error, EngineStaysDownError):
                return None
            # the supervisor has its own pauses
            return 0.0 if isinstance(error, EngineDeadError) else 1.0

        return CoreSource(connect, pause, id_prefix=f"{self._setup.number}.")

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, EngineDied):
                if message.engine in self._links:
                    self._links[message.engine].die(message)
            elif isinstance(message, GetCounts):
                assert self._server is not None, "it is asked for once it serves"
                self._channel.send(HaveCounts(self._server.state.metrics.counts()))
            elif isinstance(message, Totals):
                for waiter in self._waiters:
                    if not waiter.done():
                        waiter.set_result(message.counts)
                self._waiters.clear()
            elif isinstance(message, Drain) and self._server is not None:
                self._server.stop()

    async def _totals(self, own: MetricCounts) -> list[MetricCounts]:
        self._waiters.append(asyncio.get_running_loop().create_future())
        self._channel.send(GetTotals(own))
        return await self._waiters[-1]


async def serve(
    control: socket.socket, listener: socket.socket, shared: mmap.mmap, folder: str
) -> int:
    channel: Channel[ToFrontEnd] = await Channel.open(control, ToFrontEnd)
    setup = await channel.receive()
    if not isinstance(setup, FrontEndSetup):
        return 1
    configure_logging(setup.settings, front_end=setup.slot + 1)
    try:
        await FrontEnd(channel, setup, folder).run(
            listener, ServerLoad(memoryview(shared), setup.slot)
        )
        return 0
    except SlipstreamError as error:
        channel.send(FrontEndFailed(type(error).__name__, error.message, error.field))
        return 1
    finally:
        await channel.flush()


def main() -> int:
    # Ctrl-C and a service manager's SIGTERM reach the whole process group. The supervisor decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    *fds, folder = sys.argv[1:]
    control, listener, load = map(int, fds)
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    accepting = socket.socket(fileno=listener)
    accepting.setblocking(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            serve(socket.socket(fileno=control), accepting, mmap.mmap(load, 0), folder)
        )


if __name__ == "__main__":
    sys.exit(main())
