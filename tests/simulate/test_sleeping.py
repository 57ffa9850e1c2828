"""The simulation's scheduler plans what the Scheduler plans: the same requests with the same tokens, step by step."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.cache.invariants import check_pool
from slipstream.core.scheduler import Scheduler
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.simulate.sleeping import ANY_TOKEN, SleepingScheduler
from tests.core.configs import FULL, config, window


def request(number, prompt, answer, arrival=0.0, priority=0, shared=0):
    tokens = (1000,) * min(shared, prompt) + (number,) * (prompt - min(shared, prompt))
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=answer),
        max_tokens=answer,
        arrival=arrival,
        priority=priority,
    )


def steps_of(kind, arrivals, *, depth, num_blocks, block_size, caching, groups, **limits):
    """Contents of each step: {(request, computed, tokens)} and the number of tokens that decodes
    look at; then the ends, by step."""
    given = config(
        max_model_len=62,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        groups=groups,
        **limits,
    )
    given["cache"] = dataclasses.replace(given["cache"], block_size=block_size)
    scheduler = kind(**given, clock=lambda: 0.0)
    waiting, in_flight, steps, ends = list(arrivals), [], [], []
    for now in range(5000):
        while waiting and waiting[0][0] <= now:
            scheduler.add(waiting.pop(0)[1])
        plan = scheduler.schedule()
        if plan is not None:
            held = {(s.request_id, s.num_computed_tokens, s.num_tokens) for s in plan.scheduled}
            context = sum(s.num_computed_tokens + 1 for s in plan.scheduled if s.num_tokens == 1)
            if kind is SleepingScheduler:
                own = {
                    (r.request_id, x.computed + plan.step_id - x.since - 1, 1)
                    for r, x in scheduler._asleep.items()
                    if x.since < plan.step_id <= x.last
                }
                assert len(own) == scheduler.num_asleep
                context += scheduler.asleep_context
                held |= own
            steps.append((held, context))
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) >= depth):
            done = in_flight.pop(0)
            count = sum(s.num_sampled for s in done.scheduled)
            outputs = scheduler.update(done, StepResult(done.step_id, [ANY_TOKEN] * count))
            ends += [
                (done.step_id, o.request_id, o.num_cached_tokens)
                for o in outputs
                if o.finish_reason is not None
            ]
        elif plan is None and not waiting:
            break
        if kind is SleepingScheduler:
            assert 0 <= scheduler.pool.num_free <= scheduler.pool.num_usable
        else:
            check_pool(scheduler.pool)
    assert not scheduler.has_requests
    assert scheduler.pool.num_free == num_blocks - 1
    return steps, ends, scheduler.stats()


@st.composite
def loads(draw):
    count = draw(st.integers(1, 12))
    arrival, found = 0, []
    for i in range(count):
        arrival += draw(st.integers(0, 6))
        prompt, answer = draw(st.integers(1, 30)), draw(st.integers(1, 30))
        found.append(
            (
                arrival,
                request(
                    i, prompt, answer, arrival, draw(st.integers(0, 1)), draw(st.integers(0, 20))
                ),
            )
        )
    return found


@settings(max_examples=150)
@given(
    loads(),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 4, 8)),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from(((FULL,), (FULL, window(6)))),
    st.integers(1, 6),
    st.integers(0, 20),
    st.sampled_from((None, 2, 5)),
)
def test_steps_are_the_schedulers(
    arrivals, depth, block_size, more_blocks, caching, groups, seqs, more_tokens, chunk
):
    num_blocks = len(groups) * -(-62 // block_size) + 2 + more_blocks
    limits = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + more_tokens,
        "max_num_mixed_tokens": seqs + more_tokens // 2,
        "mixed_chunk": chunk,
    }
    given = {
        "depth": depth,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "caching": caching,
        "groups": groups,
        **limits,
    }
    expected, found = (steps_of(kind, arrivals, **given) for kind in (Scheduler, SleepingScheduler))
    for number, (one, other) in enumerate(zip(expected[0], found[0], strict=False)):
        assert one == other, number
    assert len(expected[0]) == len(found[0])
    assert sorted(expected[1]) == sorted(found[1])
    assert expected[2].prefix_hits == found[2].prefix_hits
    assert expected[2].num_preemptions == found[2].num_preemptions
