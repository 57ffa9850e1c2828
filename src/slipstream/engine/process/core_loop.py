"""The main loop of an engine core in its own process.

`core_messages.py` defines the messages. Each front end has its own socket pair and a number, and is attached by the parent
process. Front ends may send all messages except Start, Attach, Detach and Stop. They receive Ready, AdaptersChanged, and the
outputs of their own requests, one message per step. Request ids are unique over all front ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from slipstream.base.priority import at_low_priority
from slipstream.engine.process.alignments import AudioAlignments
from slipstream.engine.process.cache_watchers import CacheWatchers
from slipstream.engine.process.core_messages import (
    Abort,
    Add,
    AddBeams,
    AddTexts,
    Attach,
    Detach,
    GetStats,
    Outputs,
    Ready,
    Rejected,
    Start,
    Stats,
    Stop,
    ToChild,
    ToParent,
)
from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import Answered
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
    from slipstream.worker.executor import ExecutorSource, ForkServer


WARM_S = 12.0
"""Maximum seconds spent at the start on preparing (capturing) step sizes: enough for about 200
sizes of an 8B model on an H200. The rest is prepared when idle."""

HEARTBEAT_S = 1.0
"""Interval of the core's heartbeats in seconds, with or without work. A silent core counts as hung."""

TEND_MS = 2
"""Milliseconds between two calls of `tend`, which stores blocks in lower tiers, while there are no requests."""

PARENT = 0
"""Client number of the process that started this one."""


class CoreProcess:
    """The core process's main loop. It reads messages between steps, and sleeps when there is no work."""

    def __init__(self, address: str, forks: ForkServer | None = None) -> None:
        import zmq

        self._zmq, self._forks = zmq, forks
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by client number
        self._owners: dict[str, int] = {}  # client number by request, except the parent's
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)
        self.core: EngineCore | None = None  # None while asleep
        self._sleeper = Sleeper(self.send)
        self._adapters = ServedAdapters(self.send)
        self.pauses = GenerationPauses(self.send, self.send_all, self._deliver)
        self.cache_watchers = CacheWatchers(self.send)
        self._operations: tuple[Operation, ...] = (
            *(self._sleeper, self._adapters, AudioAlignments(self.send)),
            *(self.pauses, self.cache_watchers),
        )
        self._tending = False  # blocks are moved to lower tiers while there are no requests
        self._last_report = time.monotonic()
        self._connect(PARENT, address)

    def _connect(self, number: int, address: str) -> None:
        zmq, socket = self._zmq, self._context.socket(self._zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 2000)
        if number != PARENT:
            # the peer listens already; if it died meanwhile, no process will listen again
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        self._sockets[number] = socket
        self._poller.register(socket, zmq.POLLIN)

    def run(self) -> int:
        """Serve until a Stop message. Returns the exit code: 0, or 1 after a reported failure."""
        try:
            start = self._receive(PARENT)
            if not isinstance(start, Start):
                raise RuntimeError(f"the first message must be Start, got {type(start).__name__}")
            from slipstream.engine.asleep import build_core
            from slipstream.worker.executor import ExecutorSource

            source = ExecutorSource(start.args, forks=self._forks)
            tell = lambda phase: self.send(Phase(phase))
            self.core = at_low_priority(build_core, source, tell, low_priority=start.low_priority)
            if (lora := self.core.config.lora) is not None:
                self._adapters.begin(lora.requests)
            self.send(Phase("graphs"))
            self._prepare()
            while self._serve() and self._sleep(source):
                pass
            return 0
        except Exception as error:
            failed = Failed.of(error)
            self.send(failed)
            if failed.field is None and not isinstance(error, SlipstreamError):
                import traceback

                traceback.print_exc()
            return 1
        finally:
            if self.core is not None:
                self.core.shutdown()
            self._context.destroy()

    @property
    def _running(self) -> EngineCore:
        """The core, which must be awake."""
        if self.core is None:
            raise EngineError("the engine core sleeps")
        return self.core

    def _prepare(self, *, soon: bool = False) -> None:
        """Prepare a new core for requests, then tell all clients that it is ready. `soon`: see
        `WakeUp`; this process has already compiled the core's kernels."""
        core = self._running
        if not soon:
            core.warm(WARM_S)
        executor = core.executor
        self.ready = Ready(
            core.config.device.info, core.ledger, executor.phases, executor.tiles, executor.canary
        )
        self.ready.adapters = self._adapters.all
        self.note_version()
        self.ready.processes = (os.getpid(), *executor.processes)
        self.send_all(self.ready)
        self.cache_watchers.begin(core)

    def note_version(self) -> None:
        """Record which weight versions run and ran before, for front ends that attach later."""
        state = self._running.executor.weight_state
        self.ready.weight_version, self.ready.used_versions = state.version, [*state.used]

    def _serve(self) -> bool:
        """Run steps until a message asks to sleep (True) or to stop (False)."""
        core = self._running
        # A step creates no reference cycles. A collection would delay a step by 50 ms, so it runs only when idle.
        gc.freeze()
        gc.disable()
        worked = False
        while core.has_work or not self._sleeper.to_sleep:
            if worked and not core.has_work:
                gc.collect()
                worked = False
            self._tending = not core.has_work and core.tend()
            if not core.has_work and not self._poller.poll(0):
                core.executor.capture_next()  # step sizes that were not prepared at the start
            if not self._take_messages():
                return False
            worked = worked or core.has_work
            if core.has_work and (core.can_step or not core.is_paused):
                self._deliver(core.step())
                if self.cache_watchers:
                    self.cache_watchers.tell(core)
            if self.pauses.waits:
                self.pauses.begin_if_idle(core)
            self._report()
        return True

    def _sleep(self, source: ExecutorSource) -> bool:
        """Sleep at the level of the request. Returns True after a WakeUp, False after a Stop."""
        sleeper, core = self._sleeper, self._running
        was_paused, self.core = core.is_paused, None
        asleep, asked = sleeper.fall_asleep(core, source)
        del core  # must be dropped before its memory can be freed
        asleep.free()
        gc.freeze()  # the remaining objects stay alive, so collections during a load need not scan them
        self.send_all(self._stats())
        for number, message in asked:
            self.send(Answered(message.ticket), number)
        while not sleeper.to_wake:
            if not self._take_messages():
                return False
            self._report()
        low_priority = any(question.low_priority for _, question in sleeper.to_wake)
        self.core = at_low_priority(sleeper.wake, asleep, low_priority=low_priority)
        if was_paused:
            self.core.pause()
        self._prepare(soon=any(question.soon for _, question in sleeper.to_wake))
        sleeper.answer_woken()
        return True

    def _take_messages(self) -> bool:
        """Process all waiting messages. False if the core is to stop. All are processed before a
        step, so that cancelled requests free their blocks first."""
        while ready := dict(self._poller.poll(self._patience_ms())):
            for number in [n for n, socket in self._sockets.items() if socket in ready]:
                if number not in self._sockets:
                    continue  # detached by a message of the parent
                message = self._receive(number)
                if isinstance(message, Stop):
                    return False
                self.handle(message, number)
        return True

    def _report(self) -> None:
        """Send a heartbeat if one is due, and answer adapter changes that are confirmed or overdue."""
        if self._adapters.changes:
            self._adapters.answer()
        if (now := time.monotonic()) - self._last_report >= HEARTBEAT_S:
            self.send_all(self._stats())
            self._last_report = now

    def _stats(self, *, asked: bool = False) -> Stats:
        if self.core is None:
            return Stats(EngineStats(is_sleeping=True), asked)
        stats = self.core.stats(experts=asked)
        if queued := self.pauses.num_queued:
            stats = replace(stats, num_waiting=stats.num_waiting + queued)
        return Stats(stats, asked)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Send each client process the outputs of its requests."""
        by_owner = {PARENT: outputs}
        if self._owners:
            by_owner = defaultdict(list)
            for output in outputs:
                find = self._owners.get if output.finish_reason is None else self._owners.pop
                by_owner[find(output.request_id, PARENT)].append(output)
        for number, some in by_owner.items():
            if some:
                self.send(Outputs.of(some), number)

    def _patience_ms(self) -> int:
        """Milliseconds to wait for a message: 0 if a step is possible, otherwise until work is due."""
        core = self.core
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

    def handle(self, message: ToChild, number: int) -> None:
        """Process a message of the client `number`."""
        core = self.core
        if isinstance(message, Add | AddTexts | AddBeams):
            added = requests_of(message)
            if number != PARENT:
                self._owners.update((request.request_id, number) for request in added)
            try:
                awake = self.awake()
                if self.pauses.queues:
                    self.pauses.queued.append((message, number))
                    return
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
                self.send(
                    Rejected(ids, type(error).__name__, str(error), getattr(error, "field", None)),
                    number,
                )
        elif isinstance(message, Abort):
            if core is not None:
                self._deliver(core.abort(message.request_ids))
                self._deliver(aborted(self.pauses.drop(set(message.request_ids))))
            self._forget(message.request_ids)
        elif isinstance(message, GetStats):
            self.send(self._stats(asked=True), number)
        elif isinstance(message, Attach):
            self._connect(message.number, f"ipc://{message.path}")
            self.send(self.ready, message.number)
            self.send(self._stats(), message.number)
        elif isinstance(message, Detach) and message.number in self._sockets:
            socket = self._sockets.pop(message.number)
            for operation in self._operations:
                operation.forget(message.number)
            self._poller.unregister(socket)
            socket.close(linger=0)
            ids = [name for name, owner in self._owners.items() if owner == message.number]
            if core is not None:
                core.abort(ids)
            self._forget(ids)
        elif not isinstance(message, Start | Stop | Detach):
            operation = next(x for x in self._operations if isinstance(message, x.takes))
            try:
                operation.handle(self, message, number)
            except SlipstreamError as error:
                ticket, kind = message.ticket, type(error).__name__  # type: ignore[union-attr]  # of questions
                self.send(Answered(ticket, error.message, kind, error.field), number)

    def awake(self) -> EngineCore:
        """The core, if it accepts requests; otherwise EngineAsleepError."""
        if self.core is None or self._sleeper.to_sleep:
            raise EngineAsleepError("the model sleeps; POST /wake_up wakes it")
        return self.core

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _receive(self, number: int) -> ToChild:
        message: ToChild = self._decoder.decode(self._sockets[number].recv())
        return message

    def send(self, message: ToParent, number: int = PARENT) -> None:
        """Send a message to a front end. Its queue is unbounded. A message to a dead one is lost;
        its Detach will follow."""
        if number not in self._sockets:
            return  # detached meanwhile
        with contextlib.suppress(self._zmq.Again):
            self._sockets[number].send(self._encoder.encode(message), self._zmq.NOBLOCK)

    def send_all(self, message: ToParent) -> None:
        for number in self._sockets:
            self.send(message, number)
