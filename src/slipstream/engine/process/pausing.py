"""Pauses of an engine core, and weight updates while it serves, in the core's process.

    keep      steps stop; requests keep their blocks, and go on with the next weights
    retract   steps stop; requests compute all their tokens again, with the next weights
    wait      requests that are there end first; new ones queue
    abort     requests that are there end at once

No stream is lost by `keep`, `retract` and `wait`: front ends and clients hear nothing until `resume`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from slipstream.engine.live_weights import weights_of
from slipstream.engine.process.core_messages import Add, AddBeams, AddTexts, Rejected, ToParent
from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import (
    Answered,
    ChangeWeights,
    FinishWeights,
    FlushCache,
    GetWeights,
    KnowVersions,
    OfWeights,
    PauseGeneration,
    ResumeGeneration,
    WeightsAnswered,
    WeightsChanged,
)
from slipstream.errors import ConflictError
from slipstream.messages.beams import BeamsRequest
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.texts import TextsRequest

if TYPE_CHECKING:
    from slipstream.engine.engine_core import EngineCore
    from slipstream.engine.process.core_loop import CoreProcess

Adds = Add | AddTexts | AddBeams


class GenerationPauses(Operation):
    """Handles front ends' requests for pauses and weight updates.

    `send(message, number)` sends a message to a front end, `send_all` to all, and `deliver` sends
    outputs to their owners.
    """

    takes = (*get_args(OfWeights), KnowVersions)

    def __init__(
        self,
        send: Callable[[ToParent, int], None],
        send_all: Callable[[ToParent], None],
        deliver: Callable[[list[EngineOutput]], None],
    ) -> None:
        self._send, self._send_all, self._deliver = send, send_all, deliver
        # (front end, ticket) of pauses that wait for the last request to end
        self._waiting: list[tuple[int, int]] = []
        self.queues = False  # new requests queue here until `resume`
        self.queued: list[tuple[Adds, int]] = []

    @property
    def waits(self) -> bool:
        """Whether a pause is waiting for the last request to end."""
        return bool(self._waiting)

    def forget(self, number: int) -> None:
        self.drop(set(), number)

    def drop(self, request_ids: set[str], number: int | None = None) -> list[str]:
        """Drop queued requests, by id or of a front end that has gone. Returns their ids."""
        kept, dropped = [], []
        for message, owner in self.queued:
            own = [r.request_id for r in requests_of(message)]
            gone = owner == number or not request_ids.isdisjoint(own)
            (dropped.extend(own) if gone else kept.append((message, owner)))
        self.queued = kept
        return dropped

    @property
    def num_queued(self) -> int:
        return sum(len(requests_of(message)) for message, _ in self.queued)

    def _abort_queued(self) -> None:
        queued, self.queued = self.queued, []
        for message, owner in queued:
            ids = [r.request_id for r in requests_of(message)]
            if isinstance(message, Add):
                self._deliver(aborted(ids))
            else:
                self._send(Rejected(ids, "EngineError", "generation was paused", None), owner)

    def begin_if_idle(self, core: EngineCore) -> None:
        """Begin a pause that waits for the last request, if that has ended."""
        if self._waiting and not core.has_work:
            asked, self._waiting = self._waiting, []
            core.pause()
            for number, ticket in asked:
                self._answer(core, number, ticket)

    def handle(self, process: CoreProcess, message: OfWeights | KnowVersions, number: int) -> None:
        if isinstance(message, KnowVersions):
            if process.core is not None:
                process.core.executor.weight_state.lose(message.used)
                process.note_version()
            return
        core, ready = process.awake(), process.ready
        before = ready.weight_version
        for queued, owner in self._handle(core, message, number):
            process.handle(queued, owner)
        process.note_version()
        if ready.weight_version != before:
            process.cache_watchers.begin(core)  # the root keys of prefixes have changed

    def _handle(self, core: EngineCore, message: OfWeights, number: int) -> list[tuple[Adds, int]]:
        """Process a message, and answer it. Returns queued requests that may run now.

        RequestError, before anything is done, if the model's weights can't change.
        """
        weights = weights_of(core)
        freed: list[tuple[Adds, int]] = []
        checksums = False
        if isinstance(message, PauseGeneration):
            if self._pause(core, message, number):
                return []
        elif isinstance(message, ResumeGeneration):
            for other, ticket in self._waiting:
                self._send(
                    Answered(ticket, "it was resumed before it paused", "ConflictError"), other
                )
            self._waiting, self.queues = [], False
            core.resume()
            freed, self.queued = self.queued, []
        elif isinstance(message, FlushCache):
            if core.has_work:
                raise ConflictError("requests run; pause with mode=abort or mode=wait first")
            core.scheduler.reset_prefix_cache()
        elif isinstance(message, FinishWeights):
            weights.finish(core, message.version, self._deliver)
            self._send_all(WeightsChanged(weights.version))
        elif isinstance(message, ChangeWeights):
            weights.change(message.op)
        elif isinstance(message, GetWeights):
            checksums = message.checksums
        self._answer(core, number, message.ticket, checksums=checksums)
        return freed

    def _pause(self, core: EngineCore, message: PauseGeneration, number: int) -> bool:
        """Pause. Returns whether the answer is sent later."""
        mode = message.mode
        if mode == "wait":
            self.queues = True
            core.resume()  # a pause would keep requests from ending
            self._waiting.append((number, message.ticket))
            self.begin_if_idle(core)
            return True
        self._deliver(core.pause())
        if mode == "abort":
            self._deliver(weights_of(core).abort_all(core))
            self._abort_queued()
        elif mode == "retract":
            weights_of(core).retract_all()
        return False

    def _answer(
        self, core: EngineCore, number: int, ticket: int, *, checksums: bool = False
    ) -> None:
        info = weights_of(core).info(checksums=checksums, is_paused=core.is_paused)
        self._send(WeightsAnswered(info, ticket), number)


def requests_of(message: Adds) -> list[EngineRequest | TextsRequest | BeamsRequest]:
    return list(message.requests) if isinstance(message, Add) else [message.request]


def aborted(request_ids: list[str]) -> list[EngineOutput]:
    """The outputs of queued requests that were aborted."""
    return [TokenOutput(i, finish_reason=FinishReason.ABORT) for i in request_ids]
