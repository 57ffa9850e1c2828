"""Sampled tokens of a pipeline, sent from the last stage to the first.

The last stage samples them, and the first reads them in the requests' next step. They are sent from
device to device, so neither stage waits for the host, which plans the next step before it knows
them.

1. Each step that samples is one message, int64 [N], in the order of the steps.
2. The first stage receives a step's tokens just before it launches the next step of one of its
   requests. Until then it computes steps of other requests, while the last stage still computes
   this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.platform import Platform
from slipstream.platform.collectives import Pipe
from slipstream.worker.draft.drafter import Drafter
from slipstream.worker.draft.stages import ReceivedDrafts
from slipstream.worker.inputs.rows import Row, RowTable

MAX_DUE = 4
"""Maximum number of steps whose tokens may be unreceived at the last stage.

The tokens of ended requests are never fetched.
"""


@dataclass(slots=True)
class Due:
    """Sampled tokens of one step that a stage will receive. Each of `requests` samples `counts`
    tokens (None: one each). `rows` are the rows that they had when the step was launched. `places`,
    int64 [2, N], has the row and position of each token.
    """

    requests: Sequence[str]
    rows: Sequence[Row]
    counts: Sequence[int] | None
    places: npt.NDArray[np.int64]
    num_dropped: int  # `RowTable.num_dropped` at that time


class FirstStage:
    def __init__(
        self, pipe: Pipe, rows: RowTable, platform: Platform, draft: Drafter | None
    ) -> None:
        self._pipe, self._rows, self._platform = pipe, rows, platform
        self._due: deque[Due] = deque()
        if isinstance(draft, ReceivedDrafts):
            draft.stage = self

    def expect(self, sampled: Sequence[ScheduledRequest]) -> None:
        """Register a launched step in which these requests sample."""
        table = self._rows.rows
        rows, counts = [table[s.request_id] for s in sampled], [s.num_sampled for s in sampled]
        indices = [row.index for row in rows]
        ends = [s.num_computed_tokens + s.num_tokens for s in sampled]
        places, is_plain = np.array([indices, ends], np.int64), max(counts) == 1
        if not is_plain:
            starts = np.cumsum(counts) - counts
            places = places.repeat(counts, axis=1)
            places[1] += np.arange(len(places[1])) - (starts + counts - 1).repeat(counts)
        names = [s.request_id for s in sampled]
        self._due.append(
            Due(names, rows, None if is_plain else counts, places, self._rows.num_dropped)
        )

    def before(self, plan: StepPlan) -> None:
        """Receive the tokens that the requests of `plan` need as their first input.

        Call this before `plan` changes rows.
        """
        names = {s.request_id for s in plan.scheduled}
        newest = max(
            (i for i, due in enumerate(self._due) if not names.isdisjoint(due.requests)), default=-1
        )
        for _ in range(max(newest + 1, len(self._due) - MAX_DUE)):
            self._take(self._due.popleft())

    def take_all(self) -> None:
        """Receive the tokens of all steps so far."""
        while self._due:
            self._take(self._due.popleft())

    def _take(self, due: Due) -> None:
        tokens, places, rows = self._receive(due), due.places, self._rows
        if rows.num_dropped > due.num_dropped:  # new requests may have taken the rows of ended ones
            alive = np.array(
                [
                    rows.rows.get(name) is row
                    for name, row in zip(due.requests, due.rows, strict=True)
                ]
            )
            kept = np.flatnonzero(alive if due.counts is None else alive.repeat(due.counts))
            if not len(kept):
                return
            if len(kept) < len(tokens):
                places, tokens = places.take(kept, axis=1), tokens[self._platform.upload(kept)]
        own = self._platform.upload(places)
        rows.write(own[0], own[1], tokens)

    def _receive(self, due: Due) -> Tensor:
        return self._pipe.receive_back((due.places.shape[1],), torch.int64)

    def forget(self) -> None:
        """Drop everything after all requests have ended.

        Messages on their way are received, so that later ones are not mistaken for them.
        """
        while self._due:
            self._receive(self._due.popleft())


class LastStage:
    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._owed = 0

    def awaits_mask(self, count: int) -> None:
        """Register a launched step that samples `count` tokens once it has its grammars' masks.

        No other step may be launched before.
        """
        self._owed = count

    def drawn(self, tokens: Tensor) -> None:
        """Send the tokens of the newest step."""
        self._owed = 0
        self._pipe.send_back(tokens)

    def forget(self) -> None:
        """Drop everything after all requests have ended.

        The first stage receives a message for each step, even for one that was never sampled.
        """
        if self._owed:
            self.drawn(torch.zeros(self._owed, dtype=torch.int64, device=self._device))
