"""The scheduler of a pipeline: as many steps in flight as stages, of requests whose tokens are known."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.scheduler import Scheduler
from slipstream.types import StepPlan, StepResult
from tests.core.configs import config
from tests.core.test_scheduler import request


def sampling(plan: StepPlan) -> list[str]:
    return [s.request_id for s in plan.scheduled if s.num_sampled]


def run(scheduler: Scheduler, num_stages: int, abort_at: dict[int, str]) -> tuple[dict[str, list[int]], list[int]]:
    """Each request's tokens, and the number of steps in flight whenever a result was waited for."""
    flying: deque[StepPlan] = deque()
    tokens: dict[str, list[int]] = {}
    counts = []
    for turn in range(10_000):
        if not scheduler.has_requests and not flying:
            return tokens, counts
        if turn in abort_at:
            scheduler.abort([abort_at[turn]])
        plan = scheduler.schedule() if len(flying) < num_stages else None
        if plan is not None:
            pending = {name for other in flying for name in sampling(other)}
            assert not pending & {s.request_id for s in plan.scheduled}
            flying.append(plan)
            if len(flying) < num_stages:
                continue
        if not flying:  # who was aborted was the last
            continue
        counts.append(len(flying))
        plan = flying.popleft()
        for output in scheduler.update(plan, StepResult(plan.step_id, [plan.step_id] * len(sampling(plan)))):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("it does not end")


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(12, 40),
    st.dictionaries(st.integers(0, 30), st.integers(0, 7), max_size=2),
)
def test_steps_in_flight_have_different_requests(num_stages, sizes, num_blocks, abort_at):
    """Also when blocks run out, prompts come in chunks, and requests are cancelled while steps of theirs are in flight."""
    scheduler = Scheduler(**config(num_blocks=num_blocks, pipeline_steps=num_stages))
    for i, (length, answer) in enumerate(sizes):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + length), max_tokens=answer))
    aborted = {turn: f"r{i}" for turn, i in abort_at.items()}
    tokens, _ = run(scheduler, num_stages, aborted)
    for i, (_, answer) in enumerate(sizes):
        if f"r{i}" not in aborted.values():
            assert len(tokens[f"r{i}"]) == answer
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_no_stage_is_idle_while_there_are_requests_enough():
    scheduler = Scheduler(**config(pipeline_steps=2, num_blocks=60))
    for i in range(4):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 4), max_tokens=20))
    _, counts = run(scheduler, 2, {})
    assert sum(count == 2 for count in counts) >= 0.8 * len(counts)


def test_a_step_has_its_share_of_the_requests():
    scheduler = Scheduler(**config(pipeline_steps=2, num_blocks=60, max_num_batched_tokens=64))
    for i in range(4):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 4), max_tokens=20))
    first = scheduler.schedule()
    scheduler.update(first, StepResult(first.step_id, [1] * len(sampling(first))))
    assert [len(sampling(scheduler.schedule())) for _ in range(2)] == [2, 2]
    assert scheduler.schedule() is None
