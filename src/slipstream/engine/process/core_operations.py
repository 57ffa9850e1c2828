"""Operations of a front end on an engine core apart from requests: state, sleep, adapters, cache events."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.costs.hardware import is_stopped
from slipstream.engine.process.core_client import CoreClient
from slipstream.engine.process.core_messages import GetStats, Ready, Stats, ToChild, ToParent
from slipstream.engine.process.operation_messages import (
    AdaptersChanged,
    Answered,
    CacheEvents,
    Informed,
    KnowAdapters,
    KnowVersions,
    LoadAdapter,
    Sleep,
    UnloadAdapter,
    WakeUp,
    WatchCache,
)
from slipstream.errors import EngineDownError, as_error
from slipstream.messages.stats import EngineStats
from slipstream.messages.weights import FIRST_VERSION
from slipstream.params.lora_request import LoRARequest

T = TypeVar("T")


STALL_S = 60.0
"""Seconds after which health checks fail if the engine was silent, or made no step while requests
wait. A single step that takes longer looks the same."""


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    reason: str = ""


class CoreOperations:
    """Operations on the core linked by `_core`, such as statistics. `core_answered` receives their
    answers."""

    def __init__(self, core: CoreClient) -> None:
        self._core = core
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._waiters: dict[int, asyncio.Future[Any]] = {}  # by ticket
        self._tickets = itertools.count()
        self.is_sleeping = False
        # adapters served by name, as the core reports them
        self.adapters: dict[str, LoRARequest] = {}
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0
        self._processes: tuple[int, ...] = ()
        self._cache_watchers: list[Callable[[CacheEvents], None]] = []
        self.weight_version = FIRST_VERSION  # version of the weights of current outputs
        self.used_versions = {FIRST_VERSION}  # also those of cores that have died

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is up and ready."""
        return self._core.is_alive

    @property
    def num_restarts(self) -> int:
        return self._core.num_restarts

    def health(self) -> Health:
        if not self.is_alive:
            return Health(False, self._core.down_reason or "the engine process is down")
        if self.is_sleeping:
            return Health(True)  # a wake-up is silent as long as a start
        for i, pid in enumerate(self._processes):
            if is_stopped(pid):
                whose = f"the engine's rank {i - 1}" if i else "the engine process"
                return Health(
                    False, f"{whose} is stopped, and goes on with SIGCONT (process {pid})"
                )
        now = time.monotonic()
        silence, stall = now - self._last_heard, now - self._last_progress
        if silence > STALL_S:
            return Health(False, f"the engine process has said nothing for {silence:.0f} s")
        if stall > STALL_S:
            return Health(False, f"requests wait and the engine made no step for {stall:.0f} s")
        return Health(True)

    async def stats(self) -> EngineStats:
        """Statistics of the engine, taken between two steps. EngineDownError if it is down."""
        waiter = self._ask(GetStats(), self._stats_waiters)
        try:
            return await waiter
        finally:  # don't keep the waiter of a caller that gave up, since a hung core never answers
            if waiter in self._stats_waiters:
                self._stats_waiters.remove(waiter)

    async def sleep(self, level: int = 1) -> None:
        """Put the engine to sleep (`LLM.sleep`) when all clients' requests have ended. New requests raise EngineAsleepError
        from now on."""
        await self._ask_for(lambda ticket: Sleep(level, ticket))

    async def wake_up(self, *, soon: bool = False, low_priority: bool = False) -> None:
        """Undo `sleep`: restore weights and cache. If that fails, the core counts as dead and is
        restarted. `soon`, `low_priority`: see `WakeUp`."""
        await self._ask_for(lambda ticket: WakeUp(ticket, soon, low_priority))

    async def start_again(self) -> None:
        """Start the engine process after `shutdown` or its death, with the same tokenizer. Raises the same errors as
        `start`."""
        await self._core.start_again()

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the engine's processes, the core's first."""
        return self._processes

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Serve the adapter in the folder `path` under this name, listed in `adapters`. AdapterError if it is invalid.
        `load_inplace`: it replaces the adapter of that name between two steps, also for running requests."""
        await self._ask_for(lambda ticket: LoadAdapter(name, path, ticket, load_inplace))

    async def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter. Running requests finish with it. AdapterError if there is none of that name."""
        await self._ask_for(lambda ticket: UnloadAdapter(name, ticket))

    def watch_cache(self, watcher: Callable[[CacheEvents], None]) -> Callable[[], None]:
        """Report to `watcher` which blocks the prefix cache holds: first all of them (again after a
        restart), then changes. Returns a function that stops it."""
        self._cache_watchers.append(watcher)
        self._watch_cache()

        def end() -> None:
            self._cache_watchers.remove(watcher)
            if not self._cache_watchers:
                self._watch_cache()

        return end

    def _watch_cache(self) -> None:
        self._send(WatchCache(on=bool(self._cache_watchers)))

    def _send(self, message: ToChild) -> None:
        """Send the core a message. It is dropped while the core is down."""
        if self._core.link is not None:
            self._core.link.send(message)

    async def _ask_for(self, message: Callable[[int], ToChild]) -> Any:
        ticket, asked = next(self._tickets), list[asyncio.Future[Any]]()
        self._waiters[ticket] = waiter = self._ask(message(ticket), asked)
        return await waiter

    def _ask(self, message: ToChild, waiters: list[asyncio.Future[T]]) -> asyncio.Future[T]:
        """Send a message and return the future of its answer, which is stored in `waiters` until
        then."""
        core = self._core
        if core.link is None:
            raise EngineDownError(core.down_reason or "the engine process is down")
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        core.link.send(message)
        return waiter

    def serves(self, ready: Ready) -> None:
        """Store the data that a started or woken core reports."""
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps, self.is_sleeping, self._processes = 0, False, ready.processes
        self.adapters = {request.name: request for request in ready.adapters}
        self.weight_version = ready.weight_version
        if self.used_versions.difference(ready.used_versions):
            self._send(KnowVersions([*self.used_versions]))  # must precede any request
        self.used_versions.update(ready.used_versions)
        self._send(KnowAdapters(0))
        if self._cache_watchers:
            self._watch_cache()

    def core_answered(self, message: ToParent) -> None:
        if isinstance(message, Stats):
            waiters, self._stats_waiters = self._stats_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message.stats)
        elif isinstance(message, Answered):
            answered = self._waiters.pop(message.ticket)
            if answered.done():  # its caller has gone
                return
            if message.error:
                answered.set_exception(as_error(message.kind, message.error, message.field))
            else:
                answered.set_result(None)
        elif isinstance(message, Informed):
            answered = self._waiters.pop(message.ticket)
            if not answered.done():
                answered.set_result(message.info)
        elif isinstance(message, CacheEvents):
            for watcher in tuple(self._cache_watchers):
                watcher(message)
        elif isinstance(message, AdaptersChanged):
            self.adapters = {request.name: request for request in message.adapters}
            self._send(KnowAdapters(message.version))

    def fail_questions(self, error: Exception) -> None:
        """Fail all calls that wait for an answer of the core, which has died."""
        asked: list[asyncio.Future[Any]] = [*self._stats_waiters, *self._waiters.values()]
        self._stats_waiters, self._waiters = [], {}
        for waiter in asked:
            if not waiter.done():
                waiter.set_exception(error)
