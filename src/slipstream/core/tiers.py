"""KV cache tiers below the device: what is stored, what is loaded, when loading pays. No torch.

    device ── store ──> host ── store ──> disk          on a GPU
    device ── store ─────────────────────> disk          on a CPU, whose cache is the host's memory

1. A block is offered when it is cached (`offer`). It is stored after the steps that write it have
   ended. A cached block does not change while it is held, and a copy holds its block. So no block
   is written during its copy.
2. A request waits (`wants`) if a tier has further blocks of its prompt. They are loaded into blocks
   that no other request can find, and each is cached when it has arrived. The load holds the blocks
   until the request is admitted, which then finds them in the cache. Under memory pressure the load
   gives them back.
3. Loading is chosen if it takes less time than computing, judged by recent measurements (`Rates`).
   A rate that rules out loading expires, and a few blocks are then loaded to measure it again. A
   load that takes much longer than expected is abandoned.
4. A block that can't be read is a miss: the request computes it.
5. Blocks of a session that pauses come back before its next request, if there is room (`bring_back`).

The worker carries out the copies (`BlockStore`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Protocol

from slipstream.core.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.prefix_cache import group_key, usable_prefix
from slipstream.core.request import Request
from slipstream.spec.model import CacheGroup
from slipstream.stats import TierStats
from slipstream.types import BlockCopy, Place

PROBE_BLOCKS = 8
"""Number of blocks loaded to measure a rate again."""

RATE_AGE_S = 60.0
"""Age in seconds at which a rate that rules out loading is forgotten."""

DECAY = 0.75
"""Factor by which each new measurement reduces the weight of the older ones."""

PATIENCE = 3.0
"""Longest wait for a load, as a multiple of the expected time to compute its tokens."""

MIN_PATIENCE_S = 0.25
"""Shortest limit of the wait for a load, in seconds."""

BLIND_PATIENCE_S = 10.0
"""Longest wait for a load, in seconds, while no prompt has been measured."""

STORE_SHARE = 8
"""Copies to the tiers may hold 1/`STORE_SHARE` of the device's blocks."""


ELSEWHERE = -1
"""Stands for a block that is in a tier, instead of a block number of the device."""


class DiskInfo(Protocol):
    num_bytes: int
    limit_bytes: int

    @property
    def is_writer(self) -> bool:
        """True if this engine may write to the disk tier."""


class BlockStore(Protocol):
    """The worker's side of the tiers: it carries out copies."""

    block_bytes: int
    num_slots: int  # slots in host memory; 0 if there is no host tier

    @property
    def disk(self) -> DiskInfo | None:
        """The disk tier; None if there is none."""

    def on_disk(self, key: bytes) -> bool:
        """True if the disk probably has the block. The block may be gone when it is read."""

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        """Start copies. A copy from or to the device runs after all steps launched so far."""

    def finished(self) -> list[tuple[int, bool]]:
        """Copies that ended since the last call, as (number, success)."""

    def clear(self) -> None:
        """Delete the contents of the disk tier."""


class Rate:
    """Seconds per unit, averaged over recent measurements."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self.measured_at = 0.0

    def learn(self, units: int, seconds: float, now: float) -> None:
        self._seconds = self._seconds * DECAY + seconds
        self._units = self._units * DECAY + units
        self.measured_at = now

    def forget(self) -> None:
        self._seconds = self._units = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds per unit; None if not measured."""
        return self._seconds / self._units if self._units else None

    @property
    def per_second(self) -> float:
        """Units per second; 0 if not measured."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """Time to load a block from each tier, and time to compute a prompt token."""

    def __init__(self) -> None:
        self.host, self.disk, self.prefill = Rate(), Rate(), Rate()
        self._in_flight: dict[int, tuple[float, int]] = {}
        self._last_end = float("-inf")

    def launched(self, step_id: int, now: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """Note a step's launch. It measures prompts if at least half of its tokens are theirs."""
        if 2 * num_prompt_tokens >= num_tokens:
            self._in_flight[step_id] = now, num_prompt_tokens

    def ended(self, step_id: int, now: float) -> None:
        """Record the time of a step that was launched.

        The time runs from the step's launch, or from the end of the previous step if that is later,
        to the end of the step.
        """
        if (launched := self._in_flight.pop(step_id, None)) is not None and now > (
            begin := max(launched[0], self._last_end)
        ):
            self.prefill.learn(launched[1], now - begin, now)
        self._last_end = now

    def forget_steps(self) -> None:
        self._in_flight.clear()

    def loading_s(self, num_host: int, num_disk: int) -> float | None:
        """Seconds to load the blocks; None if a rate it needs is not measured."""
        host, disk = self.host.seconds if num_host else 0.0, self.disk.seconds if num_disk else 0.0
        return None if host is None or disk is None else num_host * host + num_disk * disk

    def computing_s(self, num_tokens: int) -> float | None:
        return None if self.prefill.seconds is None else num_tokens * self.prefill.seconds

    def pays(self, num_host: int, num_disk: int, num_tokens: int, now: float) -> bool | None:
        """Decide whether to load the blocks rather than compute `num_tokens` tokens.

        None means that a few blocks should be loaded as a measurement.
        """
        loading, computing = self.loading_s(num_host, num_disk), self.computing_s(num_tokens)
        if computing is None:
            return True
        if loading is None:
            return None
        if loading <= computing:
            return True
        old = [
            r
            for r, n in ((self.host, num_host), (self.disk, num_disk))
            if n and now - r.measured_at > RATE_AGE_S
        ]
        for rate in old:
            rate.forget()
        return None if old else False


class TierLoad:
    """Blocks that are being loaded to the device for a request."""

    def __init__(
        self, request: Request | None, held: list[int], now: float, patience_s: float, era: int
    ) -> None:
        self.request = request  # None: it is gone or waits no longer, or its session pauses
        self.arrived: Callable[[], None] | None = None  # called when all blocks are cached
        self.others: list[Request] = []  # other requests that want blocks of this load
        # device blocks that the request will find, in addition to those being loaded
        self.held = held
        self.pending: dict[int, tuple[int, bytes]] = {}  # (block, key) by copy number
        self.num_host = self.num_disk = 0
        self.probes = False  # the load measures a rate; more blocks may follow
        self.era = era
        self.begun, self.until = now, now + patience_s

    @property
    def incoming(self) -> list[int]:
        """Device blocks that no other request can find yet."""
        return [block for block, _ in self.pending.values()]


class Tiers:
    """All tiers of one device.

    `pool` is the device's pool, `own` are the groups of layers that requests write to, and `clock`
    is the scheduler's clock.
    """

    def __init__(
        self,
        store: BlockStore,
        pool: BlockPool,
        own: Sequence[int],
        windows: Mapping[int, CacheGroup],
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._pool, self._size, self._clock = store, pool, block_size, clock
        self._own, self._windows = own, windows
        self._host = BlockPool(store.num_slots + 1) if store.num_slots else None
        self.rates = Rates()
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

    def holds(self, block: int) -> int:
        """Number of times that copies and loads hold a block of the device, for tests."""
        loads = [*self._loads, *self._arrived.values()]
        held = [
            *self._storing.values(),
            *(b for load in loads for b in (*load.held, *load.incoming)),
        ]
        return held.count(block)

    # --- Storing ------------------------------------------------------------------------------------------------------

    def offer(self, block: int, key: bytes, step_id: int) -> None:
        """Offer a block cached under `key`. The steps up to `step_id` may still write it."""
        if key not in self._storing and not self.has(key):
            self._counts["dropped_blocks"] += len(self._offers) == self._offers.maxlen
            self._offers.append((step_id, block, key))

    def store(self, last_ended: int, spare: int, at_once: int | None = None) -> None:
        """Start to store offered blocks that are already written, at most `at_once`.

        `spare` blocks of the device stay free.
        """
        most, copies = max(1, self._pool.num_usable // STORE_SHARE), list[BlockCopy]()
        while (
            self._offers
            and self._offers[0][0] <= last_ended
            and len(self._storing) < most
            and len(copies) != at_once
        ):
            step_id, block, key = self._offers[0]
            if (
                self._pool.hashes[block] == key
                and not self._pool.ref_counts[block]
                and self._pool.num_free <= spare
            ):
                break  # requests need the blocks more
            self._offers.popleft()
            if key in self._storing or self.has(key):
                continue
            if self._pool.hashes[block] != key:
                self._counts["dropped_blocks"] += 1
                continue
            if (slot := self._slot()) is None:
                self._offers.appendleft((step_id, block, key))
                break  # all host slots are being copied
            self._pool.hold((block,))
            self._storing[key] = block
            target: Place = "disk" if self._host is None else "host"
            copies.append(
                self._order("device", target, key, block, slot, self._stored(block, key, slot))
            )
        if copies:
            self._store.submit(copies)

    def _stored(self, block: int, key: bytes, slot: int) -> Callable[[bool], None]:
        era = self._era

        def done(ok: bool) -> None:
            self._pool.release((block,))
            del self._storing[key]
            self._counts["stored_blocks" if ok else "dropped_blocks"] += 1
            if self._host is not None and ok and era == self._era:
                self._host.register(slot, key)
                if (
                    self._store.disk is not None
                    and self._store.disk.is_writer
                    and not self._store.on_disk(key)
                ):
                    self._store.submit([self._order("host", "disk", key, 0, slot, written)])
                    return  # the slot stays held until the disk has the block
            self._release_slot(slot)

        def written(ok: bool) -> None:
            self._counts["dropped_blocks"] += not ok
            self._release_slot(slot)

        return done

    def _release_slot(self, slot: int) -> None:
        if self._host is not None:
            self._host.release((slot,))

    def _slot(self) -> int | None:
        """Allocate a host slot. None if copies hold all slots; 0 if there is no host tier."""
        if self._host is None:
            return 0
        return self._host.allocate(1)[0] if self._host.num_free else None

    # --- Loading ------------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return self._tier_of(key) is not None

    def _tier_of(self, key: bytes) -> Place | None:
        if self._host is not None and self._host.lookup(key) is not None:
            return "host"
        return "disk" if self._store.on_disk(key) else None

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
        size, keys = self._size, request.block_keys
        reach = self._reach(keys)
        self._counts["queried_tokens"] += request.num_tokens - num_cached
        if reach * size <= num_cached:
            return False
        found = {
            g: [self._pool.lookup(group_key(key, g)) for key in keys[:reach]] for g in self._own
        }
        wanted, gained = self._missing(keys, request.num_tokens, found, reach, num_cached)
        if not wanted:
            return False
        if (
            load := next((self._loading[key] for key in wanted if key in self._loading), None)
        ) is not None:
            load.others.append(request)
            request.looked_up = False  # the tiers may have more of its blocks
            return True
        pays = self._pays(wanted, gained)
        if pays is None:
            most = num_cached // size + PROBE_BLOCKS
            wanted, gained = self._missing(keys, request.num_tokens, found, most, num_cached)
        held = [block for table in tables for block in table if block != NULL_BLOCK]
        revived = sum(not self._pool.ref_counts[block] for block in held)
        if pays is False or not wanted or len(wanted) + revived + spare > self._pool.num_free:
            return False
        self._begin(request, wanted, held, gained).probes = pays is None
        return True

    def bring_back(
        self,
        keys: Sequence[bytes],
        has_room: Callable[[int], bool],
        arrived: Callable[[Sequence[bytes], int, int], None],
    ) -> bool:
        """Load blocks of a chain that no request waits for, if `has_room` for so many.

        Calls `arrived` with the keys of the blocks, and the tokens from and to which they are, before they are let go. Returns
        False if it may be tried again.
        """
        size, end = self._size, len(keys) * self._size + 2
        reach = self._reach(keys)
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
            load = self._begin(None, wanted, held, gained)
            load.arrived = partial(arrived, wanted, cached, cached + gained)
        self._pool.release(held)
        return fits

    def count_used(self, num_tokens: int) -> None:
        """Count tokens that were brought back, and were found by the next request of their session."""
        self._counts["prefetch_hit_tokens"] += num_tokens

    def _reach(self, keys: Sequence[bytes]) -> int:
        """Upper bound on the number of prefix blocks that the device and the tiers have.

        Most prompts are in no tier. One look shows that, and it must be fast because the GPU waits
        for it.
        """
        # a group that needs all blocks of a prefix
        whole = next((g for g in self._own if g not in self._windows), None)
        if whole is not None:
            for i, key in enumerate(keys):
                own = group_key(key, whole)
                if self._pool.lookup(own) is None and not self.has(own):
                    return i
        return len(keys)

    def _missing(
        self,
        chain: Sequence[bytes],
        num_tokens: int,
        found: Mapping[int, Sequence[int | None]],
        most: int,
        num_cached: int,
    ) -> tuple[list[bytes], int]:
        """Choose the blocks of a chain to load for the longest prefix of at most `most` blocks.

        Returns (keys of the blocks, number of tokens gained over `num_cached`). `found` has the
        device's blocks by group.
        """
        keys = {g: [group_key(key, g) for key in chain[:most]] for g in found}
        there = {
            g: [
                f or (ELSEWHERE if self.has(k) else None)
                for f, k in zip(found[g], keys[g], strict=False)
            ]
            for g in found
        }
        begins, n = usable_prefix(there, self._windows, num_tokens, self._size)
        gained = n * self._size - num_cached
        if gained <= 0:
            return [], 0
        return [
            keys[g][i]
            for g, begin in begins.items()
            for i in range(begin, n)
            if there[g][i] == ELSEWHERE
        ], gained

    def _pays(self, keys: Sequence[bytes], num_tokens: int) -> bool | None:
        """`Rates.pays` for the blocks with these keys."""
        num_host = sum(self._tier_of(key) == "host" for key in keys)
        found = self.rates.pays(num_host, len(keys) - num_host, num_tokens, self._clock())
        if found is False:
            self._counts["declined_tokens"] += num_tokens
        return found

    def _begin(
        self, request: Request | None, keys: Sequence[bytes], held: Sequence[int], num_tokens: int
    ) -> TierLoad:
        """Start to load the blocks with these keys, which saves the request `num_tokens` tokens. None: it is to come.

        The `held` blocks stay on the device meanwhile. The device must have enough free blocks.
        """
        now, computing = self._clock(), self.rates.computing_s(num_tokens)
        patience = (
            BLIND_PATIENCE_S if computing is None else max(MIN_PATIENCE_S, PATIENCE * computing)
        )
        self._pool.hold(held)
        if request is None:
            patience = inf
        elif (probe := self._arrived.pop(request, None)) is not None:
            # its blocks are among the held ones
            self._pool.release(probe.held)
        load = TierLoad(request, list(held), now, patience, self._era)
        self._loads.append(load)
        copies = []
        for block, key in zip(self._pool.allocate(len(keys)), keys, strict=True):
            self._loading[key] = load
            copies.append(self._bring(load, block, key))
        load.num_host = sum(copy.source == "host" for copy in copies)
        load.num_disk = len(copies) - load.num_host
        if request is None:
            self._counts["prefetched_tokens"] += num_tokens
        else:
            tokens = num_tokens * load.num_host // len(copies)
            self._counts["host_hit_tokens"] += tokens
            self._counts["disk_hit_tokens"] += num_tokens - tokens
        self._store.submit([copy for copy in copies if copy.source != copy.target])
        for copy in copies:
            if copy.source == copy.target:
                self._after.pop(copy.number)(False)
        return load

    def _bring(self, load: TierLoad, block: int, key: bytes) -> BlockCopy:
        """Make the first copy on a block's way to the device."""

        def arrived(ok: bool) -> None:
            self._take(load, copy.number, ok)

        slot = None if self._host is None else self._host.lookup(key)
        if self._host is None:
            copy = self._order("disk", "device", key, block, 0, arrived)
        elif slot is not None:
            self._host.hold((slot,))
            copy = self._from_host(block, key, slot, arrived)
        elif (new := self._slot()) is None:
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
                self._release_slot(slot)
                return arrived(False)
            if self._host is not None and era == self._era:
                self._host.register(slot, key)
            return self._store.submit([self._from_host(block, key, slot, arrived)])

        return done

    def _from_host(
        self, block: int, key: bytes, slot: int, arrived: Callable[[bool], None]
    ) -> BlockCopy:
        """Copy a held host slot to the device. The slot is released when the copy ends."""

        def done(ok: bool) -> None:
            self._release_slot(slot)
            arrived(ok)

        return self._order("host", "device", key, block, slot, done)

    def _take(self, load: TierLoad, number: int, ok: bool) -> None:
        """Record that one block of a load has arrived or is missing."""
        block, key = load.pending.pop(number)
        self._loading.pop(key, None)
        self._counts["loaded_blocks" if ok else "failed_blocks"] += 1
        if ok and load.era == self._era:
            self._pool.register(block, key)
            load.held.append(block)
        else:
            self._pool.release((block,))
        if not load.pending:
            self._end(load)

    def _end(self, load: TierLoad) -> None:
        now = self._clock()
        rate = self.rates.disk if load.num_disk else self.rates.host
        if now > load.begun:
            rate.learn(load.num_host + load.num_disk, now - load.begun, now)
        self._loads.remove(load)
        self._ready += load.others
        if load.arrived is not None:
            load.arrived()
        if load.request is not None and load.probes:
            load.request.looked_up = False
        if load.request is None:
            self._pool.release(load.held)
        else:
            self._arrived[load.request] = load
            self._ready.append(load.request)

    # --- Between steps ------------------------------------------------------------------------------------------------

    def take(self) -> list[Request]:
        """Process finished copies. Returns the requests that no longer wait for a load."""
        if self._after:
            for number, ok in self._store.finished():
                self._after.pop(number)(ok)
            now = self._clock()
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
        """Release what is held for a request that is admitted or gone.

        The blocks stay in the cache.
        """
        if (arrived := self._arrived.pop(request, None)) is not None:
            self._pool.release(arrived.held)
        for load in self._loads:
            if load.request is request:
                load.request = None
            elif request in load.others:
                load.others.remove(request)

    def give_way(self) -> bool:
        """Give back the blocks held for waiting requests, which may then be evicted.

        False if there are none.
        """
        arrived, self._arrived = self._arrived, {}
        for load in arrived.values():
            self._pool.release(load.held)
        return bool(arrived)

    def forget_offers(self) -> None:
        """Drop all offers after a failed step, because their blocks may not be written."""
        self._offers.clear()
        self.rates.forget_steps()

    def forget_all(self) -> None:
        """Forget everything in the tiers and everything on its way."""
        self._era += 1
        self._offers.clear()
        if self._host is not None:
            self._host.forget_all()
        self._store.clear()

    def stats(self) -> TierStats:
        store, counts, rates = self._store, self._counts, self.rates
        host_blocks = 0 if self._host is None else sum(key is not None for key in self._host.hashes)
        disk = store.disk
        return TierStats(
            host_bytes=host_blocks * store.block_bytes,
            host_limit_bytes=store.num_slots * store.block_bytes,
            disk_bytes=0 if disk is None else disk.num_bytes,
            disk_limit_bytes=0 if disk is None else disk.limit_bytes,
            disk_is_written=disk is not None and disk.is_writer,
            stored_bytes=counts["stored_blocks"] * store.block_bytes,
            loaded_bytes=counts["loaded_blocks"] * store.block_bytes,
            host_bytes_per_s=rates.host.per_second * store.block_bytes,
            disk_bytes_per_s=rates.disk.per_second * store.block_bytes,
            prefill_tokens_per_s=rates.prefill.per_second,
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
    ) -> BlockCopy:
        self._number += 1
        self._after[self._number] = done
        return BlockCopy(self._number, source, target, key, block, slot)
