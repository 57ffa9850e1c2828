"""The KV cache's blocks: how many sequences hold each, which are free, and which are cached for later requests.

1. A block with `ref_count` above 0 is held by so many sequences. A block with `ref_count` 0 is in the free list.
2. A free block may still be *cached*: it holds the tokens that its key stands for, and a sequence with the same prefix takes
   it back.
3. Blocks are allocated from the head of the free list. First come blocks that were used and hold nothing, the latest released
   first; then blocks that were never used; then cached blocks, the least recently used first. So no prefix is lost while
   another block is free, and memory that the system has not handed out yet is touched last.
4. A sequence releases its last block first, so that its tail is reused before its head.
5. Block 0 is the null block. Padding writes there, it stands in tables in place of released blocks, and no sequence holds it.

Every operation takes constant time for each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.errors import ConfigError

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks={num_blocks}: the null block and at least one more are needed",
                field="num_blocks",
            )
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.ref_counts[NULL_BLOCK] = 1  # always
        self.hashes: list[bytes | None] = [None] * num_blocks  # the keys of cached blocks
        self._cached: dict[bytes, int] = {}
        self.changes: dict[bytes, bool] | None = None
        """With `listen(True)`: the keys that were cached (true) or forgotten since the listener last emptied it."""
        # A doubly linked list of the free blocks. The extra last element stands before the head and behind the tail.
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 1]
        self._previous = [*range(-1, num_blocks)]
        self._previous[1] = self._end
        self.num_free = num_blocks - 1

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, with one holder each. Their old contents are forgotten. At least `count` must be free."""
        assert count <= self.num_free, "allocate() beyond num_free"
        taken, following, end = [], self._next, self._end
        block = following[end]
        for _ in range(count):
            if self.hashes[block] is not None:
                self.forget(block)
            self.ref_counts[block] = 1
            taken.append(block)
            block = following[block]
        following[end], self._previous[block] = block, end  # they stood at the head
        self.num_free -= count
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block. A free (cached) block leaves the free list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a holder from each block, the last block first."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._link(block)

    def lookup(self, key: bytes) -> int | None:
        return self._cached.get(key)

    def register(self, block: int, key: bytes) -> None:
        """`block` is cached under `key` from now on, unless another block already is."""
        if key not in self._cached and self.hashes[block] is None:
            self._cached[key] = block
            self.hashes[block] = key
            if self.changes is not None:
                self.changes[key] = True

    def forget(self, block: int) -> None:
        """The block is no longer cached."""
        key = self.hashes[block]
        if key is not None:
            self.hashes[block] = None
            del self._cached[key]
            if self.changes is not None:
                self.changes[key] = False

    def forget_all(self) -> None:
        for block in list(self._cached.values()):
            self.forget(block)
            if self.ref_counts[block] == 0:
                self._unlink(block)
                self._link(block)

    def listen(self, on: bool) -> None:
        """Note changes from now on, or no more."""
        self.changes = {} if on else None

    def cached_keys(self) -> list[bytes]:
        """The least recently registered first."""
        return list(self._cached)

    def is_writable(self, block: int, num_leaving: int = 0) -> bool:
        """Whether one sequence alone holds it beside `num_leaving` that have made a copy, and it is not cached."""
        return self.ref_counts[block] == 1 + num_leaving and self.hashes[block] is None

    def check(self) -> None:
        """Assert every invariant, for tests."""
        free, block = [], self._next[self._end]
        while block != self._end:
            free.append(block)
            assert self._previous[self._next[block]] == block
            block = self._next[block]
        assert len(free) == len(set(free)) == self.num_free
        assert NULL_BLOCK not in free
        assert self.hashes[NULL_BLOCK] is None
        assert {b for b in range(self.num_blocks) if self.ref_counts[b] == 0} == set(free)
        assert all(count >= 0 for count in self.ref_counts)
        assert {b: k for k, b in self._cached.items()} == {
            b: k for b, k in enumerate(self.hashes) if k is not None
        }

    def _link(self, block: int) -> None:
        """At the tail if it is cached, else at the head."""
        before = self._previous[self._end] if self.hashes[block] is not None else self._end
        after = self._next[before]
        self._next[before], self._previous[block] = block, before
        self._next[block], self._previous[after] = after, block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
