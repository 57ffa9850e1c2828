"""Decides which adapters are in host memory, and which is evicted for another. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from slipstream.errors import AdapterError, EngineOverloadedError
from slipstream.params.lora_request import LoRARequest


class AdapterPlaces:
    """Slots for up to `count` adapters in host memory, ordered by last use."""

    def __init__(self, count: int) -> None:
        self.count = count
        # by id, the least recently used first
        self._held: OrderedDict[int, tuple[LoRARequest, str]] = OrderedDict()
        # folders of adapters before they were replaced, by id; requests with them continue
        self._earlier: dict[int, set[str]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def use(self, request: LoRARequest) -> str | None:
        """Mark an adapter as used. Returns the version of its files; None if it is not loaded.

        AdapterError if its id belongs to another adapter.
        """
        if (held := self._held.get(request.id)) is None:
            return None
        known, version = held
        if known.path != request.path and request.path not in self._earlier.get(request.id, ()):
            message = (
                f"id {request.id} is the adapter {known.name!r} of {known.path}; take another id"
            )
            raise AdapterError(message, field="id")
        self._held.move_to_end(request.id)
        return version

    def name(self, adapter_id: int) -> str:
        return self._held[adapter_id][0].name

    def giving_way(self, keep: Callable[[], Collection[int]]) -> int | None:
        """Id of the adapter to evict before another is added; None if there is room.

        This is the least recently used adapter whose id is not in `keep()`. EngineOverloadedError
        if all must stay.
        """
        if len(self._held) < self.count:
            return None
        kept = keep()
        found = next((i for i in self._held if i not in kept), None)
        if found is None:
            raise EngineOverloadedError(
                f"requests need {len(self._held)} other adapters, as many as max_cpu_loras allows; try again later, or raise "
                "max_cpu_loras"
            )
        return found

    def replace(self, request: LoRARequest, version: str) -> None:
        """Replace the adapter with the id of `request` by its new version."""
        known, _ = self._held[request.id]
        self._earlier.setdefault(request.id, set()).add(known.path)
        self._held[request.id] = request, version

    def add(self, request: LoRARequest, version: str) -> None:
        self._held[request.id] = request, version

    def forget(self, adapter_id: int) -> None:
        """Forget an adapter. An unknown id is ignored."""
        self._held.pop(adapter_id, None)
        self._earlier.pop(adapter_id, None)
