"""Forecasts the request rate from past arrivals: exponential smoothing with a damped trend, at
several speeds at once.

1. Holt's linear method (Holt 1957; damped: Gardner and McKenzie 1985) runs over intervals of equal
   length, once for each speed in `SPEEDS`. The method with the smallest recent error makes the
   forecast.
2. After a day of data another method competes: yesterday's rate at this time, shifted to today's
   level.
3. The upper bound is the forecast plus a quantile of its recent errors at the same horizon (split
   conformal prediction over a sliding window), so it needs no model of the noise.

Pure: no clock, and equal counts give equal forecasts. Memory is bounded: `WINDOW` errors and a day
of counts."""

from __future__ import annotations

import math
from collections import deque
from statistics import NormalDist

SPEEDS = ((0.05, 0.0), (0.12, 0.0), (0.12, 0.02), (0.25, 0.0), (0.25, 0.05), (0.5, 0.0), (1.0, 0.0))
"""Smoothing factors (of the level, of the trend). The last is the naive forecast: the latest rate.
"""

DAMPING = 0.95
FORGET = 0.98
"""Decay per interval of a method's mean error."""

WINDOW = 240
"""Errors over which the quantile is taken."""

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
    """Forecast of the mean rate over the second half of the next `horizon_s`, from counts every
    `interval_s`."""

    def __init__(self, *, interval_s: float, horizon_s: float) -> None:
        self.interval_s = interval_s
        self.steps = max(1, round(horizon_s / interval_s))
        self._methods = [_Holt(*speeds) for speeds in SPEEDS]
        self._day = max(1, round(DAY_S / interval_s))
        self._seen: deque[float] = deque(maxlen=max(self._day, self.steps) + 1)
        self._levels: deque[float] = deque(maxlen=self._seen.maxlen)
        # forecasts that are not due yet, oldest first
        self._made: deque[list[float]] = deque(maxlen=self.steps)
        self._error = [0.0] * (len(SPEEDS) + 1)
        # by how much the chosen forecasts were too low, over √rate
        self._short: deque[float] = deque(maxlen=WINDOW)
        self._chosen: deque[float] = deque(maxlen=self.steps)

    def look_ahead(self, horizon_s: float) -> None:
        """Set another horizon from the next count on. Levels and trends stay; errors are learned
        again."""
        steps = min(self._day, max(1, round(horizon_s / self.interval_s)))
        if steps != self.steps:
            self.steps = steps
            self._made, self._chosen = deque(maxlen=steps), deque(maxlen=steps)
            self._short.clear()

    @property
    def best(self) -> int:
        """Index of the method with the smallest recent error."""
        last = len(SPEEDS) if self._has_day else len(SPEEDS) - 1
        return min(range(last + 1), key=self._error.__getitem__)

    @property
    def _has_day(self) -> bool:
        return len(self._seen) == self._seen.maxlen

    def learn(self, rate: float) -> None:
        """Add the rate of the interval that ended."""
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
        """Mean rate over the last half horizon; a single interval is mostly chance."""
        count = max(1, self.steps // 2)
        last = list(self._seen)[-count:]
        return sum(last) / len(last)

    def _as_yesterday(self) -> float:
        if not self._has_day:
            return 0.0
        return max(0.0, self._seen[self.steps] + self._levels[-1] - self._levels[0])

    def mean(self) -> float:
        """Forecast of requests/s, one horizon ahead."""
        return self._chosen[-1] if self._chosen else 0.0

    def upper(self, share: float) -> float:
        """The `share` quantile of the rate forecast one horizon ahead."""
        mean = self.mean()
        scale = math.sqrt(max(mean, 1 / self.interval_s))
        # few errors yet: the noise of a Poisson process over half a horizon
        if len(self._short) < 10:
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
