"""Measures, on a running engine, the time that the host and the front end add to the steps of a
table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from slipstream.bench.load import Burst, StreamingEngine, run_load
from slipstream.bench.workload import fixed
from slipstream.costs.metrics import RequestTiming
from slipstream.costs.step_cost import HostCost, StepCost, StepCounts, non_negative_least_squares

PROMPT, ANSWER = 32, 64
USERS = (1, 4, 8, 12, 24, 48)
LONE = 9
"""Number of requests that run alone."""


async def measure_host(
    engine: StreamingEngine,
    table: StepCost,
    *,
    vocab_size: int,
    run_ahead: int | None,
    users: Sequence[int] = USERS,
) -> HostCost:
    """Measure the costs with bursts of short requests.

    - Host: the mean gap between tokens minus the table's step time. With more than `run_ahead`
      users, steps don't overlap with the host's work, and it is a cost per step and sequence. With
      fewer, they overlap, and it is the cost of sharing the cores with a CPU's step. The mean is
      used because a client's time per token is a mean, too: it includes delays of only some steps.
    - Front end: the time that a lone request's first token takes beyond its next ones, minus the
      table's time for its prompt's second token. (After a prompt of one token a CPU's next step
      runs already while the host reports the first.)"""
    rows, targets, overlapping = [], [], []
    if run_ahead is not None:
        for count in users:
            load = fixed(count, PROMPT, ANSWER, vocab_size=vocab_size, seed=count)
            records = await run_load(engine, load.requests, Burst())
            # from here on steps compute no prompts
            begin = max(r.first_token or 0.0 for r in records)
            gap = statistics.fmean(gap for r in records for gap in gaps_from(r, begin))
            beyond = max(0.0, gap - table.seconds(StepCounts.of((PROMPT + ANSWER // 2,) * count)))
            if count <= run_ahead:
                overlapping.append(beyond)
            else:
                rows.append([1.0, float(count)])
                targets.append(beyond)
    step_s, sequence_s = non_negative_least_squares(rows, targets) if rows else (0.0, 0.0)
    ahead_s = statistics.median(overlapping) if overlapping else 0.0
    lone = fixed(LONE, 2, ANSWER // 4, vocab_size=vocab_size, seed=1)
    records = [r for one in lone.requests for r in await run_load(engine, [one], Burst())]
    first = statistics.median(
        r.ttft_s - statistics.median(r.gaps_s) for r in records if r.ttft_s and r.gaps_s
    )
    first -= table.seconds(StepCounts.of((), ((0, 2),))) - table.seconds(StepCounts.of((8,)))
    if overlapping:  # the next tokens' steps overlap; the first one's does not
        first += ahead_s - step_s - sequence_s
    return HostCost(
        step_s=step_s,
        sequence_s=sequence_s,
        ahead_s=ahead_s,
        request_s=max(0.0, first),
        label="measured",
    )


def gaps_from(record: RequestTiming, begin: float) -> Iterator[float]:
    """Gaps, in seconds, between a request's tokens that begin at time `begin` or later."""
    at = record.first_token or 0.0
    for gap in record.gaps_s or ():
        if at >= begin:
            yield gap
        at += gap
