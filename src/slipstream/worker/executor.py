"""The engine's view of a worker: the `Executor` interface, and `ExecutorSource`, which chooses one.

`LocalExecutor` runs the model in this process. `ProcessExecutor` forwards the same calls to one
process per rank, each of which has a `LocalExecutor`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket

from slipstream.config import EngineArgs, num_ranks
from slipstream.costs.hardware import wake_gpu
from slipstream.spec.description import ModelDescription
from slipstream.worker.base import Executor as Executor
from slipstream.worker.base import Launched as Launched
from slipstream.worker.ranks.fork_server import ForkServer as ForkServer
from slipstream.worker.ranks.fork_server import ForkServerEndedError as ForkServerEndedError


def serve_forks(asked: socket, run: Callable[[list[str]], int]) -> None:
    """Fork processes that make executors without torch, after importing all that these need (`fork_server.py`)."""
    import slipstream.worker.host_loading
    import slipstream.worker.local_executor  # noqa: F401
    from slipstream.worker.ranks.fork_server import serve

    gc.collect()
    gc.freeze()  # forks then have nothing to collect
    serve(asked, run)


@dataclass(slots=True)
class ExecutorSource:
    """Makes an engine's executors: one at its start, and one whenever it wakes from a sleep of
    level 2. `known`: the model's description, if already read; later the one that the last executor
    read. Ranks are forked by `forks`; if it is None, each executor starts its own fork server.
    """

    args: EngineArgs
    known: ModelDescription | None = None
    forks: ForkServer | None = None

    def make(self, progress: Callable[[str], None] = lambda phase: None) -> Executor:
        """Find the model and the device, resolve the settings, and load the model. `progress` is called
        as each phase begins."""
        executor = self._make(progress)
        self.known = executor.description
        return executor

    def _make(self, progress: Callable[[str], None]) -> Executor:
        args = self.args
        if args.cpu_layers is not None:
            from slipstream.worker.ranks.process_executor import settled

            args = settled(args)
        if num_ranks(args) > 1:
            from slipstream.worker.ranks.process_executor import ProcessExecutor

            return ProcessExecutor(args, progress=progress, forks=self.forks)
        wake_gpu(args.device)
        from slipstream.worker.local_executor import LocalExecutor

        return LocalExecutor.build(args, progress=progress, known=self.known)
