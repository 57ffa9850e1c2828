"""A replica's process (`python -m slipstream.fleet.replicas.replica`): `slipstream serve` for a
fleet's gateway.

The first line of its standard input is a Setup as JSON. When it serves it writes a Serving to
standard output; if the start fails, a Failed. It ends when its standard input closes, so it never
outlives its parent. SIGTERM drains it, as it does the server."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

import msgspec
import uvloop

from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import SlipstreamError
from slipstream.server.run import bind, configure_logging, serve, settle, url
from slipstream.server.state import ServerSettings


class ReplicaSetup(msgspec.Struct):
    engine: EngineArgs
    server: dict[str, Any]  # fields of ServerSettings


class ReplicaServing(msgspec.Struct, tag=True):
    url: str
    pid: int
    start_s: float


class ReplicaFailed(msgspec.Struct, tag=True):
    error: str
    message: str
    field: str | None


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)  # the engine's process ends with this one


def _say(message: ReplicaServing | ReplicaFailed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def _run(setup: ReplicaSetup, settings: ServerSettings) -> None:
    started = asyncio.get_running_loop().time()
    listener = bind(settings)
    with listener:
        engine = await AsyncLLM.start(setup.engine)
        seconds = asyncio.get_running_loop().time() - started
        address = url(settings, listener)

        def on_ready() -> None:
            settle()
            _say(ReplicaServing(address, os.getpid(), round(seconds, 3)))

        await serve(engine, settings, listener, on_ready=on_ready)


def _first_line() -> bytes:
    """The first line, read without a buffer so that nothing holds a lock on standard input when the
    process ends."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 1)):
            return b""
        line += more
    return line


def main() -> int:
    if not (line := _first_line()):
        return 1
    setup = msgspec.json.decode(line, type=ReplicaSetup)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        settings = ServerSettings(**setup.server)
        configure_logging(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(setup, settings))
        return 0
    except SlipstreamError as error:
        _say(ReplicaFailed(type(error).__name__, error.message, error.field))
        return 1


if __name__ == "__main__":
    sys.exit(main())
