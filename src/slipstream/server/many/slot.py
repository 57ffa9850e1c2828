"""A served model among several, and its engine.

Its states:

    unloaded ──load──> loading ──> loaded ──unload──> unloading ──> asleep ──load──> loading

`asleep`: the engine's process, tokenizer and compiled code are kept, but not the weights. A model
whose process died, or was ended to free memory, is `unloaded`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from slipstream.config import EngineArgs, num_ranks
from slipstream.costs.memory import MemoryLedger
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.folder import settled
from slipstream.engine.process.child_source import CoreTemplate, child_source
from slipstream.errors import EngineDeadError
from slipstream.spec.description import ModelDescription

if TYPE_CHECKING:
    from starlette.routing import Route

    from slipstream.server.state import ServerState

State: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading", "asleep"]

_logger = logging.getLogger("slipstream.server")

GPU_PROCESS_BYTES = 768 * 2**20
"""GPU memory of an engine's process apart from its ledger, in bytes: the driver's context and
kernel code. Kept while it sleeps."""

CPU_PROCESS_BYTES = 64 * 2**20
"""Host memory of an engine's process on a CPU besides the model: the interpreter and its
modules."""

SLEEP_S = 30.0
"""Seconds in which an engine without requests must release its memory; otherwise its process is ended."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model to serve. `num_bytes`: its estimated memory; `keep_alive_s` may be infinite.

    `server`: server settings for this model alone, by their names in ServerSettings."""

    name: str
    args: EngineArgs
    description: ModelDescription
    max_model_len: int
    num_bytes: int
    keep_alive_s: float
    is_cuda: bool = False  # its device
    server: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_load_at_low_priority(self) -> bool:
        """Whether loading starts no process, and no thread of tiers, that must run fast afterwards (`at_low_priority`)."""
        args = self.args
        alone = num_ranks(args) == 1 and args.cpu_layers is None
        return not self.is_cuda and alone and not (args.kv_host_bytes or args.kv_disk_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, and how it was given on the command line."""
        return tuple(dict.fromkeys((self.name, self.args.model)))


class Slot:
    """A served model and its engine, if one is started. `users`: number of requests that use it or
    are about to. `template`: the process from which its engine is forked."""

    def __init__(self, model: ServedModel, template: CoreTemplate | None = None) -> None:
        self.model, self._template = model, template
        self.state: State = "unloaded"
        self.engine: AsyncLLM | None = None  # made by the first load
        self.server_state: ServerState | None = None
        self.routes: Sequence[Route] = ()
        # memory when loaded: estimated, then by the engine's own ledger
        self.need_bytes = model.num_bytes
        self.held_bytes = 0
        self.users = 0
        # accepts no more requests, since another model waits for its memory
        self.is_closing = False
        self.goes_when_idle = False  # unload was requested
        self.waiters: list[asyncio.Future[None]] = []
        self.waits_since = 0.0
        self.last_used = 0.0
        self.keep_alive_s = model.keep_alive_s
        self.expires_at: float | None = None  # time.monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self.low_priority = False  # load at a low priority (see `WakeUp`)
        self.failure = ""  # error of the last load
        self.num_loads = self.num_unloads = self.num_failures = 0
        self.load_s = 0.0  # seconds of all loads together
        self.last_load_s = 0.0

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def is_up(self) -> bool:
        """Whether the model is loaded and its process runs."""
        return self.state == "loaded" and self.engine is not None and self.engine.is_alive

    def note_death(self) -> None:
        """Count the process's memory as free if it has died."""
        if (
            self.state in ("loaded", "asleep")
            and self.engine is not None
            and not self.engine.is_alive
        ):
            self.failure = f"its engine died: {self.engine.health().reason}"
            self.state, self.held_bytes, self.is_closing = "unloaded", 0, False
            self.keep(None)

    async def load(self) -> None:
        """Load the model. A process that dies meanwhile is restarted once. Raises the same errors
        as `AsyncLLM.start`."""
        begin = time.monotonic()
        try:
            await self._load()
        except EngineDeadError:
            await self._load()
        assert self.engine is not None
        self.need_bytes = needed_bytes(self.engine.ledger, is_cuda=_is_cuda(self.engine))
        self.last_load_s = time.monotonic() - begin
        self.load_s += self.last_load_s

    async def _load(self) -> None:
        args = settled(self.model.args)
        if self.engine is None:
            source = child_source(
                args, lambda deaths, error: None, self._template, lambda: self.low_priority
            )
            self.engine = await AsyncLLM.start(args, source=source)
        elif self.engine.is_alive and self.engine.is_sleeping:
            await self.engine.wake_up(soon=True, low_priority=self.low_priority)
        else:
            await self.engine.start_again()

    async def unload(self) -> None:
        """Release the weights and the cache. The rest is counted in `held_bytes`."""
        assert self.engine is not None
        try:
            async with asyncio.timeout(SLEEP_S):
                await self.engine.sleep(2)
            self.held_bytes = min(self.held_bytes, asleep_bytes(self.engine))
        except (EngineDeadError, TimeoutError):
            await self.end()

    async def end(self) -> None:
        """Stop the engine's process, if there is one."""
        if self.engine is not None:
            await self.engine.shutdown()
        self.held_bytes = 0

    def keep(self, until: float | None) -> None:
        """Set when the model expires; None: not by time."""
        self.expires_at = until
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def facts(self) -> dict[str, Any]:
        """The state as JSON, for `slipstream ps` and /status.json."""
        self.note_death()
        left = None if self.expires_at is None else max(0.0, self.expires_at - time.monotonic())
        return {
            "name": self.name,
            "state": self.state,
            "memory_bytes": self.held_bytes,
            "needs_bytes": self.need_bytes,
            "num_requests": self.users,
            "num_waiting": len(self.waiters),
            "expires_at": None
            if left is None or math.isinf(left)
            else round(time.time() + left, 3),
            "failure": self.failure or None,
        }


def needed_bytes(ledger: MemoryLedger, *, is_cuda: bool) -> int:
    """Device memory of a loaded model, in bytes."""
    return ledger.used_bytes + (GPU_PROCESS_BYTES if is_cuda else CPU_PROCESS_BYTES)


def _is_cuda(engine: AsyncLLM) -> bool:
    return engine.config.device.info.is_cuda


def asleep_bytes(engine: AsyncLLM) -> int:
    """Device memory of a sleeping engine, in bytes."""
    if _is_cuda(engine):
        return GPU_PROCESS_BYTES
    return sum(map(_resident_bytes, engine.processes))


def _resident_bytes(pid: int) -> int:
    """A process's own resident memory in bytes, including its share of memory shared between forks;
    file pages don't count."""
    found = _proc_bytes(pid, "smaps_rollup", "Pss_Anon:")
    if found is None and (found := _proc_bytes(pid, "status", "RssAnon:")) is not None:
        _warn_of_whole_pages()
    return found or 0


def _proc_bytes(pid: int, file: str, key: str) -> int | None:
    """A value of a process's file in /proc, in bytes; None if it is missing or unreadable."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(key)), None)


@cache
def _warn_of_whole_pages() -> None:
    _logger.warning(
        "this system does not tell what forks share (Pss_Anon in smaps_rollup): sleeping models count what they share once each"
    )
