"""Messages from the ranks of a `ProcessExecutor`, stored until they are read. No torch."""

from __future__ import annotations

import operator
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from slipstream.messages.start import Phase, Started
from slipstream.messages.stats import ExpertTokens
from slipstream.messages.steps import StepResult
from slipstream.worker.ranks.children import Rank
from slipstream.worker.ranks.messages import (
    FromRank,
    Meeting,
    RankExpertLoad,
    RankFailed,
    RankResult,
    RankTiers,
    Reply,
)

T = TypeVar("T")

REASONS_S = 0.6
"""Seconds to wait for the failure reasons of ranks that end."""


def total_load(loads: Iterable[ExpertTokens]) -> ExpertTokens:
    """Sum of the expert loads that ranks counted for their own tokens or layers."""
    total: dict[int, tuple[int, ...]] = {}
    for layer, counts in chain.from_iterable(loads):
        total[layer] = tuple(map(operator.add, counts, total.get(layer, (0,) * len(counts))))
    return tuple(sorted(total.items()))


class Mailbox:
    """Stores the ranks' messages until they are read. A thread reads the links to the ranks until
    all are closed.
    """

    def __init__(self, ranks: Sequence[Rank], num_results: int = 1) -> None:
        """`num_results` is the number of ranks that send a result of each step."""
        self._num_results = num_results
        self._results: dict[int, dict[int, StepResult]] = {}  # by step and rank
        self.expert_loads: dict[int, RankExpertLoad] = {}  # by rank
        self.tiers: dict[int, deque[RankTiers]] = {r.number: deque() for r in ranks}
        self._start: deque[tuple[Rank, Meeting | Phase | Started]] = deque()
        self._answers: deque[Reply] = deque()
        self._failures: list[RankFailed] = []
        self._expected: set[int] = set()  # steps whose results will be requested
        self._arrived = threading.Condition()
        self._is_over = False  # a rank has failed or ended
        self.gone: list[Rank] = []  # ranks whose links have ended, in order
        self.bereft: set[int] = set()  # ranks that failed because another was gone
        self._reader = threading.Thread(target=self._read, args=(tuple(ranks),), daemon=True)
        self._reader.start()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def expect(self, step_id: int | None) -> None:
        """Register a launched step. None forgets all launched steps."""
        with self._arrived:
            if step_id is None:
                self._expected.clear()
                self._results.clear()
            else:
                self._expected.add(step_id)

    def next_of_start(self) -> tuple[Rank, Meeting | Phase | Started] | None:
        return self._start.popleft() if self._start else None

    def next_answer(self) -> Reply | None:
        return self._answers.popleft() if self._answers else None

    def next_tiers(self, rank: int) -> RankTiers | None:
        return self.tiers[rank].popleft() if self.tiers[rank] else None

    def results_of(self, step_id: int) -> list[StepResult] | None:
        """Take the results of a step, by rank; None until all have arrived."""
        if len(self._results.get(step_id, ())) < self._num_results:
            return None
        self._expected.discard(step_id)
        return [step for _, step in sorted(self._results.pop(step_id).items())]

    def wait_for(self, find: Callable[[], T | None]) -> T | None:
        """Wait until `find` returns a value. None if a rank fails or ends first."""
        with self._arrived:
            while (found := find()) is None and not self._is_over:
                self._arrived.wait()
            return found

    def last_words(self) -> list[RankFailed]:
        """Failure reasons of the ranks, once all ranks have ended."""
        self._reader.join(REASONS_S)
        return list(self._failures)

    def _read(self, ranks: Sequence[Rank]) -> None:
        poll, open_links = select.poll(), {rank.link.fileno(): rank for rank in ranks}
        for descriptor in open_links:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while open_links:
            for descriptor, _ in poll.poll():
                try:
                    message: FromRank | None = open_links[descriptor].link.receive()
                except (EOFError, OSError):
                    message = None
                    poll.unregister(descriptor)
                with self._arrived:
                    self._take(open_links[descriptor], message)
                    self._arrived.notify_all()
                if message is None:
                    del open_links[descriptor]

    def _take(self, rank: Rank, message: FromRank | None) -> None:
        if isinstance(message, RankResult):
            if message.step_id in self._expected:
                self._results.setdefault(message.step_id, {})[rank.number] = message.step
        elif isinstance(message, Reply):
            self._answers.append(message)
        elif isinstance(message, RankExpertLoad):
            self.expert_loads[rank.number] = message
        elif isinstance(message, RankTiers):
            self.tiers[rank.number].append(message)
        elif isinstance(message, Meeting | Phase | Started):
            self._start.append((rank, message))
        else:
            self._is_over = True
            if isinstance(message, RankFailed):
                self._failures.append(message)
                if message.of_peer:
                    self.bereft.add(rank.number)
            else:
                self.gone.append(rank)
