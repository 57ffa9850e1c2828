"""The scheduler without a free block: cases that random runs seldom reach."""

from __future__ import annotations

from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.request import Request
from slipstream.core.step import StepBuilder
from slipstream.messages.finish_reason import FinishReason
from tests.core.configs import BLOCK, config, window
from tests.core.test_scheduler import Engine, request, scheduled


def test_a_copy_needs_a_block_as_well():
    """A choice and its fork share a prompt's last block, and no block is free for a copy of it: the fork gives the prompt back
    before it has begun, and computes it again."""
    engine = Engine(config(num_blocks=3, enable_prefix_caching=False))
    prompt = range(BLOCK + 2)
    engine.scheduler.add(request("a", prompt, max_tokens=2))
    engine.scheduler.add(request("a/1", prompt, max_tokens=2, fork_of="a"))
    engine.run()
    assert engine.ends == {"a": FinishReason.LENGTH, "a/1": FinishReason.LENGTH}
    assert not any(plan.block_copies for plan in engine.plans)
    assert [scheduled(plan).get("a/1", 0) for plan in engine.plans] == [0, 0, BLOCK + 2, 1]


def test_a_block_that_another_holds_is_not_freed_by_passing_it():
    """Two requests share the first block of a window group, and none is free. That one of them has passed the block gives it
    no other, as long as the other request holds it."""
    kv = KVCacheManager(config(groups=(window(BLOCK),))["cache"], 4, "")
    a, b = (
        Request(request(name, range(2 * BLOCK)), (0, 0.0, i), b"", 1) for i, name in enumerate("ab")
    )
    step = StepBuilder(config()["scheduling"], {})
    assert kv.allocate(step, a, 2 * BLOCK)
    kv.adopt(b, a.blocks)
    kv.pool.allocate(1)
    a.num_computed_tokens = b.num_computed_tokens = 2 * BLOCK
    before = [*b.blocks[0]]
    assert not kv.allocate(step, b, 2 * BLOCK + 1)
    assert (b.blocks[0], b.num_passed[0]) == (before, 0)
    kv.release(a)
    assert kv.allocate(step, b, 2 * BLOCK + 1)
    assert b.blocks[0][2] == before[0]
    check_pool(kv.pool)
