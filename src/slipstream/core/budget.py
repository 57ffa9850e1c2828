"""How many prompt tokens a step may take beside decodes, so that it ends within an objective for the time between tokens.

1. The time of a step is predicted as a + b·decodes + c·prompt tokens + d·(prompt tokens × the context that each attends to).
   The four are learned from the steps that have ended, by a Kalman filter: they drift as contexts grow, and old steps count
   less and less.
2. A step takes the prompt tokens with which the prediction stays within the objective, less twice what predictions were wrong
   by.
3. A step takes at most twice as many prompt tokens as any step measured so far, since a prediction far from all that was
   measured says nothing. The first step of all has `MIN_CHUNK`.
4. If the first prompt in line came more than `PATIENCE_S` ago, a step takes at least `MIN_CHUNK` tokens of it, whatever the
   prediction. So prompts go on where decodes alone already take longer than the objective.

Nothing here reads a clock: the same times give the same budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import ScheduledRequest

MIN_CHUNK = 32
PATIENCE_S = 0.5

Features = tuple[float, float, float, float]
"""Of a step: 1, and its decodes, prompt tokens and prompt attention in the `SCALES`."""

SCALES = (1.0, 100.0, 1000.0, 1e6)
DEVIATIONS = (1.0, 1.0, 1.0, 0.2)
"""What the coefficients may be before anything is measured, in seconds. The attention of 1,000 tokens to 1,000 others takes
less time than all else that is done for 1,000 tokens."""

NOISE = 0.05
"""Two steps alike differ by this share of their time."""

DRIFT = 0.01
"""A coefficient changes by this share of itself from one step to the next."""

OUTLIER = 4.0
"""A step that took longer than so many times the prediction counts as one that took just so long: it compiled a kernel, or the
machine was busy with something else."""


def features(num_decodes: int, prompts: Sequence[ScheduledRequest]) -> Features:
    tokens = sum(s.num_tokens for s in prompts)
    attention = sum(s.num_tokens * (s.num_computed_tokens + s.num_tokens / 2) for s in prompts)
    return 1.0, num_decodes / SCALES[1], tokens / SCALES[2], attention / SCALES[3]


class StepCost:
    """The time of a step, learned."""

    def __init__(self) -> None:
        self.coefficients = [0.0] * 4  # never negative
        self.error = 0.0  # mean share of a step's time that its prediction was wrong by, of the last steps with prompts
        self.num_steps = 0
        self.largest = 0  # prompt tokens of a step
        self._covariance = [[d * d if i == j else 0.0 for j in range(4)] for i, d in enumerate(DEVIATIONS)]

    def predict(self, x: Features) -> float:
        return sum(a * b for a, b in zip(self.coefficients, x, strict=True))

    def learn(self, x: Features, seconds: float) -> None:
        predicted, rows = self.predict(x), self._covariance
        if predicted > 0 and self.num_steps >= 4:
            seconds = min(seconds, OUTLIER * predicted)
        if x[2] and seconds > 0 and self.num_steps >= 4:
            self.error += (min(1.0, abs(seconds - predicted) / seconds) - self.error) / 16
        self.num_steps += 1
        self.largest = max(self.largest, round(x[2] * SCALES[2]))
        for i, value in enumerate(self.coefficients):
            drift = DRIFT * max(value, DEVIATIONS[i] * predicted / 10)
            rows[i][i] = min(rows[i][i] + drift**2, DEVIATIONS[i] ** 2)
        spread = [sum(a * b for a, b in zip(row, x, strict=True)) for row in rows]
        scale = sum(a * b for a, b in zip(spread, x, strict=True)) + (NOISE * max(seconds, predicted)) ** 2
        if not scale:
            return  # a clock that stands still
        for i in range(4):
            self.coefficients[i] = max(0.0, self.coefficients[i] + spread[i] / scale * (seconds - predicted))
            for j in range(4):
                rows[i][j] -= spread[i] * spread[j] / scale


class Pace:
    """Chooses the prompt tokens of steps with decodes for an objective of `target_s` seconds between tokens."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.cost = StepCost()
        self._in_flight: dict[int, tuple[float, Features]] = {}
        self._last_end = float("-inf")

    def launched(self, step_id: int, now: float, num_decodes: int, prompts: Sequence[ScheduledRequest]) -> None:
        self._in_flight[step_id] = now, features(num_decodes, prompts)

    def ended(self, step_id: int, now: float) -> None:
        """A step takes from its launch, or the end of the step before it if that is later, to its own end."""
        if (launched := self._in_flight.pop(step_id, None)) is not None:
            begin, x = launched
            self.cost.learn(x, now - max(begin, self._last_end))
        self._last_end = now

    def forget_steps(self) -> None:
        """The steps in flight will not end."""
        self._in_flight.clear()

    def prompt_tokens(self, num_decodes: int, prompts: Sequence[ScheduledRequest], computed: int, age_s: float) -> int:
        """How many tokens prompts may take in a step that holds `num_decodes` and `prompts` already. The first of them in line
        has `computed` tokens done, and came `age_s` ago."""
        least = MIN_CHUNK if age_s >= PATIENCE_S else 0
        if not self.cost.num_steps:
            return MIN_CHUNK
        most = max(MIN_CHUNK, 2 * self.cost.largest)
        base = self.cost.predict(features(num_decodes, prompts))
        spare = self.target_s / (1 + 2 * self.cost.error) - base
        if spare <= 0:
            return least
        # c·n + d·(n·computed + n²/2) = spare
        linear = self.cost.coefficients[2] / SCALES[2] + self.cost.coefficients[3] / SCALES[3] * computed
        square = self.cost.coefficients[3] / SCALES[3] / 2
        root = (linear * linear + 4 * square * spare) ** 0.5
        fits = 2 * spare / (linear + root) if linear + root > 0 else most
        return max(least, min(most, int(fits)))
