"""Predicts the speed of unmeasured candidates by a prior that is corrected by measurements of others.

The log of measured over predicted is modelled as a Gaussian process. The prior's error is a sum of:

1. a part common to every candidate on this machine,
2. a part for each choice: the compression, and each setting,
3. a part for the combination of all choices.

So a measurement improves the predictions of all candidates that share a choice, and each prediction has a
standard deviation. Measurements of similar numeric choices are used too. A measurement has two further parts
that do not belong to the candidate: the machine's speed, which drifts from one measurement to the next, and
noise. The standard deviations of all parts maximize the likelihood of the measurements, under a prior around
usual values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.optimize.candidates import NOTHING, Candidate, Prior, TrialResult

OF_ALL = 0.5
OF_COMPRESSION = 0.4
OF_SETTING = 0.15
OF_COMBINATION = 0.05
DRIFT = 0.05
NOISE = 0.05
"""Usual standard deviations of logarithms: of each part of the prior's error, of the machine's
speed, and of a repeated measurement."""

FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Factors of the usual standard deviations that are tried."""

UNUSUAL = 0.8
"""Standard deviation of the logarithm of such a factor."""

NEAR = 1.0
"""Correlation length between numeric choices, in factors of two."""

STEADY = 6.0
"""Correlation length of the machine's speed, in number of measurements."""


class Corrected:
    """Corrected predictions of (−ln throughput, ln seconds). `measured` are results in the order of
    measurement."""

    def __init__(self, prior: Prior, measured: Sequence[TrialResult]) -> None:
        self._prior = prior
        known = [
            (i, r)
            for i, r in enumerate(measured)
            if r.throughput and r.tpot_s and prior(r.candidate) != NOTHING
        ]
        self._known = [r.candidate for _, r in known]
        found = np.array(
            [
                (-math.log(r.throughput), math.log(r.tpot_s))
                for _, r in known
                if r.throughput and r.tpot_s
            ]
        )
        if not known:
            return
        residuals = found.reshape(len(known), 2) - self._expected(self._known)
        when = np.array([i for i, _ in known], dtype=float)
        drift = np.exp(-np.abs(when[:, None] - when[None, :]) / STEADY)
        own = _alike_parts(self._known, self._known)
        parts = np.concatenate([own, drift[None], np.eye(len(known))[None]])  # [P, K, K]
        num_settings = len(own) - 3
        usual = np.array(
            [OF_ALL, OF_COMPRESSION, *[OF_SETTING] * num_settings, OF_COMBINATION, DRIFT, NOISE]
        )
        variances = _likeliest(residuals, parts, usual) ** 2
        self._variances = variances[: len(own)]
        self._inverse = np.linalg.inv(np.tensordot(variances, parts, 1))
        self._weights = self._inverse @ residuals  # [K, 2]

    def at(self, candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        """Predicted (mean, standard deviation) of the candidates, both [N, 2]."""
        if not self._known:
            return self._expected(candidates), np.full(
                (len(candidates), 2), math.hypot(OF_ALL, OF_COMPRESSION)
            )
        cross = np.tensordot(self._variances, _alike_parts(candidates, self._known), 1)  # [N, K]
        variance = self._variances.sum() - np.einsum("nk,kl,nl->n", cross, self._inverse, cross)
        deviation = np.sqrt(np.maximum(variance, 0))
        return self._expected(candidates) + cross @ self._weights, np.stack(
            [deviation, deviation], axis=1
        )

    def _expected(self, candidates: Sequence[Candidate]) -> Any:
        expected = [self._prior(c) for c in candidates]
        return np.array([(-math.log(p.throughput), math.log(p.tpot_s)) for p in expected]).reshape(
            len(candidates), 2
        )


def _likeliest(residuals: Any, parts: Any, usual: Any) -> Any:
    """Most likely standard deviations [P] of the parts, optimized one after the other, in two
    rounds."""
    factors = np.ones(len(usual))
    for _, i in itertools.product(range(2), range(len(usual))):

        def likelihood(factor: float, i: int = i) -> float:
            tried = factors.copy()
            tried[i] = factor
            covariance = np.tensordot((tried * usual) ** 2, parts, 1)
            return _log_likelihood(residuals, covariance) - 0.5 * (math.log(factor) / UNUSUAL) ** 2

        factors[i] = max(FACTORS, key=likelihood)
    return factors * usual


def _log_likelihood(residuals: Any, covariance: Any) -> float:
    """Log-likelihood of both columns [K, 2], up to a constant."""
    _, log_volume = np.linalg.slogdet(covariance)
    return float(
        -0.5 * np.sum(residuals * np.linalg.solve(covariance, residuals))
        - 0.5 * residuals.shape[1] * log_volume
    )


def _alike_parts(first: Sequence[Candidate], second: Sequence[Candidate]) -> Any:
    """Similarity of each pair of candidates for each part, [P, N, K] from 0 to 1: common part,
    compression, each setting, and the combination."""
    shape = len(first), len(second)
    parts = [
        np.ones(shape),
        _table([c.compression for c in first], [c.compression for c in second]),
    ]
    columns = zip(*(c.settings for c in (*first, *second)), strict=True)
    for column in columns:
        values = [value for _, value in column]
        parts.append(_table(values[: len(first)], values[len(first) :]))
    return np.stack([*parts, np.prod(parts[1:], axis=0)])


def _table(first: Sequence[Any], second: Sequence[Any]) -> Any:
    """`_alike` of each pair of settings, computed once per distinct pair of values."""
    rows, columns = list(dict.fromkeys(first)), list(dict.fromkeys(second))
    small = np.array([[_alike(x, y) for y in columns] for x in rows]).reshape(
        len(rows), len(columns)
    )
    return small[np.ix_([rows.index(x) for x in first], [columns.index(y) for y in second])]


def _alike(x: Any, y: Any) -> float:
    if x == y:
        return 1.0
    if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0:
        return math.exp(-0.5 * (math.log2(x / y) / NEAR) ** 2)
    return 0.0
