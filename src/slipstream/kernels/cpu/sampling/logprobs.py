"""Log-probabilities of tokens, over NumPy arrays. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs

STRETCH = 64
"""Tokens of a stretch in `_bound_of_top`."""


def best_logprobs(
    logits: Floats, tokens: Longs, num_top: int
) -> tuple[Floats, Longs, Longs, Floats]:
    """Returns (log-probability, rank, best ids, their log-probabilities) of raw logits [N, V] and a
    token for each row.

    The last two are [N, num_top]. Among equal tokens the lower id comes first.
    """
    count, num_top = len(logits), min(num_top, logits.shape[1])
    chosen, rank = np.empty(count, np.float32), np.empty(count, np.int64)
    ids, values = np.empty((count, num_top), np.int64), np.empty((count, num_top), np.float32)
    for i, (row, token) in enumerate(zip(logits, tokens.tolist(), strict=True)):
        largest = row.max()
        log_z = largest + np.log(np.exp(row - largest).sum(dtype=np.float64))
        chosen[i], rank[i] = row[token] - log_z, np.count_nonzero(row > row[token]) + 1
        if num_top:
            at = np.flatnonzero(row >= _bound_of_top(row, num_top))
            ids[i] = at[np.argsort(-row[at], kind="stable")[:num_top]]
            values[i] = row[ids[i]] - log_z
    return chosen, rank, ids, values


def _bound_of_top(row: Floats, count: int) -> np.float32:
    """Returns a number that at least `count` of a row reach, and few more.

    The maxima of stretches show one without ordering the row.
    """
    stretches = row[: len(row) // STRETCH * STRETCH].reshape(-1, STRETCH)
    found = row if len(stretches) < count else stretches.max(axis=1)
    return np.float32(np.partition(found, -count)[-count])


def packed_logprobs(logits: Floats, tokens: Longs, num_top: int) -> npt.NDArray[np.int32]:
    """Applies `OpSet.packed_logprobs`."""
    chosen, rank, ids, values = best_logprobs(logits, tokens, num_top)
    parts = chosen[:, None].view(np.int32), rank[:, None], ids, values.view(np.int32)
    return np.concatenate(parts, axis=1, dtype=np.int32, casting="unsafe")


def unpacked_logprobs(packed: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
    """Returns arrays like `best_logprobs` from what `packed_logprobs` makes of them."""
    chosen, rank, best = packed[:, :1].view(np.float32)[:, 0], packed[:, 1], packed[:, 2:]
    ids, values = np.split(best, 2, axis=1)
    return chosen, rank.astype(np.int64), ids.astype(np.int64), values.view(np.float32)
