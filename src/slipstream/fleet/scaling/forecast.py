"""Forecasts the request rate from past arrivals: a level with a damped trend, at several speeds at once.

Holt's linear method (Holt 1957; damped: Gardner and McKenzie 1985) over intervals of equal length, once for each speed in
`SPEEDS`; the speed whose forecasts were off the least lately forecasts. What has a day before it is also forecast as yesterday
at this time, moved to today's level, and that competes with the others. The upper bound is the forecast plus a quantile of how
far it was too low lately at this very horizon (split conformal prediction, over a sliding window), so it needs no model of the
noise.

Pure: no clock, and the same counts give the same forecasts. State is bounded: `WINDOW` errors and a day of counts.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import NormalDist

SPEEDS = ((0.05, 0.0), (0.12, 0.0), (0.12, 0.02), (0.25, 0.0), (0.25, 0.05), (0.5, 0.0), (1.0, 0.0))
"""(of the level, of the trend); the last is the naive forecast: as it is now."""

DAMPING = 0.95
FORGET = 0.98
"""The mean error of a speed forgets at this rate."""

WINDOW = 240
"""Errors that bounds come from."""

DAY_S = 86400.0
_NORMAL = NormalDist()


class _Holt:
    def __init__(self, level_speed: float, trend_speed: float) -> None:
        self._speeds = level_speed, trend_speed
        self.level: float | None = None
        self.trend = 0.0

    def learn(self, value: float) -> None:
        if self.level is None:
            self.level = value
            return
        a, b = self._speeds
        before = self.level
        self.level = a * value + (1 - a) * (before + DAMPING * self.trend)
        self.trend = b * (self.level - before) + (1 - b) * DAMPING * self.trend

    def ahead(self, steps: int) -> float:
        grown = DAMPING * (1 - DAMPING**steps) / (1 - DAMPING)
        return max(0.0, (self.level or 0.0) + grown * self.trend)


class Forecast:
    """`interval_s` between counts. The forecast is the mean rate over the second half of the next `horizon_s`."""

    def __init__(self, *, interval_s: float, horizon_s: float) -> None:
        self.interval_s = interval_s
        self.steps = max(1, round(horizon_s / interval_s))
        self._methods = [_Holt(*speeds) for speeds in SPEEDS]
        self._day = max(1, round(DAY_S / interval_s))
        self._seen: deque[float] = deque(maxlen=max(self._day, self.steps) + 1)
        self._levels: deque[float] = deque(maxlen=self._seen.maxlen)
        self._made: deque[list[float]] = deque(
            maxlen=self.steps
        )  # forecasts that are not due yet, the oldest first
        self._error = [0.0] * (len(SPEEDS) + 1)
        self._short: deque[float] = deque(
            maxlen=WINDOW
        )  # by how much the chosen forecasts were too low, over √rate
        self._chosen: deque[float] = deque(maxlen=self.steps)

    def look_ahead(self, horizon_s: float) -> None:
        """Another horizon from the next count on. Levels and trends stay; how far forecasts are off is learnt anew."""
        steps = min(self._day, max(1, round(horizon_s / self.interval_s)))
        if steps != self.steps:
            self.steps = steps
            self._made, self._chosen = deque(maxlen=steps), deque(maxlen=steps)
            self._short.clear()

    @property
    def best(self) -> int:
        """The number of the method that forecasts."""
        last = len(SPEEDS) if self._has_day else len(SPEEDS) - 1
        return min(range(last + 1), key=self._error.__getitem__)

    @property
    def _has_day(self) -> bool:
        return len(self._seen) == self._seen.maxlen

    def learn(self, rate: float) -> None:
        """The rate of the interval that ended."""
        self._seen.append(rate)
        if len(self._made) == self.steps:
            came = self._recent()
            due, chosen = self._made.popleft(), self._chosen.popleft()
            for i, value in enumerate(due):
                self._error[i] = FORGET * self._error[i] + (1 - FORGET) * abs(value - came)
            self._short.append((came - chosen) / math.sqrt(max(chosen, 1 / self.interval_s)))
        for method in self._methods:
            method.learn(rate)
        self._levels.append(self._methods[1].level or 0.0)
        made = [method.ahead(self.steps) for method in self._methods]
        made.append(self._as_yesterday())
        self._made.append(made)
        self._chosen.append(made[self.best])

    def _recent(self) -> float:
        """What came in the last half of a horizon: a mean, since one interval is mostly chance."""
        count = max(1, self.steps // 2)
        last = list(self._seen)[-count:]
        return sum(last) / len(last)

    def _as_yesterday(self) -> float:
        if not self._has_day:
            return 0.0
        return max(0.0, self._seen[self.steps] + self._levels[-1] - self._levels[0])

    def mean(self) -> float:
        """Requests a second, a horizon ahead."""
        return self._chosen[-1] if self._chosen else 0.0

    def upper(self, share: float) -> float:
        """What the rate a horizon ahead stays below in such a share of the cases."""
        mean = self.mean()
        scale = math.sqrt(max(mean, 1 / self.interval_s))
        if (
            len(self._short) < 10
        ):  # independent users: a Poisson distribution's noise over half a horizon
            return max(
                0.0,
                mean
                + _NORMAL.inv_cdf(share)
                * scale
                / math.sqrt(max(1.0, self.steps / 2) * self.interval_s),
            )
        errors = sorted(self._short)
        place = min(len(errors) - 1, math.ceil(share * (len(errors) + 1)) - 1)
        return max(0.0, mean + errors[place] * scale)
