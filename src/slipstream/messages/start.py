"""Messages about the start and failure of a process that runs a model or one rank of it. No torch.

An engine core sends them to the process that started it, a rank to its executor.
"""

from __future__ import annotations

import msgspec

from slipstream.config import DeviceInfo
from slipstream.costs.memory import MemoryLedger
from slipstream.errors import SlipstreamError, as_error
from slipstream.messages.stats import CanaryResult


class Phase(msgspec.Struct, tag=True):
    """Start of a phase of starting the process."""

    name: str


class Started(msgspec.Struct, tag=True):
    """The model is loaded. `phases`: seconds of each phase. `tiles`: the tile table of a GPU.
    `most_drafts` of a rank: maximum drafts per request and step, which its draft head may limit."""

    device: DeviceInfo
    ledger: MemoryLedger
    phases: dict[str, float]
    tiles: str = ""
    canary: CanaryResult | None = None
    most_drafts: int | None = None


class Failed(msgspec.Struct, tag=True):
    """Error that ends the process."""

    error: str
    message: str
    field: str | None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        return cls(type(error).__name__, str(error), getattr(error, "field", None))

    @property
    def as_error(self) -> SlipstreamError:
        """Convert the error to an exception of the receiving process."""
        return as_error(self.error, self.message, self.field)
