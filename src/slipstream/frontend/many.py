"""The life of a server of several models: one front end in this process, and an engine for each loaded model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import uvloop

from slipstream.server.many.app import ManyEngines, create_many_app
from slipstream.server.run import serve, settle

if TYPE_CHECKING:
    from slipstream.frontend.guard import Guarded
    from slipstream.server.many.slots import ModelSlots
    from slipstream.server.state import EngineProtocol, ServerSettings


def serve_many(
    slots: ModelSlots,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    announce: Callable[[], None],
    guarded: Guarded | None = None,
) -> None:
    """Serve until an orderly stop. `announce` is called when the server takes requests."""

    def on_ready() -> None:
        settle()
        if guarded is not None:
            guarded.serves(listener)
        announce()

    own: dict[str, Any] = {} if guarded is None else guarded.for_server
    engines = cast("EngineProtocol", ManyEngines(slots))
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(engines, settings, listener, on_ready=on_ready, create=create_many_app, **own)
        )
