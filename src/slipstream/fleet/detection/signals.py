"""The observed time series, and the test that distinguishes a change from noise.

Each series becomes a residual z, in units of its own noise:

1. A baseline (level and noise) is learned while nothing is wrong. It adapts within about an hour,
   so that the daily rhythm causes no change. An observation counts as at most `CLIP` deviations.
   The noise is at least the series' `floor`, the smallest relevant change. A mean over n requests
   has the noise of one request over √n.
2. Page and Hinkley's test (Page 1954; the package river) adds up the part of z beyond `ALLOWANCE`.
   At `THRESHOLD` the level has changed. For independent Gaussian noise that is one false alarm in
   e^(2·ALLOWANCE·THRESHOLD) observations; a change of 4 deviations is seen after four.
3. Some series often change a little more than chance explains (one hour's answers are longer than
   another's). Their `Signal` gives the smallest change that `matters`, and half of it is subtracted
   before the sum, as in the optimal test for such a change.
4. Shares of failed requests add up the logarithm of a likelihood ratio (`ShareBaseline`): among few
   requests, a few failures are more significant than under a normal distribution.
5. The change is over when `CALM` observations in a row are within `NEAR` deviations.

A change that lasts `ADOPTED_S` becomes the new normal: it ends, and the baseline is learned again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from river.drift import PageHinkley

from slipstream.fleet.detection.causes import FULL
from slipstream.fleet.detection.observation import Observation

CLIP = 6.0
STEP_CLIP = 10.0
"""Clip of step times in deviations: one such observation is not enough, but two are if the second
follows soon, even if it is a third as large. A noisy neighbour comes and goes."""

ERROR_CLIP = 8.0
"""Clip of errors, which are independent and use a likelihood ratio: two such observations are
enough."""

BLOCKED = 2.0
"""Factor for a queue at a full cache, relative to an ordinary queue, which may be a burst."""

ALLOWANCE = 1.0
THRESHOLD = 11.0
CALM = 6
NEAR = 2.5
WARM_UP = 60
"""Observations that a baseline needs before any change is reported."""

MEMORY = 720
"""Number of observations over which a baseline adapts."""

ADOPTED_S = 6 * 3600.0

MAX_INTERVALS = 60
"""Maximum number of intervals whose number of running sequences is stored."""

USUAL_PROMPT = 1000.0
"""Prompt tokens that count as one request where only tokens are counted."""

Value = tuple[float, float]
"""(value of a series, number of requests of which it is the mean; 1 if it is no mean)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Definition of one series. Fields:

    - `read`: function from an observation to the value; None if it gives none.
    - `floor`: minimum noise, in the series' unit.
    - `spread`: minimum noise of one request, as a fraction of the level.
    - `matters`: smallest change to detect, as a fraction of the level.
    - `is_share`: the value is a fraction of requests.
    - `clip`: maximum deviations that one observation counts.
    - `allowance`: deviations subtracted from each observation as usual."""

    name: str
    what: str
    read: Callable[[Observation], Value | None]
    direction: Literal["up", "down"]
    floor: float
    spread: float = 0.0
    matters: float = 0.0
    is_share: bool = False
    clip: float = CLIP
    allowance: float = ALLOWANCE


def _slowness(seen: Observation) -> Value | None:
    if not seen.step_s or not seen.expected_step_s or (seen.num_steps or 0) < 5:
        return None
    return math.log(seen.step_s / seen.expected_step_s), 1.0


def _step_age(seen: Observation) -> Value | None:
    if seen.step_age_s is None or seen.num_running is None:
        return None
    waits = seen.num_running + (seen.num_waiting or 0.0) > 0
    return (math.log1p(seen.step_age_s) if waits else 0.0), 1.0


def _orphans(seen: Observation) -> Value | None:
    if seen.num_open is None or seen.num_running is None or seen.num_waiting is None:
        return None
    return max(0.0, seen.num_running + seen.num_waiting - seen.num_open), 1.0


def _queue(seen: Observation) -> Value | None:
    if seen.num_waiting is None or seen.num_running is None:
        return None
    return math.log1p(seen.num_waiting) * (
        BLOCKED if (seen.kv_cache_usage or 0.0) >= FULL else 1.0
    ), 1.0


def _hit_rate(seen: Observation) -> Value | None:
    if not seen.prefix_queries or seen.prefix_hits is None:
        return None
    return seen.prefix_hits / seen.prefix_queries, max(1.0, seen.prefix_queries / USUAL_PROMPT)


def _ends(seen: Observation) -> Value | None:
    if not seen.generated_tokens or seen.num_finished is None:
        return None
    return min(1.0, seen.num_finished / seen.generated_tokens), seen.generated_tokens


def _mean(total: float | None, count: float | None) -> Value | None:
    return None if not count or total is None else (total / count, count)


def _count(count: float | None) -> Value | None:
    return None if count is None else (math.sqrt(count), 1.0)


def _log(value: float | None) -> Value | None:
    return None if value is None else (math.log(max(value, 1e-9)), 1.0)


SIGNALS = (
    Signal(name="step_time", what="steps take longer than predicted", read=_slowness, direction="up", floor=0.06,
           clip=STEP_CLIP),
    Signal(name="step_age", what="no step ends", read=_step_age, direction="up", floor=0.4),
    Signal(name="orphans", what="sequences that nobody waits for", read=_orphans, direction="up", floor=0.6),
    Signal(name="queue", what="requests wait", read=_queue, direction="up", floor=0.8),
    Signal(name="hit_rate", what="fewer prompt tokens are in the cache", read=_hit_rate, direction="down", floor=0.08),
    Signal(name="preemptions", what="sequences lose their blocks", direction="up", floor=0.7,
           read=lambda o: _count(o.num_preemptions)),
    Signal(name="prompt_length", what="longer prompts", direction="up", floor=100.0, spread=1.0, matters=1.0,
           read=lambda o: _mean(o.finished_prompt_tokens, o.num_finished)),
    Signal(name="answer_length", what="longer answers", direction="up", floor=40.0, spread=1.2, matters=1.0,
           read=lambda o: _mean(o.finished_output_tokens, o.num_finished)),
    Signal(name="ends", what="fewer tokens end an answer", read=_ends, direction="down", floor=1e-6, is_share=True),
    Signal(name="errors", what="requests fail", direction="up", floor=0.005, is_share=True, clip=ERROR_CLIP, allowance=0.5,
           read=lambda o: _mean(o.num_errors, o.num_responses)),
    Signal(name="write_stall", what="clients do not read their answers", direction="up", floor=0.1,
           read=lambda o: None if o.write_stall_s is None else (o.write_stall_s / o.interval_s, 1.0)),
    Signal(name="canary", what="answers differ from the checkpoint's", direction="up", floor=0.4,
           read=lambda o: _log(o.canary_kl)),
    Signal(name="clock", what="the device's clock is low", direction="down", floor=0.03,
           read=lambda o: None if o.clock_share is None else (o.clock_share, 1.0)),
)  # fmt: skip


class Baseline:
    """Robust estimates of a series' level and noise."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._first: list[Value] = []
        self.level = 0.0
        self._variance = 0.0

    @property
    def is_ready(self) -> bool:
        return not self._first and self._variance > 0

    def noise(self, count: float) -> float:
        """Standard deviation of a mean over `count` requests."""
        one = max(math.sqrt(self._variance), self._signal.spread * abs(self.level))
        return max(self._signal.floor, one / math.sqrt(count))

    def z(self, value: Value) -> float:
        clip = self._signal.clip
        return max(-clip, min(clip, (value[0] - self.level) / self.noise(value[1])))

    def beyond(self, value: Value) -> float:
        """The deviation that the test adds up: z, minus half of the change that `matters`, if the
        signal has one. Never below 0 in magnitude, because the test also subtracts the mean of all
        values, which would undo the subtraction."""
        if not (matters := self._signal.matters):
            return self.z(value)
        far = abs(value[0] - self.level) - 0.5 * matters * abs(self.level)
        return min(self._signal.clip, max(0.0, far / self.noise(value[1]))) * math.copysign(
            1.0, value[0] - self.level
        )

    def learn(self, value: Value) -> None:
        if not self.is_ready:
            self._first.append(value)
            if len(self._first) >= WARM_UP:
                self.level = statistics.median(v for v, _ in self._first)
                spread = statistics.median(
                    abs(v - self.level) * math.sqrt(n) for v, n in self._first
                )
                self._variance = max((1.4826 * spread) ** 2, 1e-18)
                self._first = []
            return
        clipped = max(-3.0, min(3.0, self.z(value))) * self.noise(value[1])
        self.level += clipped / MEMORY
        self._variance += (max(1e-18, clipped * clipped * value[1]) - self._variance) / MEMORY


class ShareBaseline(Baseline):
    """Usual fraction of requests with a property, as a mean, because the median of a rare event is
    uninformative.

    |z| is ln(P(seen | alternative) / P(seen | usual fraction)). The usual fraction is at least
    `floor`. The alternative to a rise is `MATTERS`, or `TIMES` the usual fraction if that is more;
    to a fall, the usual fraction divided by `TIMES`."""

    MATTERS = 0.1
    TIMES = 4.0

    def __init__(self, signal: Signal) -> None:
        super().__init__(signal)
        self._true = self._count = 0.0
        self._num_learned = 0

    @property
    def is_ready(self) -> bool:
        return self._num_learned >= WARM_UP

    def z(self, value: Value) -> float:
        share, count = value
        usual = min(0.99, max(self._signal.floor, self.level))
        is_up = self._signal.direction == "up"
        other = (
            min(max(self.MATTERS, self.TIMES * usual), (1 + usual) / 2)
            if is_up
            else usual / self.TIMES
        )
        ratio = share * math.log(other / usual) + (1 - share) * math.log((1 - other) / (1 - usual))
        return max(-self._signal.clip, min(self._signal.clip, count * ratio)) * (1 if is_up else -1)

    def beyond(self, value: Value) -> float:
        z = self.z(value)
        return max(0.0, z) if self._signal.direction == "up" else min(0.0, z)

    def learn(self, value: Value) -> None:
        keep = 1 - 1 / MEMORY
        self._true, self._count = (
            keep * self._true + value[0] * value[1],
            keep * self._count + value[1],
        )
        self.level = self._true / self._count
        self._num_learned += 1


def _new_baseline(signal: Signal) -> Baseline:
    return ShareBaseline(signal) if signal.is_share else Baseline(signal)


class Flag:
    """A condition that is either true or false, without a baseline."""

    def __init__(self, name: str, what: str, read: Callable[[Observation], bool | None]) -> None:
        self.name, self._what, self._read = name, what, read
        self.is_active = False

    def update(self, seen: Observation) -> None:
        found = self._read(seen)
        if found is not None:
            self.is_active = found

    def describe(self) -> str:
        return f"{self.name}: {self._what}"


def new_flags() -> list[Flag]:
    return [
        Flag("down", "the engine does not answer", lambda o: not o.is_up),
        Flag(
            "canary_failed",
            "the model's answers are off: the canary at the start failed, or a check since",
            lambda o: None if o.canary_ok is None else not o.canary_ok,
        ),
    ]


class SeriesWatch:
    """Watches one series of one replica. `recent`: the latest values since it deviates."""

    def __init__(self, signal: Signal) -> None:
        self.signal, self.name = signal, signal.name
        self.baseline = _new_baseline(signal)
        self._sign = 1.0 if signal.direction == "up" else -1.0
        self._test = self._new_test()
        self._z: deque[float] = deque(maxlen=CALM)
        self.recent: deque[float] = deque(maxlen=24)
        self.value = 0.0
        self.since: float | None = None  # time at which the change was detected

    def _new_test(self) -> PageHinkley:
        # With the default forgetting factor the sum would lose as much as the allowance subtracts.
        return PageHinkley(
            min_instances=2, delta=self.signal.allowance, threshold=THRESHOLD, alpha=1.0, mode="up"
        )

    @property
    def is_active(self) -> bool:
        return self.since is not None

    def update(self, seen: Observation) -> None:
        value = self._value(seen)
        if value is None:
            return
        if not self.baseline.is_ready:
            self.baseline.learn(value)
            return
        z = self._sign * self.baseline.z(value)
        self._z.append(z)
        self.value = value[0]
        if self.since is not None or z > NEAR:
            self.recent.append(value[0])
        else:
            self.recent.clear()
        if self.since is None:
            self._test.update(self._sign * self.baseline.beyond(value))  # type: ignore[no-untyped-call]
            if self._test.drift_detected:
                self.since = seen.at
            elif z < NEAR:
                self.baseline.learn(value)
            return
        if len(self._z) == CALM and max(self._z) < NEAR:
            self._end()
        elif seen.at - self.since >= ADOPTED_S:
            self.baseline = _new_baseline(self.signal)
            self._end()

    def _value(self, seen: Observation) -> Value | None:
        return self.signal.read(seen)

    def describe(self) -> str:
        return (
            f"{self.name}: {self.signal.what} ({self.value:.4g}, before {self.baseline.level:.4g})"
        )

    def _end(self) -> None:
        self.since, self._test = None, self._new_test()
        self._z.clear()
        self.recent.clear()


class EndsWatch(SeriesWatch):
    """Watches the fraction of tokens that end an answer. Only sequences that have run as long as an answer takes
    count, because many that began together, after a quiet minute or a long queue, have not had time to end.
    """

    def __init__(self, signal: Signal) -> None:
        super().__init__(signal)
        self._running: deque[float] = deque(maxlen=MAX_INTERVALS)

    def _value(self, seen: Observation) -> Value | None:
        value = super()._value(seen)
        self._running.append(seen.num_running or 0.0)
        if value is None or not self.baseline.is_ready:
            return value
        share, tokens = value
        # number of intervals that an answer takes
        intervals = math.ceil(
            self._running[-1] / max(self.signal.floor, self.baseline.level) / tokens
        )
        old = min(list(self._running)[-intervals - 1 :]) / max(1.0, self._running[-1])
        return None if old <= 0 else (min(1.0, share / old), tokens * old)


def new_watch(signal: Signal) -> SeriesWatch:
    return EndsWatch(signal) if signal.name == "ends" else SeriesWatch(signal)
