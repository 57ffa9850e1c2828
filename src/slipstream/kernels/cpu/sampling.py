"""A CPU's sampler over NumPy arrays: `OpSet.sample`, a row at a time. No torch.

Each filter keeps values at or above a threshold, so a row's weights need not add up to 1: they are
exp((logit − largest) / temperature). With top_k, later filters read only the tokens that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.metadata import SamplingTensors

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

NUCLEUS_STEPS = (64, 1024)
"""Numbers of most likely tokens that top-p looks at before it sorts all of them."""


STRETCH = 64
"""Tokens of a stretch in `_bound_of_top`."""


def sample(
    logits: Floats,
    params: SamplingTensors,
    argmax: Callable[[Floats], Longs],
    draws: Callable[[Floats, SamplingTensors], Longs] | None = None,
) -> Longs:
    """Samples from float32 [S, V], which is overwritten → int64 [S]. `params` has arrays. `argmax`
    gives the first maximum of each row. `draws`, if given, draws all rows."""
    apply_bias_and_penalties(logits, params)
    if draws is not None and not params.all_greedy:
        return draws(logits, params)
    tokens = argmax(logits)
    if params.all_greedy:
        return tokens
    temperature, top_k, top_p, min_p = (
        array(x) for x in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    u = uniform(array(params.seeds), array(params.history_lens))
    for i in np.flatnonzero(temperature > 0).tolist():
        tokens[i] = draw(
            logits[i], temperature[i], int(top_k[i]), float(top_p[i]), float(min_p[i]), float(u[i])
        )
    return tokens


def apply_bias(
    logits: Floats, limits: tuple[Any, Any, Any] | None, biases: tuple[Any, Any, Any] | None
) -> None:
    """Applies allowed tokens, then biases, in place.

    `limits` is (limited rows, row of each allowed token, allowed token); `biases` is (rows, tokens,
    values).
    """
    if limits is not None:
        limited, *allowed = map(array, limits)
        at = tuple(allowed)
        kept = logits[at]
        logits[limited] = -np.inf
        logits[at] = kept
    if biases is not None:
        rows, tokens, values = map(array, biases)
        np.add.at(logits, (rows, tokens), values)


def apply_bias_and_penalties(logits: Floats, params: SamplingTensors) -> None:
    """Applies allowed tokens, logit bias, then repetition, frequency and presence penalties, in
    place."""
    limits = params.limited_rows, params.allowed_rows, params.allowed_tokens
    biases = params.bias_rows, params.bias_tokens, params.bias_values
    apply_bias(logits, None if limits[0] is None else limits, None if biases[0] is None else biases)
    if params.history is None:
        return
    history, lens, prompts = (
        array(x).tolist() for x in (params.history, params.history_lens, params.prompt_lens)
    )
    strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    for row, tokens, end, start, repetition, presence, frequency in zip(
        logits, history, lens, prompts, *(array(x) for x in strengths), strict=True
    ):
        seen = np.unique(np.array(tokens[:end], np.int64))
        row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        answered, counts = np.unique(np.array(tokens[start:end], np.int64), return_counts=True)
        row[answered] -= frequency * counts.astype(np.float32)
        row[answered] -= presence


def mask_logits(
    logits: Floats, rows: Longs, bits: npt.NDArray[np.int32], which: Longs | None = None
) -> None:
    """Applies `OpSet.mask_logits`: −∞ where the row's bit in `bits` [U, ⌈V / 32⌉] is 0."""
    banned = ~np.unpackbits(
        bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    ).view(bool)
    places = range(len(bits)) if which is None else which.tolist()
    for row, place in zip(rows.tolist(), places, strict=True):
        np.copyto(logits[row], -np.inf, where=banned[place])


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


def uniform(seeds: npt.NDArray[Any], counters: npt.NDArray[Any]) -> Floats:
    """Returns `reference.uniform`'s numbers in (0, 1), which depend on (seed, counter) alone, with
    the same bits."""
    x = seeds.astype(np.int64).view(np.uint64) + counters.astype(np.int64).view(np.uint64) * _GOLDEN
    x = _mix(_mix(x) + _GOLDEN)
    return ((x >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(1.0 / 2**23)


def array(x: Any) -> npt.NDArray[Any]:
    """Returns a field of `SamplingTensors`, an array or a tensor, as an array."""
    return x if isinstance(x, np.ndarray) else np.asarray(x.cpu().numpy())


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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
