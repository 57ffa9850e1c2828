"""What the engine knows of a worker: the `Executor` interface, and `build_executor`, which chooses one.

`LocalExecutor` runs the model in this process. `ProcessExecutor` takes the same calls and sends them to a process for each
rank, each of which has a `LocalExecutor`.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import EngineArgs, num_ranks
from slipstream.costs.hardware import wake_gpu
from slipstream.worker.base import Executor as Executor
from slipstream.worker.base import Launched as Launched


def build_executor(
    args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
) -> Executor:
    """Find the model and the device, resolve the settings, load. `progress` is called with each phase as it begins."""
    if args.cpu_layers is not None:
        from slipstream.worker.process_executor import settled

        args = settled(args)
    if num_ranks(args) > 1:
        from slipstream.worker.process_executor import ProcessExecutor

        return ProcessExecutor.build(args, progress=progress)
    wake_gpu(args.device)
    from slipstream.worker.local_executor import LocalExecutor

    return LocalExecutor.build(args, progress=progress)
