"""KV cache tiers below the device: storing, loading, and when loading pays. No torch.

    device ── store ──> host ── store ──> disk          on a GPU
    device ── store ─────────────────────> disk          on a CPU, whose cache is the host's memory
    device ── hand over ──> exchange ── load ──> another engine's device

1. A block is offered when it is cached (`offer`). It is stored after the steps that write it have
   ended. A cached block does not change while it is held, and a copy holds its block. So no block
   is written during its copy.
2. A request waits (`wants`) if a tier has further blocks of its prompt. They are loaded into blocks
   that no other request can find; each is cached when it has arrived. The load holds the blocks
   until the request is admitted, which then finds them in the cache. Under memory pressure the load
   gives them back.
3. Loading is chosen if it takes less time than computing, judged by recent measurements (`TierRates`).
   A rate that rules out loading expires, and a few blocks are then loaded to measure it again. A
   load that takes much longer than expected is abandoned.
4. A block that can't be read is a miss: the request computes it.
5. Checkpoints of other kinds of cache, such as recurrent states (`core/cache/states.py`), are
   stored and loaded as blocks are. Their keys are those of the blocks that end there, in a group of
   their own (`slot_key`). A load brings the blocks up to the last checkpoint, and the checkpoint.
   Without attention, blocks are empty: they are not stored, and any that a checkpoint needs is there.
6. An engine that computed a prompt for another one puts its blocks into its exchange (`hand_over`).
   The other engine's request says where they are (`EngineRequest.handover_from`), and they are
   loaded as from a tier. Lost ones are computed again.
7. Blocks of a pausing session are loaded before its next request, if there is room (`bring_back`).

The worker performs the copies (`BlockStore`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from slipstream.core.cache.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.cache.prefix_cache import group_key, kind_of, slot_key, usable_prefix
from slipstream.core.request import Request
from slipstream.core.tiers.block_store import BlockStore
from slipstream.core.tiers.rates import TierRates
from slipstream.messages.stats import TierStats
from slipstream.messages.tiers import BlockCopy, Place
from slipstream.spec.model import CacheGroup

if TYPE_CHECKING:
    from slipstream.core.cache.kv_cache_manager import KVCacheManager

PROBE_BLOCKS = 8
"""Number of blocks loaded to measure a rate again."""

PATIENCE = 3.0
"""Maximum wait for a load, as a multiple of the expected time to compute its tokens."""

MIN_PATIENCE_S = 0.25
"""Minimum of that limit, in seconds."""

PEER_PATIENCE_S = 2.0
"""Minimum of the limit for another engine's blocks, in seconds. It is reached if that engine hangs."""

BLIND_PATIENCE_S = 10.0
"""Maximum wait for a load, in seconds, before any prompt has been measured."""

STORE_SHARE = 8
"""Copies to the tiers may hold 1/`STORE_SHARE` of the device's blocks, and of its slots."""

SPARE_SLOTS = 2
"""Free slots of a kind that copies to the tiers leave for requests."""

ELSEWHERE = -1
"""Value instead of a device block number for a block that is in a tier."""


Found: TypeAlias = Mapping[int, Sequence[int | None]]
"""The device's blocks of a chain, by group; None for a block that is not there."""


class TierLoad:
    """Blocks that are being loaded to the device for a request, and the slots that go with them."""

    def __init__(
        self,
        request: Request | None,
        held: list[tuple[BlockPool, int]],
        now: float,
        patience_s: float,
        era: int,
    ) -> None:
        # None: it has gone or stopped waiting, or the load is for a pausing session
        self.request = request
        self.arrived: Callable[[], None] | None = None  # called when all blocks are cached
        self.others: list[Request] = []  # other requests that need blocks of this load
        # blocks that the request will find on the device, besides those being loaded
        self.held = held
        self.pending: dict[int, tuple[int, bytes]] = {}  # (block, key) by copy number
        self.sizes = Counter[Place]()  # bytes by location
        self.num_peer_tokens = 0  # tokens saved by a peer's blocks, if all arrive
        self.num_lost = 0
        self.probes = False  # the load only measures a rate; more blocks may follow
        self.is_measured = False
        self.era = era
        self.begun, self.until = now, now + patience_s

    def release(self) -> None:
        for pool, block in self.held:
            pool.release((block,))


class Tiers:
    """All tiers of one device.

    `pool` is the device's pool, `own` are the groups of layers that requests write to, and `clock`
    is the scheduler's clock. `slots` are the pools of the model's other kinds of cache, by kind.
    Ranks with requests of their own have tiers each, and share the `rates`.
    """

    def __init__(
        self,
        store: BlockStore,
        pool: BlockPool,
        own: Sequence[int],
        windows: Mapping[int, CacheGroup],
        block_size: int,
        clock: Callable[[], float],
        slots: Mapping[int, BlockPool],
        rates: TierRates,
    ) -> None:
        self._store, self._pool, self._size, self._clock = store, pool, block_size, clock
        self._own, self._windows, self._kinds = own, windows, slots
        self._pools = {0: pool, **slots}
        self._keeps = any(store.slots) or store.disk is not None
        # (blocks of the request being looked up that a peer promised, the peer's address)
        self._promised: frozenset[bytes] = frozenset()
        self._peer = ""
        self._handing: list[tuple[BlockPool, int]] = []  # held until copied to the exchange
        # a host tier, unless empty, has slots for each kind that the device has
        self._hosts = [BlockPool(count + 1) if count else None for count in store.slots]
        self.rates = rates
        self._looked = -inf  # when finished copies were looked for last
        self._number = self._era = 0  # a new era begins when everything is forgotten
        # callbacks to run when a copy ends, by copy number
        self._after: dict[int, Callable[[bool], None]] = {}
        # Bounded, in case the tiers stay slower than the device for long. Most of the oldest blocks
        # have then been reused anyway.
        # (last step that writes the block, block, key)
        self._offers: deque[tuple[int, int, bytes]] = deque(maxlen=4 * pool.num_blocks)
        self._storing: dict[bytes, int] = {}  # device blocks held by stores, by key
        self._loads: list[TierLoad] = []  # loads in progress
        self._loading: dict[bytes, TierLoad] = {}  # loads in progress, by the keys of their blocks
        # finished loads whose requests are not admitted yet
        self._arrived: dict[Request, TierLoad] = {}
        self._ready: list[Request] = []
        self._counts = dict.fromkeys(
            (
                *(
                    "stored_blocks",
                    "dropped_blocks",
                    "loaded_blocks",
                    "failed_blocks",
                    "queried_tokens",
                ),
                *("host_hit_tokens", "disk_hit_tokens", "declined_tokens", "late_loads"),
                *("prefetched_tokens", "prefetch_hit_tokens"),
                *("stored_bytes", "loaded_bytes"),
                *("handed_blocks", "handed_bytes", "peer_hit_tokens"),
            ),
            0,
        )

    @property
    def is_busy(self) -> bool:
        """True if copies are in progress or blocks are offered for storing."""
        return bool(self._after or self._offers)

    @property
    def is_copying(self) -> bool:
        return bool(self._after)

    def holds(self, block: int, kind: int = 0) -> int:
        """Number of holds of copies and loads on a device block or slot, for tests."""
        loads = [*self._loads, *self._arrived.values()]
        pool = self._pools[kind]
        held = [found for key, found in self._storing.items() if kind_of(key) == kind]
        held += [found for of, found in self._handing if of is pool]
        for load in loads:
            held += [found for of, found in load.held if of is pool]
            held += [found for found, key in load.pending.values() if kind_of(key) == kind]
        return held.count(block)

    def _device(self, key: bytes) -> BlockPool:
        """The device's pool for the contents stored under `key`: of blocks, or of slots."""
        return self._pools[kind_of(key)]

    def _slots(self, key: bytes) -> BlockPool | None:
        """The host tier's pool for `key`; None without a host tier."""
        return self._hosts[kind_of(key)]

    def _bytes(self, key: bytes) -> int:
        return self._store.sizes[kind_of(key)]

    def _chain_key(self, key: bytes) -> bytes:
        """The device pool's key for the contents that tiers store under `key`."""
        return key[:-1] if kind_of(key) else key

    # --- Storing ------------------------------------------------------------------------------------------------------

    def offer(self, block: int, key: bytes, step_id: int) -> None:
        """Offer a block cached under `key`, or a slot. The steps up to `step_id` may still write it."""
        if not self._keeps:
            return
        if key not in self._storing and self._bytes(key) and not self.has(key):
            self._counts["dropped_blocks"] += len(self._offers) == self._offers.maxlen
            self._offers.append((step_id, block, key))

    def store(self, last_ended: int, spare: int, at_once: int | None = None) -> None:
        """Start to store offered blocks that are already written, at most `at_once`.

        `spare` blocks of the device stay free.
        """
        copies: list[BlockCopy] = []
        storing = Counter(map(kind_of, self._storing))
        while self._offers and self._offers[0][0] <= last_ended and len(copies) != at_once:
            step_id, block, key = self._offers[0]
            kind = kind_of(key)
            pool, spared = self._pools[kind], SPARE_SLOTS if kind else spare
            if storing[kind] >= max(1, pool.num_usable // STORE_SHARE):
                break
            is_cached = pool.hashes[block] == self._chain_key(key)
            if is_cached and not pool.ref_counts[block] and pool.num_free <= spared:
                break  # requests need the blocks more
            self._offers.popleft()
            if key in self._storing or self.has(key):
                continue
            if not is_cached:
                self._counts["dropped_blocks"] += 1
                continue
            if (slot := self._slot(key)) is None:
                self._offers.appendleft((step_id, block, key))
                break  # all host slots are being copied
            pool.hold((block,))
            self._storing[key] = block
            storing[kind] += 1
            target: Place = "disk" if self._slots(key) is None else "host"
            copies.append(
                self._order("device", target, key, block, slot, self._stored(block, key, slot))
            )
        if copies:
            self._store.submit(copies)

    def _stored(self, block: int, key: bytes, slot: int) -> Callable[[bool], None]:
        era = self._era

        def done(ok: bool) -> None:
            self._device(key).release((block,))
            del self._storing[key]
            self._counts["stored_blocks" if ok else "dropped_blocks"] += 1
            self._counts["stored_bytes"] += ok * self._bytes(key)
            if (host := self._slots(key)) is not None and ok and era == self._era:
                host.register(slot, key)
                if (
                    self._store.disk is not None
                    and self._store.disk.is_writer
                    and not self._store.on_disk(key)
                ):
                    self._store.submit([self._order("host", "disk", key, 0, slot, written)])
                    return  # the slot stays held until the disk has the block
            self._release_slot(key, slot)

        def written(ok: bool) -> None:
            self._counts["dropped_blocks"] += not ok
            self._release_slot(key, slot)

        return done

    def _release_slot(self, key: bytes, slot: int) -> None:
        if (host := self._slots(key)) is not None:
            host.release((slot,))

    def _slot(self, key: bytes) -> int | None:
        """Allocate a host slot. None if copies hold all slots; 0 if there is no host tier."""
        if (host := self._slots(key)) is None:
            return 0
        return host.allocate(1)[0] if host.num_free else None

    # --- Handing over -------------------------------------------------------------------------------------------------

    def hand_over(self, request: Request) -> None:
        """Give the blocks of a computed prompt to the exchange, and the checkpoint at their end.

        These are what another engine's request with this prompt finds (`usable_prefix`). All steps
        that write them have ended. They are held until they are copied.
        """
        if self._store.exchange is None:
            return
        size = self._size
        keys = request.block_keys[: (request.num_prompt_tokens - 2) // size]
        found: list[tuple[BlockPool, int | None, bytes]] = []
        for g in self._own if self._store.sizes[0] else ():
            window = self._windows.get(g)
            begin = 0 if window is None else window.first_block(len(keys) * size, size)
            own = [group_key(key, g) for key in keys[begin:]]
            found += [(self._pool, self._pool.lookup(key), key) for key in own]
        if keys:
            ends = self._kinds.items()
            found += [(pool, pool.lookup(keys[-1]), slot_key(keys[-1], k)) for k, pool in ends]
        copies = []
        for pool, block, key in found:
            if block is not None:
                pool.hold((block,))
                self._handing.append((pool, block))
                done = partial(self._handed, pool, block, key)
                copies.append(self._order("device", "peer", key, block, 0, done))
        if copies:
            self._store.submit(copies)

    def _handed(self, pool: BlockPool, block: int, key: bytes, ok: bool) -> None:
        pool.release((block,))
        self._handing.remove((pool, block))
        self._counts["handed_blocks" if ok else "dropped_blocks"] += 1
        self._counts["handed_bytes"] += ok * self._bytes(key)

    def _promises(self, request: Request) -> frozenset[bytes]:
        """Keys of the blocks and the state that another engine may hand over for the request's
        prompt; empty if it named no engine."""
        if not request.spec.handover_from or self._store.exchange is None:
            return frozenset()
        keys = request.block_keys[: (request.num_prompt_tokens - 2) // self._size]
        own = [group_key(key, g) for g in self._own for key in keys]
        return frozenset([*own, *(slot_key(key, k) for k in self._kinds for key in keys[-1:])])

    # --- Loading ------------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return self._tier_of(key) is not None

    def _tier_of(self, key: bytes) -> Place | None:
        if (host := self._slots(key)) is not None and host.lookup(key) is not None:
            return "host"
        if self._store.on_disk(key):
            return "disk"
        return "peer" if key in self._promised else None

    def wants(
        self, request: Request, tables: Sequence[Sequence[int]], num_cached: int, spare: int
    ) -> bool:
        """Decide whether the request waits for blocks from a tier, and start the load.

        On the device the request finds `tables`, with `num_cached` tokens. `spare` blocks of the
        device stay free.
        """
        if request.looked_up:
            return False
        request.looked_up = True
        self._promised, self._peer = self._promises(request), request.spec.handover_from
        try:
            return self._look_up(request, tables, num_cached, spare)
        finally:
            self._promised = frozenset()

    def _look_up(
        self, request: Request, tables: Sequence[Sequence[int]], num_cached: int, spare: int
    ) -> bool:
        size, keys = self._size, request.block_keys
        self._counts["queried_tokens"] += request.num_tokens - num_cached
        found, wanted, gained = self._further(keys, request.num_tokens, num_cached)
        if not wanted:
            return False
        if (
            load := next((self._loading[key] for key in wanted if key in self._loading), None)
        ) is not None:
            load.others.append(request)
            request.looked_up = False  # the tiers may have more of its blocks
            return True
        pays = self._pays(wanted, gained)
        # A few blocks may end before any checkpoint. If they arrived within a step, more are needed to measure their rate.
        before = self._arrived.get(request)
        probes = pays is None and not self._kinds and (before is None or before.is_measured)
        if probes:
            most = num_cached // size + PROBE_BLOCKS
            wanted, gained = self._missing(keys, request.num_tokens, found, most, num_cached)
        held = [(self._pool, block) for table in tables for block in table if block != NULL_BLOCK]
        revived = sum(not pool.ref_counts[block] for pool, block in held)
        num = Counter(map(kind_of, wanted))
        if pays is False or not wanted or num[0] + revived + spare > self._pool.num_free:
            return False
        for kind, pool in self._kinds.items():
            if num[kind] >= pool.num_free:
                return False
            if not num[kind]:
                # the checkpoint at the end is on the device
                end = pool.lookup(request.block_keys[(num_cached + gained) // size - 1])
                assert end is not None
                held.append((pool, end))
        load = self._begin(request, wanted, held, gained)
        load.probes = probes
        return True

    def available_tokens(self, request: Request, num_cached: int) -> int:
        """Number of tokens of a request's prompt that the device and the tiers have together.

        `num_cached` of them are on the device. A request that was looked up computes the others.
        """
        if request.looked_up:
            return num_cached
        return num_cached + self._further(request.block_keys, request.num_tokens, num_cached)[2]

    def bring_back(
        self,
        keys: Sequence[bytes],
        has_room: Callable[[int], bool],
        arrived: Callable[[Sequence[bytes], int, int], None],
    ) -> bool:
        """Load blocks of a chain that no request waits for, if `has_room` for their number.

        Calls `arrived` with the keys of the blocks, the position of their first token and the one
        after their last, before they are released. Returns False if the caller may try again.
        """
        size, end = self._size, len(keys) * self._size + 2
        reach = self._max_prefix(keys)
        found = {
            g: [self._pool.lookup(group_key(key, g)) for key in keys[:reach]] for g in self._own
        }
        cached = usable_prefix(found, self._windows, end, size)[1] * size
        wanted, gained = self._missing(keys, end, found, reach, cached)
        if not wanted or any(key in self._loading for key in wanted):
            return True
        if self._pays(wanted, gained) is False:
            return True
        held = [block for blocks in found.values() for block in blocks if block is not None]
        self._pool.hold(held)
        if fits := has_room(len(wanted)):
            load = self._begin(None, wanted, [(self._pool, block) for block in held], gained)
            load.arrived = partial(arrived, wanted, cached, cached + gained)
        self._pool.release(held)
        return fits

    def count_used(self, num_tokens: int) -> None:
        """Count loaded tokens that the next request of their session used."""
        self._counts["prefetch_hit_tokens"] += num_tokens

    def _max_prefix(self, keys: Sequence[bytes]) -> int:
        """Upper bound on the number of prefix blocks that the device and the tiers have.

        Most prompts are in no tier. This check shows that, and must be fast because the GPU waits
        for it.
        """
        # a group that needs all blocks of a prefix
        whole = next((g for g in self._own if g not in self._windows), None)
        if whole is not None and self._store.sizes[0]:
            for i, key in enumerate(keys):
                own = group_key(key, whole)
                if self._pool.lookup(own) is None and not self.has(own):
                    return i
        return len(keys)

    def _further(
        self, keys: Sequence[bytes], num_tokens: int, num_cached: int
    ) -> tuple[Found, list[bytes], int]:
        """Look for blocks of a prompt that only the tiers have, after the `num_cached` tokens on the device.

        Returns (the device's blocks by group, keys of the blocks to load, number of tokens gained).
        """
        reach = self._max_prefix(keys)
        if reach * self._size <= num_cached:
            return {}, [], 0
        found = {
            g: [self._pool.lookup(group_key(key, g)) for key in keys[:reach]] for g in self._own
        }
        return found, *self._missing(keys, num_tokens, found, reach, num_cached)

    def _missing(
        self, chain: Sequence[bytes], num_tokens: int, found: Found, most: int, num_cached: int
    ) -> tuple[list[bytes], int]:
        """Choose the blocks and slots to load for a chain's longest prefix of at most `most` blocks.

        Returns (keys of the blocks, number of tokens gained over `num_cached`). `found` has the
        device's blocks by group.
        """
        keys = {g: [group_key(key, g) for key in chain[:most]] for g in found}
        empty = not self._store.sizes[0]
        there = {
            g: [
                f or (ELSEWHERE if empty or self.has(k) else None)
                for f, k in zip(found[g], keys[g], strict=False)
            ]
            for g in found
        }
        kinds = self._kinds.items()

        def ends(n: int) -> bool:
            """Whether there is a checkpoint of each kind after n blocks, on the device or in a tier."""
            key = chain[n - 1]
            return all(
                pool.lookup(key) is not None or self.has(slot_key(key, k)) for k, pool in kinds
            )

        begins, n = usable_prefix(
            there, self._windows, num_tokens, self._size, ends if kinds else None
        )
        gained = n * self._size - num_cached
        if gained <= 0:
            return [], 0
        wanted = [
            keys[g][i]
            for g, begin in begins.items()
            for i in range(begin, n)
            if there[g][i] == ELSEWHERE
        ]
        last = chain[n - 1]
        wanted += [slot_key(last, k) for k, pool in kinds if pool.lookup(last) is None]
        return wanted, gained

    def _pays(self, keys: Sequence[bytes], num_tokens: int) -> bool | None:
        """`TierRates.pays` for the blocks with these keys."""
        sizes = Counter[Place]()
        for key in keys:
            sizes[self._tier_of(key) or "disk"] += self._bytes(key)
        if sizes["peer"]:
            return True  # the sender of the request has decided
        found = self.rates.pays(sizes["host"], sizes["disk"], num_tokens, self._clock())
        if found is False:
            self._counts["declined_tokens"] += num_tokens
        return found

    def _begin(
        self,
        request: Request | None,
        keys: Sequence[bytes],
        held: Sequence[tuple[BlockPool, int]],
        num_tokens: int,
    ) -> TierLoad:
        """Start to load the blocks and states of these keys, which saves the request `num_tokens`
        tokens. Those in `held` stay on the device meanwhile. The device must have enough free
        blocks.
        """
        now, computing = self._clock(), self.rates.computing_s(num_tokens)
        least = PEER_PATIENCE_S if self._promised else MIN_PATIENCE_S
        patience = BLIND_PATIENCE_S if computing is None else max(least, PATIENCE * computing)
        for pool, block in held:
            pool.hold((block,))
        if request is None:  # a session's next request, which will arrive later
            patience = inf
        elif (probe := self._arrived.pop(request, None)) is not None:
            # its blocks are among the held ones
            probe.release()
        load = TierLoad(request, list(held), now, patience, self._era)
        self._loads.append(load)
        copies = []
        for key in keys:
            pool = self._device(key)
            (block,) = pool.allocate(1)
            if not self._bytes(key):  # nothing to copy
                pool.register(block, key)
                load.held.append((pool, block))
                continue
            self._loading[key] = load
            copies.append(self._bring(load, block, key))
        for copy in copies:
            load.sizes[copy.source] += self._bytes(copy.key)
        if request is None:
            self._counts["prefetched_tokens"] += num_tokens
        else:
            total = max(1, load.sizes.total())
            tokens = num_tokens * load.sizes["host"] // total
            load.num_peer_tokens = num_tokens * load.sizes["peer"] // total
            self._counts["host_hit_tokens"] += tokens
            self._counts["disk_hit_tokens"] += num_tokens - tokens - load.num_peer_tokens
        self._store.submit([copy for copy in copies if copy.source != copy.target])
        load.begun = self._clock()  # the store may have waited for a step
        if not copies:
            self._end(load)
        for copy in copies:
            if copy.source == copy.target:
                self._after.pop(copy.number)(False)
        return load

    def _bring(self, load: TierLoad, block: int, key: bytes) -> BlockCopy:
        """First copy on a block's way to the device."""

        def arrived(ok: bool) -> None:
            self._take(load, copy.number, ok)

        host = self._slots(key)
        slot = None if host is None else host.lookup(key)
        if self._tier_of(key) == "peer":
            copy = self._order("peer", "device", key, block, 0, arrived, self._peer)
        elif host is None:
            copy = self._order("disk", "device", key, block, 0, arrived)
        elif slot is not None:
            host.hold((slot,))
            copy = self._from_host(block, key, slot, arrived)
        elif (new := self._slot(key)) is None:
            # no host slot to read it into
            copy = self._order("disk", "disk", key, block, 0, arrived)
        else:
            copy = self._order("disk", "host", key, 0, new, self._read(block, key, new, arrived))
        load.pending[copy.number] = block, key
        return copy

    def _read(
        self, block: int, key: bytes, slot: int, arrived: Callable[[bool], None]
    ) -> Callable[[bool], None]:
        """Callback after a read from the disk: it copies the block from the host to the device."""
        era = self._era

        def done(ok: bool) -> None:
            if not ok:
                self._release_slot(key, slot)
                return arrived(False)
            if (host := self._slots(key)) is not None and era == self._era:
                host.register(slot, key)
            return self._store.submit([self._from_host(block, key, slot, arrived)])

        return done

    def _from_host(
        self, block: int, key: bytes, slot: int, arrived: Callable[[bool], None]
    ) -> BlockCopy:
        """Copy a held host slot to the device. The slot is released when the copy ends."""

        def done(ok: bool) -> None:
            self._release_slot(key, slot)
            arrived(ok)

        return self._order("host", "device", key, block, slot, done)

    def _take(self, load: TierLoad, number: int, ok: bool) -> None:
        """Record that one block of a load has arrived or is missing."""
        block, key = load.pending.pop(number)
        pool = self._device(key)
        self._loading.pop(key, None)
        self._counts["loaded_blocks" if ok else "failed_blocks"] += 1
        self._counts["loaded_bytes"] += ok * self._bytes(key)
        if ok and load.era == self._era:
            pool.register(block, self._chain_key(key))
            load.held.append((pool, block))
        else:
            pool.release((block,))
            load.num_lost += 1
        if not load.pending:
            self._end(load)

    def _end(self, load: TierLoad) -> None:
        now = self._clock()
        rates, sizes = self.rates, load.sizes
        rate = rates.peer if sizes["peer"] else rates.disk if sizes["disk"] else rates.host
        # A step, during which nobody checks, may take seconds that are not the copies' time. The
        # previous check is their earliest end; if they began after it, nothing is known.
        unseen = not sizes["peer"] and self.rates.last_end > max(self._looked, load.begun)
        ended = self._looked if unseen else now
        if ended > load.begun and not (sizes["peer"] and load.num_lost):
            rate.learn(sizes.total(), ended - load.begun, now)
            load.is_measured = True
        if not load.num_lost:  # a peer's promised blocks count as hits only when they arrive
            self._counts["peer_hit_tokens"] += load.num_peer_tokens
            if load.request is not None:
                load.request.num_peer_tokens = load.num_peer_tokens
        self._loads.remove(load)
        self._ready += load.others
        if load.arrived is not None:
            load.arrived()
        if load.request is not None and load.probes:
            load.request.looked_up = False
        if load.request is None:
            load.release()
        else:
            self._arrived[load.request] = load
            self._ready.append(load.request)

    # --- Between steps ------------------------------------------------------------------------------------------------

    def take(self) -> list[Request]:
        """Process finished copies. Returns the requests that no longer wait for a load."""
        if self._after:
            for number, ok in self._store.finished():
                self._after.pop(number)(ok)
            now = self._looked = self._clock()
            for load in self._loads:
                if load.until <= now:
                    late = [*load.others, *([] if load.request is None else [load.request])]
                    self._counts["late_loads"] += len(late)
                    self._ready += late
                    load.request, load.others = None, []
                    for request in late:
                        request.looked_up = True
        ready, self._ready = self._ready, []
        return ready

    def let_go(self, request: Request) -> None:
        """Release the blocks held for a request that was admitted or has gone.

        The blocks stay in the cache.
        """
        if (arrived := self._arrived.pop(request, None)) is not None:
            arrived.release()
        for load in self._loads:
            if load.request is request:
                load.request = None
            elif request in load.others:
                load.others.remove(request)

    def give_way(self) -> bool:
        """Release the blocks held for waiting requests, so that they may be evicted.

        False if there are none.
        """
        arrived, self._arrived = self._arrived, {}
        for load in arrived.values():
            load.release()
        return bool(arrived)

    def forget_offers(self) -> None:
        """Drop all offers after a failed step, because their blocks may not be written."""
        self._offers.clear()
        self.rates.forget_steps()

    def forget_all(self) -> None:
        """Forget all contents of the tiers, and all copies in progress."""
        self._era += 1
        self._offers.clear()
        for host in self._hosts:
            if host is not None:
                host.forget_all()
        self._store.clear()

    def stats(self) -> TierStats:
        """Statistics; their rates are 0, because all ranks share these (`total_stats`)."""
        store, counts = self._store, self._counts
        host_bytes = sum(
            each * sum(key is not None for key in host.hashes)
            for host, each in zip(self._hosts, store.sizes, strict=True)
            if host is not None
        )
        disk, exchange = store.disk, store.exchange
        return TierStats(
            host_bytes=host_bytes,
            disk_bytes=0 if disk is None else disk.num_bytes,
            exchange_bytes=0 if exchange is None else exchange.num_bytes,
            exchange_limit_bytes=0 if exchange is None else exchange.limit_bytes,
            expired_blocks=0 if exchange is None else exchange.num_expired + exchange.num_evicted,
            **counts,
        )

    def _order(
        self,
        source: Place,
        target: Place,
        key: bytes,
        block: int,
        slot: int,
        done: Callable[[bool], None],
        address: str = "",
    ) -> BlockCopy:
        self._number += 1
        self._after[self._number] = done
        return BlockCopy(self._number, source, target, key, block, slot, kind_of(key), address)


def make_tiers(
    kvs: Sequence[KVCacheManager], stores: Sequence[BlockStore], clock: Callable[[], float]
) -> list[Tiers]:
    """Make the tiers below the caches of all ranks, each in its own of the `stores`; none without these."""
    rates, made = TierRates(), list[Tiers]()
    for kv, store in zip(kvs, stores, strict=True) if stores else ():
        slots, windows = {kind.number: kind.pool for kind in kv.kinds}, dict(kv.windows)
        made.append(Tiers(store, kv.pool, kv.own, windows, kv.block_size, clock, slots, rates))
        kv.use_tiers(made[-1])
    return made


def total_stats(tiers: Sequence[Tiers]) -> TierStats | None:
    """Sums of all ranks' statistics, and the rates that they share; None if there are no tiers."""
    if not tiers:
        return None
    each, rates = [asdict(own.stats()) for own in tiers], tiers[0].rates
    return TierStats(
        **{name: sum(own[name] for own in each) for name in each[0]}
        | {
            "host_bytes_per_s": rates.host.per_second,
            "disk_bytes_per_s": rates.disk.per_second,
            "peer_bytes_per_s": rates.peer.per_second,
            "prefill_tokens_per_s": rates.prefill.per_second,
        }
    )
