"""Loads blocks of pausing sessions from a tier before their next request arrives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slipstream.core.cache.prefix_cache import KEY_BYTES, group_key
from slipstream.core.cache.sessions import Session

if TYPE_CHECKING:
    from slipstream.core.cache.block_pool import BlockPool
    from slipstream.core.cache.cache_value import ValueOrder
    from slipstream.core.cache.kv_cache_manager import KVCacheManager


def prefetch(kvs: Sequence[KVCacheManager], spare: int) -> None:
    """Bring back blocks of sessions whose return is near, from a tier to their rank's device.

    Only blocks of lower value are evicted for them. `spare` blocks of the device stay free.
    """
    sessions = kvs[0].sessions  # of all ranks
    if sessions is None or not sessions.keeps_keys:
        return
    sessions.tick()
    while sessions.returning:
        session = sessions.returning.pop()
        kv = kvs[session.rank]
        order, tiers = kv.order, kv.tiers
        assert order is not None, "sessions are an order's"
        assert tiers is not None, "sessions keep keys for tiers"
        joined = session.keys
        keys = [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
        worth = order.value_of(session, len(keys) * kv.block_size)

        has_room = partial(_has_room, kv.pool, order, worth, spare)
        done = tiers.bring_back(keys, has_room, partial(_brought_back, kv, session, keys))
        if done or session.returns_at > session.returns_by:
            sessions.drop_keys(session)


def _has_room(pool: BlockPool, order: ValueOrder, worth: float, spare: int, count: int) -> bool:
    """True if `count` blocks fit that are blank or worth less, and `spare` ones."""
    blank = pool.num_blank(count + spare)
    return blank + order.num_below(worth) >= count + spare <= pool.num_free


def _brought_back(
    kv: KVCacheManager,
    session: Session,
    keys: list[bytes],
    loaded: Sequence[bytes],
    begin: int,
    end: int,
) -> None:
    """Add a session's blocks that were loaded from a tier to those that wait for its next request."""
    session.prefetched = begin, end
    if kv.order is None or session.due is None:
        return  # its request has arrived and uses them
    table: list[int] = []
    if kv.full is not None:
        for key in keys:
            block = kv.pool.lookup(group_key(key, kv.full))
            if block is None:
                break
            table.append(block)
        for shared in kv.order.enter(table, session, "")[1]:
            kv.order.sessions.close(shared, "shared")
    own = {block for block in map(kv.pool.lookup, loaded) if block is not None}
    if ends := own.difference(table):
        kv.order.apart(session, ends, end)
