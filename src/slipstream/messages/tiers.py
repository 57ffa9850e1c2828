"""Copies of cache blocks between tiers. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Place: TypeAlias = Literal["device", "host", "disk", "peer"]


class BlockCopy(NamedTuple):
    """A copy of a KV cache block between two tiers, or with `is_state` of the recurrent states in a
    slot. `number` identifies the order and comes back when it is done."""

    number: int
    source: Place
    target: Place
    key: bytes  # identifies the block's content; on disk the file's name
    block: int = 0  # on the device; of states, their slot
    slot: int = 0  # in the host's memory
    is_state: bool = False
    address: str = ""  # of the other engine that has the block
