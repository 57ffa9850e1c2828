"""Experts that are kept for answers: each token's own, whatever happens while steps are in flight."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from slipstream.config.forms import NgramDrafts
from slipstream.core.make import make_scheduler
from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.steps import StepResult
from tests.core.configs import config
from tests.core.test_scheduler import request


def answer(prompt: list[int], count: int) -> list[int]:
    """The prompt and an answer that repeats itself, so that some drafts are right."""
    return prompt + [(sum(prompt) + i * i) % 3 for i in range(count)]


def experts_of(tokens: list[int]) -> list[int]:
    """A token's expert, which depends on all tokens up to it."""
    found, number = [], 0
    for token in tokens:
        number = (number * 31 + token + 1) % 30011
        found.append(number)
    return found


def run(seed: int, depth: int, *, drafts: bool) -> tuple[int, int, int]:
    """Answers random requests. Returns how many ended, preemptions, and prompt tokens of hits."""
    rng = random.Random(seed)
    more = {"speculation": NgramDrafts(num_speculative_tokens=3)} if drafts else {}
    scheduler = make_scheduler(
        **config(num_blocks=rng.randint(17, 24), **more), routed_experts=True
    )
    shared = [rng.randrange(50) for _ in range(12)]
    prompts: dict[str, list[int]] = {}
    flying: deque = deque()
    todo, num_ended, num_hits = rng.randint(4, 10), 0, 0
    while len(prompts) < todo or scheduler.has_requests or flying:
        if len(prompts) < todo and rng.random() < 0.4:
            own = [rng.randrange(50) for _ in range(rng.randint(1, 12))]
            name = f"r{len(prompts)}"
            prompts[name] = shared[: rng.choice([0, 4, 8, 12])] + own
            scheduler.add(
                request(name, prompts[name], rng.randint(1, 25), priority=rng.choice([0, 0, 1]))
            )
        if prompts and rng.random() < 0.02:
            scheduler.abort([rng.choice(list(prompts))])
        plan = scheduler.schedule() if len(flying) < depth else None
        if plan is not None:
            flying.append((plan, *computed(plan, prompts)))
            if rng.random() < 0.8:
                continue
        if not flying:
            continue
        plan, tokens, experts = flying.popleft()
        extra = RoutedExperts.of(np.array(experts, np.int16).reshape(-1, 1, 1))
        given = [token for own in tokens for token in own]
        counts = [len(own) for own in tokens]
        for output in scheduler.update(
            plan, StepResult(plan.step_id, given, counts, extras=(extra,))
        ):
            num_hits += output.num_cached_tokens
            if output.finish_reason is not None:
                assert output.routed_experts is not None
                found = output.routed_experts.array[:, 0, 0].tolist()
                prompt = prompts[output.request_id]
                assert found == experts_of(answer(prompt, 25))[: len(found)]
                assert len(found) >= len(prompt)
                num_ended += 1
    return num_ended, scheduler.requests.num_preemptions, num_hits


def computed(plan, prompts) -> tuple[list[list[int]], list[int]]:
    """A step's sampled tokens of each request up to the first wrong draft, and all tokens' experts."""
    tokens, experts = [], []
    for share in plan.scheduled:
        begin, end = share.num_computed_tokens, share.num_computed_tokens + share.num_tokens
        right = answer(prompts[share.request_id], 60)
        inputs = right[: end - len(share.drafts)] + list(share.drafts)
        experts += experts_of(inputs[:end])[begin:]
        if share.num_sampled:
            first, own = end - share.num_sampled, []
            for at in range(first, end):
                own.append(right[at + 1])
                if at + 1 < end and inputs[at + 1] != right[at + 1]:
                    break
            tokens.append(own)
    return tokens, experts


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_answer_has_its_own_tokens_experts(depth, drafts):
    seen = np.sum([run(seed, depth, drafts=drafts) for seed in range(40)], axis=0)
    assert min(seen) > 10  # ends, preemptions, hits
