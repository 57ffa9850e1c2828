"""Chooses how many drafts of a draft model a step verifies.

All requests for which drafts pay get the same number, because a drafter pass takes as long for a
few requests as for all. A chain drafted ahead is as long as the last one. A request without drafts
gets none later, because the drafter would first have to compute the tokens it missed.

Acceptance rates are kept by position, per request and over all requests. They are arrays for speed,
because the GPU waits for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config.forms import MAX_DRAFTS, MAX_STEP_DRAFTS
from slipstream.core.step_times import MARGIN, MIN_SURVIVAL, seconds_from

STAY = 1.01
"""Speed-up, in tokens per second, that a new chain length must promise over the last one."""

MIN_FIRST = 0.3
"""Acceptance rate of the first draft below which a request gets no drafts."""

REACH = 2
"""Number of positions by which chains may exceed the longest chosen so far."""

OWN_MEMORY, MEMORY = 32, 1024
"""Number of drafts at a position, (per request, over all), after which both counts are halved."""

OWN_WEIGHT = 4
"""Weight of a prior in tries: the overall rates are a request's prior, `_FIRST` is theirs."""

_POSITIONS = np.arange(MAX_DRAFTS)
_FIRST = (_POSITIONS + 8) / (_POSITIONS + 10)  # expected acceptance rates before any measurement


class DraftCounts:
    """Tried and accepted drafts by position, [rows, MAX_DRAFTS]."""

    def __init__(self, num_rows: int, memory: int) -> None:
        self.tried, self.accepted = np.zeros((2, num_rows, MAX_DRAFTS))
        self._memory = memory

    def add(
        self, rows: npt.NDArray[np.int64] | int, tried: npt.NDArray[Any], accepted: npt.NDArray[Any]
    ) -> None:
        """Add counts of distinct rows, [rows, MAX_DRAFTS], or of one row, [MAX_DRAFTS]."""
        sum_tried, sum_accepted = self.tried[rows] + tried, self.accepted[rows] + accepted
        shares = np.where(sum_tried > self._memory, 0.5, 1.0)
        self.tried[rows], self.accepted[rows] = sum_tried * shares, sum_accepted * shares

    def rates(
        self, rows: npt.NDArray[np.int64] | int, expected: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        return (self.accepted[rows] + OWN_WEIGHT * expected) / (self.tried[rows] + OWN_WEIGHT)

    def grow(self) -> None:
        self.tried, self.accepted = (
            np.concatenate([x, np.zeros_like(x)]) for x in (self.tried, self.accepted)
        )


class Chains:
    def __init__(self) -> None:
        self._own, self._all = DraftCounts(64, OWN_MEMORY), DraftCounts(1, MEMORY)
        self._rows: dict[str, int] = {}  # row of each request
        self._free = list(range(64))
        # (drafts, accepted drafts) by row, not counted yet
        self._verified: dict[int, tuple[int, int]] = {}
        self._length = self._longest = 0  # of the last chosen chains; of the longest ever chosen
        # tokens per second relative to plain steps, for the last choice; 0 without drafts
        self.gain = 0.0
        self._prepared: dict[str, int] = {}  # drafts of each request in the next step

    @property
    def reach(self) -> int:
        return self._longest + REACH

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        row = self._row(request_id)
        if row in self._verified:
            self._count()
        self._verified[row] = num_drafts, num_accepted

    def ended(self, request_id: str) -> None:
        self._count()
        if (row := self._rows.pop(request_id, None)) is not None:
            self._own.tried[row] = self._own.accepted[row] = 0
            self._free.append(row)

    def prepare(
        self, request_ids: Sequence[str], most: int, line: Sequence[tuple[int, float]]
    ) -> None:
        """Choose drafts for the step after the one in flight, while that step runs.

        The drafts in flight are not verified yet, so the choice is kept only if the chain length
        does not change. Another length is chosen later, with the latest counts.
        """
        length, gain, counts = self._choose(request_ids, [most] * len(request_ids), line)
        self._prepared = {}
        if length == self._length:
            self._prepared, self.gain = dict(zip(request_ids, counts, strict=True)), gain

    def prepared(self, request_ids: Sequence[str]) -> list[int] | None:
        """Take the prepared number of drafts of each request; a second call returns None.

        A request that arrived since gets the common length. None also if nothing was prepared, or
        if the number of requests has changed by more than an eighth.
        """
        known, self._prepared = self._prepared, {}
        if not known or 8 * abs(len(known) - len(request_ids)) > len(known):
            return None
        return [known.get(request_id, self._length) for request_id in request_ids]

    def best(
        self, request_ids: Sequence[str], most: Sequence[int], line: Sequence[tuple[int, float]]
    ) -> list[int]:
        """Choose each request's number of drafts, at most `most`, for the most tokens per second.

        `line` gives step times as (tokens, seconds), beginning with the step without drafts.
        """
        self._length, self.gain, counts = self._choose(request_ids, most, line)
        self._longest = max(self._longest, self._length)
        return counts

    def _choose(
        self, request_ids: Sequence[str], most: Sequence[int], line: Sequence[tuple[int, float]]
    ) -> tuple[int, float, list[int]]:
        """Returns (chain length, its gain, drafts of each request)."""
        self._count()
        num_seqs, longest = len(request_ids), max(most)
        if longest <= 0:
            return 0, 0.0, [0] * num_seqs
        rows = np.array([self._row(request_id) for request_id in request_ids])
        rates = self._own.rates(rows, self._all.rates(0, _FIRST))[:, :longest]
        survivals = np.cumprod(rates, axis=1)
        survivals[
            (survivals < MIN_SURVIVAL) | (_POSITIONS[:longest] >= np.array(most)[:, None])
        ] = 0
        survivals[survivals[:, 0] < MIN_FIRST] = 0
        # drafts in a step, for each chain length
        num_drafts = np.count_nonzero(survivals, axis=0).cumsum()
        speeds = (num_seqs + survivals.sum(axis=0).cumsum()) / seconds_from(
            line, num_seqs + num_drafts
        )
        if self._length:
            speeds[self._length - 1 : self._length] *= STAY
        speeds[(num_drafts > MAX_STEP_DRAFTS) | (num_drafts == 0)] = 0
        chosen = int(speeds.argmax()) + 1
        gain = float(speeds[chosen - 1]) * line[0][1] / num_seqs
        if gain <= MARGIN:
            chosen, gain = 0, 0.0
        return chosen, gain, np.minimum(np.count_nonzero(survivals, axis=1), chosen).tolist()

    def _row(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                self._free = list(range(len(self._own.tried), 2 * len(self._own.tried)))
                self._own.grow()
            row = self._rows[request_id] = self._free.pop()
        return row

    def _count(self) -> None:
        if not self._verified:
            return
        rows = np.array(list(self._verified))
        drafts, accepted = np.array(list(self._verified.values())).T
        self._verified.clear()
        right = accepted[:, None] > _POSITIONS
        tried = np.minimum(drafts, accepted + 1)[:, None] > _POSITIONS
        self._own.add(rows, tried, right)
        self._all.add(0, tried.sum(axis=0), right.sum(axis=0))
