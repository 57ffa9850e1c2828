"""An operation on an engine core that serves, in the core's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slipstream.engine.process.core_loop import CoreProcess


class Operation:
    """Answers front ends' messages of the classes that it `takes`."""

    takes: ClassVar[tuple[type, ...]]

    def handle(self, process: CoreProcess, message: Any, number: int) -> None:
        """Do what a message of the front end `number` asks, and answer it. A SlipstreamError is answered by the process."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Expect nothing of a front end that has gone, and tell it nothing more."""
