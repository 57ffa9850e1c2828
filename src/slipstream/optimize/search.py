"""Chooses the candidate to measure next. No engine runs here: measurement and prior are functions.

A candidate is a compression plus engine settings. There are three objectives: throughput (high),
time between tokens (low) and KL divergence from the original (low). A *prior* predicts the first
two for every candidate. Measurements correct it (`corrected`), which also estimates the
uncertainty. Divergence depends only on the compression and the KV cache's type: it is measured once
for all candidates that share them, and estimated until then.

1. The first candidate is the uncompressed original, with the settings of highest predicted
   throughput.
2. The next one has the largest expected hypervolume gain, which includes the chance that its
   quality is outside the limits. The hypervolume's reference is the worst value expected of any
   candidate, so that the ends of the front count from the start.
3. Every eighth candidate comes from Optuna's tree-structured Parzen estimator, which does not use
   the prior, if its expected gain is at least half of the best one's.
4. The search ends when no candidate is expected to improve the front, or when the time is over."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.errors import ConfigError, SlipstreamError, install_command
from slipstream.optimize.candidates import (
    NOTHING,
    Candidate,
    Measure,
    Prediction,
    Prior,
    Space,
    TrialResult,
)
from slipstream.optimize.corrected import Corrected
from slipstream.optimize.pareto import expected_gain, front, hypervolume

MIN_GAIN = 0.001
"""Minimum expected gain of a candidate, as a fraction of the front's hypervolume; below it the
candidate is not measured."""

MIN_MEASURED = 6
EXPLORE_EVERY = 8
EXPLORED_GAIN = 0.5
"""Minimum expected gain of Optuna's proposal, as a fraction of the best gain."""

GUESSED = 1.0
OF_SIBLING = 0.5
"""Standard deviations of the log of an unmeasured KL: of any compression, and of one measured with
another KV cache."""

QUADRATURE = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))
"""(standard deviations, weight) of Gauss–Hermite quadrature with three points."""


class Search:
    """One search. `known`: results of an interrupted search, which count as measured. If `measure`
    raises a SlipstreamError, it is stored as the candidate's result."""

    def __init__(
        self,
        space: Space,
        prior: Prior,
        measure: Measure,
        *,
        known: Iterable[TrialResult] = (),
        seed: int = 0,
        kl_limit: float = 0.1,
    ) -> None:
        self.space, self._prior, self._measure = space, prior, measure
        self._kl_limit = kl_limit
        self._all = space.candidates()
        self.results: list[TrialResult] = [r for r in known if r.candidate in set(self._all)]
        self._optuna = _Explorer(space, seed)
        for result in self.results:
            self._optuna.tell(result)
        self.why_ended = ""

    def run(
        self,
        *,
        budget_s: float,
        on_result: Callable[[TrialResult], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[TrialResult]:
        """Measure until no candidate is expected to improve the front, or `budget_s` is over. A
        candidate is not started if, judging by the latest ones, the remaining time is too short.
        Then only candidates of known quality are tried, which take much less time."""
        begin = clock()
        longest: dict[bool, float] = {}  # maximum time by whether the quality was known
        while (candidate := self.propose()) is not None:
            started = clock()
            left_s = budget_s - (started - begin)
            known = {r.candidate.quality_key for r in self.results if r.kl is not None}
            new = longest.get(False, longest.get(True, 0.0))
            # an estimate for a kind that was not measured yet
            takes = {False: new, True: longest.get(True, new / 2)}
            if self.results and takes[candidate.quality_key in known] > left_s:
                in_time = {c for c in self.waiting() if takes[c.quality_key in known] <= left_s}
                candidate = self.propose(in_time.__contains__)
                if candidate is None:
                    self.why_ended = f"the budget of {budget_s:.0f} s is over"
                    if left_s >= 1:
                        self.why_ended += f" but for {left_s:.0f} s, too few for a candidate that might move the front"
                    break
            is_known = candidate.quality_key in known
            predicted = self.predict(candidate)
            try:
                result = self._measure(candidate)
            except SlipstreamError as error:
                result = TrialResult(candidate=candidate, error=str(error))
            figures = {
                "predicted_throughput": predicted.throughput,
                "predicted_tpot_s": predicted.tpot_s,
                **result.figures,
            }
            result = dataclasses.replace(result, figures=figures)
            self.results.append(result)
            self._optuna.tell(result)
            on_result(result)
            longest[is_known] = max(longest.get(is_known, 0.0) * 0.7, clock() - started)
        return self.results

    def propose(
        self, among: Callable[[Candidate], bool] = lambda candidate: True
    ) -> Candidate | None:
        """The candidate to measure next, among those for which `among` is true. None, with the
        reason in `why_ended`, if no candidate is expected to improve the front."""
        waiting = [candidate for candidate in self.waiting() if among(candidate)]
        if not waiting:
            self.why_ended = "every candidate was measured, or shares the fault of one that was"
            return None
        points, (gains, volume) = self.points(), self._gains(waiting)
        best = int(np.argmax(gains))
        if len(points) >= MIN_MEASURED and gains[best] <= MIN_GAIN * volume:
            self.why_ended = "no candidate is expected to move the front"
            return None
        if points and len(self.results) % EXPLORE_EVERY == EXPLORE_EVERY - 1:
            worth = {
                c
                for c, gain in zip(waiting, gains, strict=True)
                if gain >= EXPLORED_GAIN * gains[best]
            }
            if (other := self._optuna.ask(worth)) is not None:
                return other
        return waiting[best]

    def predict(self, candidate: Candidate) -> Prediction:
        """The prior's prediction, corrected by the measurements so far."""
        ((minus_log_throughput, log_tpot),), _ = Corrected(self._prior, self.results).at(
            [candidate]
        )
        return Prediction(
            throughput=math.exp(-minus_log_throughput),
            tpot_s=math.exp(log_tpot),
            kl=self._kl(candidate)[0],
        )

    def waiting(self) -> list[Candidate]:
        """Candidates not measured yet. A compression that missed the quality limits with some KV
        cache is left out with caches of no better quality."""
        done = {r.candidate for r in self.results}
        unfit = [
            (r.candidate.compression, self._prior(r.candidate).kl)
            for r in self.results
            if not r.fits
        ]
        return [
            c
            for c in self._all
            if c not in done
            and not any(c.compression == of and self._prior(c).kl >= kl for of, kl in unfit)
        ]

    def points(self) -> list[tuple[float, float, float]]:
        return [p for r in self.results if (p := r.point) is not None]

    def front(self) -> list[TrialResult]:
        """Measured results on the Pareto front, fastest first."""
        found = [r for r in self.results if r.point is not None]
        best = [found[i] for i in front([r.point for r in found if r.point is not None])]
        return sorted(best, key=lambda r: -(r.throughput or 0))

    def _kl(self, candidate: Candidate) -> tuple[float, float]:
        """(KL divergence in nats, standard deviation of its logarithm) of a candidate. It is the
        measured value if a candidate with the same quality key was measured; else its compression's
        value with another KV cache, plus the difference of the caches; else the prior's."""
        known = {
            r.candidate.quality_key: (r.kl, r.candidate) for r in self.results if r.kl is not None
        }
        if candidate.quality_key in known:
            return known[candidate.quality_key][0], 0.0
        guess = self._prior(candidate).kl
        for kl, other in known.values():
            if other.compression == candidate.compression:
                return max(kl + self._between_caches(candidate, other, known), 0.0), OF_SIBLING
        return guess, GUESSED

    def _between_caches(
        self, candidate: Candidate, other: Candidate, known: Mapping[Any, tuple[float, Candidate]]
    ) -> float:
        """KL of `candidate` minus that of `other`, which differs in the KV cache: measured with
        another compression, or the prior's."""
        for compression in self.space.compressions:
            keys = [(compression, *c.quality_key[1:]) for c in (candidate, other)]
            if all(key in known for key in keys):
                return known[keys[0]][0] - known[keys[1]][0]
        return self._prior(candidate).kl - self._prior(other).kl

    def _believed(self, known: Corrected) -> list[tuple[float, float, float]]:
        """Points of the measured results without the estimated measurement noise. A value that is
        too good by noise would hide other candidates."""
        found = [r for r in self.results if r.point is not None]
        if not found:
            return []
        mean, _ = known.at([r.candidate for r in found])
        return [
            (float(a), float(b), r.kl)
            if r.kl is not None and self._prior(r.candidate) != NOTHING
            else r.point
            for r, (a, b) in zip(found, mean, strict=True)
            if r.point is not None
        ]

    def _reference(
        self, known: Corrected, points: list[tuple[float, float, float]]
    ) -> tuple[float, float, float]:
        """Reference point that is worse than all measured points and all predictions."""
        planned = [c for c in self.waiting() if self._prior(c) != NOTHING]
        mean = known.at(planned)[0] if planned else []
        all_points = [*points, *((float(a), float(b), 0.0) for a, b in mean)]
        worst = [max(p[i] for p in all_points) for i in (0, 1, 2)]
        return worst[0] + 0.1, worst[1] + 0.1, max(self._kl_limit, worst[2]) * 1.1 + 1e-9

    def _gains(self, waiting: Sequence[Candidate]) -> tuple[Any, float]:
        """(expected hypervolume gain [N] of each candidate, hypervolume of the front)."""
        known = Corrected(self._prior, self.results)
        mean, deviation = known.at(waiting)
        kl, spread = np.array([self._kl(c) for c in waiting]).T
        points = self._believed(known)
        if not points:  # no front yet: the least KL first, then the highest throughput
            return np.where(kl == kl.min(), -mean[:, 0], -math.inf), 0.0
        reference, gains = self._reference(known, points), np.zeros(len(waiting))
        for place, weight in QUADRATURE:
            here = kl * np.exp(place * spread)
            gains += (
                weight
                * (here <= self._kl_limit)
                * expected_gain(points, reference, mean, deviation, here)
            )
        return gains, hypervolume(points, reference)


def load_optuna() -> Any:
    """Import Optuna. ConfigError names the extra to install."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            f"the search needs Optuna: {install_command('optimize')}", field="out"
        ) from None
    return optuna


class _Explorer:
    """Optuna's sampler over the same space. It is given every result. A proposal is measured only
    if it was not measured before."""

    TRIES = 16

    def __init__(self, space: Space, seed: int) -> None:
        optuna = load_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._axes = {"compression": space.compressions, **space.axes}
        kind = optuna.distributions.CategoricalDistribution
        # Choices are passed as indices, because Optuna needs plain values, and ours may be dictionaries.
        self._distributions: dict[str, Any] = {
            name: kind(tuple(range(len(values)))) for name, values in self._axes.items()
        }
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=MIN_MEASURED, multivariate=True
        )
        self._study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)

    def tell(self, result: TrialResult) -> None:
        given = {"compression": result.candidate.compression, **dict(result.candidate.settings)}
        numbers = {name: values.index(given[name]) for name, values in self._axes.items()}
        trial, states = self._optuna.trial, self._optuna.trial.TrialState
        point = result.point
        state = {"state": states.FAIL} if point is None else {"values": point}
        self._study.add_trial(
            trial.create_trial(params=numbers, distributions=self._distributions, **state)
        )

    def ask(self, wanted: set[Candidate]) -> Candidate | None:
        for _ in range(self.TRIES):
            trial = self._study.ask(self._distributions)
            # the measurement is added as a separate trial
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            values = {name: self._axes[name][number] for name, number in trial.params.items()}
            found = Candidate(
                values.pop("compression"),
                tuple((name, values[name]) for name in self._axes if name in values),
            )
            if found in wanted:
                return found
        return None
