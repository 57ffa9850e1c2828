"""Search for the highest arrival rate at which objectives still hold."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.costs.metrics import DISTRIBUTIONS, PERCENTILES, Summary
from slipstream.errors import ConfigError

PRECISION = 1.05
"""Ratio of the lowest failed rate to the highest successful one at which the search ends."""

_FIELDS = {
    f"{field.removesuffix('_s')}_{q}": (field, q)
    for field in DISTRIBUTIONS.values()
    for q in PERCENTILES
}


@dataclass(frozen=True, slots=True)
class RateObjective:
    """Objective that a percentile of the requests' latencies is at most `most` seconds."""

    name: str
    most: float

    def value(self, summary: Summary) -> float | None:
        """Measured percentile in seconds; None without values, such as gaps in answers of one token."""
        field, q = _FIELDS[self.name]
        found = getattr(summary, field)
        return None if found is None else float(getattr(found, q))


def parse_rate_objectives(text: str) -> tuple[RateObjective, ...]:
    """Parse `ttft_p99=0.2,tpot_p99=0.02`, in seconds."""
    found = []
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            objective = RateObjective(name, float(value))
        except ValueError:
            objective = RateObjective(name, 0.0)
        if name not in _FIELDS or not objective.most > 0:
            raise ConfigError(
                f"find_rate: {part!r} is not NAME=SECONDS with a NAME of {', '.join(_FIELDS)}",
                field="find_rate",
            )
        found.append(objective)
    return tuple(found)


def holds(summary: Summary, objectives: tuple[RateObjective, ...]) -> bool:
    """Whether every request was answered, and the objectives are met."""
    values = [(objective.value(summary), objective.most) for objective in objectives]
    return not summary.num_failed and all(value is None or value <= most for value, most in values)


class RateSearch:
    """Searches the highest rate: doubles or halves it until one rate meets the objectives and one
    does not, then bisects; at most `max_runs` runs."""

    def __init__(self, rate: float, max_runs: int) -> None:
        self.rate: float | None = rate  # rate to try next; None at the end
        self.best: float | None = None  # highest rate that met the objectives
        self._failed: float | None = None  # lowest rate that did not
        self._runs_left = max_runs

    def record(self, held: bool) -> None:
        """Record whether the objectives were met at `rate`."""
        assert self.rate is not None
        if held:
            self.best = self.rate
        else:
            self._failed = self.rate
        self._runs_left -= 1
        if self._failed is None:
            self.rate *= 2
        elif self.best is None:
            self.rate /= 2
        else:
            self.rate = (self.best + self._failed) / 2
        found = (
            self.best is not None
            and self._failed is not None
            and self._failed <= self.best * PRECISION
        )
        if found or not self._runs_left:
            self.rate = None
