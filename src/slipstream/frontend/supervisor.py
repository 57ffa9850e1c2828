"""The process that the user started: it binds the port, starts the engine and the front ends, and replaces what dies.

1. A front end that dies is replaced. The engine cancels its requests, and frees its part of the limits. One that dies too
   often (`deaths`) is restarted after the longest pause while another serves. If none does, the supervisor ends with an
   error.
2. An engine that dies is started again by the rules of `core_client`. Front ends get a message, and wait for it.
3. SIGTERM or SIGINT: the front ends drain (`server.run`). When they have ended, the engine does. A second signal does not wait.
4. If the supervisor dies, all its processes end, since their standard inputs close.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from slipstream.base.deaths import MAX_PAUSE_S, WINDOW_S, Deaths, describe_exit, stdin_of
from slipstream.config import EngineArgs, EngineConfig
from slipstream.costs.memory import MemoryLedger
from slipstream.engine.folder import settled
from slipstream.engine.process.child_source import child_source
from slipstream.engine.process.core_client import CoreClient
from slipstream.engine.process.core_messages import Attach, Detach, Ready, ToParent
from slipstream.engine.process.core_start import resolved_config, socket_folder, wait_or_kill
from slipstream.errors import ConfigError, EngineError, SlipstreamError, as_error
from slipstream.frontend.control import (
    Channel,
    Drain,
    EngineDied,
    FrontEndFailed,
    FrontEndServing,
    FrontEndSetup,
    GetCounts,
    GetTotals,
    HaveCounts,
    Listen,
    ToSupervisor,
    Totals,
)
from slipstream.hub import resolve_model
from slipstream.server.http.load import ServerLoad
from slipstream.server.http.rates import forget_front_end
from slipstream.server.operations.metrics import Metrics
from slipstream.server.run import stop_signals
from slipstream.server.state import ServerSettings
from slipstream.spec.description import read_spec

_COUNTS_TIMEOUT_S = 1.0  # of a scrape: a front end that is slower is counted as it was
_GRACE_S = 10.0  # after the drain timeout, for answers to be read

_logger = logging.getLogger("slipstream.server")


class FrontEndHandle:
    """A front end's process, as the supervisor sees it."""

    def __init__(
        self,
        number: int,
        slot: int,
        process: subprocess.Popen[bytes],
        channel: Channel[ToSupervisor],
    ) -> None:
        self.number, self.slot, self.process, self.channel = number, slot, process, channel
        self.is_serving = False
        self.failed: SlipstreamError | None = None
        self.counts = Metrics("").counts()
        self._waiters: list[asyncio.Future[None]] = []

    def took_counts(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def ask_counts(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.channel.send(GetCounts())
        return waiter


class SharedCore:
    """One engine process. Front ends that listen are attached when it is ready."""

    def __init__(self, index: int, args: EngineArgs, tell: Callable[[EngineDied], None]) -> None:
        self.args, self.index, self._send_to_all = args, index, tell
        self.description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
        self._source = child_source(args)
        self.client = CoreClient(self, self._source)
        self._paths: dict[int, str] = {}  # where front ends listen, by their numbers
        self._stays_down: EngineDied | None = None
        self.ready: Ready

    async def start(self, progress: Callable[[str], None]) -> None:
        await self.client.adopt(await self._source.connect(), progress)
        self.client.watch()

    def listen(self, front_end: FrontEndHandle, path: str) -> None:
        if self._stays_down is not None:
            front_end.channel.send(self._stays_down)
            return
        self.forget(front_end)  # it may have given up another connection
        self._paths[front_end.number] = path
        self._send(Attach(front_end.number, path))

    def forget(self, front_end: FrontEndHandle) -> None:
        if self._paths.pop(front_end.number, None) is not None:
            self._send(Detach(front_end.number))

    def _send(self, message: Attach | Detach) -> None:
        if self.client.link is not None:
            self.client.link.send(message)

    def core_ready(self, ready: Ready) -> None:
        self.ready = ready
        for number, path in self._paths.items():
            self._send(Attach(number, path))

    def core_said(self, message: ToParent) -> None:
        """Handle a message of the engine. Only `Ready` matters here: a front end receives its own
        heartbeats."""
        if isinstance(message, Ready):  # it woke up
            self.ready = message

    def core_died(self, reason: str, *, final: bool) -> None:
        self._paths.clear()
        died = EngineDied(self.index, reason, final)
        self._stays_down = died if final else None
        self._send_to_all(died)


class Supervisor:
    """Supervisor of a server's processes. `engines[0]` serves. A second one, or the first if
    `shortens`, shortens prompts."""

    def __init__(
        self,
        engines: Sequence[EngineArgs],
        settings: ServerSettings,
        listener: socket.socket,
        num_front_ends: int,
        *,
        shortens: bool = False,
    ) -> None:
        if settings.grpc_port == 0:
            raise ConfigError(
                "several front ends share one port for gRPC; name it", field="grpc_port"
            )
        engines = [settled(args) for args in engines]
        self._engines, self._shortens = engines, shortens
        self._listener, self._num_front_ends = listener, num_front_ends
        self._cores = [
            SharedCore(index, args, self._send_to_all) for index, args in enumerate(engines)
        ]
        self._front_ends: dict[int, FrontEndHandle] = {}  # by slot
        self._numbers = itertools.count(1)
        self._ended = Metrics("")  # counts of front ends that have ended
        self._all_serve = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = socket_folder()
        self._settings = dataclasses.replace(settings, shared_dir=self._folder.path)
        self._load_fd = _shared_memory(ServerLoad.size(num_front_ends))
        self._load = mmap.mmap(self._load_fd, 0)
        listener.setblocking(False)

    # --- What a banner says -------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._engines[0].model

    @property
    def config(self) -> EngineConfig:
        core = self._cores[0]
        return resolved_config(core.args, core.description, core.ready)

    @property
    def ledger(self) -> MemoryLedger:
        return self._cores[0].ready.ledger

    @property
    def tiles(self) -> str:
        return self._cores[0].ready.tiles

    # --- From the start to the end ------------------------------------------------------------------------------------

    async def run(self, *, progress: Callable[[str], None], on_ready: Callable[[], None]) -> None:
        """Serve until a signal. Errors of the start are raised."""
        try:
            with contextlib.ExitStack() as signals:
                async with asyncio.TaskGroup() as group:
                    for slot in range(self._num_front_ends):
                        group.create_task(self._keep(slot))
                    for core in self._cores:
                        await core.start(progress)
                    progress("front ends")
                    await self._all_serve.wait()
                    on_ready()
                    signals.enter_context(stop_signals(self._stop))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._listener.close()
            await asyncio.gather(*(core.client.stop() for core in self._cores))
            self._folder.remove()
            os.close(self._load_fd)

    def _stop(self) -> None:
        if not self._stopping.is_set():
            patience = self._settings.drain_timeout_s + _GRACE_S
            asyncio.get_running_loop().call_later(min(patience, 1e6), self._kill)
        self._stopping.set()
        for front_end in self._front_ends.values():
            if front_end.is_serving:
                front_end.channel.send(Drain())
            else:
                front_end.process.kill()

    def _kill(self) -> None:
        for front_end in self._front_ends.values():
            front_end.process.kill()

    # --- Front ends ---------------------------------------------------------------------------------------------------

    async def _keep(self, slot: int) -> None:
        """Keep a front end running in its slot. Raises errors of the first start, and an error if it dies too often."""
        deaths = Deaths()
        while not self._stopping.is_set():
            served, error = await self._live(slot)
            if self._stopping.is_set():
                return
            if not self._all_serve.is_set():
                raise error
            self._ended.num_front_end_deaths += served
            deaths.add()
            if deaths.too_many and not any(f.is_serving for f in self._front_ends.values()):
                raise EngineError(
                    f"front end {slot + 1} died too often within {WINDOW_S:g} s, and no other serves; the last time: {error}"
                )
            pause_s = MAX_PAUSE_S if deaths.too_many else deaths.pause_s
            then = f"in {pause_s:g} s" if pause_s else "now"
            _logger.error("front end %d ended and will be replaced: %s (%s)", slot + 1, error, then)
            if pause_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()

    async def _live(self, slot: int) -> tuple[bool, SlipstreamError]:
        """Start a front end and wait for its end. Returns whether it served, and how it ended."""
        try:
            front_end = await self._spawn(slot)
        except OSError as error:
            return False, EngineError(f"front end {slot + 1} cannot be started: {error}")
        try:
            while (message := await front_end.channel.receive()) is not None:
                self._take(front_end, message)
            code = await asyncio.to_thread(wait_or_kill, front_end.process, 5.0)
        finally:
            self._mark_dead(front_end)
        return front_end.is_serving, front_end.failed or EngineError(
            f"front end {slot + 1} {describe_exit(code)}"
        )

    async def _spawn(self, slot: int) -> FrontEndHandle:
        ours, theirs = socket.socketpair()
        with theirs:
            shared = (theirs.fileno(), self._listener.fileno(), self._load_fd)
            command = [
                sys.executable,
                "-m",
                "slipstream.frontend.process",
                *map(str, shared),
                self._folder.path,
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared)
        try:
            self._folder.make()  # after the process, which removes it if we are killed
            channel: Channel[ToSupervisor] = await Channel.open(ours, ToSupervisor)
        except BaseException:
            process.kill()
            process.wait()
            raise
        number = next(self._numbers)
        channel.send(FrontEndSetup(number, slot, self._engines, self._settings, self._shortens))
        front_end = self._front_ends[slot] = FrontEndHandle(number, slot, process, channel)
        if self._stopping.is_set():
            process.kill()  # the signal came before the process could get the message
        return front_end

    def _take(self, front_end: FrontEndHandle, message: ToSupervisor) -> None:
        match message:
            case Listen():
                self._cores[message.engine].listen(front_end, message.path)
            case FrontEndServing():
                front_end.is_serving = True
                serving = [f for f in self._front_ends.values() if f.is_serving]
                if len(serving) == self._num_front_ends:
                    self._all_serve.set()
            case FrontEndFailed():
                front_end.failed = as_error(message.error, message.message, message.field)
            case HaveCounts():
                front_end.counts = message.counts
                front_end.took_counts()
            case GetTotals():
                front_end.counts = message.counts
                task = asyncio.create_task(self._add_up(front_end))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _mark_dead(self, front_end: FrontEndHandle) -> None:
        """Handle the end of a front end's process: its requests are cancelled, its share of the limits is freed, and
        its counts are kept."""
        front_end.process.kill()  # nothing, if it has ended
        front_end.process.wait()
        stdin_of(front_end.process).close()
        front_end.channel.close()
        del self._front_ends[front_end.slot]
        ServerLoad(memoryview(self._load), front_end.slot).clear()
        forget_front_end(self._folder.path, front_end.slot)
        self._ended.add(front_end.counts)
        front_end.took_counts()
        for core in self._cores:
            core.forget(front_end)

    async def _add_up(self, asker: FrontEndHandle) -> None:
        others = [f for f in self._front_ends.values() if f.is_serving and f is not asker]
        if others:
            await asyncio.wait([f.ask_counts() for f in others], timeout=_COUNTS_TIMEOUT_S)
        asker.channel.send(
            Totals([self._ended.counts(), *(f.counts for f in self._front_ends.values())])
        )

    def _send_to_all(self, message: EngineDied) -> None:
        for front_end in self._front_ends.values():
            front_end.channel.send(message)


def _shared_memory(num_bytes: int) -> int:
    """File descriptor of unnamed memory that other processes can map."""
    if sys.platform == "linux":
        fd = os.memfd_create("slipstream")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
