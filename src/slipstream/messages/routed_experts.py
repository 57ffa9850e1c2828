"""The experts of tokens, from the worker to an answer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts chosen for some tokens: int16 [tokens, layers with experts, k]. −1: unknown.

    For a step: one row for each of its tokens, in the plan's order. For an answer: one for each
    token but the last, which was never computed.
    """

    num_layers: int
    num_chosen: int
    experts: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Self:
        _, num_layers, num_chosen = array.shape
        return cls(num_layers, num_chosen, array.astype(np.int16, copy=False).tobytes())

    @property
    def array(self) -> npt.NDArray[np.int16]:
        rows = np.frombuffer(self.experts, np.int16)
        return rows.reshape(-1, self.num_layers, self.num_chosen)
