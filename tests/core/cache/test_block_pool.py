"""The order in which free blocks are taken: what holds nothing before what may still be wanted."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.cache import block_pool
from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.cache_value import ValueOrder
from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.sessions import Sessions


def test_a_block_that_holds_nothing_is_used_again_at_once():
    pool = BlockPool(10)
    first = pool.allocate(3)
    pool.release(first)
    assert pool.allocate(3) == first  # not the next three: their memory was never written
    check_pool(pool)


def test_a_cached_block_goes_last_and_the_oldest_first():
    pool = BlockPool(8)
    a, b = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate((*a, *b)):
        pool.register(block, bytes([i]))
    pool.release(b)
    pool.release(a)
    assert pool.allocate(3) == [5, 6, 7]  # never used
    assert pool.lookup(b"\0") == a[0]
    assert pool.allocate(2) == [b[1], b[0]]  # released before a, its tail before its head
    assert pool.lookup(b"\2") is None
    assert pool.lookup(b"\0") == a[0]
    check_pool(pool)


def test_forgotten_blocks_hold_nothing():
    pool = BlockPool(10)
    held, free = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate((*held, *free)):
        pool.register(block, bytes([i]))
    pool.release(free)
    pool.forget_all()
    assert sorted(pool.allocate(2)) == free
    pool.release(held)
    assert pool.allocate(2) == held
    check_pool(pool)


def test_a_chain_ends_at_the_first_key_that_is_not_cached():
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, (b"a", b"b", b"d", b"e"), strict=True):
        pool.register(block, key)
    assert [*pool.chain([b"a", b"b", b"c", b"d"])] == blocks[:2]
    assert not pool.chain([b"x", b"a"])
    assert not pool.chain([])


@pytest.mark.parametrize("ordered", [False, True])
@given(data=st.data())
def test_operations_over_arrays_do_what_loops_do(ordered, data):
    """A small pool, as if few blocks were many, next to one that always loops."""
    pools = [BlockPool(12), BlockPool(12)]
    for pool in pools:
        if ordered:
            pool.order = ValueOrder(Sessions(lambda: 0.0, 1000.0), pool, 16)
    held: list[list[int]] = []
    for number in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["allocate", "register", "hold", "release"]))
        count = data.draw(st.integers(0, pools[0].num_free))
        which = data.draw(st.integers(0, max(0, len(held) - 1)))
        found = []
        for pool, many in zip(pools, (1, 1000), strict=True):
            with mock.patch.object(block_pool, "MANY", many):
                if kind == "allocate":
                    found.append(pool.allocate(count))
                elif kind == "hold":
                    cached = [*map(pool.lookup, pool.cached_keys())]
                    assert pool.num_leading_cached([*cached, 0]) == len(cached)
                    revived = sum(not pool.ref_counts[block] for block in cached)
                    assert pool.num_revived(cached) == revived
                    pool.hold(cached)
                    found.append(cached)
                elif held and kind == "register":
                    for i, block in enumerate(held[which][:count]):
                        pool.register(block, bytes((number, i)))
                elif held:
                    pool.release(held[which])
                check_pool(pool)
        if found:
            assert found[0] == found[1]
            held += found[:1] if found[0] else []
        elif held and kind == "release":
            held.pop(which)
        assert pools[0].ref_counts == pools[1].ref_counts
        assert pools[0].hashes == pools[1].hashes
    assert pools[0].allocate(pools[0].num_free) == pools[1].allocate(pools[1].num_free)
