"""Which candidate to measure next. Nothing here runs an engine: measuring is a function, and so is what is known beforehand.

A candidate is a compression with settings of the engine. Three figures of it are to be good: throughput (high), time between
tokens (low) and divergence from the original (low). A *prior* predicts the first two for every candidate. What was measured
corrects it: the logarithms of measured over predicted are a Gaussian process, whose kernel is the share of choices that two
candidates have in common, and e^(−d) for d that differ. So a candidate learns most from those most like it, and how sure it is
of its figures is known.

1. The next candidate is the one that would add the most hypervolume to the front if it came out at the good end of what is
   likely.
2. Every eighth comes from Optuna's tree-structured Parzen estimator instead, which does not believe the prior.
3. The search ends when no candidate could move the front, even at the good end, or when the time is over.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.optimize.pareto import front, hypervolume

LEAST_GAIN = 0.003
"""The front can't move when nothing would add this share of its hypervolume."""

LEAST_MEASURED = 6
OPTIMISM = 1.0
"""Standard deviations towards the good end."""

EXPLORE_EVERY = 8
MAIN_EFFECTS = 0.7
"""The share of what the prior gets wrong that each choice adds by itself, whatever the others are."""

NOISE = 0.05
"""What a measurement repeats to, as a share."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`compression` is a name; `settings` are (name, value), in the space's order."""

    compression: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.compression, *(f"{name}={value}" for name, value in self.settings if value is not None)])

    @property
    def quality_key(self) -> tuple[Any, ...]:
        """What its answers depend on: candidates that have this in common are measured once."""
        return (self.compression, *(pair for pair in self.settings if pair[0] == "kv_cache_dtype"))

    def distance(self, other: Candidate) -> int:
        """In how many choices they differ."""
        apart = sum(a != b for a, b in zip(self.settings, other.settings, strict=True))
        return apart + (self.compression != other.compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Every compression with every choice of each axis."""

    compressions: tuple[str, ...]
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def candidates(self) -> list[Candidate]:
        choices = [[(name, value) for value in values] for name, values in self.axes.items()]
        return [Candidate(c, settings) for c in self.compressions for settings in itertools.product(*choices)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Estimated output tokens a second, seconds between tokens, and divergence in nats."""

    throughput: float
    tpot_s: float
    kl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A candidate that was measured, or failed. `fits` says whether its quality is within the limits. `figures` are whatever
    the measuring had to say."""

    candidate: Candidate
    throughput: float | None = None
    tpot_s: float | None = None
    kl: float | None = None
    fits: bool = True
    error: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> tuple[float, float, float] | None:
        """Its place, all three to be small: −ln throughput, ln seconds, nats. None of one that failed or does not fit."""
        if self.error is not None or not self.fits or not self.throughput or not self.tpot_s or self.kl is None:
            return None
        return -math.log(self.throughput), math.log(self.tpot_s), self.kl


Prior: TypeAlias = Callable[[Candidate], Prediction]
Measure: TypeAlias = Callable[[Candidate], Result]


class Corrected:
    """The prior, corrected by what was measured: (mean, standard deviation) of a candidate's two logarithms."""

    def __init__(self, prior: Prior, measured: Sequence[Result]) -> None:
        self._prior = prior
        self._known = [r for r in measured if r.throughput and r.tpot_s]
        residuals = np.array([self._residual(r) for r in self._known]).reshape(len(self._known), 2)
        self._center = residuals.mean(axis=0) if len(residuals) else np.zeros(2)
        spread = residuals.std(axis=0) if len(residuals) > 1 else np.full(2, 0.5)
        self._scale = np.maximum(spread, 2 * NOISE)
        covariance = self._kernel([r.candidate for r in self._known]) if self._known else np.zeros((0, 0))
        self._inverse = [np.linalg.inv(s * s * covariance + NOISE**2 * np.eye(len(self._known))) for s in self._scale]
        self._weights = [
            inverse @ column for inverse, column in zip(self._inverse, (residuals - self._center).T, strict=True)
        ]

    def _residual(self, result: Result) -> tuple[float, float]:
        expected = self._prior(result.candidate)
        assert result.throughput is not None
        assert result.tpot_s is not None
        return -math.log(result.throughput / expected.throughput), math.log(result.tpot_s / expected.tpot_s)

    def _kernel(self, candidates: Sequence[Candidate]) -> Any:
        apart = np.array([[a.distance(b.candidate) for b in self._known] for a in candidates], dtype=float)
        alike = 1 - apart / (1 + len(self._known[0].candidate.settings))
        return MAIN_EFFECTS * alike + (1 - MAIN_EFFECTS) * np.exp(-apart)

    def at(self, candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        """Mean and standard deviation [N, 2] of (−ln throughput, ln seconds)."""
        expected = [self._prior(c) for c in candidates]
        base = np.array([(-math.log(p.throughput), math.log(p.tpot_s)) for p in expected]).reshape(len(candidates), 2)
        if not self._known:
            return base, np.tile(self._scale, (len(candidates), 1))
        kernel = self._kernel(candidates)
        mean, deviation = base + self._center, np.empty_like(base)
        for i, scale in enumerate(self._scale):
            cross = scale * scale * kernel
            mean[:, i] += cross @ self._weights[i]
            variance = scale * scale - np.einsum("nk,kl,nl->n", cross, self._inverse[i], cross)
            deviation[:, i] = np.sqrt(np.maximum(variance, 0))
        return mean, deviation


class Search:
    """`known` are results of an interrupted search, which count as measured. `measure` may raise what goes wrong with a
    candidate: that is a result with its error."""

    def __init__(
        self,
        space: Space,
        prior: Prior,
        measure: Measure,
        *,
        known: Iterable[Result] = (),
        seed: int = 0,
        kl_limit: float = 0.1,
    ) -> None:
        self.space, self._prior, self._measure = space, prior, measure
        self._kl_limit = kl_limit
        self._all = space.candidates()
        self.results: list[Result] = [r for r in known if r.candidate in set(self._all)]
        self._optuna = _Explorer(space, seed)
        for result in self.results:
            self._optuna.tell(result)
        self.why_ended = ""

    def run(
        self,
        *,
        budget_s: float,
        on_result: Callable[[Result], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[Result]:
        """Measure until the front can't move or `budget_s` is over; a candidate is not begun that the time would not suffice
        for, judging by the last ones."""
        begin, longest = clock(), 0.0
        while (candidate := self.propose()) is not None:
            started = clock()
            if started - begin + longest > budget_s and self.results:
                self.why_ended = f"the budget of {budget_s:.0f} s is over"
                break
            predicted = self.predict(candidate)
            try:
                result = self._measure(candidate)
            except SlipstreamError as error:
                result = Result(candidate=candidate, error=str(error))
            figures = {
                "predicted_throughput": predicted.throughput,
                "predicted_tpot_s": predicted.tpot_s,
                **result.figures,
            }
            result = dataclasses.replace(result, figures=figures)
            self.results.append(result)
            self._optuna.tell(result)
            on_result(result)
            longest = max(longest * 0.7, clock() - started)
        return self.results

    def propose(self) -> Candidate | None:
        """The candidate to measure next; None, with `why_ended`, if no other is worth it."""
        waiting = self.waiting()
        if not waiting:
            self.why_ended = "every candidate was measured, or shares the fault of one that was"
            return None
        points, gains = self.points(), self._gains(waiting)
        best = int(np.argmax(gains))
        volume = hypervolume(points, self._reference()) if points else 0.0
        if len(points) >= LEAST_MEASURED and gains[best] <= LEAST_GAIN * volume:
            self.why_ended = "no candidate could move the front, even at the good end of its uncertainty"
            return None
        if (
            len(self.results) % EXPLORE_EVERY == EXPLORE_EVERY - 1
            and (other := self._optuna.ask(set(waiting))) is not None
        ):
            return other
        return waiting[best]

    def predict(self, candidate: Candidate) -> Prediction:
        """By the prior, as corrected by what was measured so far."""
        ((minus_log_throughput, log_tpot),), _ = Corrected(self._prior, self.results).at([candidate])
        return Prediction(throughput=math.exp(-minus_log_throughput), tpot_s=math.exp(log_tpot), kl=self._kl(candidate))

    def waiting(self) -> list[Candidate]:
        """Not measured, and of no compression that was found not to fit."""
        done = {r.candidate for r in self.results}
        unfit = {r.candidate.quality_key for r in self.results if not r.fits}
        return [c for c in self._all if c not in done and c.quality_key not in unfit]

    def points(self) -> list[tuple[float, float, float]]:
        return [p for r in self.results if (p := r.point) is not None]

    def front(self) -> list[Result]:
        """The best that were measured, the fastest first."""
        found = [r for r in self.results if r.point is not None]
        best = [found[i] for i in front([r.point for r in found if r.point is not None])]
        return sorted(best, key=lambda r: -(r.throughput or 0))

    def _kl(self, candidate: Candidate) -> float:
        """Measured, if any candidate of its quality was; else the prior's."""
        key = candidate.quality_key
        return next(
            (r.kl for r in self.results if r.kl is not None and r.candidate.quality_key == key),
            self._prior(candidate).kl,
        )

    def _reference(self) -> tuple[float, float, float]:
        """Beyond all that was measured, so that the ends of the front count, too."""
        points = self.points()
        worst = [max(p[i] for p in points) for i in (0, 1)]
        return worst[0] + 0.1, worst[1] + 0.1, self._kl_limit * 1.1 + 1e-9

    def _gains(self, waiting: Sequence[Candidate]) -> list[float]:
        """The hypervolume that each would add at the good end."""
        mean, deviation = Corrected(self._prior, self.results).at(waiting)
        good = mean - OPTIMISM * deviation
        expected = [(float(a), float(b), self._kl(c)) for (a, b), c in zip(good, waiting, strict=True)]
        points = self.points()
        if not points:  # no front yet: the original as it is, or what is nearest to it, with the most throughput
            nearest = min(p[2] for p in expected)
            return [-p[0] if p[2] == nearest else -math.inf for p in expected]
        reference = self._reference()
        before = hypervolume(points, reference)
        return [hypervolume([*points, p], reference) - before for p in expected]


class _Explorer:
    """Optuna's sampler over the same space. It is told of every result; what it asks for is measured only if nobody did."""

    TRIES = 16

    def __init__(self, space: Space, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("the search needs Optuna: pip install 'slipstream[optimize]'", field="out") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._axes = {"compression": space.compressions, **space.axes}
        kind = optuna.distributions.CategoricalDistribution
        # A choice is its number: Optuna's are to be plain values, and ours may be tables.
        self._distributions: dict[str, Any] = {
            name: kind(tuple(range(len(values)))) for name, values in self._axes.items()
        }
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=LEAST_MEASURED, multivariate=True)
        self._study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)

    def tell(self, result: Result) -> None:
        given = {"compression": result.candidate.compression, **dict(result.candidate.settings)}
        numbers = {name: values.index(given[name]) for name, values in self._axes.items()}
        trial, states = self._optuna.trial, self._optuna.trial.TrialState
        point = result.point
        state = {"state": states.FAIL} if point is None else {"values": point}
        self._study.add_trial(trial.create_trial(params=numbers, distributions=self._distributions, **state))

    def ask(self, wanted: set[Candidate]) -> Candidate | None:
        for _ in range(self.TRIES):
            trial = self._study.ask(self._distributions)
            self._study.tell(
                trial, state=self._optuna.trial.TrialState.FAIL
            )  # what was measured is told as a trial of its own
            values = {name: self._axes[name][number] for name, number in trial.params.items()}
            found = Candidate(
                values.pop("compression"), tuple((name, values[name]) for name in self._axes if name in values)
            )
            if found in wanted:
                return found
        return None
