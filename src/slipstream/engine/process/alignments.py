"""Engine operation that computes when in its audio the words of a text are spoken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.engine.process.core_messages import ToParent
from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import AlignAudio, AudioAligned

if TYPE_CHECKING:
    from slipstream.engine.process.core_loop import CoreProcess


class AudioAlignments(Operation):
    takes = (AlignAudio,)

    def __init__(self, send: Callable[[ToParent, int], None]) -> None:
        self._send = send

    def handle(self, process: CoreProcess, message: AlignAudio, number: int) -> None:
        found = process.awake().executor.attention_of(message.question)
        self._send(AudioAligned(found.tobytes(), message.ticket), number)
