"""Engine processes as children, started again after a death."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import EngineArgs, num_ranks
from slipstream.engine.process.child_link import ChildLink
from slipstream.engine.process.core_start import CoreSource, restart_pause
from slipstream.worker.executor import ForkServer


def child_source(
    args: EngineArgs,
    pause: Callable[[int, Exception], float | None] = restart_pause,
) -> CoreSource:
    """Engine processes with these settings, one after the other. Their ranks are forks of one process."""
    forks: ForkServer | None = None

    async def connect() -> ChildLink:
        nonlocal forks
        if num_ranks(args) == 1 and args.cpu_layers is None:
            return await ChildLink.start(args)
        if forks is None or not forks.is_alive:
            forks = ForkServer.start()
        return await ChildLink.start(args, forks)

    def close() -> None:
        if forks is not None:
            forks.close()

    return CoreSource(connect, pause, close=close)
