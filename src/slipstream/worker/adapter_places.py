"""Decides which adapters are in the host's memory, and which is evicted for another. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from slipstream.errors import AdapterError, EngineOverloadedError
from slipstream.types import LoRARequest


class AdapterPlaces:
    """Up to `count` adapters."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held: OrderedDict[int, tuple[LoRARequest, str]] = (
            OrderedDict()
        )  # by id, the least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def use(self, request: LoRARequest) -> str | None:
        """The version of the adapter's files that were read; None: it has no place. AdapterError: its id is another's."""
        if (held := self._held.get(request.id)) is None:
            return None
        known, version = held
        if known.path != request.path:
            message = (
                f"id {request.id} is the adapter {known.name!r} of {known.path}; take another id"
            )
            raise AdapterError(message, field="id")
        self._held.move_to_end(request.id)
        return version

    def giving_way(self, keep: Callable[[], Collection[int]]) -> int | None:
        """The id of the one that must be forgotten before another is added: the least recently used one whose id is not in
        `keep()`. None: there is room. EngineOverloadedError: all must stay."""
        if len(self._held) < self.count:
            return None
        kept = keep()
        found = next((i for i in self._held if i not in kept), None)
        if found is None:
            raise EngineOverloadedError(
                f"requests need {len(self._held)} other adapters, as many as max_cpu_loras allows; try again later, or start "
                "with more"
            )
        return found

    def add(self, request: LoRARequest, version: str) -> None:
        self._held[request.id] = request, version

    def forget(self, adapter_id: int) -> None:
        """An unknown id is nothing to do."""
        self._held.pop(adapter_id, None)
