"""A server's life: the engine is started, then one front end in this process or several in their own; both end together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import uvloop

if TYPE_CHECKING:
    from slipstream.config import EngineArgs
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.frontend.guard import Guarded
    from slipstream.frontend.supervisor import Supervisor
    from slipstream.server.state import ServerSettings, Watcher

logger = logging.getLogger("slipstream.server")

Phases: TypeAlias = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Shows the phases of the start. It yields the function that names the current one."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server to run. `shortens`: contexts are shortened by the second of `engines`, or by the
    first if there is only one. `announce` is called when the server is ready."""

    engines: Sequence[EngineArgs]
    settings: ServerSettings
    listener: socket.socket
    shortens: bool
    phases: Phases
    announce: Callable[[AsyncLLM | Supervisor], None]
    watch: Watcher | None = None
    guarded: Guarded | None = None

    def run(self, num_front_ends: int) -> None:
        """Serve until an orderly stop. Errors of the start are raised."""
        with self.listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._one() if num_front_ends == 1 else self._several(num_front_ends))

    async def _one(self) -> None:
        from slipstream.engine.context import Shortener
        from slipstream.server.run import serve, settle

        engine, small = await self._start()

        def on_ready() -> None:
            settle()
            self._announce_start(engine)

        guarded: dict[str, Any] = {} if self.guarded is None else self.guarded.for_server
        try:
            await serve(
                engine,
                self.settings,
                self.listener,
                on_ready=on_ready,
                shortener=Shortener(small) if self.shortens else None,
                watch=self.watch,
                **guarded,
            )
        finally:
            if small is not engine:
                await small.shutdown()

    async def _start(self) -> tuple[AsyncLLM, AsyncLLM]:
        """The engine, and the one that shortens contexts."""
        from slipstream.engine.async_llm import AsyncLLM

        with self.phases() as progress:
            engine = await AsyncLLM.start(self.engines[0], progress=progress)
            if len(self.engines) == 1:
                return engine, engine
            try:
                return engine, await AsyncLLM.start(self.engines[1], progress=progress)
            except BaseException:
                await engine.shutdown()
                raise

    def _announce_start(self, engine: AsyncLLM) -> None:
        if self.guarded is not None:
            self.guarded.serves(self.listener)
            if self.guarded.num_deaths:
                logger.info("the server serves again (start %d)", self.guarded.num_deaths + 1)
                return
        self.announce(engine)

    async def _several(self, num_front_ends: int) -> None:
        from slipstream.frontend.supervisor import Supervisor

        supervisor = Supervisor(
            self.engines, self.settings, self.listener, num_front_ends, shortens=self.shortens
        )
        with contextlib.ExitStack() as shown:
            progress = shown.enter_context(self.phases())

            def on_ready() -> None:
                shown.close()
                self.announce(supervisor)

            await supervisor.run(progress=progress, on_ready=on_ready)
