"""The list of cache kinds other than blocks."""

from __future__ import annotations

from slipstream.config import CacheConfig
from slipstream.core.cache.sessions import Sessions
from slipstream.core.cache.slots import Slots
from slipstream.core.cache.states import StateSlots

KINDS: tuple[type[Slots], ...] = (StateSlots,)
"""The class of each `SlotKind`, in the order of `SLOT_KINDS`."""


def make_kinds(cache: CacheConfig, max_drafts: int, sessions: Sessions | None) -> list[Slots]:
    """Makes one rank's slots, for each kind that has any."""
    return [
        made(number, num_slots, cache, max_drafts, sessions)
        for number, (made, num_slots) in enumerate(zip(KINDS, cache.slots, strict=True), 1)
        if num_slots
    ]
