"""Facts about the running weights: their version, checksums, pauses. No torch, and no msgspec: `LLM` needs neither."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

PauseMode: TypeAlias = Literal["keep", "retract", "wait", "abort"]
"""Handling of running requests in a pause: keep their blocks and continue later; compute all tokens
again later; finish first, while new ones queue; end at once."""

FIRST_VERSION = "0"
"""Version of the weights that are loaded from the checkpoint at the start."""


@dataclass(frozen=True, slots=True)
class GivenPiece:
    """A piece of an update: tensors or arrays of this process, by name. They can't be sent in a
    message."""

    tensors: dict[str, Any]


@dataclass(slots=True)
class WeightState:
    """Version of the running weights, for as long as they are in memory."""

    version: str = FIRST_VERSION
    checksum: str = ""  # of all weights together; empty before the first update
    used: set[str] = field(default_factory=lambda: {FIRST_VERSION})
    broken: str = ""  # reason why no request may run: an update was written in part, or lost

    def lose(self, used: Iterable[str]) -> None:
        """Record that the engine has loaded the checkpoint's weights again, after the versions
        `used`. If an update wrote one of those, it is lost, so no request may run."""
        self.used.update(used)
        if len(self.used) > 1 and not self.checksum:
            self.broken = "the weights that were written are lost, since the engine has read the checkpoint's again"


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """Facts for a user about the running weights.

    `checksums` are by parameter, in the layout in memory, if requested; with several ranks a name
    begins with the rank. `seconds` is the time of the last check and write, during which no step
    ran.
    """

    weight_version: str = FIRST_VERSION
    checksum: str = ""
    is_paused: bool = False
    is_updating: bool = False
    broken: str = ""
    seconds: float = 0.0
    checksums: dict[str, str] | None = None


def total_checksum(checksums: dict[str, str]) -> str:
    """Checksum of all weights together, from those by parameter."""
    told = "".join(f"{name} {value};" for name, value in sorted(checksums.items()))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
