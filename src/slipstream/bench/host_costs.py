"""What the engine's host and its front end add to the steps of a table, measured on a running engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slipstream.bench.load import ClosedLoop, StreamingEngine, run_load
from slipstream.bench.workload import fixed
from slipstream.plan.step_cost import HostCost, StepCost, StepShape, non_negative_least_squares

PROMPT, ANSWER = 32, 48


async def measure_host(
    engine: StreamingEngine, table: StepCost, *, vocab_size: int, users: Sequence[int] = (1, 12, 24, 48), run_ahead: int | None = 8
) -> HostCost:
    """Closed loops of short requests. What a step takes beyond the table's time is the host's, by the sequences in it, where
    steps don't overlap with it; what the first token of a lone request takes beyond its prompt's step is the front end's."""
    rows, targets, first = [], [], []
    for count in users:
        load = fixed(3 * count, PROMPT, ANSWER, vocab_size=vocab_size, seed=count)
        records = await run_load(engine, load.requests, ClosedLoop(concurrency=count))
        tpot = statistics.mean(r.tpot_s for r in records if r.tpot_s is not None)
        if count == 1:
            prompt = table.seconds(StepShape.of((), ((0, PROMPT),)))
            first = [r.ttft_s - prompt for r in records if r.ttft_s is not None]
        if run_ahead is None or count <= run_ahead:
            continue
        # All prompts come at once, so that nearly all steps are decodes; two waves of prompts are passed over.
        expected = table.seconds(StepShape.of((PROMPT + ANSWER // 2,) * count))
        prompts = table.seconds(StepShape.of((), ((0, PROMPT),) * count)) * 2 / 3 / ANSWER
        rows.append([1.0, float(count)])
        targets.append(max(0.0, tpot - expected - prompts * 0))
    step_s, sequence_s = non_negative_least_squares(rows, targets) if rows else (0.0, 0.0)
    request_s = max(0.0, statistics.median(first) - step_s) if first else 0.0
    return HostCost(step_s=step_s, sequence_s=sequence_s, request_s=request_s, label="measured")
