"""Pool of KV cache blocks: reference counts, the free list, and cached blocks.

1. `ref_count` is the number of sequences that hold a block. Blocks with `ref_count` 0 are in the
   free list.
2. A free block may still be *cached*: it keeps the tokens of its key, and a sequence with the same
   prefix takes it back.
3. Blocks are allocated from the head of the free list. The order is: used blocks without cached
   contents, the latest released first; blocks that were never used; cached blocks, the least
   recently used first, or in the order of their value (`ValueOrder`). So no prefix is lost while
   another block is free, and memory that the operating system has not yet handed out is touched
   last.
4. A sequence releases its last block first, so its tail is reused before its head.
5. Block 0 is the null block. Padding is written to it, and it replaces released blocks in block
   tables. No sequence holds it.

Every operation takes constant time per block, apart from the order's own. For many blocks at once,
counts and flags are changed as arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.core.cache.cache_value import ValueOrder

NULL_BLOCK = 0

MANY = 32
"""Number of blocks from which on operations over arrays are faster than loops."""


def as_array(blocks: Sequence[int]) -> npt.NDArray[np.int32]:
    """The blocks as an array, which shares their memory if possible."""
    return np.frombuffer(blocks if isinstance(blocks, array) else array("i", blocks), np.int32)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks={num_blocks}: the null block and at least one more are needed",
                field="num_blocks",
            )
        self.num_blocks = num_blocks
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self._counts = as_array(self.ref_counts)  # the same memory
        self.ref_counts[NULL_BLOCK] = 1  # always
        self.hashes: list[bytes | None] = [None] * num_blocks  # the keys of cached blocks
        self._cached: dict[bytes, int] = {}
        self._flags = bytearray(num_blocks)  # 1: the block is cached
        self._is_cached = np.frombuffer(self._flags, np.bool_)
        self.changes: dict[bytes, bool] | None = None
        """Keys cached (True) or forgotten (False) since the listener last emptied it.

        None without `listen`.
        """
        self.forgotten: list[bytes] | None = None
        """Keys of blocks that were forgotten, in order, for a listener that empties it. None without one."""
        # Doubly linked list of the free blocks. The extra last element is a sentinel: it precedes
        # the head and follows the tail.
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 1]
        self._previous = [*range(-1, num_blocks)]
        self._previous[1] = self._end
        self.num_free = num_blocks - 1
        self.order: ValueOrder | None = None
        """Order of the free cached blocks, which are then not in the list. Set it before the first block is cached."""

    @property
    def num_usable(self) -> int:
        """Number of blocks available to sequences: all except the null block."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, with one holder each.

        Their cached contents are forgotten. At least `count` blocks must be free.
        """
        assert count <= self.num_free, "allocate() beyond num_free"
        taken, following, end = [], self._next, self._end
        block = following[end]
        for _ in range(count):
            if block == end:
                break  # the other blocks are in the order
            if self.hashes[block] is not None:
                self.forget(block)
            self.ref_counts[block] = 1
            taken.append(block)
            block = following[block]
        following[end], self._previous[block] = block, end  # they were at the head
        self.num_free -= count
        if self.order is not None and len(taken) < count:
            for block in self.order.take(count - len(taken)):
                self.forget(block)
                self.ref_counts[block] = 1
                taken.append(block)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one holder to each of these (distinct) blocks. A free (cached) block leaves the free list."""
        counts, free = self.ref_counts, array("i")
        if len(blocks) >= MANY:
            where = as_array(blocks)
            before = self._counts[where]
            self._counts[where] = before + 1
            free.frombytes(where[before == 0].tobytes())
        else:
            for block in blocks:
                if not counts[block]:
                    free.append(block)
                counts[block] += 1
        if free:
            self._unlink(free)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each of these (distinct) blocks, starting with the last one."""
        counts, free = self.ref_counts, array("i")
        if len(blocks) >= MANY:
            where = as_array(blocks)[::-1]
            left = self._counts[where] - 1
            self._counts[where] = left
            free.frombytes(where[left == 0].tobytes())
        else:
            for block in reversed(blocks):
                counts[block] = count = counts[block] - 1
                if not count:
                    free.append(block)
        if free:
            self._link(free)

    def num_revived(self, blocks: Sequence[int]) -> int:
        """Number of these blocks without a holder."""
        return len(blocks) - int(np.count_nonzero(self._counts[as_array(blocks)]))

    def num_leading_cached(self, blocks: Sequence[int]) -> int:
        """Number of blocks before the first that is not cached."""
        flags = self._is_cached[as_array(blocks)]
        return len(blocks) if flags.all() else int(flags.argmin())

    def num_blank(self, most: int) -> int:
        """Number of free blocks outside the order, limited to `most`."""
        block, count = self._next[self._end], 0
        while block != self._end and count < most:
            block, count = self._next[block], count + 1
        return count

    def lookup(self, key: bytes) -> int | None:
        return self._cached.get(key)

    def chain(self, keys: Sequence[bytes]) -> array[int]:
        """The blocks of the leading keys of a chain that are cached.

        A key covers all tokens before it, so one comparison finds as many blocks as the order has together.
        """
        found = array("i")
        get, hashes = self._cached.get, self.hashes
        while (begin := len(found)) < len(keys) and (block := get(keys[begin])) is not None:
            run: Sequence[int] = (block,)
            if self.order is not None:
                run = self.order.following(block)
            most = min(len(run), len(keys) - begin)
            if hashes[run[most - 1]] != keys[begin + most - 1]:
                same = range(1, most)
                most = bisect_left(same, True, key=lambda n: hashes[run[n]] != keys[begin + n]) + 1
            found.extend(run[:most])
        return found

    def lookups(self, keys: Iterable[bytes]) -> list[int | None]:
        return list(map(self._cached.get, keys))

    def register(self, block: int, key: bytes) -> bool:
        """Cache `block` under `key`. False if the key or the block is already cached."""
        if key in self._cached or self.hashes[block] is not None:
            return False
        self._cached[key] = block
        self.hashes[block] = key
        self._flags[block] = 1
        if self.changes is not None:
            self.changes[key] = True
        return True

    def forget(self, block: int) -> None:
        """Remove the block from the cache."""
        key = self.hashes[block]
        if key is not None:
            self.hashes[block] = None
            self._flags[block] = 0
            del self._cached[key]
            if self.changes is not None:
                self.changes[key] = False
            if self.forgotten is not None:
                self.forgotten.append(key)

    def drop(self, block: int) -> None:
        """Forget a cached block, which is then among the first to be used."""
        if self.ref_counts[block] == 0:
            self._unlink((block,))
        if self.order is not None:
            self.order.discard(block)
        self.forget(block)
        if self.ref_counts[block] == 0:
            self._link((block,))

    def forget_all(self) -> None:
        if self.order is not None:
            self.order.forget_all()
        for block in list(self._cached.values()):
            self.drop(block)

    def listen(self, on: bool) -> None:
        """Start or stop recording changes."""
        self.changes = {} if on else None

    def cached_keys(self) -> list[bytes]:
        """Keys of the cached blocks, the least recently registered first."""
        return list(self._cached)

    def is_writable(self, block: int, num_leaving: int = 0) -> bool:
        """True if an uncached block has one holder, apart from `num_leaving` pending copies."""
        return self.ref_counts[block] == 1 + num_leaving and self.hashes[block] is None

    def _cached_and_others(self, blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        if len(blocks) < MANY:
            flags = self._flags
            others = [b for b in blocks if not flags[b]]
            return (blocks, ()) if not others else ([b for b in blocks if flags[b]], others)
        where = as_array(blocks)
        flagged = self._is_cached[where]
        if flagged.all():
            return blocks, ()
        return array("i", where[flagged].tobytes()), array("i", where[~flagged].tobytes())

    def _link(self, blocks: Sequence[int]) -> None:
        """Add free blocks: cached ones at the list's tail or to the order, others at the head."""
        self.num_free += len(blocks)
        following, previous, hashes = self._next, self._previous, self.hashes
        if self.order is not None:
            cached, blocks = self._cached_and_others(blocks)
            self.order.add(cached)
        for block in blocks:
            before = self._end if hashes[block] is None else previous[self._end]
            after = following[before]
            following[before], previous[block] = block, before
            following[block], previous[after] = after, block

    def _unlink(self, blocks: Sequence[int]) -> None:
        self.num_free -= len(blocks)
        following, previous = self._next, self._previous
        if self.order is not None:
            cached, blocks = self._cached_and_others(blocks)
            self.order.remove(cached)
        for block in blocks:
            before, after = previous[block], following[block]
            following[before], previous[after] = after, before
