"""A pipeline's sampled tokens: its last stage draws them, and its first reads them in the next step of their requests.

They go from device to device, so neither stage waits for the host, which plans the next step before it knows them.

1. Each step that samples is one message, int64 [N], in the order of the steps.
2. The first stage takes a step's tokens just before it launches the next step of one of its requests. Until then it computes
   steps of other requests, while the last stage is still at this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.platform import Pipe, Platform
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.rows import Row, RowTable

MOST_DUE = 4
"""Steps whose tokens may be left at the last stage. Of requests that have ended nobody asks for them."""


@dataclass(slots=True)
class Due:
    """Tokens that are to come: of each its row, and the row's index and the position, int64 [2, N]."""

    names: frozenset[str]
    rows: Sequence[Row]
    places: npt.NDArray[np.int64]


class FirstStage:
    def __init__(self, pipe: Pipe, rows: RowTable, platform: Platform) -> None:
        self._pipe, self._rows, self._platform = pipe, rows, platform
        self._due: deque[Due] = deque()

    def expect(self, sampled: Sequence[ScheduledRequest]) -> None:
        """A step was launched in which these requests sample."""
        table, rows, positions = self._rows.rows, list[Row](), list[int]()
        for s in sampled:
            first = s.num_computed_tokens + s.num_tokens - s.num_sampled + 1
            rows += [table[s.request_id]] * s.num_sampled
            positions += range(first, first + s.num_sampled)
        places = np.array([[row.index for row in rows], positions], np.int64)
        self._due.append(Due(frozenset(s.request_id for s in sampled), rows, places))

    def before(self, plan: StepPlan) -> None:
        """Have the tokens that the requests of `plan` begin with. To be called before it changes rows."""
        names = {s.request_id for s in plan.scheduled}
        newest = max((i for i, due in enumerate(self._due) if not names.isdisjoint(due.names)), default=-1)
        for _ in range(max(newest + 1, len(self._due) - MOST_DUE)):
            self._take(self._due.popleft())

    def _take(self, due: Due) -> None:
        tokens = self._receive(due)
        alive = {id(row) for row in self._rows.rows.values()}
        kept = [i for i, row in enumerate(due.rows) if id(row) in alive]
        places = self._platform.upload(due.places.take(kept, axis=1))
        if len(kept) < len(tokens):  # the others' requests have ended, and new ones may have their rows
            tokens = tokens[self._platform.upload(np.array(kept, np.int64))]
        if kept:
            self._rows.write(places[0], places[1], tokens)

    def _receive(self, due: Due) -> Tensor:
        return self._pipe.receive_back((len(due.rows),), torch.int64)

    def forget(self) -> None:
        """All requests have ended. What is on its way is received, so that what follows is not taken for it."""
        while self._due:
            self._receive(self._due.popleft())


class LastStage:
    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._owed = 0

    def awaits_mask(self, count: int) -> None:
        """A step was launched that draws `count` tokens once it has its grammars' masks. No other is launched before."""
        self._owed = count

    def drawn(self, tokens: Tensor) -> None:
        """Of the newest step."""
        self._owed = 0
        self._pipe.send_back(tokens)

    def forget(self) -> None:
        """All requests have ended. The first stage receives a message of each step, also of one that was never drawn."""
        if self._owed:
            self.drawn(torch.zeros(self._owed, dtype=torch.int64, device=self._device))
