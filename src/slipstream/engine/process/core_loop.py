"""The main loop of an engine core in its own process.

`core_messages.py` has the messages. Front ends have a pair of sockets of their own, by a number: the parent attaches them.
They send what the parent sends, but for Start, Attach, Detach and Stop. They get Ready, AdaptersChanged, and the outputs of
their own requests in one message a step. Ids of requests are unique over all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from slipstream.config import EngineArgs
from slipstream.engine.process.cache_watchers import CacheWatchers
from slipstream.engine.process.core_messages import (
    Abort,
    Add,
    AddBeams,
    AddTexts,
    Attach,
    Detach,
    GetStats,
    OfWeights,
    Outputs,
    Ready,
    Rejected,
    Start,
    Stats,
    Stop,
    ToChild,
    ToParent,
)
from slipstream.engine.process.operation_messages import (
    Answered,
    KnowAdapters,
    LoadAdapter,
    Sleep,
    UnloadAdapter,
    WakeUp,
    WatchCache,
)
from slipstream.engine.process.pausing import GenerationPauses, aborted, requests_of
from slipstream.engine.process.served_adapters import ServedAdapters
from slipstream.engine.process.sleeping import Sleeper
from slipstream.errors import EngineAsleepError, EngineError, SlipstreamError
from slipstream.messages.outputs import EngineOutput
from slipstream.messages.start import Failed, Phase
from slipstream.messages.stats import EngineStats

if TYPE_CHECKING:
    import zmq

    from slipstream.engine.engine_core import EngineCore


WARM_S = 12.0
"""Seconds of a start that are spent on preparing sizes of steps at most. They suffice for some 200
sizes of an 8B model on an H200. The others follow whenever there is nothing to do."""

HEARTBEAT_S = 1.0
"""Seconds between two reports of the child, with and without work. A child that is silent hangs."""

TEND_MS = 2
"""Milliseconds between two looks at what has been stored, while there are no requests."""

PARENT = 0
"""Number of the process that started the child, as a client."""


class CoreProcess:
    """The child's main loop. It takes messages between steps, and sleeps when there is no work."""

    def __init__(self, address: str) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by number
        self._owners: dict[str, int] = {}  # of requests that are not the parent's
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)
        self._core: EngineCore | None = None  # while it is awake
        self._sleeper = Sleeper(self._send)
        self._adapters = ServedAdapters(self._send)
        self._pauses = GenerationPauses(self._send, self._send_all, self._deliver)
        self._cache_watchers = CacheWatchers(self._send)
        # blocks go on to the tiers below the device's cache while there are no requests
        self._tending = False
        self._last_report = time.monotonic()
        self._connect(PARENT, address)

    def _connect(self, number: int, address: str) -> None:
        zmq, socket = self._zmq, self._context.socket(self._zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 2000)
        if number != PARENT:
            # it listens already; if it has died meanwhile, no process will
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        self._sockets[number] = socket
        self._poller.register(socket, zmq.POLLIN)

    def run(self) -> int:
        """Serve until a Stop message. Returns the exit code: 0, or 1 after a failure that was reported."""
        try:
            start = self._receive(PARENT)
            if not isinstance(start, Start):
                raise RuntimeError(f"the first message must be Start, got {type(start).__name__}")
            from slipstream.engine.asleep import build_core

            self._core = build_core(start.args, progress=lambda phase: self._send(Phase(phase)))
            if (lora := self._core.config.lora) is not None:
                self._adapters.begin(lora.requests)
            self._send(Phase("graphs"))
            self._prepare()
            while self._serve() and self._sleep(start.args):
                pass
            return 0
        except Exception as error:
            failed = Failed.of(error)
            self._send(failed)
            if failed.field is None and not isinstance(error, SlipstreamError):
                import traceback

                traceback.print_exc()
            return 1
        finally:
            if self._core is not None:
                self._core.shutdown()
            self._context.destroy()

    @property
    def _running(self) -> EngineCore:
        """The core, which does not sleep now."""
        if self._core is None:
            raise EngineError("the engine core sleeps")
        return self._core

    def _prepare(self, *, soon: bool = False) -> None:
        """Prepare a new core for requests, then tell all clients that they may send some. `soon`: see `WakeUp`; this
        process has compiled what the core needs."""
        core = self._running
        if not soon:
            core.warm(WARM_S)
        executor = core.executor
        self._ready = Ready(
            core.config.device.info, core.ledger, executor.phases, executor.tiles, executor.canary
        )
        self._ready.adapters = self._adapters.all
        self._ready.weight_version = executor.weight_state.version
        self._ready.processes = (os.getpid(), *executor.processes)
        self._send_all(self._ready)
        self._cache_watchers.begin(core)

    def _serve(self) -> bool:
        """Make steps until it is to sleep, or (False) to stop."""
        core = self._running
        # A step leaves no cycles of garbage. Python's search for them would stop a step for 50 ms, so it is made when idle.
        gc.freeze()
        gc.disable()
        worked = False
        while core.has_work or not self._sleeper.to_sleep:
            if worked and not core.has_work:
                gc.collect()
                worked = False
            self._tending = not core.has_work and core.tend()
            if not core.has_work and not self._poller.poll(0):
                core.executor.capture_next()  # sizes of steps that were not prepared at the start
            if not self._take_messages():
                return False
            worked = worked or core.has_work
            if core.has_work and (core.can_step or not core.is_paused):
                self._deliver(core.step())
                if self._cache_watchers:
                    self._cache_watchers.tell(core)
            if self._pauses.waits:
                self._pauses.begin_if_idle(core)
            self._report()
        return True

    def _sleep(self, args: EngineArgs) -> bool:
        """Sleep at the level of the request. Returns True after a WakeUp, False after a Stop."""
        sleeper, core = self._sleeper, self._running
        self._core = None
        asleep, asked = sleeper.fall_asleep(core, args)
        del core  # only now can its memory be found unused
        asleep.free()
        self._send_all(self._stats())
        for number, message in asked:
            self._send(Answered(message.ticket), number)
        while not sleeper.to_wake:
            if not self._take_messages():
                return False
            self._report()
        self._core = sleeper.wake(asleep)
        self._prepare(soon=any(question.soon for _, question in sleeper.to_wake))
        sleeper.answer_woken()
        return True

    def _take_messages(self) -> bool:
        """Take all messages that wait. Returns False if the core is to stop. All are taken before a
        step, so that a cancelled request frees its blocks first."""
        while ready := dict(self._poller.poll(self._patience_ms())):
            for number in [n for n, socket in self._sockets.items() if socket in ready]:
                if number not in self._sockets:
                    continue  # detached by the parent's message
                message = self._receive(number)
                if isinstance(message, Stop):
                    return False
                self._handle(message, number)
        return True

    def _report(self) -> None:
        """Send a heartbeat when it is due, and answer changes of adapters."""
        if self._adapters.changes:
            self._adapters.answer()
        if (now := time.monotonic()) - self._last_report >= HEARTBEAT_S:
            self._send_all(self._stats())
            self._last_report = now

    def _stats(self, *, asked: bool = False) -> Stats:
        return Stats(
            self._core.stats(experts=asked) if self._core else EngineStats(is_sleeping=True), asked
        )

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Send each process what belongs to its requests."""
        by_owner = {PARENT: outputs}
        if self._owners:
            by_owner = defaultdict(list)
            for output in outputs:
                find = self._owners.get if output.finish_reason is None else self._owners.pop
                by_owner[find(output.request_id, PARENT)].append(output)
        for number, some in by_owner.items():
            if some:
                self._send(Outputs.of(some), number)

    def _patience_ms(self) -> int:
        """Milliseconds to wait for a message: 0 while steps can be made, else until the next
        wake-up or heartbeat."""
        core = self._core
        sleeper = self._sleeper
        if sleeper.to_wake or (sleeper.to_sleep and core is not None and not core.has_work):
            return 0
        if core is None or not core.has_work:
            return TEND_MS if self._tending else int(HEARTBEAT_S * 1000)
        if core.can_step:
            return 0
        wakeup = core.next_wakeup()
        if wakeup is None:
            return 100
        return max(0, min(1000, int((wakeup - time.monotonic()) * 1000) + 1))

    def _handle(self, message: ToChild, number: int) -> None:
        core = self._core
        if isinstance(message, Add | AddTexts | AddBeams):
            added = requests_of(message)
            if number != PARENT:
                self._owners.update((request.request_id, number) for request in added)
            if self._pauses.queues:
                self._pauses.queued.append((message, number))
                return
            try:
                awake = self._awake()
                if isinstance(message, Add):
                    awake.add(message.requests)
                elif isinstance(message, AddBeams):
                    awake.add_beams(message.request)
                else:
                    awake.add_texts(message.request)
            except Exception as error:
                ids = [r.request_id for r in added]
                if core is not None:
                    core.abort(ids)
                self._forget(ids)
                self._send(
                    Rejected(ids, type(error).__name__, str(error), getattr(error, "field", None)),
                    number,
                )
        elif isinstance(message, Abort):
            if core is not None:
                self._deliver(core.abort(message.request_ids))
                self._deliver(aborted(self._pauses.forget(set(message.request_ids))))
            self._forget(message.request_ids)
        elif isinstance(message, GetStats):
            self._send(self._stats(asked=True), number)
        elif isinstance(message, Sleep):
            self._sleeper.take_sleep(core, message, number)
        elif isinstance(message, WakeUp):
            self._sleeper.take_wake_up(core, message, number)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            try:
                changed = self._adapters.change(self._awake(), message)
                self._ready.adapters = changed.adapters
                self._send_all(changed)
                self._adapters.answer_later(message.ticket, number)
            except SlipstreamError as error:
                self._send(
                    Answered(message.ticket, error.message, type(error).__name__, error.field),
                    number,
                )
        elif isinstance(message, OfWeights):
            self._change_weights(message, number)
        elif isinstance(message, KnowAdapters):
            self._adapters.know(number, message.version)
        elif isinstance(message, WatchCache):
            self._cache_watchers.watch(core, number, on=message.on)
        elif isinstance(message, Attach):
            self._connect(message.number, f"ipc://{message.path}")
            self._send(self._ready, message.number)
            self._send(self._stats(), message.number)
        elif isinstance(message, Detach) and message.number in self._sockets:
            socket = self._sockets.pop(message.number)
            self._cache_watchers.forget(message.number)
            self._adapters.forget(message.number)
            self._poller.unregister(socket)
            socket.close(linger=0)
            ids = [name for name, owner in self._owners.items() if owner == message.number]
            if core is not None:
                core.abort(ids)
            self._pauses.forget(set(), message.number)
            self._forget(ids)

    def _change_weights(self, message: OfWeights, number: int) -> None:
        try:
            core = self._awake()
        except SlipstreamError as error:
            told = Answered(message.ticket, error.message, type(error).__name__, error.field)
            self._send(told, number)
            return
        version = self._ready.weight_version
        for queued, owner in self._pauses.handle(core, message, number):
            self._handle(queued, owner)
        self._ready.weight_version = core.executor.weight_state.version
        if version != self._ready.weight_version:
            self._cache_watchers.begin(core)  # prefixes begin with another key

    def _awake(self) -> EngineCore:
        """The core, if it takes requests. EngineAsleepError otherwise."""
        if self._core is None or self._sleeper.to_sleep:
            raise EngineAsleepError("the model sleeps; POST /wake_up wakes it")
        return self._core

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _receive(self, number: int) -> ToChild:
        message: ToChild = self._decoder.decode(self._sockets[number].recv())
        return message

    def _send(self, message: ToParent, number: int = PARENT) -> None:
        """A queue has no bound. What is sent to one who has died is lost: a Detach is on its way."""
        if number not in self._sockets:
            return  # detached meanwhile
        with contextlib.suppress(self._zmq.Again):
            self._sockets[number].send(self._encoder.encode(message), self._zmq.NOBLOCK)

    def _send_all(self, message: ToParent) -> None:
        for number in self._sockets:
            self._send(message, number)
