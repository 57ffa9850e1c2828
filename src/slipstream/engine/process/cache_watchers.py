"""Clients of an engine process that receive events of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import CacheEvents, WatchCache

if TYPE_CHECKING:
    from slipstream.engine.engine_core import EngineCore
    from slipstream.engine.process.core_loop import CoreProcess


class CacheWatchers(Operation):
    """The clients of an engine process that receive cache events. `send(message, number)` sends a
    message to a client."""

    takes = (WatchCache,)

    def __init__(self, send: Callable[[CacheEvents, int], None]) -> None:
        self._send = send
        self._numbers: set[int] = set()
        self._last = 0  # sequence number of the last event

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def begin(self, core: EngineCore) -> None:
        """Send all watchers the blocks that a new core holds."""
        if self._numbers:
            core.cache_news.listen(on=True)
            self.tell(core, whole_to=self._numbers)

    def handle(self, process: CoreProcess, message: WatchCache, number: int) -> None:
        """Start or stop a client's cache events. The first event has the whole content."""
        (self._numbers.add if message.on else self._numbers.discard)(number)
        if process.core is not None:
            process.core.cache_news.listen(on=bool(self._numbers))
            if message.on:
                self.tell(process.core, whole_to={number})

    def forget(self, number: int) -> None:
        self._numbers.discard(number)

    def tell(self, core: EngineCore, whole_to: frozenset[int] | set[int] = frozenset()) -> None:
        """Sends the changes to each watcher; those in `whole_to` get the whole content instead."""
        news, states = core.cache_news, any(core.config.cache.slots)
        changes = news.changes()
        if changes is not None:
            self._last += 1
            for number in self._numbers - whole_to:
                told = CacheEvents(self._last, *news.identity(), *changes, has_states=states)
                self._send(told, number)
        for number in whole_to:
            own = self._last, *news.identity(), news.keys()
            self._send(CacheEvents(*own, whole=True, has_states=states), number)
