"""Step times by number of sequences and tokens.

They are measured while steps run, and on some devices also before the first request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from math import sqrt
from statistics import median

import numpy as np
import numpy.typing as npt

from slipstream.messages.steps import StepTime

MARGIN = 1.05
"""Speed-up over a plain step, in tokens per second, that a step with drafts must promise."""

MIN_SURVIVAL = 0.02
"""Probability of being right below which drafts are not considered."""

NUM_TIMES = 15
"""Number of times kept per step size. Their median is used."""

MIN_TIMES = 3
"""Number of times after which a plain step's size counts as measured."""

SPEED_MEMORY = 0.2
"""Weight of the latest step in the running average of `StepCosts._slowness`."""

SIMILAR = 1.34
"""Maximum ratio of two numbers of sequences for which one's times are used for the other."""

EXPECTED_TIMES = 2
"""Weight of an expected time, in measurements."""

EXCESS_MEMORY = 0.05
"""Weight of the latest step in the running averages of `ExpectedStepTimes`."""

STALE = 256
"""Steps after which a size is measured again, since machine or lengths may have changed."""

SURE, SURE_STALE = 1.25, 2048
"""Speed-up of chains above which plain steps are measured again only after `SURE_STALE` steps.

A measurement is expensive: it takes some plain steps, and the drafter must then catch up.
"""

ASSUMED_SLOPE = 0.04
"""Assumed cost of one more token, relative to a plain step, until measured.

It is low, so drafts are tried.
"""

COUNTS: tuple[int, ...] = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
"""Numbers of sequences and tokens that are timed separately. Above 64 they grow by an eighth."""


class ExpectedStepTimes:
    """Step times measured before requests arrive: dummy sequences, short contexts, an idle host.

    Between measured sizes, times rise with the rows that a step's graph computes. Two running
    averages correct for how much longer real steps take: one of plain steps, one of steps with
    drafts.
    """

    def __init__(self, times: Sequence[StepTime], padded: Callable[[int], int]) -> None:
        """Store the measurements.

        `times` cover some numbers of sequences, beginning with 1. Each has a step without drafts
        and steps with the same numbers of drafts, but larger numbers of sequences may lack the
        largest of these. `padded` maps a step's tokens to its graph's tokens.
        """
        self._padded = padded
        ordered = sorted(times)
        self._seconds = {
            n: [t.seconds for t in of] for n, of in groupby(ordered, lambda t: t.num_seqs)
        }
        self._drafts = [
            t.num_tokens // t.num_seqs - 1 for t in ordered if t.num_seqs == ordered[0].num_seqs
        ]
        self._counts = list(self._seconds)
        self._excess, self._num_added = [1.0, 1.0], [0, 0]

    def add(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        line, with_drafts = self._line(num_seqs), num_tokens > num_seqs
        expected = np.interp(num_tokens, [n for n, _ in line], [time for _, time in line])
        self._num_added[with_drafts] += 1
        share = max(EXCESS_MEMORY, 1 / self._num_added[with_drafts])
        known = self._excess[with_drafts]
        self._excess[with_drafts] += share * (min(seconds / float(expected), 2 * known) - known)

    def line(self, num_seqs: int) -> list[tuple[int, float]]:
        """Expected (tokens, seconds) of steps of `num_seqs` sequences, the plain step first."""
        plain, drafts = self._excess
        return [
            (n, seconds * (drafts if i else plain))
            for i, (n, seconds) in enumerate(self._line(num_seqs))
        ]

    def _line(self, num_seqs: int) -> list[tuple[int, float]]:
        below = self._counts[max(0, bisect_right(self._counts, num_seqs) - 1)]
        above = self._counts[min(bisect_left(self._counts, num_seqs), len(self._counts) - 1)]
        found = list[tuple[int, float]]()
        for drafts, first, last in zip(
            self._drafts, self._seconds[below], self._seconds[above], strict=False
        ):
            low, rows, high = (self._padded(n * (1 + drafts)) for n in (below, num_seqs, above))
            share = (rows - low) / (high - low) if high > low else 0.0
            found.append((num_seqs * (1 + drafts), (1 - share) * first + share * last))
        return found


class StepCosts:
    """Seconds of steps in which every token is sampled, by number of sequences and of tokens.

    Other work on the machine slows all sizes alike. `_slowness` is the ratio of recent step times
    to the known times of their sizes, and new times are divided by it. So a burst of other work
    makes no size look slow.
    """

    def __init__(self) -> None:
        self._slowness = 1.0
        self._times: dict[tuple[int, int], deque[float]] = {}
        # index of the step that last measured the size
        self._measured: dict[tuple[int, int], int] = {}
        # (tokens, seconds) in ascending order, by number of sequences
        self._lines: dict[int, list[tuple[int, float]]] = {}
        self._step = 0
        self._expected: ExpectedStepTimes | None = None

    def expect(self, times: Sequence[StepTime], padded: Callable[[int], int]) -> None:
        """Use step times measured beforehand, so no size must be tried first.

        `padded` is the same as for `ExpectedStepTimes`.
        """
        self._expected = ExpectedStepTimes(times, padded) if times else None

    def add(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        self._step += 1
        key = (_near(num_seqs), _near(num_tokens))
        if self._step - self._measured.get(key, self._step) > STALE:
            self._times.pop(key, None)
        times = self._times.setdefault(key, deque(maxlen=NUM_TIMES))
        if len(times) >= MIN_TIMES:
            self._slowness += SPEED_MEMORY * (
                min(seconds / median(times), 4 * self._slowness) - self._slowness
            )
        times.append(max(seconds, 1e-6) / self._slowness)
        self._measured[key] = self._step
        self._lines.pop(key[0], None)
        if self._expected is not None:
            self._expected.add(num_seqs, num_tokens, times[-1])

    def plain(self, num_seqs: int, stale: int = STALE) -> float | None:
        """Seconds of a step with one token per sequence, without drafts.

        None if it was not measured within `stale` steps.
        """
        if self._expected is not None:
            return self._with_measured(num_seqs, self._expected.line(num_seqs)[:1])[0][1]
        key = self._like(num_seqs, stale)
        return None if key is None else float(median(self._times[key, key]))

    def _like(self, num_seqs: int, stale: int = STALE) -> int | None:
        """The nearest number of sequences with known plain steps, if one is near enough."""
        first = _near(num_seqs)
        near = [n for n, of in self._times if n == of and max(n, first) <= SIMILAR * min(n, first)]
        known = [n for n in near if self._is_known(n, stale)]
        return min(known, key=lambda n: abs(n - first), default=None)

    def _is_known(self, first: int, stale: int) -> bool:
        times = self._times.get((first, first), ())
        return len(times) >= MIN_TIMES and self._step - self._measured[first, first] <= stale

    def line(self, num_seqs: int, plain: float) -> list[tuple[int, float]]:
        """Known steps of `num_seqs` sequences as (tokens, seconds), the plain step first."""
        if self._expected is not None:
            return [
                (num_seqs, plain),
                *self._with_measured(num_seqs, self._expected.line(num_seqs)[1:]),
            ]
        line = self._line(_near(num_seqs))
        if not line and (like := self._like(num_seqs)) is not None:
            # sizes that scale to the same number of tokens are one point
            line = list({round(n * num_seqs / like): t for n, t in self._line(like)}.items())
        return [(num_seqs, plain), *(point for point in line if point[0] > num_seqs)]

    def _line(self, first: int) -> list[tuple[int, float]]:
        line = self._lines.get(first)
        if line is None:
            known = [
                (n, median(t)) for (s, n), t in self._times.items() if s == first and n > first
            ]
            line = self._lines[first] = sorted(
                (n, t) for n, t in known if self._step - self._measured[first, n] <= STALE
            )
        return line

    def _with_measured(
        self, num_seqs: int, expected: Sequence[tuple[int, float]]
    ) -> list[tuple[int, float]]:
        """The points of a line, corrected by the measurements of their sizes."""
        first, found = _near(num_seqs), list[tuple[int, float]]()
        for num_tokens, seconds in expected:
            key = first, _near(num_tokens)
            if self._step - self._measured.get(key, -STALE - 1) <= STALE:
                seconds = float(median([*EXPECTED_TIMES * [seconds], *self._times[key]]))
            found.append((num_tokens, seconds))
        return found


def seconds_from(
    line: Sequence[tuple[int, float]], num_tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Seconds of steps with `num_tokens` tokens, interpolated on `line`.

    Beyond its end, the line continues with its slope among steps with drafts, and at least with the
    assumed slope. The slope from the plain step to the first draft is left out because it is
    steeper: the first draft costs a run of the drafter and the overlap of steps.
    """
    (fewest, plain), (last, seconds) = line[0], line[-1]
    slope = ASSUMED_SLOPE * plain / sqrt(fewest)
    if len(line) > 2:
        slope = max(slope, (seconds - line[1][1]) / (last - line[1][0]))
    known = np.interp(num_tokens, [n for n, _ in line], [time for _, time in line])
    return known + slope * np.maximum(0, num_tokens - last)


def _near(count: int) -> int:
    """Largest of `COUNTS` up to `count`.

    Above the last of them, a multiple of an eighth of a power of two.
    """
    if count <= COUNTS[-1]:
        return COUNTS[bisect_right(COUNTS, count) - 1]
    below = 1 << (count.bit_length() - 4)
    return count // below * below
