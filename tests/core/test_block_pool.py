"""The order in which free blocks are taken: what holds nothing before what may still be wanted."""

from __future__ import annotations

from slipstream.core.cache.block_pool import BlockPool


def test_a_block_that_holds_nothing_is_used_again_at_once():
    pool = BlockPool(10)
    first = pool.allocate(3)
    pool.release(first)
    assert pool.allocate(3) == first  # not the next three: their memory was never written
    pool.check()


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
    pool.check()


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
    pool.check()


def test_a_chain_ends_at_the_first_key_that_is_not_cached():
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, (b"a", b"b", b"d", b"e"), strict=True):
        pool.register(block, key)
    assert [*pool.chain([b"a", b"b", b"c", b"d"])] == blocks[:2]
    assert not pool.chain([b"x", b"a"])
    assert not pool.chain([])
