"""What steps of some sequences and tokens take, as it is measured while they run."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import sqrt
from statistics import median

import numpy as np
import numpy.typing as npt

MARGIN = 1.05
"""A step with drafts must promise this many times the tokens per second of a plain one."""

LEAST_SURVIVAL = 0.02
"""Drafts that are less likely to be right are not looked at."""

NUM_TIMES = 15
"""The number of times that are kept for a size of step. Their median counts."""

LEAST_TIMES = 3
"""A size of plain steps counts as measured with this many times."""

SPEED_MEMORY = 0.2
"""The weight of the latest step in the running average of `StepCosts._slowness`."""

SIMILAR = 1.34
"""Until they are measured, steps of a number of sequences are taken to cost what steps of another do that is so near."""

STALE = 256
"""Steps after which a size is measured anew: the machine, or the lengths of the sequences, may have changed."""

SURE, SURE_STALE = 1.25, 2048
"""While chains promise so many times the tokens per second of plain steps, those are measured anew after so many steps. A
measurement takes some plain steps, and then the drafter has tokens to catch up on."""

GUESSED_SLOPE = 0.04
"""The assumed cost of a further token, as a share of a plain step's time, until it was measured. It is low, so that drafts are
tried."""

COUNTS: tuple[int, ...] = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
"""Numbers of sequences, and of tokens, whose steps are timed separately. Beyond 64 they grow by an eighth."""


class StepCosts:
    """Seconds of steps in which every token is sampled, by their numbers of sequences and of tokens.

    Other work on the machine slows all sizes alike. `_slowness` is the ratio of recent steps' times to the known times of their
    sizes, and times are divided by it. So a burst of other work makes no size look slow.
    """

    def __init__(self) -> None:
        self._slowness = 1.0
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._measured: dict[tuple[int, int], int] = {}  # the step that measured it last
        self._lines: dict[int, list[tuple[int, float]]] = {}  # by sequences: (tokens, seconds), ascending
        self._step = 0

    def add(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        self._step += 1
        key = (_near(num_seqs), _near(num_tokens))
        if self._step - self._measured.get(key, self._step) > STALE:
            self._times.pop(key, None)
        times = self._times.setdefault(key, deque(maxlen=NUM_TIMES))
        if len(times) >= LEAST_TIMES:
            self._slowness += SPEED_MEMORY * (min(seconds / median(times), 4 * self._slowness) - self._slowness)
        times.append(max(seconds, 1e-6) / self._slowness)
        self._measured[key] = self._step
        self._lines.pop(key[0], None)

    def plain(self, num_seqs: int, stale: int = STALE) -> float | None:
        """Seconds of a step with one token of each sequence. None: it must be measured first, or was not for `stale` steps."""
        key = self._like(num_seqs, stale)
        return None if key is None else float(median(self._times[key, key]))

    def _like(self, num_seqs: int, stale: int = STALE) -> int | None:
        """The number of sequences whose plain steps are known that is nearest, if it is near enough."""
        first = _near(num_seqs)
        near = [n for n, of in self._times if n == of and max(n, first) <= SIMILAR * min(n, first)]
        known = [n for n in near if self._is_known(n, stale)]
        return min(known, key=lambda n: abs(n - first), default=None)

    def _is_known(self, first: int, stale: int) -> bool:
        times = self._times.get((first, first), ())
        return len(times) >= LEAST_TIMES and self._step - self._measured[first, first] <= stale

    def line(self, num_seqs: int, plain: float) -> list[tuple[int, float]]:
        """The measured steps of `num_seqs` sequences, (tokens, seconds), beginning with the plain step."""
        line = self._line(_near(num_seqs))
        if not line and (like := self._like(num_seqs)) is not None:
            line = [(round(n * num_seqs / like), seconds) for n, seconds in self._line(like)]
        return [(num_seqs, plain), *(point for point in line if point[0] > num_seqs)]

    def _line(self, first: int) -> list[tuple[int, float]]:
        line = self._lines.get(first)
        if line is None:
            known = [(n, median(t)) for (s, n), t in self._times.items() if s == first and n > first]
            line = self._lines[first] = sorted(
                (n, t) for n, t in known if self._step - self._measured[first, n] <= STALE
            )
        return line


def seconds_from(line: Sequence[tuple[int, float]], num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Seconds of steps of so many tokens, interpolated on `line`. Beyond its end the line is extended as it rises among steps
    with drafts, with at least the guessed slope. Before them it rises faster: the first draft of a step costs a run of the
    drafter and the overlap of steps."""
    (fewest, plain), (last, seconds) = line[0], line[-1]
    slope = GUESSED_SLOPE * plain / sqrt(fewest)
    if len(line) > 2:
        slope = max(slope, (seconds - line[1][1]) / (last - line[1][0]))
    known = np.interp(num_tokens, [n for n, _ in line], [time for _, time in line])
    return known + slope * np.maximum(0, num_tokens - last)


def _near(count: int) -> int:
    """The largest of `COUNTS` up to `count`. Beyond the last, the next lower multiple of an eighth of a power of two."""
    if count <= COUNTS[-1]:
        return COUNTS[bisect_right(COUNTS, count) - 1]
    below = 1 << (count.bit_length() - 4)
    return count // below * below
