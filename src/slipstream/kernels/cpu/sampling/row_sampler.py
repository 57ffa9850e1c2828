"""The end of a step on a CPU without torch: tokens from rows of logits, as NumPy arrays."""

from __future__ import annotations

import numpy as np

from slipstream.kernels.cpu.program.programs import Argmax, RowDraws
from slipstream.kernels.cpu.sampling import logprobs, sampling, token_masks
from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import SamplingTensors


class RowSampler:
    """`OpSet`'s sampling over arrays. Programs are made for each size of a vocabulary."""

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
        size = logits.shape[1]
        if size not in self._draws:
            self._draws[size] = RowDraws(self.pool, size)
        return self._draws[size](logits, params)

    best_logprobs = staticmethod(logprobs.best_logprobs)
    packed_logprobs = staticmethod(logprobs.packed_logprobs)
    mask_logits = staticmethod(token_masks.mask_logits)
