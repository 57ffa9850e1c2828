"""An operation on a serving engine core, in the core's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slipstream.engine.process.core_loop import CoreProcess


class Operation:
    """Base of handlers of front ends' messages, of the classes in `takes`."""

    takes: ClassVar[tuple[type, ...]]

    def handle(self, process: CoreProcess, message: Any, number: int) -> None:
        """Process and answer a message of the front end `number`. A raised SlipstreamError is answered by the caller."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Forget a front end that has gone: expect no more messages from it and send it none."""
