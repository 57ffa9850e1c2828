"""The adapters that an engine's process serves by name, and which front ends know the latest changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.engine.process.core_messages import ToParent
from slipstream.engine.process.operation import Operation
from slipstream.engine.process.operation_messages import (
    AdaptersChanged,
    Answered,
    KnowAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from slipstream.errors import AdapterError
from slipstream.params.lora_request import LoRARequest

if TYPE_CHECKING:
    from slipstream.engine.engine_core import EngineCore
    from slipstream.engine.process.core_loop import CoreProcess

KNOW_S = 10.0
"""Seconds within which a front end must confirm a change."""


@dataclass(slots=True)
class _Change:
    """A change of an adapter that some front ends have not confirmed. When all have, the front end
    that requested it gets the answer."""

    asked_by: int
    ticket: int
    version: int
    unaware: set[int]
    until: float


class ServedAdapters(Operation):
    """Adapters by name. `send(message, number)` sends a message to a front end."""

    takes = (LoadAdapter, UnloadAdapter, KnowAdapters)

    def __init__(self, send: Callable[[ToParent, int], None]) -> None:
        self._send = send
        self._by_name: dict[str, LoRARequest] = {}
        self._last_id = 0  # the highest id assigned
        self._version = 0
        self._serving: set[int] = set()  # front ends that have sent KnowAdapters
        self.changes: list[_Change] = []  # changes not yet answered

    @property
    def all(self) -> list[LoRARequest]:
        return list(self._by_name.values())

    def begin(self, requests: Iterable[LoRARequest]) -> None:
        """Serve the adapters that the core loaded at its start."""
        self._by_name = {request.name: request for request in requests}
        self._last_id = len(self._by_name)

    def handle(
        self, process: CoreProcess, message: LoadAdapter | UnloadAdapter | KnowAdapters, number: int
    ) -> None:
        if isinstance(message, KnowAdapters):
            self.know(number, message.version)
            return
        changed = self.change(process.awake(), message)
        process.ready.adapters = changed.adapters
        process.send_all(changed)
        self.answer_later(message.ticket, number)

    def change(self, core: EngineCore, message: LoadAdapter | UnloadAdapter) -> AdaptersChanged:
        """Load or unload an adapter. Returns the message for all front ends. AdapterError if that is not possible."""
        known = self._by_name.get(message.name)
        if isinstance(message, UnloadAdapter):
            if known is None:
                raise AdapterError(f"no adapter is served as {message.name!r}", field="lora_name")
            core.unload_adapter(known.id)
            del self._by_name[message.name]
        else:
            if known is not None and not message.in_place:
                raise AdapterError(
                    f"an adapter is served as {message.name!r} already; unload it first, or set load_inplace",
                    field="lora_name",
                )
            number = self._last_id + 1 if known is None else known.id
            request = LoRARequest(message.name, number, message.path)
            core.load_adapter(request) if known is None else core.replace_adapter(request)
            self._last_id = max(self._last_id, number)
            self._by_name[message.name] = request
        self._version += 1
        return AdaptersChanged(self.all, self._version)

    def answer_later(self, ticket: int, asked_by: int) -> None:
        """Answer a change when all front ends have confirmed it. The one that requested it receives the change before the
        answer."""
        unaware, until = self._serving - {asked_by}, time.monotonic() + KNOW_S
        self.changes.append(_Change(asked_by, ticket, self._version, unaware, until))
        self.answer()

    def know(self, number: int, version: int) -> None:
        """Record that a front end serves requests, and has applied the changes up to `version`."""
        self._serving.add(number)
        self._note(number, version)

    def forget(self, number: int) -> None:
        self._serving.discard(number)
        self._note(number, self._version)

    def _note(self, number: int, version: int) -> None:
        for change in self.changes:
            if change.version <= version:
                change.unaware.discard(number)
        self.answer()

    def answer(self) -> None:
        """Answers the changes that all front ends have confirmed, and those that timed out."""
        now, left = time.monotonic(), list[_Change]()
        for change in self.changes:
            if not change.unaware:
                self._send(Answered(change.ticket), change.asked_by)
            elif now < change.until:
                left.append(change)
            else:
                late = f"{len(change.unaware)} of the front ends said nothing for {KNOW_S:g} s"
                late = f"the change is made, but {late}, and may not know of it; see /health"
                self._send(Answered(change.ticket, late, "EngineError"), change.asked_by)
        self.changes = left
