"""Invariants of the block cache, for tests and simulations."""

from __future__ import annotations

from slipstream.core.cache.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.cache.cache_value import ValueOrder
from slipstream.core.request import Request, Status
from slipstream.core.scheduler import Scheduler


def check_pool(pool: BlockPool) -> None:
    """Assert every invariant of a pool and of its order."""
    free, block = [], pool._next[pool._end]
    while block != pool._end:
        free.append(block)
        assert pool._previous[pool._next[block]] == block
        block = pool._next[block]
    if pool.order is not None:
        check_order(pool.order)
        free += [b for b, n in enumerate(pool.ref_counts) if not n and pool.hashes[b] is not None]
    assert len(free) == len(set(free)) == pool.num_free
    assert NULL_BLOCK not in free
    assert pool.hashes[NULL_BLOCK] is None
    assert {b for b in range(pool.num_blocks) if pool.ref_counts[b] == 0} == set(free)
    assert all(count >= 0 for count in pool.ref_counts)
    assert {b: k for k, b in pool._cached.items()} == {
        b: k for b, k in enumerate(pool.hashes) if k is not None
    }
    assert [*map(bool, pool._flags)] == [key is not None for key in pool.hashes]


def check_order(order: ValueOrder) -> None:
    """Assert every invariant of an order."""
    counts = order._ref_counts
    runs = {run for run in order._owners if run is not None}
    for run in runs:
        assert run.session is not None
        assert run in run.session.runs
        assert all(order._owners[block] is run for block in run.blocks)
        assert run.num_free == sum(not counts[block] for block in run.blocks)
        assert run.num_below == sum(other.above is run for other in runs)
        assert run.above is None or run.above in runs or run.above.session is None
        assert not run.num_free or run.num_below or run.entry is not None or counts[run.blocks[-1]]
    assert sum(len(run.blocks) for run in runs) == sum(run is not None for run in order._owners)
    assert all(order._owners[block] is None and not counts[block] for block in order._loose)


def check_lease(request: Request) -> None:
    """Assert that the conditions of a decode lease hold."""
    kv, computed, lease = request.kv, request.num_computed_tokens, request.lease
    if computed >= lease:
        return
    held = min(len(request.blocks[g]) for g in kv.own) * kv.block_size
    assert request.status is Status.RUNNING
    assert request.num_tokens == computed + 1
    assert lease <= held
    assert lease < request.end
    assert not any((request.needs_copy, request.held, request.guide, request.drafts))
    assert all(
        kv._is_writable(request.blocks[g][i])
        for g in kv.own
        for i in range(computed // kv.block_size, -(-lease // kv.block_size))
    )


def check_leases(scheduler: Scheduler) -> None:
    """Assert invariants that must hold between steps."""
    for request in scheduler.requests.running:
        check_lease(request)
