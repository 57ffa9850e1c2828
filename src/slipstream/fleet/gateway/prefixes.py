"""The index of cached blocks: a compact table from a block's key to the set of replicas that hold
it.

1. Keys are the first 8 of the 16 bytes of the engine's keys (`core.prefix_cache`). A collision
   costs a request some cached tokens, never a wrong answer, because the replica compares the whole
   key.
2. A table entry has 12 bytes: the key, and the number of a set of holders. Equal sets are stored
   once, as a mask with a bit for each slot. The blocks of a prefix mostly have the same holders, so
   there are few sets.
3. The table has `_NUM_PARTS` parts that grow one at a time, so growing never needs twice the
   memory.
4. A replica has a slot. When it leaves, its bit is dead, at no cost. `sweep` removes dead bits from
   all sets; then their slots can be reused.

A lookup assumes that a replica with a block also has the blocks before it, because the engine
evicts the last blocks of a prefix first. With a sliding window that does not hold, and the number
of blocks found is an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from slipstream.core.cache.prefix_cache import announced_state

_NUM_PARTS = 16
_FIRST_SIZE = 256  # entries of a new part
_MAX_FILLED = 0.7
_EMPTY, _GONE = 0, 1  # set numbers that no block has: an entry never used, and a deleted entry
_MAX_DEAD = 64  # dead slots that trigger a sweep
_MAX_SHARED = 4096  # prefixes whose shared length is remembered
MAX_BACK = 1024
"""Maximum blocks between two checkpoints that a lookup bridges: 8,192 tokens, and twice that for safety."""
MAX_GROUPS = 4
"""Maximum distinct prefix lengths that one lookup distinguishes, the longest first."""


class _HashTable:
    """Hash table with open addressing and linear probing. The arrays are read through memoryviews,
    which is faster for one entry at a time.

    An entry's key is 0 until its first use, and a deleted entry keeps its key. So a search only
    reads keys, and `add` never puts a key after an entry that held it before."""

    __slots__ = ("_key_array", "_set_array", "keys", "mask", "num_filled", "num_used", "sets")

    def __init__(self, size: int) -> None:
        self._key_array, self._set_array = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
        self.keys, self.sets = self._key_array.data, self._set_array.data
        self.mask = size - 1
        self.num_used = 0  # entries with a block
        self.num_filled = 0  # entries with a block, and deleted ones, which a search must skip

    @property
    def num_bytes(self) -> int:
        return self._key_array.nbytes + self._set_array.nbytes

    def find(self, key: int) -> int:
        """The key's entry; −1 if there is none."""
        keys, mask = self.keys, self.mask
        place = key & mask
        while (here := keys[place]) != key:
            if not here:
                return -1
            place = (place + 1) & mask
        return place if self.sets[place] != _GONE else -1

    def add(self, key: int, number: int) -> None:
        """Add a key that is not in the table."""
        if self.num_filled >= _MAX_FILLED * (self.mask + 1):
            self._grow()
        sets, mask = self.sets, self.mask
        place = key & mask
        while sets[place] > _GONE:
            place = (place + 1) & mask
        self.num_filled += sets[place] == _EMPTY
        self.num_used += 1
        self.keys[place], sets[place] = key, number

    def drop(self, place: int) -> None:
        self.sets[place] = _GONE
        self.num_used -= 1

    def renumber(self, numbers: np.ndarray) -> None:
        """Rename set n to numbers[n] in all entries."""
        np.take(numbers, self._set_array, out=self._set_array)
        self.num_used = int(np.count_nonzero(self._set_array > _GONE))

    def _grow(self) -> None:
        """Double the table, or rebuild it at the same size if many entries are deleted."""
        used = self._set_array > _GONE
        keys, sets = self._key_array[used], self._set_array[used]
        size = self.mask + 1
        new = _HashTable(2 * size if 2 * len(keys) > _MAX_FILLED * size else size)
        place = keys & np.uint64(new.mask)
        while len(keys):  # of several keys for the same free entry, one is stored per pass
            free = new._set_array[place] == _EMPTY
            new._key_array[place[free]] = keys[free]
            settled = free & (new._key_array[place] == keys)
            new._set_array[place[settled]] = sets[settled]
            keys, sets = keys[~settled], sets[~settled]
            place = (place[~settled] + np.uint64(1)) & np.uint64(new.mask)
        self._key_array, self._set_array = new._key_array, new._set_array
        self.keys, self.sets, self.mask = new.keys, new.sets, new.mask
        self.num_used = self.num_filled = int(used.sum())


class PrefixStore:
    """Index of the blocks of all replicas. Keys are bytes of the engine's length; slots are small
    numbers from `new_slot`."""

    def __init__(self) -> None:
        self._parts = [_HashTable(_FIRST_SIZE) for _ in range(_NUM_PARTS)]
        self._masks = [0, 0]  # by set number: the holders
        self._uses = [0, 0]  # by set number: the blocks that have it
        self._numbers: dict[int, int] = {}  # mask → set number
        self._unused: list[int] = []  # set numbers to reuse
        self._alive = 0  # mask of slots in use
        self._dead = 0  # mask of freed slots before a sweep
        self._free_slots: list[int] = []
        self._num_slots = 0
        # First block of a chain → length that most of its holders share. A search tries it first.
        self._shared: dict[bytes, int] = {}

    # --- Slots --------------------------------------------------------------------------------------------------------

    def new_slot(self) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._alive |= 1 << slot
        return slot

    def free_slot(self, slot: int) -> None:
        """Forget the blocks of the slot's replica."""
        self._alive &= ~(1 << slot)
        self._dead |= 1 << slot
        if self._dead.bit_count() >= _MAX_DEAD:
            self.sweep()

    def sweep(self) -> None:
        """Remove dead slots from all sets, and make them reusable."""
        numbers = np.arange(len(self._masks), dtype=np.uint32)
        found: dict[int, int] = {}
        for mask, number in list(self._numbers.items()):
            left = mask & ~self._dead
            if not left:
                numbers[number] = _GONE
            else:
                numbers[number] = found.setdefault(left, number)
        for part in self._parts:
            part.renumber(numbers)
        for number in self._numbers.values():
            kept, uses = int(numbers[number]), self._uses[number]
            if kept != number:
                self._masks[number] = self._uses[number] = 0
                self._unused.append(number)
                self._uses[kept] += uses if kept > _GONE else 0
        for mask, number in found.items():
            self._masks[number] = mask
        self._numbers = found
        self._free_slots += slots_of(self._dead)
        self._dead = 0

    # --- Blocks -------------------------------------------------------------------------------------------------------

    def stored(self, slot: int, keys: Iterable[bytes]) -> None:
        bit = 1 << slot
        parts, masks = self._parts, self._masks
        for raw in keys:
            key = int.from_bytes(raw[:8], "little") or 1
            part = parts[key >> 60]
            place = part.find(key)
            if place < 0:
                part.add(key, self._use(bit))
                continue
            number = part.sets[place]
            mask = masks[number]
            if not mask & bit:
                part.sets[place] = self._use(mask | bit)
                self._leave(number)

    def removed(self, slot: int, keys: Iterable[bytes]) -> None:
        bit = 1 << slot
        for raw in keys:
            key = int.from_bytes(raw[:8], "little") or 1
            part = self._parts[key >> 60]
            place = part.find(key)
            if place < 0:
                continue
            number = part.sets[place]
            mask = self._masks[number]
            if mask & bit:
                if mask == bit:
                    part.drop(place)
                else:
                    part.sets[place] = self._use(mask ^ bit)
                self._leave(number)

    def _use(self, mask: int) -> int:
        """Returns the number of the set `mask`, and counts one more block for it."""
        number = self._numbers.get(mask)
        if number is None:
            if self._unused:
                number = self._unused.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._uses.append(0)
            self._numbers[mask] = number
        self._uses[number] += 1
        return number

    def _leave(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self._masks[number]]
            self._masks[number] = 0
            self._unused.append(number)

    # --- Looking up ---------------------------------------------------------------------------------------------------

    def holders(self, raw: bytes) -> int:
        """Mask of the slots of all replicas that hold the block."""
        key = int.from_bytes(raw[:8], "little") or 1
        part = self._parts[key >> 60]
        place = part.find(key)
        return 0 if place < 0 else self._masks[part.sets[place]] & self._alive

    def match(self, chain: Sequence[bytes]) -> list[tuple[int, int]]:
        """How many leading blocks of the chain each replica holds, as (blocks, mask of slots), the
        longest first. After `MAX_GROUPS` groups the remaining replicas count as holding one block.
        """
        found: list[tuple[int, int]] = []
        if not chain or not (left := self.holders(chain[0])):
            return found
        if whole := self.holders(chain[-1]) & left:
            found.append((len(chain), whole))
            left &= ~whole
        high, shared = len(chain) - 1, self._shared.get(chain[0], 0)
        while left:
            if len(found) == MAX_GROUPS:
                found.append((1, left))
                break
            # Binary search for the last block in [low, high) that a replica of `left` holds. `mask`
            # holds block `low`; none of `mask` holds `high`.
            low, mask, guesses = 0, left, [shared - 1, shared]
            while low < high - 1:
                middle = guesses.pop() if guesses else (low + high) // 2
                if not low < middle < high:
                    continue
                if here := self.holders(chain[middle]) & left:
                    low, mask = middle, here
                else:
                    high = middle
            found.append((low + 1, mask))
            left &= ~mask
            high = low
        if len(found) > 1 and found[-1][0] != shared:
            self._shared[chain[0]] = found[-1][0]
            if len(self._shared) > _MAX_SHARED:
                del self._shared[next(iter(self._shared))]
        return found

    def checkpoints(
        self, chain: Sequence[bytes], count: int, mask: int
    ) -> Iterator[tuple[int, int]]:
        """Yield (blocks, mask of slots): for the replicas in `mask`, which hold `count` blocks of
        the chain, the position of the last checkpoint of a recurrent state from which each can
        continue. Those without one, or with none in the last `MAX_BACK` blocks, are left out."""
        for end in range(count, max(0, count - MAX_BACK), -1):
            if not mask:
                return
            if own := self.holders(announced_state(chain[end - 1])) & mask:
                yield end, own
                mask &= ~own

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks. Until a sweep this includes blocks that only dead slots hold."""
        return sum(part.num_used for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Approximate size of the table and the sets."""
        sets = (
            sum(28 + mask.bit_length() // 7 for mask in self._masks)
            + 16 * len(self._masks)
            + 100 * len(self._numbers)
        )
        return sum(part.num_bytes for part in self._parts) + sets


def slots_of(mask: int) -> list[int]:
    """Returns the indices of the bits that are set in a mask."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def fill(values: np.ndarray, mask: int, value: float) -> None:
    """Set `values` to `value` where the mask has a bit, in the faster of two ways."""
    if mask.bit_count() < 32:
        for slot in slots_of(mask):
            values[slot] = value
    else:
        raw = np.frombuffer(mask.to_bytes((len(values) + 7) // 8, "little"), np.uint8)
        np.putmask(
            values, np.unpackbits(raw, count=len(values), bitorder="little").view(np.bool_), value
        )
