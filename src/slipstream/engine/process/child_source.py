"""Engine processes as children, started again after a death."""

from __future__ import annotations

import os
from collections.abc import Callable

from slipstream.config import EngineArgs, num_ranks
from slipstream.engine.process.child_link import ChildLink
from slipstream.engine.process.core_start import CORE_MODULE, CoreSource, restart_pause
from slipstream.worker.executor import ForkServer


class CoreParent:
    """The process that engine processes are forks of, which has imported what they need. It is started by the first
    `get`, and again after its death, which its forks survive."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None

    def get(self) -> ForkServer | None:
        """None: this system has no such forks (`os.pidfd_open`)."""
        if not hasattr(os, "pidfd_open"):
            return None
        if self._forks is None or not self._forks.is_alive:
            self._forks = ForkServer.start(CORE_MODULE, forks_stay=True)
        return self._forks


def child_source(
    args: EngineArgs,
    pause: Callable[[int, Exception], float | None] = restart_pause,
    parent: CoreParent | None = None,
    low_priority: Callable[[], bool] = lambda: False,
) -> CoreSource:
    """Engine processes with these settings, one after the other. Their ranks are forks of one process. With
    `parent` they are forks themselves. `low_priority`: see `WakeUp`; not for ranks."""
    forks: ForkServer | None = None

    async def connect() -> ChildLink:
        nonlocal forks
        of = None if parent is None else parent.get()
        if num_ranks(args) == 1 and args.cpu_layers is None:
            return await ChildLink.start(args, parent=of, low_priority=low_priority())
        if forks is None or not forks.is_alive:
            forks = ForkServer.start()
        return await ChildLink.start(args, forks, of)

    def close() -> None:
        if forks is not None:
            forks.close()

    return CoreSource(connect, pause, close=close)
