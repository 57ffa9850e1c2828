"""Sleep of an engine core in its process: which front ends requested it, and which its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.engine.process.core_messages import ToParent
from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import Answered, Sleep, WakeUp
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.engine.asleep import Asleep
    from slipstream.engine.engine_core import EngineCore
    from slipstream.engine.process.core_loop import CoreProcess
    from slipstream.worker.executor import ExecutorSource


class Sleeper(Operation):
    """Handles front ends' requests for sleep. `send(message, number)` sends a message to a front
    end."""

    takes = (Sleep, WakeUp)

    def __init__(self, send: Callable[[ToParent, int], None]) -> None:
        self._send = send
        self.asleep: Asleep | None = None  # the sleeping core
        self.to_sleep: list[tuple[int, Sleep]] = []  # (front end, message) of requests for sleep
        self.to_wake: list[tuple[int, WakeUp]] = []

    def fall_asleep(
        self, core: EngineCore, source: ExecutorSource
    ) -> tuple[Asleep, list[tuple[int, Sleep]]]:
        """Put the core to sleep at the requested level. Its owner must have dropped its reference
        to it. Returns (the sleeping core, the front ends to answer)."""
        from slipstream.engine.asleep import Asleep

        asked, self.to_sleep = self.to_sleep, []
        self.asleep = asleep = Asleep(core, source, max(message.level for _, message in asked))
        gc.unfreeze()
        return asleep, asked

    def wake(self, asleep: Asleep) -> EngineCore:
        core, self.asleep = asleep.wake(), None
        return core

    def answer_woken(self) -> None:
        woken, self.to_wake = self.to_wake, []
        for number, question in woken:
            self._send(Answered(question.ticket), number)

    def handle(self, process: CoreProcess, message: Sleep | WakeUp, number: int) -> None:
        if isinstance(message, Sleep):
            self._take_sleep(process, message, number)
        else:
            self._take_wake_up(process.core, message, number)

    def _take_sleep(self, process: CoreProcess, message: Sleep, number: int) -> None:
        from slipstream.engine.asleep import Asleep

        core = process.core
        if core is not None:
            Asleep.check(core, message.level)
            pauses = process.pauses
            if (core.is_paused or pauses.queues) and (core.has_work or pauses.queued):
                raise RequestError(
                    "generation is paused, so its requests don't end; resume it first, or pause with mode=abort"
                )
            self.to_sleep.append((number, message))
        elif self.asleep is not None and message.level > self.asleep.level:
            raise RequestError(
                f"it sleeps at level {self.asleep.level}; wake it up first", field="level"
            )
        else:
            self._send(Answered(message.ticket), number)

    def _take_wake_up(self, core: EngineCore | None, message: WakeUp, number: int) -> None:
        for other, sleep in self.to_sleep:
            self._send(Answered(sleep.ticket, "it was woken before it slept"), other)
        self.to_sleep.clear()
        if core is None:
            self.to_wake.append((number, message))
        else:
            self._send(Answered(message.ticket), number)
