"""Requests whose prompts are cached: how many join one step."""

from __future__ import annotations

import pytest

from slipstream.core import scheduler
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request


@pytest.mark.parametrize(("enough", "expected"), [(8, [2, 2]), (1000, [4])])
def test_a_step_takes_over_few_cached_blocks_once_it_has_enough_tokens(
    monkeypatch, enough, expected
):
    monkeypatch.setattr(scheduler, "MAX_ADOPTED", 8)
    monkeypatch.setattr(scheduler, "ENOUGH_TOKENS", enough)
    e = Engine(config(max_num_batched_tokens=256, max_model_len=400, num_blocks=64))
    prompts = [[1000 * i + n for n in range(5 * BLOCK)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        e.scheduler.add(request(f"first{i}", prompt, 1))
    e.run()
    before = len(e.plans)
    for i, prompt in enumerate(prompts):
        e.scheduler.add(request(f"hit{i}", [*prompt, 1, 2, 3, 4], 1))
    e.run()
    assert [len(plan.new) for plan in e.plans[before:] if plan.new] == expected
    assert all(new.request_id[:3] == "hit" for plan in e.plans[before:] for new in plan.new)
