"""Two kinds of slots at once. `test_scheduler`'s worker checks what is read of each."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from slipstream.core.cache import kinds
from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.prefix_cache import kind_of
from slipstream.core.cache.states import StateSlots
from tests.core.cache.test_tiers import Store, run
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request

PROMPT = range(8 * BLOCK + 3)


class Second(StateSlots):
    """A kind that keeps nothing inside of what a step computes."""

    def _keep_inner(self, request, state, computed, end):
        pass


@pytest.fixture
def start(monkeypatch):
    def start(store=None):
        sizes = dict(max_num_batched_tokens=2 * BLOCK, max_model_len=400, num_blocks=300)
        made = config(**sizes, state_interval=2 * BLOCK, state_slots=40)
        made["cache"] = dataclasses.replace(made["cache"], slots=(40, 30))
        engine = Engine({**made, "stores": () if store is None else (store,)})
        if store is not None:
            store.cells, store.states = engine.worker.slots, engine.worker.states
        return engine

    monkeypatch.setattr(kinds, "KINDS", (StateSlots, Second))
    return start


def hit(engine, name):
    """The tokens of the prompt that a new request does not compute."""
    before = len(engine.plans)
    engine.scheduler.add(request(name, PROMPT))
    run(engine) if engine.scheduler.kv.tiers else engine.run()
    return next(
        s.num_computed_tokens
        for plan in engine.plans[before:]
        for s in plan.scheduled
        if s.request_id == name
    )


def test_a_prefix_hit_ends_where_each_kind_has_a_checkpoint(start):
    engine = start()
    states, second = engine.scheduler.kv.kinds
    assert [kind.number for kind in (states, second)] == [1, 2]
    assert hit(engine, "a") == 0
    assert hit(engine, "b") == 8 * BLOCK
    last = engine.scheduler.kv.kinds[1].pool.cached_keys()
    second.pool.forget_all()
    assert last
    assert hit(engine, "c") == 0
    assert hit(engine, "d") == 8 * BLOCK
    states.pool.forget_all()
    assert hit(engine, "e") == 0
    for pool in (engine.scheduler.pool, *engine.scheduler.slot_pools):
        check_pool(pool)
        assert pool.num_free == pool.num_usable


def test_tiers_keep_the_checkpoints_of_each_kind(start):
    store = Store(30, {})
    store.sizes, store.slots = [10, 7, 5], [30, 9, 8]
    engine = start(store)
    assert hit(engine, "a") == 0
    counts = Counter(map(kind_of, store.files))
    assert counts[0] >= 8
    assert counts[1]
    assert counts[2]
    for pool in (engine.scheduler.pool, *engine.scheduler.slot_pools):
        pool.forget_all()
    assert hit(engine, "b") == 8 * BLOCK
    assert engine.scheduler.stats().tiers.host_hit_tokens == 8 * BLOCK
    for pool in (
        engine.scheduler.pool,
        *engine.scheduler.slot_pools,
        engine.scheduler.kv.tiers._hosts[2],
    ):
        pool.forget_all()
    store.lost.update(key for key in store.files if kind_of(key) == 2)
    assert hit(engine, "c") == 0


def test_a_second_kind_keeps_no_checkpoint_inside_of_a_part(start, monkeypatch):
    monkeypatch.setattr(Second, "planned", lambda kind: ("a mark",))
    with pytest.raises(AssertionError, match="StateMark is of the first kind"):
        hit(start(), "a")
