"""Decides which replicas get no requests for a while, and how many requests may be retried. Pure
policy, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

MAX_FAILURES = 3
"""Failures in a row after which a replica gets no requests for a while."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
MIN_SEEN = 8
"""Requests that a replica must have answered before it can count as slow."""

SLOW_EXCESS_S = 0.25
"""A replica counts as slow only if it is at least this much later than the others, whatever the
ratio."""

MIN_LATE = 0.5
"""Fraction of late requests above which a replica may count as slow: one prompt of 100,000 tokens
is late everywhere."""

MIN_WAVES = 2
"""Minimum number of waves of late requests for a replica to count as slow. A wave is a late request and all
sent before its first token, because everything waiting after one long prompt is late together."""

MAX_OUT = 0.5
"""Maximum fraction of replicas excluded as slow or wrong. If there are more, the cause is something
else."""

LARGE, MEDIANS_S = 32, 0.1
"""(number of replicas above which a fleet is large, seconds for which its medians stay valid)."""

_LEARN = 0.15


class RetryBudget:
    """Budget of retries: a fraction of all requests, plus an initial reserve."""

    def __init__(self, share: float, reserve: float = 10.0) -> None:
        self._share, self._reserve = share, reserve
        self.left = reserve if share else 0.0

    def request(self) -> None:
        self.left = min(self._reserve, self.left + self._share)

    def take(self) -> bool:
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class Watched:
    """Results of requests and probes of one replica."""

    failures: int = 0  # in a row
    pauses: int = 0  # in a row
    out_until: float = 0.0
    why: str = ""
    trial: bool = False  # after a pause: one trial request is allowed
    # It was excluded as slow. Until it is faster, it gets one request at a time.
    was_slow: bool = False
    seen: int = 0
    late_s: float = 0.0  # smoothed delay of first tokens beyond the predicted TTFT
    ttft_s: float = 0.0  # smoothed
    late_share: float = 0.0  # smoothed fraction of requests late by `SLOW_EXCESS_S`
    late_at: float = -inf  # first token of the request that began the last wave of late ones
    late_waves: int = 0  # since `late_share` was last below half of `MIN_LATE`
    wrong: int = 0  # wrong probes in a row


@dataclass(slots=True)
class ReplicaGuard:
    slow_factor: float = 4.0
    replicas: dict[str, Watched] = field(default_factory=dict)
    # Replicas that had a pause and have not recovered: few of a large fleet. Only these can be excluded.
    _paused: dict[str, Watched] = field(default_factory=dict)
    _medians: tuple[float, float, float] = (-inf, 0.0, 0.0)  # (at, late_s, ttft_s) of a large fleet

    def add(self, replica: str) -> None:
        self.replicas[replica] = Watched()
        self._paused.pop(replica, None)

    def remove(self, replica: str) -> None:
        self.replicas.pop(replica, None)
        self._paused.pop(replica, None)

    def out(self, now: float) -> set[str]:
        """Replicas that get no requests now. After its pause a replica gets one trial request, and
        more when that is answered."""
        return {
            name
            for name, watched in self._paused.items()
            if watched.out_until > now or watched.trial
        }

    def slow(self) -> set[str]:
        """Replicas of `out` that are only slow, and so better than none."""
        return {name for name, w in self._paused.items() if w.was_slow and w.out_until < inf}

    def next_change(self, now: float) -> float | None:
        """Time at which the next pause ends."""
        return min(
            (w.out_until for w in self._paused.values() if inf > w.out_until > now), default=None
        )

    def sent(self, replica: str, now: float) -> None:
        watched = self.replicas.get(replica)
        if watched is not None and watched.pauses and watched.out_until <= now:
            watched.trial = True

    def let_go(self, replica: str) -> None:
        """Allow the next trial request, because one at this replica ended, with whatever result."""
        if (watched := self.replicas.get(replica)) is not None:
            watched.trial = False

    def did_well(self, replica: str, now: float) -> None:
        """Record a successful answer whose time to first token is unknown."""
        if (watched := self.replicas.get(replica)) is not None:
            watched.failures, watched.trial = 0, False
            if watched.out_until <= now and not watched.was_slow:
                self._is_well(replica, watched)

    def failed(self, replica: str, why: str, now: float, *, gone: bool = False) -> None:
        """Count a failure. `gone`: the replica can't be reached at all, so one failure is enough."""
        watched = self.replicas.get(replica)
        if watched is None or (watched.out_until > now and not watched.was_slow):
            return  # it was sent before the pause
        watched.failures += 1
        if gone or watched.trial or watched.failures >= MAX_FAILURES:
            watched.was_slow = False
            self._pause(replica, why, now)

    def answered(self, replica: str, ttft_s: float, predicted_s: float, now: float) -> None:
        watched = self.replicas.get(replica)
        if watched is None:
            return
        watched.failures, watched.trial = 0, False
        is_late = ttft_s - predicted_s > SLOW_EXCESS_S
        if is_late and now - ttft_s >= watched.late_at:
            watched.late_waves += 1
            watched.late_at = now
        weight = max(_LEARN, 1 / (watched.seen + 1))
        watched.seen += 1
        watched.late_s += weight * (max(0.0, ttft_s - predicted_s) - watched.late_s)
        watched.ttft_s += weight * (ttft_s - watched.ttft_s)
        watched.late_share += weight * (is_late - watched.late_share)
        if watched.late_share < MIN_LATE / 2:
            watched.late_waves = 0
        if self._is_slow(replica, now):
            _, others = self._others(replica, now) or (0.0, 0.0)
            self._pause(
                replica,
                f"slow: {watched.ttft_s:.2f} s to a first token, the others {others:.2f} s",
                now,
            )
            watched.was_slow = True
            watched.seen = 0
            watched.late_s = watched.ttft_s = watched.late_share = 0.0
        elif watched.out_until <= now and (not watched.was_slow or watched.seen >= MIN_SEEN):
            watched.was_slow = False
            self._is_well(replica, watched)

    def _is_slow(self, replica: str, now: float) -> bool:
        watched = self.replicas[replica]
        if watched.seen < MIN_SEEN or watched.late_s <= SLOW_EXCESS_S:
            return False  # regardless of the others
        others = self._others(replica, now)
        if others is None or not self._may_take_out(now):
            return False
        late_s, ttft_s = others
        return (
            watched.ttft_s > self.slow_factor * ttft_s
            and watched.late_share > MIN_LATE
            and watched.late_waves >= MIN_WAVES
            and watched.late_s > late_s + SLOW_EXCESS_S
        )

    def _others(self, replica: str, now: float) -> tuple[float, float] | None:
        """(median of the other replicas' `late_s`, of their `ttft_s`); None if none has enough requests.

        In a large fleet they cover all replicas and are up to `MEDIANS_S` old: one replica hardly changes
        them, and every answer would sort all."""
        is_large = len(self.replicas) > LARGE
        if is_large and 0 <= now - self._medians[0] < MEDIANS_S:
            return self._medians[1:]
        others = [
            w
            for name, w in self.replicas.items()
            if w.seen >= MIN_SEEN and (is_large or name != replica)
        ]
        if not others:
            return None
        found = median(w.late_s for w in others), median(w.ttft_s for w in others)
        if is_large:
            self._medians = (now, *found)
        return found

    def _is_well(self, replica: str, watched: Watched) -> None:
        """Forget the pauses of a replica that has recovered."""
        if watched.pauses:
            watched.pauses, watched.why = 0, ""
            del self._paused[replica]

    def probed(self, answers: Mapping[str, object], now: float) -> list[str]:
        """Compare the replicas' answers to the same probe. A replica that differs from the majority
        twice in a row gets no requests until it agrees again. Returns the newly excluded replicas.
        """
        counts: dict[object, int] = {}
        for answer in answers.values():
            counts[answer] = counts.get(answer, 0) + 1
        right, number = max(counts.items(), key=lambda item: item[1], default=(None, 0))
        if len(answers) < 3 or number <= len(answers) / 2:
            return []  # with two answers it is unknown which one is wrong
        found = []
        for name, answer in answers.items():
            watched = self.replicas.get(name)
            if watched is None:
                continue
            watched.wrong = 0 if answer == right else watched.wrong + 1
            is_out = watched.out_until == inf
            if is_out and not watched.wrong:
                watched.out_until = now
            elif not is_out and watched.wrong >= 2 and self._may_take_out(now):
                self._pause(
                    name, "wrong: it answers a probe otherwise than the other replicas", now
                )
                watched.out_until = inf
                found.append(name)
        return found

    def _may_take_out(self, now: float) -> bool:
        return len(self.out(now)) + 1 <= MAX_OUT * len(self.replicas)

    def _pause(self, replica: str, why: str, now: float) -> None:
        watched = self.replicas[replica]
        if watched.out_until == inf:
            return  # only an agreeing probe brings it back
        watched.out_until = now + min(FIRST_PAUSE_S * 2**watched.pauses, LONGEST_PAUSE_S)
        watched.pauses += 1
        watched.failures, watched.trial, watched.why = 0, False, why
        self._paused[replica] = watched
