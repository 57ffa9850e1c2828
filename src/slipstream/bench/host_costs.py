"""Measures on a running engine the time that the engine's host and its front end add to the steps of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slipstream.bench.load import Burst, StreamingEngine, run_load
from slipstream.bench.workload import fixed
from slipstream.plan.step_cost import HostCost, StepCost, StepShape, non_negative_least_squares

PROMPT, ANSWER = 32, 64
USERS = (1, 12, 24, 48)
LONE = 9
"""Requests that run alone."""


async def measure_host(
    engine: StreamingEngine, table: StepCost, *, vocab_size: int, run_ahead: int | None, users: Sequence[int] = USERS
) -> HostCost:
    """Bursts of short requests. What the median gap between tokens is beyond the table's step is the host's, where steps don't
    overlap with it (`plan.simulate.SimulatedEngine.run_ahead`). What the first token of a lone request with a prompt of one
    token takes beyond its next ones is the front end's: both are steps of one token, and of the same moment."""
    rows, targets, first = [], [], 0.0
    for count in users:
        if count == 1:
            lone = fixed(LONE, 1, ANSWER // 4, vocab_size=vocab_size, seed=count)
            records = [r for one in lone.requests for r in await run_load(engine, [one], Burst())]
            first = statistics.median(r.ttft_s - statistics.median(r.gaps_s) for r in records if r.ttft_s and r.gaps_s)
            continue
        if run_ahead is None or count <= run_ahead:
            continue
        load = fixed(count, PROMPT, ANSWER, vocab_size=vocab_size, seed=count)
        records = await run_load(engine, load.requests, Burst())
        gap = statistics.median(gap for r in records for gap in r.gaps_s or ())
        rows.append([1.0, float(count)])
        targets.append(max(0.0, gap - table.seconds(StepShape.of((PROMPT + ANSWER // 2,) * count))))
    step_s, sequence_s = non_negative_least_squares(rows, targets) if rows else (0.0, 0.0)
    return HostCost(step_s=step_s, sequence_s=sequence_s, request_s=max(0.0, first - step_s), label="measured")
