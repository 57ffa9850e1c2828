"""Blocks of KV cache below the device: which are stored, which are loaded again, and when loading pays. No torch.

    device ── store ──> host ── store ──> disk          on a GPU
    device ── store ─────────────────────> disk          on a CPU, whose cache is the host's memory

1. A block is offered when it is cached (`offer`), and stored once the steps that write it have ended. A cached block never
   changes while it is held. A copy holds its block. So no block is written while it is copied.
2. A request whose prompt goes on in a tier waits (`wants`) while its blocks are loaded into blocks that no other request can
   find. Each is cached when it has arrived, and not before. The load holds them until the request is admitted, which then finds
   them like any others; under pressure it gives them back.
3. Loading is chosen if it takes less time than computing, by what both took lately (`Rates`). A rate that speaks against
   loading expires after a while, and a few blocks are loaded to measure it again. A load that takes much longer than expected
   is not waited for.
4. A block that can't be read is a miss: the request computes it.

The copies themselves are the worker's (`BlockStore`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slipstream.core.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.prefix_cache import group_key, usable_prefix
from slipstream.core.request import Request
from slipstream.spec.model import CacheGroup
from slipstream.stats import TierStats
from slipstream.types import BlockCopy, Place

PROBE_BLOCKS = 8
"""So many blocks are loaded to measure a rate anew."""

RATE_AGE_S = 60.0
"""A rate by which loading does not pay is forgotten after so long."""

DECAY = 0.75
"""What a measurement counts after the next one."""

PATIENCE = 3.0
"""A request waits for a load this many times as long as computing its tokens is expected to take ..."""

LEAST_PATIENCE_S = 0.25
"""... and at least so long."""

BLIND_PATIENCE_S = 10.0
"""How long it waits while no prompt has been measured."""

STORE_SHARE = 8
"""One of so many blocks of the device may be held by copies to the tiers."""


ELSEWHERE = -1
"""In the place of a block of the device: it is in a tier."""


class DiskInfo(Protocol):
    num_bytes: int
    limit_bytes: int

    @property
    def is_writer(self) -> bool:
        """Whether this engine may write."""


class BlockStore(Protocol):
    """Carries out the copies."""

    block_bytes: int
    num_slots: int  # in the host's memory; 0: there is no such tier

    @property
    def disk(self) -> DiskInfo | None:
        """None: there is no such tier."""

    def on_disk(self, key: bytes) -> bool:
        """Whether the disk seems to have it. It may be gone when it is read."""

    def submit(self, copies: Sequence[BlockCopy]) -> None:
        """Begin copies. Those from and to the device come after all steps that are launched."""

    def finished(self) -> list[tuple[int, bool]]:
        """The numbers of copies that ended since the last call, and whether they succeeded."""

    def clear(self) -> None:
        """Forget what is on the disk."""


class Rate:
    """Seconds of one unit, as it was lately."""

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
        """None: not measured."""
        return self._seconds / self._units if self._units else None

    @property
    def per_second(self) -> float:
        """0: not measured."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """What a block of each tier takes to load, and what a token of a prompt takes to compute."""

    def __init__(self) -> None:
        self.host, self.disk, self.prefill = Rate(), Rate(), Rate()
        self._in_flight: dict[int, tuple[float, int]] = {}
        self._last_end = float("-inf")

    def launched(self, step_id: int, now: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """A step of which at least half the tokens are prompts' measures the time of prompts."""
        if 2 * num_prompt_tokens >= num_tokens:
            self._in_flight[step_id] = now, num_prompt_tokens

    def ended(self, step_id: int, now: float) -> None:
        """A step takes from its launch, or the end of the step before it if that is later, to its own end."""
        if (launched := self._in_flight.pop(step_id, None)) is not None and now > (
            begin := max(launched[0], self._last_end)
        ):
            self.prefill.learn(launched[1], now - begin, now)
        self._last_end = now

    def forget_steps(self) -> None:
        self._in_flight.clear()

    def loading_s(self, num_host: int, num_disk: int) -> float | None:
        """None: a rate that it needs has not been measured."""
        host, disk = self.host.seconds if num_host else 0.0, self.disk.seconds if num_disk else 0.0
        return None if host is None or disk is None else num_host * host + num_disk * disk

    def computing_s(self, num_tokens: int) -> float | None:
        return None if self.prefill.seconds is None else num_tokens * self.prefill.seconds

    def pays(self, num_host: int, num_disk: int, num_tokens: int, now: float) -> bool | None:
        """Whether to load so many blocks rather than compute so many tokens. None: that is to be measured by a few."""
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
    """Blocks on their way to the device, for a request."""

    def __init__(
        self, request: Request, held: list[int], now: float, patience_s: float, era: int
    ) -> None:
        self.request: Request | None = request  # None: it is gone, or waits no longer
        self.others: list[Request] = []  # that want blocks of it, too
        self.held = (
            held  # blocks of the device that the request will find, beside those that arrive
        )
        self.pending: dict[int, tuple[int, bytes]] = {}  # block and key, by the order's number
        self.num_host = self.num_disk = 0
        self.probes = False  # it measures a rate, and the rest may follow
        self.era = era
        self.begun, self.until = now, now + patience_s

    @property
    def incoming(self) -> list[int]:
        """Blocks of the device that no other request can find yet."""
        return [block for block, _ in self.pending.values()]


class Tiers:
    """`pool` is the device's, `own` are the groups of layers that requests write to, `clock` is the scheduler's."""

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
        self._number = self._era = 0  # an era ends when everything is forgotten
        self._after: dict[
            int, Callable[[bool], None]
        ] = {}  # what to do when a copy is done, by the order's number
        # A bound, where the tiers are slower than the device for long; most of the oldest blocks have been used again then.
        self._offers: deque[tuple[int, int, bytes]] = deque(
            maxlen=4 * pool.num_blocks
        )  # (last step that writes, block, key)
        self._storing: dict[bytes, int] = {}  # blocks of the device that stores hold, by key
        self._loads: list[TierLoad] = []  # that are on their way
        self._loading: dict[bytes, TierLoad] = {}  # by key
        self._arrived: dict[Request, TierLoad] = {}  # that wait to be admitted
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
            ),
            0,
        )

    @property
    def is_busy(self) -> bool:
        """Copies are under way, or blocks wait to be stored."""
        return bool(self._after or self._offers)

    @property
    def is_copying(self) -> bool:
        return bool(self._after)

    def holds(self, block: int) -> int:
        """How many times copies and loads hold a block of the device, for tests."""
        loads = [*self._loads, *self._arrived.values()]
        held = [
            *self._storing.values(),
            *(b for load in loads for b in (*load.held, *load.incoming)),
        ]
        return held.count(block)

    # --- Storing ------------------------------------------------------------------------------------------------------

    def offer(self, block: int, key: bytes, step_id: int) -> None:
        """The block is cached under `key`; the steps up to `step_id` may still write it."""
        if key not in self._storing and not self.has(key):
            self._counts["dropped_blocks"] += len(self._offers) == self._offers.maxlen
            self._offers.append((step_id, block, key))

    def store(self, last_ended: int, spare: int, at_once: int | None = None) -> None:
        """Begin to store what is written by now, `at_once` blocks at most. `spare` blocks of the device stay free."""
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
                break  # all of the host's memory is being copied
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
                    return  # the slot stays until the disk has it
            self._release_slot(slot)

        def written(ok: bool) -> None:
            self._counts["dropped_blocks"] += not ok
            self._release_slot(slot)

        return done

    def _release_slot(self, slot: int) -> None:
        if self._host is not None:
            self._host.release((slot,))

    def _slot(self) -> int | None:
        """Room in the host's memory, held; None: all of it is being copied. 0: there is no such tier."""
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
        """Whether the request is to wait for blocks. On the device it finds `tables`, with `num_cached` tokens. `spare` blocks
        of the device stay free."""
        if request.looked_up:
            return False
        request.looked_up = True
        size, reach = self._size, self._reach(request)
        self._counts["queried_tokens"] += request.num_tokens - num_cached
        if reach * size <= num_cached:
            return False
        found = {
            g: [self._pool.lookup(key) for key in self._keys_of(request, g)[:reach]]
            for g in self._own
        }
        wanted, gained = self._missing(request, found, reach, num_cached)
        if not wanted:
            return False
        if (
            load := next((self._loading[key] for key in wanted if key in self._loading), None)
        ) is not None:
            load.others.append(request)
            request.looked_up = False  # there may be more
            return True
        pays = self._pays(wanted, gained)
        if pays is None:
            wanted, gained = self._missing(
                request, found, num_cached // size + PROBE_BLOCKS, num_cached
            )
        held = [block for table in tables for block in table if block != NULL_BLOCK]
        revived = sum(not self._pool.ref_counts[block] for block in held)
        if pays is False or not wanted or len(wanted) + revived + spare > self._pool.num_free:
            return False
        self._begin(request, wanted, held, gained).probes = pays is None
        return True

    def _reach(self, request: Request) -> int:
        """No prefix of more blocks is there. Most prompts are nowhere: to see it takes one look, since the GPU waits for it."""
        whole = next(
            (g for g in self._own if g not in self._windows), None
        )  # of which all blocks of a prefix are needed
        if whole is not None:
            for i, key in enumerate(request.block_keys):
                own = group_key(key, whole)
                if self._pool.lookup(own) is None and not self.has(own):
                    return i
        return len(request.block_keys)

    def _missing(
        self,
        request: Request,
        found: Mapping[int, Sequence[int | None]],
        most: int,
        num_cached: int,
    ) -> tuple[list[bytes], int]:
        """The keys of blocks to load for a prefix of at most `most` blocks, and how many tokens more it has. `found`: the
        device's blocks, by group."""
        keys = {g: self._keys_of(request, g)[:most] for g in found}
        there = {
            g: [
                f or (ELSEWHERE if self.has(k) else None)
                for f, k in zip(found[g], keys[g], strict=False)
            ]
            for g in found
        }
        begins, n = usable_prefix(there, self._windows, request.num_tokens, self._size)
        gained = n * self._size - num_cached
        if gained <= 0:
            return [], 0
        return [
            keys[g][i]
            for g, begin in begins.items()
            for i in range(begin, n)
            if there[g][i] == ELSEWHERE
        ], gained

    def _keys_of(self, request: Request, group: int) -> list[bytes]:
        return [group_key(key, group) for key in request.block_keys]

    def _pays(self, keys: Sequence[bytes], num_tokens: int) -> bool | None:
        """`Rates.pays`, of the blocks with these keys."""
        num_host = sum(self._tier_of(key) == "host" for key in keys)
        found = self.rates.pays(num_host, len(keys) - num_host, num_tokens, self._clock())
        if found is False:
            self._counts["declined_tokens"] += num_tokens
        return found

    def _begin(
        self, request: Request, keys: Sequence[bytes], held: Sequence[int], num_tokens: int
    ) -> TierLoad:
        """Load the blocks with these keys for the request, which saves it `num_tokens`. The `held` ones on the device stay
        there meanwhile. The device has room."""
        now, computing = self._clock(), self.rates.computing_s(num_tokens)
        patience = (
            BLIND_PATIENCE_S if computing is None else max(LEAST_PATIENCE_S, PATIENCE * computing)
        )
        self._pool.hold(held)
        if (
            probe := self._arrived.pop(request, None)
        ) is not None:  # whose blocks are among the held ones
            self._pool.release(probe.held)
        load = TierLoad(request, list(held), now, patience, self._era)
        self._loads.append(load)
        copies = []
        for block, key in zip(self._pool.allocate(len(keys)), keys, strict=True):
            self._loading[key] = load
            copies.append(self._bring(load, block, key))
        load.num_host = sum(copy.source == "host" for copy in copies)
        load.num_disk = len(copies) - load.num_host
        tokens = num_tokens * load.num_host // len(copies)
        self._counts["host_hit_tokens"] += tokens
        self._counts["disk_hit_tokens"] += num_tokens - tokens
        self._store.submit([copy for copy in copies if copy.source != copy.target])
        for copy in copies:
            if copy.source == copy.target:
                self._after.pop(copy.number)(False)
        return load

    def _bring(self, load: TierLoad, block: int, key: bytes) -> BlockCopy:
        """The first copy of a block's way to the device."""

        def arrived(ok: bool) -> None:
            self._take(load, copy.number, ok)

        slot = None if self._host is None else self._host.lookup(key)
        if self._host is None:
            copy = self._order("disk", "device", key, block, 0, arrived)
        elif slot is not None:
            self._host.hold((slot,))
            copy = self._from_host(block, key, slot, arrived)
        elif (new := self._slot()) is None:
            copy = self._order("disk", "disk", key, block, 0, arrived)  # no room to read it into
        else:
            copy = self._order("disk", "host", key, 0, new, self._read(block, key, new, arrived))
        load.pending[copy.number] = block, key
        return copy

    def _read(
        self, block: int, key: bytes, slot: int, arrived: Callable[[bool], None]
    ) -> Callable[[bool], None]:
        """The second part of a load from the disk: from the host to the device."""
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
        """The copy to the device of a slot that is held, and then released."""

        def done(ok: bool) -> None:
            self._release_slot(slot)
            arrived(ok)

        return self._order("host", "device", key, block, slot, done)

    def _take(self, load: TierLoad, number: int, ok: bool) -> None:
        """One of a load's blocks has arrived, or is missing."""
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
        if load.request is not None and load.probes:
            load.request.looked_up = False
        if load.request is None:
            self._pool.release(load.held)
        else:
            self._arrived[load.request] = load
            self._ready.append(load.request)

    # --- Between steps ------------------------------------------------------------------------------------------------

    def take(self) -> list[Request]:
        """Note what is done. Returns requests that wait no longer for a load."""
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
        """The request is admitted, or gone. What was held for it is the cache's."""
        if (arrived := self._arrived.pop(request, None)) is not None:
            self._pool.release(arrived.held)
        for load in self._loads:
            if load.request is request:
                load.request = None
            elif request in load.others:
                load.others.remove(request)

    def give_way(self) -> bool:
        """Give back the blocks that requests wait with; they may find them or not. False: there are none."""
        arrived, self._arrived = self._arrived, {}
        for load in arrived.values():
            self._pool.release(load.held)
        return bool(arrived)

    def forget_offers(self) -> None:
        """A step failed: what it was to write may not be there."""
        self._offers.clear()
        self.rates.forget_steps()

    def forget_all(self) -> None:
        """Nothing that the tiers hold is found again, nor what is on its way."""
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
