"""The budget of a step, the lease of plain decodes, and the bound on idle steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from slipstream.config.forms import MAX_STEP_DRAFTS
from slipstream.core.cache.invariants import check_leases
from slipstream.core.make import make_scheduler
from slipstream.core.request import Status
from slipstream.core.step import StepBudget
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request
from tests.support.scheduler_checks import MAX_IDLE_STEPS


def running_on(rank, num_running):
    kv = SimpleNamespace(rank=rank, num_running=num_running)
    return SimpleNamespace(kv=kv, status=Status.RUNNING)


def test_budget_keeps_a_token_for_each_running_request():
    sizes = config(max_num_batched_tokens=16, max_num_mixed_tokens=10)["scheduling"]
    running, scheduled = ["a", "b", "c"], set()
    budget, a = StepBudget(sizes, running, scheduled), running_on(0, 3)
    assert (budget.left, budget.spare(a.kv)) == (10, 7)
    scheduled |= {"a", "b"}  # plain decodes take nothing
    assert (budget.left, budget.spare(a.kv)) == (8, 7)
    budget.take(a.kv, 5, 5)
    assert (budget.left, budget.spare(a.kv), budget.drafts_left) == (4, 3, MAX_STEP_DRAFTS - 4)
    running.pop()  # a preempted request gives its token back
    assert (budget.left, budget.spare(a.kv)) == (4, 4)
    budget.take_others(2)
    budget.bound(1)
    budget.bound(3)  # a looser bound changes nothing
    assert budget.left == budget.room(a) == 1
    budget.widen()
    assert budget.left == 16 - 2 - 4 - 2


def test_budget_of_one_rank_leaves_the_other_s_alone():
    sizes = config(max_num_batched_tokens=20, max_num_seqs=4, num_ranks=2)["scheduling"]
    running, scheduled = ["a", "b", "c"], set()
    budget, here, there = StepBudget(sizes, running, scheduled), running_on(0, 2), running_on(1, 1)
    assert (budget.spare(here.kv), budget.spare(there.kv)) == (8, 9)
    budget.take(here.kv, 7, 0)
    assert (budget.spare(here.kv), budget.spare(there.kv)) == (2, 9)
    assert (budget.room(here), budget.room(there)) == (3, 10)
    there.status = Status.WAITING  # its rank does not count it yet
    assert budget.room(there) == 9


def test_a_decode_asks_for_blocks_only_where_its_lease_ends(monkeypatch):
    engine, asked = Engine(config(enable_prefix_caching=False)), []
    engine.scheduler.add(request("a", range(BLOCK + 1), max_tokens=2 * BLOCK))
    allocate = engine.scheduler.kv.allocate
    monkeypatch.setattr(
        engine.scheduler.kv,
        "allocate",
        lambda step, own, end: asked.append(end) or allocate(step, own, end),
    )
    engine.run()
    assert asked == [BLOCK + 1, 2 * BLOCK + 1]


@pytest.mark.parametrize("fault", ["blocks", "end", "drafts", "copy"])
def test_check_finds_a_lease_that_promises_too_much(fault):
    engine = Engine(config())
    engine.scheduler.add(request("a", range(2), max_tokens=20))
    engine.step()
    own = engine.scheduler.requests.by_id["a"]
    check_leases(engine.scheduler)
    assert own.lease == BLOCK
    if fault == "blocks":
        own.lease += 1
    elif fault == "end":
        own.end = BLOCK
    elif fault == "drafts":
        own.drafts = (1,)
    else:
        own.needs_copy = True
    with pytest.raises(AssertionError):
        check_leases(engine.scheduler)
    own.kv.drop_lease(own)
    check_leases(engine.scheduler)


def step_until_done(engine):
    while engine.scheduler.has_requests:
        engine.step()


def test_a_scheduler_that_schedules_nothing_for_ever_fails(monkeypatch):
    engine = Engine(config())
    engine.scheduler.add(request("a", range(3), max_tokens=20))
    engine.step()
    engine.scheduler.requests.by_id["a"].num_computed_tokens += 1  # it seems to have all
    with pytest.raises(AssertionError, match="nothing is scheduled"):
        step_until_done(engine)
    assert engine.scheduler.num_idle_steps == MAX_IDLE_STEPS


def test_waiting_for_time_is_not_idling():
    scheduler = make_scheduler(**config(policy="dynamic", batch_window_s=60.0))
    scheduler.add(request("a", range(3), max_tokens=2, arrival=time.monotonic()))
    for _ in range(MAX_IDLE_STEPS + 1):
        assert scheduler.schedule() is None
