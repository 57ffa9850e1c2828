"""A CPU's sampler over NumPy arrays: `OpSet.sample`, a row at a time. No torch.

Each filter keeps values at or above a threshold, so a row's weights need not add up to 1: they are
exp((logit − largest) / temperature). With top_k, later filters read only the tokens that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.arrays import array
from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs, draw
from slipstream.kernels.metadata import SamplingTensors


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
        seen = np.array(sorted({*tokens[:end]}), np.int64)
        row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        answered, counts = np.unique(np.array(tokens[start:end], np.int64), return_counts=True)
        row[answered] -= frequency * counts.astype(np.float32)
        row[answered] -= presence


def uniform(seeds: npt.NDArray[Any], counters: npt.NDArray[Any]) -> Floats:
    """Returns `reference.uniform`'s numbers in (0, 1), which depend on (seed, counter) alone, with
    the same bits."""
    x = seeds.astype(np.int64).view(np.uint64) + counters.astype(np.int64).view(np.uint64) * _GOLDEN
    x = _mix(_mix(x) + _GOLDEN)
    return ((x >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(1.0 / 2**23)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
