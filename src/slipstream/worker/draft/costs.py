"""Measures step times of dummy sequences with 0, 1, … drafts each, before the first request.

The number of drafts is chosen by the cost of steps (`core/participants/speculation.py`). With
random arrivals, each number of sequences only occurs for a few steps, too few to learn from.

1. Steps follow one another as in the engine. Two steps without drafts may be in flight. A step with
   drafts begins after the last token sampled by the previous one, so that a chain of drafts
   launched ahead is used.
2. Ranks measure together, so the number of steps does not depend on the clock.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import cycle, islice, pairwise
from statistics import median

from slipstream.config.forms import MAX_STEP_DRAFTS, LearnedDrafts, NoDrafts
from slipstream.messages.steps import (
    FROM_MODEL,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    StepTime,
    TableUpdate,
)
from slipstream.params.sampling import SamplingParams
from slipstream.worker.base import Launched
from slipstream.worker.model_runner import ModelRunner

CONTEXT = 256
"""Number of cached tokens of a dummy sequence before its first measured step."""

NUM_SEQS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
NUM_DRAFTS = (0, 1, 2, 3, 5, 8)

NUM_TIMED = 3

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def measure_draft_costs(runner: ModelRunner, num_blocks: int) -> list[StepTime]:
    """Measure seconds of steps by numbers of sequences and of drafts.

    This is only done if the number of drafts is "auto". It takes about a second for an 8B model on
    a GPU. `num_blocks` is the number of blocks in the cache, null block included; they are
    overwritten. No step may be in flight.
    """
    config, spec = runner.config, runner.model.spec
    speculation = config.speculation
    if isinstance(speculation, NoDrafts) or speculation.num_speculative_tokens is not None:
        return []
    if not (spec.has_first and spec.has_last) or spec.encoder is not None:
        # a pipeline's earlier stages have no result
        return []
    found, most = [], min(config.max_num_sampled, config.scheduling.max_num_batched_tokens)
    for num_seqs in _counts(config.scheduling.max_num_seqs):
        for num_drafts in NUM_DRAFTS:
            num_tokens = num_seqs * (1 + num_drafts)
            room = (NUM_TIMED + 3) * (1 + num_drafts)
            if (
                num_drafts > speculation.limit
                or num_tokens > most
                or num_tokens - num_seqs > MAX_STEP_DRAFTS
            ):
                break
            if room >= config.model.max_model_len:
                break
            drafts = (FROM_MODEL if isinstance(speculation, LearnedDrafts) else 1,) * num_drafts
            run = _StepSeries(runner, num_blocks, num_seqs, drafts, room)
            found.append(StepTime(num_seqs, num_tokens, run.seconds()))
    runner.reset_expert_load()
    return found


def _counts(most: int) -> list[int]:
    return [*(n for n in NUM_SEQS if n < most), most]


class _StepSeries:
    """One measured series of steps with `num_seqs` sequences, each with room for `room` tokens
    after its context."""

    def __init__(
        self,
        runner: ModelRunner,
        num_blocks: int,
        num_seqs: int,
        drafts: tuple[int, ...],
        room: int,
    ) -> None:
        self.runner, self.num_blocks, self.room = runner, num_blocks, room
        self.context = min(CONTEXT, runner.config.model.max_model_len - room)
        self.drafts = drafts
        # position of the last known token
        self.last = dict.fromkeys((f"drafts {i}" for i in range(num_seqs)), self.context)

    def seconds(self) -> float:
        """Median of the timed steps.

        The first two are not timed: one creates the rows, and the other has no chain launched ahead.
        """
        runner, in_flight, ends = self.runner, deque[Launched](), list[float]()
        for i in range(2 + NUM_TIMED):
            plan = self._next(i)
            in_flight.append(runner.launch(plan))
            if i == 0:
                for row in runner.rows.rows.values():
                    # the drafter need not process tokens that were never computed
                    row.num_drafted = self.context
            while len(in_flight) >= (1 if self.drafts else runner.max_in_flight(plan)):
                ends.append(self._end(in_flight.popleft()))
        ends += [self._end(step) for step in in_flight]
        runner.forget_rows()
        return median(b - a for a, b in pairwise(ends[1:]))

    def _end(self, step: Launched) -> float:
        counts = step.result().tokens_of_each
        if self.drafts:
            for name, tokens in zip(self.last, counts, strict=True):
                self.last[name] += len(tokens)
        return time.perf_counter()

    def _next(self, number: int) -> StepPlan:
        if number == 0:
            return self._first()
        drafts = self.drafts
        n = 1 + len(drafts)
        ahead = 0 if drafts else number
        return StepPlan(
            number,
            tuple(
                ScheduledRequest(name, at + ahead, n, n, (), drafts)
                for name, at in self.last.items()
            ),
        )

    def _first(self) -> StepPlan:
        """Plan one token of each sequence. Sequences share blocks where the cache has too few."""
        config, groups = self.runner.config, range(len(self.runner.config.cache.groups))
        need = -(-(self.context + self.room) // config.cache.block_size)
        blocks = cycle(range(1, self.num_blocks))
        scheduled, new = [], []
        for name, at in self.last.items():
            tables = tuple(TableUpdate(group, 0, tuple(islice(blocks, need))) for group in groups)
            scheduled.append(ScheduledRequest(name, at, 1, 1, tables))
            new.append(NewRequest(name, (1,) * (at + 1), at + 1, _GREEDY))
        return StepPlan(0, tuple(scheduled), tuple(new))
