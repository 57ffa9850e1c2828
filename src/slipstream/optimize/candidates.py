"""Candidates: their settings, predictions and measurements. No engine runs here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ONE_DEVICE = "tp1"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate. `compression` is a name; `settings` are (name, value) pairs in the space's
    order."""

    compression: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join(
            [
                self.compression,
                *(f"{name}={value}" for name, value in self.settings if value is not None),
            ]
        )

    @property
    def quality_key(self) -> tuple[Any, ...]:
        """The settings on which its answers depend. The quality of candidates with the same key is
        measured once."""
        return (self.compression, *(pair for pair in self.settings if pair[0] == "kv_cache_dtype"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All combinations of compressions and choices of each axis. Axes are settings of the engine,
    and `parallel`, how several devices are used (`tp2`). `left_out`: combinations that no engine
    can start with."""

    compressions: tuple[str, ...]
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    left_out: frozenset[Candidate] = frozenset()

    def candidates(self) -> list[Candidate]:
        choices = [[(name, value) for value in values] for name, values in self.axes.items()]
        every = (
            Candidate(c, settings)
            for c in self.compressions
            for settings in itertools.product(*choices)
        )
        return [candidate for candidate in every if candidate not in self.left_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted output tokens per second, seconds between tokens, and KL divergence in nats."""

    throughput: float
    tpot_s: float
    kl: float = 0.0


NOTHING = Prediction(throughput=1e-3, tpot_s=1e3, kl=1e3)
"""Prediction for a candidate that can't be planned, for example because it does not fit. It is
tried last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Result of a candidate that was measured or failed. `fits`: whether its quality is within the
    limits. `figures`: all other measurements."""

    candidate: Candidate
    throughput: float | None = None
    tpot_s: float | None = None
    kl: float | None = None
    fits: bool = True
    error: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> tuple[float, float, float] | None:
        """(−ln throughput, ln seconds, nats); smaller is better for each. None if it failed or is
        outside the quality limits."""
        if (
            self.error is not None
            or not self.fits
            or not self.throughput
            or not self.tpot_s
            or self.kl is None
        ):
            return None
        return -math.log(self.throughput), math.log(self.tpot_s), self.kl


Prior: TypeAlias = Callable[[Candidate], Prediction]
Measure: TypeAlias = Callable[[Candidate], TrialResult]
