"""The end of a step on a CPU without torch: tokens from rows of logits, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.program.programs import Argmax, Beyond, RowDraws
from slipstream.kernels.cpu.sampling import sampling, token_masks
from slipstream.kernels.cpu.sampling.logprobs import unpacked_logprobs
from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import SamplingTensors


class RowSampler:
    """The sampling of an `OpSet`, over arrays. Programs are made for each size of a vocabulary."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool = pool
        self._argmax: dict[int, Argmax] = {}  # by vocabulary size
        self._draws: dict[int, RowDraws] = {}

    def largest(self, logits: Floats) -> Longs:
        """Returns the first largest of each row [S, V]."""
        size = logits.shape[1]
        if size not in self._argmax:
            self._argmax[size] = Argmax(self.pool, size)
        return self._argmax[size](np.ascontiguousarray(logits))

    def sample(self, logits: Floats, params: SamplingTensors) -> Longs:
        return sampling.sample(logits, params, self.largest, self.draw)

    def draw(self, logits: Floats, params: SamplingTensors) -> Longs:
        """Draws from logits [S, V] after biases and penalties."""
        return self._draws_of(logits.shape[1])(logits, params)[0]

    def _draws_of(self, size: int) -> RowDraws:
        if size not in self._draws:
            self._draws[size] = RowDraws(self.pool, size)
        return self._draws[size]

    def packed_logprobs(self, logits: Floats, tokens: Longs, num_top: int) -> npt.NDArray[np.int32]:
        """Applies `OpSet.packed_logprobs`."""
        size = logits.shape[1]
        beyond = Beyond(None, range(len(logits)), min(num_top, size), tokens)
        return self._draws_of(size)(logits, None, beyond)[1]

    def best_logprobs(
        self, logits: Floats, tokens: Longs, num_top: int
    ) -> tuple[npt.NDArray[Any], ...]:
        """Applies `OpSet.best_logprobs`."""
        return unpacked_logprobs(self.packed_logprobs(logits, tokens, num_top))

    mask_logits = staticmethod(token_masks.mask_logits)
