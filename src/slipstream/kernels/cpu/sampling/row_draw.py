"""Sampling from one row of logits, over NumPy arrays. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


NUCLEUS_STEPS = (64, 1024)
"""How many of the most likely tokens top-p sorts: first 64, then 1,024 if their mass does not
suffice, then all."""


def draw(
    row: Floats, temperature: np.float32, top_k: int, top_p: float, min_p: float, u: float
) -> int:
    """Draws a token from logits [V]."""
    at: Longs | None = None
    if 0 < top_k < len(row):
        at = np.flatnonzero(row >= np.partition(row, -top_k)[-top_k])
        row = row[at]
    scaled = row / temperature
    with np.errstate(invalid="ignore"):  # if nothing is allowed
        weights: Floats = np.exp(scaled - scaled.max())
    if min_p > 0.0:
        weights[weights < np.float32(min_p)] = 0.0  # the largest is 1
    if top_p < 1.0:
        weights[weights < least_of_top_p(weights, top_p)] = 0.0
    running = weights.cumsum(dtype=np.float64)
    chosen = int(np.searchsorted(running, u * running[-1], side="right"))
    if chosen == len(weights):  # rounding left none: take the last that can be drawn
        chosen = int(np.flatnonzero(weights)[-1])
    return chosen if at is None else int(at[chosen])


def least_of_top_p(weights: Floats, top_p: float) -> np.float32:
    """Returns the smallest weight that top_p keeps.

    A token is needed while the mass before it is too small. The first is always needed.
    """
    wanted = np.float64(np.float32(top_p)) * weights.sum(dtype=np.float64)
    for count in (*(c for c in NUCLEUS_STEPS if c < len(weights)), len(weights)):
        ordered = np.sort(np.partition(weights, -count)[-count:])[::-1]
        running = ordered.cumsum(dtype=np.float64)
        if running[-1] >= wanted or count == len(weights):
            break
    last = max(1, int(np.count_nonzero(running - ordered < wanted))) - 1
    return np.float32(ordered[last])
