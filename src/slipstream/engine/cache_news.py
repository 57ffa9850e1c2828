"""Changes of the prefix cache, for routers that send a request where its prefix is cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slipstream.core.cache.prefix_cache import KEY_BYTES, announced_state

if TYPE_CHECKING:
    from slipstream.core.scheduler import Scheduler


class CacheNews:
    """Keys of the blocks in a scheduler's prefix cache. `adapters`: by adapter name, the key with
    which its prefixes begin. Without a scheduler the cache stays empty."""

    def __init__(
        self, block_size: int, scheduler: Scheduler | None, adapters: Mapping[str, bytes]
    ) -> None:
        self._block_size = block_size
        self._adapters = adapters
        self._pools = [] if scheduler is None else scheduler.pools
        self._slot_pools = [] if scheduler is None else scheduler.slot_pools
        self._scheduler = scheduler

    def listen(self, *, on: bool) -> None:
        """Begin (`on`) or stop recording changes. It costs nothing while it is off."""
        for pool in (*self._pools, *self._slot_pools):
            if not on or pool.changes is None:
                pool.listen(on)

    def identity(self) -> tuple[int, bytes, dict[str, bytes]]:
        """(block size, root key of prefixes without an adapter, root keys by adapter name)."""
        root = b"" if self._scheduler is None else self._scheduler.kv.root_key("", "")
        return self._block_size, root, dict(self._adapters)

    def keys(self) -> bytes:
        """Keys of all cached blocks, concatenated. Only blocks of the first cache group count."""
        # several ranks may have one
        keys = dict.fromkeys(key for pool in self._pools for key in pool.cached_keys())
        states = (pool.cached_keys() for pool in self._slot_pools)
        of_states = {announced_state(key): None for keys in states for key in keys}
        return b"".join([key for key in (*keys, *of_states) if len(key) == KEY_BYTES])

    def changes(self) -> tuple[bytes, bytes] | None:
        """Keys added and keys removed since the last call; None if nothing changed."""
        changes: dict[bytes, bool] = {}
        for pools, named in ((self._pools, bytes), (self._slot_pools, announced_state)):
            changes |= {
                named(key): any(pool.lookup(key) is not None for pool in pools)
                for pool in pools
                for key in pool.changes or ()
            }
            for pool in pools:
                if pool.changes:
                    pool.changes.clear()
        if not changes:
            return None
        came = [key for key, held in changes.items() if held and len(key) == KEY_BYTES]
        went = [key for key, held in changes.items() if not held and len(key) == KEY_BYTES]
        return b"".join(came), b"".join(went)
