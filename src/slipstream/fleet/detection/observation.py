"""A replica's observation every few seconds, and the expected time of its steps, learned from
earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INTERVAL_S = 5.0
"""Time between two observations of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One replica over the last `interval_s` seconds. None: not reported. Counts are for the
    interval; fields marked `now` are current values.

    - `expected_step_s`: step time that the planner or a table predicts; None: the detector learns
      it (`ExpectedSteps`).
    - `num_open`: sequences of open requests, in the same unit as `num_running` and `num_waiting`.
    - `write_stall_s`: time for which finished text waited for slow clients.
    - `canary_kl`: divergence of the canary's last run, in nats.
    - `clock_share`: the device's clock divided by its nominal clock."""

    replica: str
    at: float  # seconds, of any monotonic clock
    interval_s: float = INTERVAL_S
    num_steps: float | None = None
    step_s: float | None = None
    expected_step_s: float | None = None
    step_age_s: float | None = None  # now: since the last step ended
    num_running: float | None = None  # now
    num_waiting: float | None = None  # now
    num_open: float | None = None  # now
    kv_cache_usage: float | None = None  # now, 0 to 1
    prefix_queries: float | None = None  # tokens
    prefix_hits: float | None = None
    num_preemptions: float | None = None
    prompt_tokens: float | None = None  # of requests that arrived
    generated_tokens: float | None = None
    num_finished: float | None = None
    finished_prompt_tokens: float | None = None  # of requests that finished
    finished_output_tokens: float | None = None
    num_responses: float | None = None
    num_errors: float | None = None  # responses with status 500 or above
    write_stall_s: float | None = None
    canary_kl: float | None = None
    clock_share: float | None = None
    canary_ok: bool | None = None  # at the start, and in each check since
    is_up: bool = True  # its engine answers


class ExpectedSteps:
    """Learned model of step time: a coefficient each for steps, tokens decoded, prompt tokens
    computed, and cache read. Recursive least squares of the relative error; an observation's weight
    halves every `HALF_LIFE` observations.

    `expected` is None until `NEEDED` observations were learned."""

    NEEDED = 60
    HALF_LIFE = 2000.0
    SCALES = (100.0, 1000.0, 10_000.0, 100.0)

    def __init__(self) -> None:
        self._coefficients = np.zeros(4)
        self._covariance = np.eye(4) * 1e4
        self._keep = 0.5 ** (1 / self.HALF_LIFE)
        self.num_learned = 0

    def expected(self, seen: Observation) -> float | None:
        features = self._features(seen)
        if features is None or self.num_learned < self.NEEDED:
            return None
        found = float(features @ self._coefficients)
        return found if found > 0 else None

    def learn(self, seen: Observation) -> None:
        features = self._features(seen)
        if features is None or not seen.step_s:
            return
        x = features / seen.step_s
        spread = self._covariance @ x
        gain = spread / (self._keep + x @ spread)
        self._coefficients += gain * (1 - x @ self._coefficients)
        found = (self._covariance - np.outer(gain, spread)) / self._keep
        # without a bound it would grow for features that never occur
        self._covariance = np.minimum(found, 1e6)
        self.num_learned += 1

    def _features(self, seen: Observation) -> np.ndarray | None:
        if not seen.num_steps or seen.generated_tokens is None or seen.prompt_tokens is None:
            return None
        computed = max(0.0, seen.prompt_tokens - (seen.prefix_hits or 0.0))
        values = (
            seen.num_steps,
            seen.generated_tokens,
            computed,
            seen.num_steps * (seen.kv_cache_usage or 0.0),
        )
        return np.array(values) / self.SCALES
