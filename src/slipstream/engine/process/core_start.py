"""A core's start: where its socket is, when it is started again, its settings once it is ready."""

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
"""The longest path of a Unix socket that every system takes: macOS has 104 bytes with the final zero, Linux 108."""


def restart_pause(deaths: int, error: Exception) -> float | None:
    """Seconds to wait before the next start, after this number of deaths in a row, the last by
    `error`; None: no further start."""
    if deaths > MAX_FAST_DEATHS or isinstance(error, ConfigError | ModelError):
        return None
    return min(2.0**deaths, MAX_RESTART_PAUSE_S) if deaths > 1 else 0.0


@dataclass(frozen=True, slots=True)
class CoreSource:
    """Source of links to a core; `connect` makes one. All ids of requests begin with `id_prefix`, so that several
    processes can use one core."""

    connect: Callable[[], Awaitable[CoreLink]]
    pause: Callable[[int, Exception], float | None] = restart_pause
    id_prefix: str = ""
    close: Callable[[], None] = lambda: None
    """Called when the last link has ended on purpose; another `connect` may follow."""


def resolved_config(args: EngineArgs, description: ModelDescription, ready: Ready) -> EngineConfig:
    """Configuration that a core runs with. Its memory limits are those of the core's own ledger."""
    config, ledger = resolve(args, description, ready.device), ready.ledger
    return config.with_memory_limits(ledger.num_blocks - 1, ledger.block_bytes, ledger.num_slots)


def socket_folder() -> OwnedFolder:
    """A folder for sockets, which the caller makes. ConfigError if its path is too long for a socket in it."""
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
    """A core's process, which connects to `path`. `forks`: the fork server for its ranks. `template`: the one that it is
    a fork of; the first fork waits until that has imported all."""
    passed = [] if forks is None else [forks.fileno()]
    words = [f"ipc://{path}", *map(str, passed)]
    if template is not None:
        fork = partial(template.fork, words, passed=passed, environment=os.environ)
        return await asyncio.to_thread(fork)
    command = [sys.executable, "-m", CORE_MODULE, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed)


def wait_or_kill(process: Process, seconds: float) -> int:
    """Wait for a process to end, and kill it if it does not. Returns its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
