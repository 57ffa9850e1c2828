"""An operation on an engine core that serves, in the core's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slipstream.engine.process.core_loop import CoreProcess


class Operation:
    """Answers front ends' messages of the classes that it `takes`."""

    takes: ClassVar[tuple[type, ...]]

    def handle(self, process: CoreProcess, message: Any, number: int) -> None:
        """Carry out and answer a message of the front end `number`. The process answers a raised SlipstreamError."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Forget a front end that has gone: expect no more messages from it and send it none."""
