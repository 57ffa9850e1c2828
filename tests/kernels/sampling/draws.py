"""Tokens that may be drawn from a row of logits, found in float64 by sorting."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from slipstream.kernels.metadata import SamplingTensors


class Wants(NamedTuple):
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def kept_weights(
    logits: np.ndarray, wants: Wants, top_p: float, min_p: float = 1 - 1e-6
) -> np.ndarray:
    """float64 [V], 0 where a filter drops the token. Equal tokens are kept together. `min_p` is a factor of the
    parameter's."""
    x = logits.astype(np.float64)
    w = np.exp((x - x.max()) / np.float64(np.float32(wants.temperature)))
    w[w < max(np.float64(np.float32(wants.min_p)) * min_p, 2.0**-42)] = 0.0
    if 0 < wants.top_k < len(x):
        w[x < np.sort(x)[-wants.top_k]] = 0.0
    if top_p < 1.0:
        ordered = np.sort(w)[::-1]
        before = ordered.cumsum() - ordered
        w[w < ordered[max(1, np.count_nonzero(before < top_p * w.sum())) - 1]] = 0.0
    return w


def may_draw(logits: np.ndarray, wants: Wants, u: float, token: int) -> bool:
    """Whether `token` is where the sum of the kept weights, in the order of ids, exceeds u · total. Cuts and sums
    may round: a top_p or min_p nearby counts, too."""
    if wants.temperature == 0.0:
        return token == int(logits.argmax())
    p = float(np.float32(wants.top_p))
    cuts = p, p * (1 - 1e-5), min(1.0, p * (1 + 1e-5)) if p < 1.0 else 1.0
    for near, least in product(cuts, (1 - 1e-6, 1.0)):
        w = kept_weights(logits, wants, near, least)
        running = w.cumsum()
        target, slack = u * running[-1], 2e-5 * running[-1]
        before = running[token] - w[token]
        if w[token] > 0 and before - slack <= target <= running[token] + slack:
            return True
    return False


def tensors(wants: list[Wants], seeds=None, rows=None) -> SamplingTensors:
    count = len(wants)
    floats = {
        n: torch.tensor([getattr(w, n) for w in wants]) for n in ("temperature", "top_p", "min_p")
    }
    return SamplingTensors(
        **floats,
        top_k=torch.tensor([w.top_k for w in wants]),
        seeds=torch.arange(count) if seeds is None else seeds,
        history_lens=torch.arange(count if rows is None else len(rows), dtype=torch.int32),
        rows=rows,
    )


def are_draws_of(weights: np.ndarray, tokens: np.ndarray) -> bool:
    """Whether the tokens are distributed like the weights, by a chi-square test that errs in one of 10⁵ cases."""
    drawn = np.bincount(tokens, minlength=len(weights))
    expected = len(tokens) * weights / weights.sum()
    there = weights > 0
    statistic, freedom = ((drawn - expected)[there] ** 2 / expected[there]).sum(), there.sum() - 1
    return not drawn[~there].any() and statistic < freedom + 5 * np.sqrt(2 * freedom) + 10


def random_case(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, Wants]:
    """Logits of some shape, with ties and forbidden tokens, and parameters of some mixture."""
    x = (rng.standard_normal(vocab) * rng.choice([0.0, 0.3, 2.0, 8.0])).astype(np.float32)
    shape = rng.integers(5)
    if shape == 0:
        x = np.round(x, int(rng.integers(2)))  # ties
    elif shape == 1:
        x[rng.random(vocab) < rng.choice([0.5, 0.99])] = -np.inf
        x[rng.integers(vocab)] = 0.0
    elif shape == 2:
        x[rng.integers(vocab)] += 30.0
    wants = Wants(
        float(rng.choice([0.0, 1e-3, 0.3, 0.8, 1.0, 3.0, 1e4])),
        int(rng.choice([0, 0, 1, 2, 50, vocab - 1, vocab, 10**6])),
        float(rng.choice([1.0, 1.0, 0.0, 1e-6, 0.3, 0.9, 0.95, 0.9999])),
        float(rng.choice([0.0, 0.0, 0.02, 0.5, 1.0])),
    )
    return x, wants
