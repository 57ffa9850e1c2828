"""`num_speculative_tokens="auto"` beside each fixed number and plain decoding, in the virtual time of `virtual_gpu`."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from slipstream.core.cache.kv_cache_manager import KVCacheManager
from tests.core.virtual_gpu import Mixed, Rates, Steady, VirtualGPU, poisson, tokens_a_second

RIGHT = {
    "3.3 tokens": lambda: Steady(3.3),
    "3 of 4 right": lambda: Rates(0.75),
    "1 of 10 right": lambda: Rates(0.1),
    "of each third request": lambda: Mixed(0.9, 0.1),
}


PLAIN = "3.3 tokens"
"""Whatever stands for plain decoding, which has no drafts that could be right."""


@cache
def of_batches(num_seqs: int, right: str, num_drafts: Any) -> float:
    return tokens_a_second(
        VirtualGPU(num_drafts, num_seqs, RIGHT[right]()), num_seqs, rounds=2, warm=1, max_tokens=192
    )


@cache
def of_random_loads(right: str, num_drafts: Any) -> float:
    return sum(poisson(VirtualGPU(num_drafts, 64, RIGHT[right]()), 4, 8, seed=i) for i in range(4))


@cache
def of_full_loads(right: str, num_drafts: Any, is_known: bool = False) -> float:
    gpu = VirtualGPU(num_drafts, 256, RIGHT[right](), noise=0.03, is_known=is_known)
    return poisson(gpu, 120, 2, max_tokens=256)


@pytest.mark.parametrize(
    ("num_seqs", "right", "least"),
    [
        *((n, "3.3 tokens", 0.96) for n in (1, 4, 16, 64)),
        *((n, "3 of 4 right", 0.94) for n in (1, 4, 16, 64)),
        (1, "1 of 10 right", 0.96),  # few steps, of which the first try it out
        *((n, "1 of 10 right", 0.98) for n in (4, 16)),
    ],
)
def test_auto_is_near_the_best_number(num_seqs, right, least):
    best = max(
        of_batches(num_seqs, PLAIN, None), *(of_batches(num_seqs, right, n) for n in (2, 3, 5))
    )
    assert of_batches(num_seqs, right, "auto") > least * best


@pytest.mark.parametrize(
    ("right", "least"),
    [("3 of 4 right", 1.7), ("1 of 10 right", 0.98), ("of each third request", 1.0)],
)
def test_auto_under_a_load_that_varies(right, least):
    """Requests that come at random, so that each step may have another number of sequences. Their mean time counts, of several
    loads: one alone is 5 % off."""
    assert of_random_loads(PLAIN, None) > least * of_random_loads(right, "auto")


@pytest.mark.parametrize(("right", "least"), [("3.3 tokens", 0.95), ("1 of 10 right", 0.98)])
def test_auto_from_the_first_request_where_steps_were_measured(right, least):
    """120 requests a second, so that up to 150 run. Learned from these steps alone it takes longer."""
    best = min(of_full_loads(PLAIN, None), of_full_loads(right, 2))
    assert best > least * of_full_loads(right, "auto", True)
    if right == "3.3 tokens":
        assert of_full_loads(right, "auto", True) < 0.97 * of_full_loads(right, "auto")


@pytest.mark.parametrize("budget", [20, 8192])
@pytest.mark.parametrize("num_drafts", [3, "auto"])
def test_drafts_that_need_no_block_are_scheduled_as_all_others(monkeypatch, num_drafts, budget):
    """Drafts are scheduled so even if the step's budget is below what all sequences with their
    drafts would take."""

    def plans():
        gpu, found = VirtualGPU(num_drafts, 16, Rates(0.75), is_known=num_drafts == "auto"), []
        sizes = {"max_num_batched_tokens": budget, "max_num_mixed_tokens": budget}
        gpu.scheduler.scheduling = dataclasses.replace(gpu.scheduler.scheduling, **sizes)
        schedule = gpu.scheduler.schedule

        def noted():
            plan = schedule()
            if plan is not None:
                found.append(sorted(plan.scheduled))
            return plan

        gpu.scheduler.schedule = noted
        poisson(gpu, 600, 0.1, max_tokens=60)
        return found

    fast = plans()
    assert any(s.drafts for plan in fast for s in plan)
    assert all(sum(s.num_tokens for s in plan) <= budget for plan in fast)
    monkeypatch.setattr(KVCacheManager, "holds", lambda *_: False)
    assert plans() == fast
