"""What is known of candidates that were not measured: the prior, corrected by those that were.

The logarithms of measured over predicted are a Gaussian process. What the prior gets wrong is a sum: of what it gets wrong for
every candidate of this machine, of a part for each choice (the compression's is the largest: kernels differ more than the
scheduler), and of a little for each combination. So all candidates that share a choice learn from one measurement, and how sure
a figure is follows. A choice between numbers learns from numbers near it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.optimize.candidates import NOTHING, Candidate, Prior, Result

OF_ALL = 0.5
OF_COMPRESSION = 0.4
OF_SETTING = 0.1
OF_COMBINATION = 0.05
NOISE = 0.05
"""Standard deviations of logarithms: of what the prior gets wrong by each, and of measuring again."""

SCALES = (0.7, 1.0, 1.4, 2.0, 2.8)
"""What all of them are multiplied by: what makes the measured figures likeliest."""

NEAR = 1.0
"""Doublings over which what is wrong of a number's choices is nearly alike."""


class Corrected:
    """(mean, standard deviation) of a candidate's −ln throughput and ln seconds."""

    def __init__(self, prior: Prior, measured: Sequence[Result]) -> None:
        self._prior = prior
        known = [r for r in measured if r.throughput and r.tpot_s and prior(r.candidate) != NOTHING]
        self._known = [r.candidate for r in known]
        found = np.array([(-math.log(r.throughput), math.log(r.tpot_s)) for r in known if r.throughput and r.tpot_s])
        residuals = found.reshape(len(known), 2) - self._expected(self._known)
        covariance = self._kernel(self._known, self._known) + NOISE**2 * np.eye(len(known))
        self._scale = max(SCALES, key=lambda scale: _log_likelihood(residuals, scale**2 * covariance))
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ residuals  # [K, 2]

    def at(self, candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        """Both [N, 2]."""
        cross = self._kernel(candidates, self._known)  # [N, K]
        own = self._kernel(candidates[:1], candidates[:1]).sum()  # alike for all
        variance = own - np.einsum("nk,kl,nl->n", cross, self._inverse, cross)
        deviation = self._scale * np.sqrt(np.maximum(variance, 0))
        return self._expected(candidates) + cross @ self._weights, np.stack([deviation, deviation], axis=1)

    def _expected(self, candidates: Sequence[Candidate]) -> Any:
        expected = [self._prior(c) for c in candidates]
        return np.array([(-math.log(p.throughput), math.log(p.tpot_s)) for p in expected]).reshape(len(candidates), 2)

    @staticmethod
    def _kernel(first: Sequence[Candidate], second: Sequence[Candidate]) -> Any:
        return np.array([[covariance(a, b) for b in second] for a in first]).reshape(len(first), len(second))


def _log_likelihood(residuals: Any, covariance: Any) -> float:
    """Of both columns [K, 2], up to a constant."""
    _, log_volume = np.linalg.slogdet(covariance)
    return float(-0.5 * np.sum(residuals * np.linalg.solve(covariance, residuals)) - 0.5 * residuals.shape[1] * log_volume)


def covariance(a: Candidate, b: Candidate) -> float:
    """Of what the prior gets wrong of two candidates."""
    compression = float(a.compression == b.compression)
    settings = [_alike(x, y) for (_, x), (_, y) in zip(a.settings, b.settings, strict=True)]
    of_settings = OF_SETTING**2 * sum(settings)
    return OF_ALL**2 + OF_COMPRESSION**2 * compression + of_settings + OF_COMBINATION**2 * compression * math.prod(settings)


def _alike(x: Any, y: Any) -> float:
    if x == y:
        return 1.0
    if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0:
        return math.exp(-0.5 * (math.log2(x / y) / NEAR) ** 2)
    return 0.0
