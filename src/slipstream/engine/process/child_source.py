"""Engine processes as child processes, restarted after a death."""

from __future__ import annotations

import os
from collections.abc import Callable

from slipstream.config import EngineArgs, num_ranks
from slipstream.engine.process.child_link import ChildLink
from slipstream.engine.process.core_start import CORE_MODULE, CoreSource, restart_pause
from slipstream.worker.executor import ForkServer, ForkServerEndedError


class CoreTemplate:
    """The process from which engine processes are forked; it has imported what they need. The first
    `get` starts it, also after its death, which its forks survive."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None

    def get(self) -> ForkServer | None:
        """The fork server, started if needed. None if this system can't fork this way (`os.pidfd_open`)."""
        if not hasattr(os, "pidfd_open"):
            return None
        if self._forks is None or not self._forks.is_alive:
            self._forks = ForkServer.start(CORE_MODULE, forks_stay=True)
        return self._forks


def child_source(
    args: EngineArgs,
    pause: Callable[[int, Exception], float | None] = restart_pause,
    template: CoreTemplate | None = None,
    low_priority: Callable[[], bool] = lambda: False,
) -> CoreSource:
    """A source of engine processes with these settings, one at a time. Their ranks are forked from one
    process, with `template` the engine processes, too. `low_priority`: see `WakeUp`; it doesn't apply to ranks."""
    forks: ForkServer | None = None

    async def connect() -> ChildLink:
        try:
            return await start()
        except ForkServerEndedError:  # killed since `template.get`, which starts another
            return await start()

    async def start() -> ChildLink:
        nonlocal forks
        of = None if template is None else template.get()
        if num_ranks(args) == 1 and args.cpu_layers is None:
            return await ChildLink.start(args, template=of, low_priority=low_priority())
        if forks is None or not forks.is_alive:
            forks = ForkServer.start()
        return await ChildLink.start(args, forks, of)

    def close() -> None:
        if forks is not None:
            forks.close()

    return CoreSource(connect, pause, close=close)
