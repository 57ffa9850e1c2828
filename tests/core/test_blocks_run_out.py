"""What the scheduler does without a free block, where random runs seldom come."""

from __future__ import annotations

from slipstream.types import FinishReason
from tests.core.configs import BLOCK, config
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
