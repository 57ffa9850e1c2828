"""Copies of cache blocks between tiers. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Place: TypeAlias = Literal["device", "host", "disk", "peer"]


class BlockCopy(NamedTuple):
    """A copy of a KV cache block between two tiers, or of a slot of another `kind` of cache
    (`SlotKind`). `number` identifies the copy and is reported when it is done."""

    number: int
    source: Place
    target: Place
    key: bytes  # identifies the block's content; file name on disk
    block: int = 0  # index on the device; for another kind, its slot
    slot: int = 0  # index in the host's memory
    kind: int = 0  # 0: blocks; else the number of the `SlotKind`
    address: str = ""  # address of the other engine that has the block
