"""The link to an engine core in a process that this process started."""

from __future__ import annotations

import asyncio
import signal

from slipstream.base.deaths import describe_exit, stdin_of
from slipstream.config import EngineArgs
from slipstream.engine.process.core_client import CoreLink
from slipstream.engine.process.core_messages import Start, Stop
from slipstream.engine.process.core_start import Process, socket_folder, start_process, wait_or_kill
from slipstream.engine.temporary import OwnedFolder
from slipstream.errors import EngineDeadError, EngineKilledError
from slipstream.worker.executor import ForkServer


class ChildLink(CoreLink):
    """An engine process started by this process. The caller must call `end`, whatever happens."""

    def __init__(self, process: Process, folder: OwnedFolder):
        self.process, self._folder = process, folder
        try:
            self._folder.make()
            super().__init__(f"{folder.path}/engine")
        except BaseException:
            self.process.kill()
            self.process.wait()
            self._folder.remove()
            raise

    @classmethod
    async def start(
        cls, args: EngineArgs, forks: ForkServer | None = None,
        template: ForkServer | None = None, *, low_priority: bool = False,
    ) -> ChildLink:  # fmt: skip
        """Start the process, and send the first message as soon as it has connected. If the process ends
        before, `receive` raises. `forks`, `template`: see `start_process`. `low_priority`: see `WakeUp`."""
        # The process is started before the folder is created: if we are killed, it removes the folder.
        folder = socket_folder()
        child = cls(await start_process(f"{folder.path}/engine", forks, template), folder)
        try:
            while not child.send(Start(args, low_priority)) and child.process.poll() is None:
                await asyncio.sleep(0.005)
        except BaseException:
            await child.end(at_once=True)
            raise
        child._folder.remove()  # both ends are connected, so the socket's path is not needed any more
        return child

    def death(self) -> EngineDeadError | None:
        code = self.process.poll()
        if code is None:
            return None
        kind = EngineKilledError if code == -signal.SIGKILL else EngineDeadError
        return kind(f"the engine process {describe_exit(code)}")

    async def end(self, *, at_once: bool = False) -> None:
        """Ask the process to stop, wait, kill it if it does not, and remove the socket. If the caller is cancelled
        meanwhile, or with `at_once`, the process is killed at once: while starting it reads no messages, and has
        nothing to finish."""
        try:
            if at_once:
                self.process.kill()
            elif self.process.poll() is None:
                self.send(Stop())
            await asyncio.to_thread(wait_or_kill, self.process, 5.0)
        finally:
            self.process.kill()  # no effect if it has ended
            stdin_of(self.process).close()
            await super().end(at_once=at_once)
            self._folder.remove()
