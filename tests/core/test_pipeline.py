"""The scheduler of a pipeline: as many steps in flight as stages and one planned ahead, of different requests."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.make import make_scheduler
from slipstream.core.participants.forced_tokens import ForcedTokens
from slipstream.core.scheduler import Scheduler
from slipstream.messages.steps import StepPlan, StepResult
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams
from tests.core.configs import config
from tests.core.test_scheduler import request

WITH_GRAMMAR = {"r1", "r4"}


def sampling(plan: StepPlan) -> list[str]:
    return [s.request_id for s in plan.scheduled if s.num_sampled]


def run(
    scheduler: Scheduler, num_stages: int, abort_at: dict[int, str]
) -> tuple[dict[str, list[int]], list[int]]:
    """Each request's tokens, and the number of steps in flight whenever a result was waited for."""
    flying: deque[StepPlan] = deque()
    tokens: dict[str, list[int]] = {}
    counts = []
    for turn in range(10_000):
        if not scheduler.has_requests and not flying:
            return tokens, counts
        if turn in abort_at:
            scheduler.abort([abort_at[turn]])
        is_full = scheduler.num_running >= num_stages
        plan = scheduler.schedule() if len(flying) <= num_stages else None
        if plan is not None:
            newest = [*flying][1 - num_stages :]  # which the other stages are at
            pending = {name for other in newest for name in sampling(other)} if is_full else set()
            assert not pending & {s.request_id for s in plan.scheduled}
            of_all = {name for other in flying for name in sampling(other)} & {
                s.request_id for s in plan.scheduled
            }
            known = scheduler.requests.by_id
            assert not any(known[name].spec.sampling.structured_outputs for name in of_all)
            flying.append(plan)
            if len(flying) <= num_stages:
                continue
        if not flying:  # who was aborted was the last
            continue
        counts.append(len(flying))
        plan = flying.popleft()
        for output in scheduler.update(
            plan, StepResult(plan.step_id, [plan.step_id] * len(sampling(plan)))
        ):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("it does not end")


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(12, 40),
    st.dictionaries(st.integers(0, 30), st.integers(0, 7), max_size=2),
)
def test_steps_in_flight_have_different_requests(num_stages, sizes, num_blocks, abort_at):
    """Steps differ also when blocks run out, prompts come in chunks, and requests in flight are cancelled."""
    scheduler = make_scheduler(**config(num_blocks=num_blocks, pipeline_steps=num_stages))
    scheduler.join(ForcedTokens(lambda request_id, num_pending: ()))
    for i, (length, answer) in enumerate(sizes):
        grammar = StructuredOutputsParams(regex="a*") if f"r{i}" in WITH_GRAMMAR else None
        sampling = SamplingParams(max_tokens=answer, structured_outputs=grammar)
        scheduler.add(
            request(f"r{i}", range(100 * i, 100 * i + length), max_tokens=answer, sampling=sampling)
        )
    aborted = {turn: f"r{i}" for turn, i in abort_at.items()}
    tokens, _ = run(scheduler, num_stages, aborted)
    for i, (_, answer) in enumerate(sizes):
        if f"r{i}" not in aborted.values():
            assert len(tokens[f"r{i}"]) == answer
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_no_stage_is_idle_while_there_are_requests_enough():
    scheduler = make_scheduler(**config(pipeline_steps=2, num_blocks=60))
    for i in range(4):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 4), max_tokens=20))
    _, counts = run(scheduler, 2, {})
    assert sum(count == 3 for count in counts) >= 0.8 * len(counts)


@given(st.integers(2, 5), st.integers(1, 6))
def test_requests_take_turns(num_stages, num_requests):
    """No request is more than a token ahead of another, also when they are fewer than the stages."""
    scheduler = make_scheduler(
        **config(
            pipeline_steps=num_stages, num_blocks=120, max_num_batched_tokens=64, max_num_seqs=8
        )
    )
    for i in range(num_requests):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 4), max_tokens=20))
    flying, counts = deque[StepPlan](), dict.fromkeys((f"r{i}" for i in range(num_requests)), 0)
    while scheduler.has_requests:
        while len(flying) <= num_stages and (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        plan = flying.popleft()
        for output in scheduler.update(plan, StepResult(plan.step_id, [1] * len(sampling(plan)))):
            counts[output.request_id] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


def test_one_request_does_not_wait_for_the_host():
    """The next steps of the request are planned before its tokens are known."""
    scheduler = make_scheduler(**config(pipeline_steps=2, num_blocks=60))
    scheduler.add(request("r0", range(4), max_tokens=20))
    tokens, counts = run(scheduler, 2, {})
    assert len(tokens["r0"]) == 20
    assert sum(count == 3 for count in counts) >= 0.8 * len(counts)


def test_a_step_has_its_share_of_the_requests():
    scheduler = make_scheduler(**config(pipeline_steps=2, num_blocks=60, max_num_batched_tokens=64))
    for i in range(4):
        scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 4), max_tokens=20))
    first = scheduler.schedule()
    scheduler.update(first, StepResult(first.step_id, [1] * len(sampling(first))))
    steps = [sampling(scheduler.schedule()) for _ in range(3)]
    assert [len(step) for step in steps] == [2, 2, 2]
    assert steps[0] == steps[2]
    assert not set(steps[0]) & set(steps[1])
