"""Start of a core: its socket, restart delays, and its settings once it is ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from slipstream.config import EngineArgs, EngineConfig, resolve
from slipstream.engine.process.core_messages import Ready
from slipstream.engine.temporary import OwnedFolder
from slipstream.errors import ConfigError, ModelError
from slipstream.spec.description import ModelDescription

if TYPE_CHECKING:
    from slipstream.engine.process.core_client import CoreLink
    from slipstream.worker.ranks.fork_server import ForkedProcess, ForkServer

Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"

CORE_MODULE = "slipstream.engine.process.core_process"

MAX_FAST_DEATHS = 3
MAX_RESTART_PAUSE_S = 30.0

_SOCKET_PATH_BYTES = 103
"""Maximum bytes of a Unix socket's path on all systems: macOS has 104 with the final zero, Linux 108."""


def restart_pause(deaths: int, error: Exception) -> float | None:
    """Seconds to wait before the next start, after this number of deaths in a row, the last one by
    `error`; None: no further start."""
    if deaths > MAX_FAST_DEATHS or isinstance(error, ConfigError | ModelError):
        return None
    return min(2.0**deaths, MAX_RESTART_PAUSE_S) if deaths > 1 else 0.0


@dataclass(frozen=True, slots=True)
class CoreSource:
    """Source of links to a core; `connect` creates one. Request ids begin with `id_prefix`, so that
    several processes can use one core."""

    connect: Callable[[], Awaitable[CoreLink]]
    pause: Callable[[int, Exception], float | None] = restart_pause
    id_prefix: str = ""
    close: Callable[[], None] = lambda: None
    """Called when the last link was closed on purpose; another `connect` may follow."""


def resolved_config(args: EngineArgs, description: ModelDescription, ready: Ready) -> EngineConfig:
    """The configuration with which a core runs. Its memory limits are those of the core's own ledger."""
    config, ledger = resolve(args, description, ready.device), ready.ledger
    return config.with_memory_limits(ledger.num_blocks - 1, ledger.block_bytes, ledger.num_slots)


def socket_folder() -> OwnedFolder:
    """A folder for sockets, not yet created. ConfigError if its path is too long for a socket."""
    folder = OwnedFolder()
    if len(os.fsencode(folder.path + "/engine")) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the folder for temporary files, {tempfile.gettempdir()}, has too long a path for a Unix socket "
            f"({_SOCKET_PATH_BYTES} bytes with the socket's name); set TMPDIR to a shorter one"
        )
    return folder


async def start_process(
    path: str, forks: ForkServer | None = None, template: ForkServer | None = None
) -> Process:
    """Start a core's process, which connects to `path`. `forks`: the fork server for its ranks.
    `template`: the fork server for the core itself; its first fork waits until imports are done."""
    passed = [] if forks is None else [forks.fileno()]
    words = [f"ipc://{path}", *map(str, passed)]
    if template is not None:
        fork = partial(template.fork, words, passed=passed, environment=os.environ)
        return await asyncio.to_thread(fork)
    command = [sys.executable, "-m", CORE_MODULE, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed)


def wait_or_kill(process: Process, seconds: float) -> int:
    """Wait for a process to end, and kill it after `seconds`. Returns its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
