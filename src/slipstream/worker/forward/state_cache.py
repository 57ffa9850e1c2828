"""Cache of the hidden states that a draft head reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.platform.base import Values

if TYPE_CHECKING:
    from torch import Tensor


class StateCache:
    """Hidden states that a draft head reads, in the blocks of the requests' first group.

    They are stored only if `kept` [B · block_size, E] is set.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.kept: Any = None

    def write(self, states: Tensor, meta: AttentionMetadata) -> None:
        """Store the states [T, E] of a step's tokens."""
        if self.kept is not None:
            self.values.put(self.kept, meta.slot_mapping, states)

    def read(self, meta: AttentionMetadata) -> Any:
        """States [T, E] of a step's tokens, in the kept type."""
        return self.kept[meta.slot_mapping]

    def floats(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Converts states to a float32 array [T, E]."""
        return self.values.floats(self.kept[slots])
