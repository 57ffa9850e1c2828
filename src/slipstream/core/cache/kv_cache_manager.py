"""Blocks held by requests: block tables, shared prefixes, and the tiers below the device.

A request has a block table per group of layers (`CacheGroup`). All groups take blocks from one pool.

1. In a `window` group, blocks that no later token attends to are released when the request next
   needs blocks.
2. A `cross` group's blocks (an encoder's keys and values) are held as long as the request's own.
3. A prompt's block is offered to the prefix cache when it is scheduled, so requests of one step can
   share it. This is safe because the worker writes a layer's keys and values before any attention
   reads them.
4. A request writes only to a block that it alone holds and that is not cached. Any other block is
   copied first. Only two kinds of requests need copies: beams, and choices that share a prompt and
   join after the step that computed it. Copies run before the next step. Until that step is
   planned, `copies` lists them, and each copy holds its source. So no source is also a target.

`core/cache/shared_blocks.py` has the operations for requests that share a prompt's blocks. Ranks
that compute different requests have a manager each (`Request.kv`); these share `sessions` alone.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from slipstream.config import CacheConfig
from slipstream.core.cache.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.cache.cache_value import ValueOrder
from slipstream.core.cache.kinds import make_kinds
from slipstream.core.cache.prefix_cache import (
    extend_keys,
    group_key,
    longest_hit,
    root_key,
    salted,
    slot_key,
)
from slipstream.core.cache.sessions import Session, Sessions
from slipstream.core.cache.slots import Slots
from slipstream.core.request import Request, Status
from slipstream.core.step import StepBuilder
from slipstream.core.tiers.tiers import Tiers
from slipstream.messages.steps import StateMark, TableUpdate


class KVCacheManager:
    """Manages the blocks of one rank.

    `num_blocks` is the size of the pool, null block included. `salt` keeps prefixes of different
    models apart. `rank` is the rank whose cache this is. With `sessions`, which all ranks share,
    cached blocks are evicted by value.
    """

    def __init__(
        self,
        cache: CacheConfig,
        num_blocks: int,
        salt: str,
        rank: int = 0,
        max_drafts: int = 0,
        sessions: Sessions | None = None,
    ) -> None:
        self.cache = cache
        self.rank = rank
        self.num_running = 0  # running requests with blocks here
        self.pool = BlockPool(num_blocks)
        self.block_size = cache.block_size
        self.own = tuple(g for g, group in enumerate(cache.groups) if group.kind != "cross")
        """Groups in which the request's own tokens are cached."""
        self.windows = tuple(
            (g, group) for g, group in enumerate(cache.groups) if group.kind == "window"
        )
        self.full = next((g for g, group in enumerate(cache.groups) if group.kind == "full"), None)
        self.cross = next(
            (g for g, group in enumerate(cache.groups) if group.kind == "cross"), None
        )
        self.sessions = sessions
        self.order: ValueOrder | None = None
        if sessions is not None:
            self.pool.order = self.order = ValueOrder(sessions, self.pool, cache.block_size)
        self.kinds = make_kinds(cache, max_drafts, sessions)
        self.copies: dict[int, int] = {}  # pending copies: target block to source block
        self._copied = Counter[int]()  # number of pending copies of each source block
        self.tiers: Tiers | None = None
        self.stored: Callable[[Request, Sequence[int]], None] | None = None
        """Callback with a request and the indices of its blocks that were newly cached."""
        self._last_step = 0
        self._model = self._salt = salt
        self._root_key = root_key(salt, "")  # for requests without a salt and an adapter

    def use_tiers(self, tiers: Tiers) -> None:
        """Puts tiers below this cache. Sessions keep the keys of their blocks then, for `returning`."""
        self.tiers = tiers
        if self.sessions is not None and not self.kinds:  # slots come back from no tier
            self.sessions.keeps_keys = True

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Number of blocks that this number of tokens needs, in all groups."""
        return self.blocks_for(num_tokens) * len(self.own)

    # --- Blocks to write ----------------------------------------------------------------------------------------------

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether `allocate` would change nothing."""
        if request.needs_copy or self.windows:
            return False
        if self.kinds and not self._may_write(request):
            return False
        return num_tokens <= len(request.blocks[self.own[0]]) * self.block_size

    def allocate(self, step: StepBuilder, request: Request, num_tokens: int) -> bool:
        """Prepare the blocks that a request writes next, in every group.

        1. Release the blocks that no later token attends to.
        2. Copy the block that is written next, if it is shared.
        3. Append blocks up to `num_tokens` tokens.

        Returns False and changes nothing if too few blocks are free, or no slot.
        """
        pool, size, tables = self.pool, self.block_size, request.blocks
        if self.holds(request, num_tokens):
            return True
        if self.kinds and not self._may_write(request):
            return False
        computed, length = request.num_computed_tokens, len(tables[self.own[0]])
        need = max(0, self.blocks_for(num_tokens) - length)
        first = computed // size  # index of the block that is written next
        copies = []
        if request.needs_copy and first < length:
            copies = [g for g in self.own if not self._is_writable(tables[g][first])]
        passed = [(g, group.first_block(computed, size)) for g, group in self.windows]
        passed = [(g, keep) for g, keep in passed if keep > request.num_passed[g]]
        freed = sum(
            pool.ref_counts[b] == 1
            for g, keep in passed
            for b in tables[g][request.num_passed[g] : keep]
        )
        if need * len(self.own) + len(copies) > pool.num_free + freed:
            return False
        updates: list[TableUpdate] = []
        for g, keep in passed:
            begin = request.num_passed[g]
            if self.order is not None:
                for block in tables[g][begin:keep]:
                    if pool.hashes[block] is not None:
                        request.passed = self.order.aside(block, request.passed, computed)
            pool.release(tables[g][begin:keep])
            tables[g][begin:keep] = [NULL_BLOCK] * (keep - begin)
            request.num_passed[g] = keep
            updates.append(TableUpdate(g, begin, (NULL_BLOCK,) * (keep - begin)))
        for g in copies:
            old, (new,) = tables[g][first], pool.allocate(1)
            self.copy_block(old, new)
            pool.release([old])
            tables[g][first] = new
            updates.append(TableUpdate(g, first, (new,)))
        request.needs_copy = False
        if need:
            for g in self.own:
                blocks = pool.allocate(need)
                tables[g] += blocks
                updates.append(TableUpdate(g, length, tuple(blocks)))
        if updates and request.in_worker:
            step.updates.setdefault(request.request_id, []).extend(updates)
        return True

    # A decode lease lets a request decode up to a position without any call: it has the blocks, no
    # other request holds them, and no part of the engine wants to see its steps. The scheduler's loop
    # only compares positions. Whatever changes one of these conditions drops the lease.

    def lease(self, request: Request) -> None:
        """Give a decoding request a lease up to the end of its blocks."""
        num_tokens = len(request.blocks[self.own[0]]) * self.block_size
        for kind in self.kinds:
            num_tokens = min(num_tokens, kind.next_mark(request))
        request.lease = min(num_tokens, request.end - 1)

    def drop_lease(self, request: Request) -> None:
        """End the request's lease. Its next step calls `allocate` again."""
        request.lease = 0

    def _may_write(self, request: Request) -> bool:
        return all(kind.may_write(request) for kind in self.kinds)

    def _is_writable(self, block: int) -> bool:
        """True if only one request holds the uncached block, not counting pending copies."""
        return self.pool.is_writable(block, self._copied[block])

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block before the next step. The source is held until then."""
        self.pool.hold([source])
        self.copies[target] = source
        self._copied[source] += 1

    def begin_copies(self) -> tuple[tuple[int, int], ...]:
        """Take the pending copies, as (source, target), for the step that is being planned."""
        if not self.copies:
            return ()
        found = tuple([(source, target) for target, source in self.copies.items()])
        for source in self.copies.values():  # several copies may have the same source
            self.pool.release([source])
        self.copies.clear()
        self._copied.clear()
        return found

    def allocate_encoder(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks for an encoder's text of `num_tokens` tokens. They must be free."""
        assert self.cross is not None, "the model has no encoder"
        request.blocks[self.cross] = self.pool.allocate(self.blocks_for(num_tokens))

    def release(self, request: Request) -> None:
        """Release all blocks of the request and mark none of its tokens as computed."""
        if self.order is not None and request.session is not None:
            self._leave_order(self.order, request, request.session)
        for g, table in enumerate(request.blocks):
            for target in self.copies.keys() & table if self.copies else ():
                source = self.copies.pop(target)
                self._copied[source] -= 1
                self.pool.release([source])
            self.pool.release(table[request.num_passed[g] :])
            request.blocks[g], request.num_passed[g] = [], 0
        request.num_computed_tokens = request.num_registered = 0
        request.drafts = ()
        request.needs_copy = False
        for kind in self.kinds:
            kind.release(request)
            self._offer_slots(kind)
        self.drop_lease(request)
        if request.is_mixed:
            self.begin_anew(request)

    # --- A request's steps ----------------------------------------------------------------------------------------------
    #
    # What the scheduler asks and tells. Kinds of cache besides blocks (`slots.py`) are asked, too.

    def has_room(
        self,
        request: Request,
        cached: Sequence[Sequence[int]],
        num_tokens: int,
        encoded: int,
        spare: int,
    ) -> bool:
        """True if a waiting request fits with `spare` blocks left.

        It needs blocks for `num_tokens` tokens, and for `encoded` tokens of an encoder's text.
        `cached` are the blocks of its prefix, by group.
        """
        if self.kinds and not self._have_room(request):
            return False
        num_held = len(request.blocks[0] or (cached[0] if cached else ()))
        own = (self.blocks_for(num_tokens) - num_held + request.needs_copy) * len(self.own)
        revived = sum(map(self.pool.num_revived, cached))
        return own + self.blocks_for(encoded) + revived + spare <= self.pool.num_free

    def _have_checkpoints(self, keys: Sequence[bytes], num_blocks: int) -> bool:
        return all(kind.has(keys[num_blocks - 1]) for kind in self.kinds)

    def _have_room(self, request: Request) -> bool:
        return all(kind.has_room(request) for kind in self.kinds)

    def begin(self, request: Request, cached: Sequence[Sequence[int]], computed: int) -> None:
        """Start a request with `computed` tokens in blocks that it holds, or in the `cached` ones."""
        if cached:
            self.adopt(request, cached)
            request.num_registered = len(cached[0])
        if self.tiers is not None:
            self.tiers.let_go(request)
        request.num_computed_tokens = computed
        for kind in self.kinds:
            kind.start(request, computed)

    def place(self, request: Request, computed: int, end: int, num_drafts: int) -> bool:
        """Record that a step computes tokens [computed, end). True if the request may decode under a lease after it."""
        given = request, computed, end, num_drafts
        return not self.kinds or all([kind.place(*given) for kind in self.kinds])  # noqa: C419

    def verified(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Undo the tokens that were computed after the last accepted draft."""
        request.num_computed_tokens -= num_drafts - num_right
        for kind in self.kinds:
            kind.verified(request, num_right)

    @property
    def may_rewind(self) -> bool:
        """Whether a request may compute its last token again: only if a step changes nothing but blocks."""
        return not self.kinds

    # --- The order of eviction ------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Find the request's session. From now on its blocks are evicted after those of sessions not in use."""
        if self.sessions is None or request.session is not None:
            return
        full = len(request.token_ids) // self.block_size
        keys, spec = request.block_keys, request.spec
        extend_keys(keys, request.root_key, request.token_ids, self.block_size, full, spec.media)
        request.session = self.sessions.arrived(keys, spec.cache_hints, spec.cache_salt)

    def _enter_order(
        self, order: ValueOrder, request: Request, tables: Sequence[Sequence[int]], session: Session
    ) -> None:
        depth = len(tables[self.own[0]]) * self.block_size
        for g in self.own:
            if g == self.full:
                end = self.pool.num_leading_cached(tables[g])
                request.run, request.shared, request.num_shared = order.enter(
                    tables[g][:end], session, request.request_id
                )
            else:
                order.touch([b for b in tables[g] if b != NULL_BLOCK], depth)

    def _leave_order(self, order: ValueOrder, request: Request, session: Session) -> None:
        """Prepare the order for a request's blocks. Blocks at the ends of windows go with the last blocks of its chain."""
        hashes, depth = self.pool.hashes, request.num_computed_tokens
        last = [
            block
            for g in self.own
            if g != self.full
            for block in request.blocks[g][request.num_passed[g] :]
            if hashes[block] is not None
        ]
        if last:
            order.apart(session, last, depth)
        if request.run is not None and request.run.writer == request.request_id:
            request.run.writer = ""
        for shared in request.shared:
            order.sessions.close(shared, "shared")
        request.run, request.shared, request.passed = None, [], None

    def ended(self, request: Request) -> None:
        """Tell the session of a request that it has ended; its blocks were released."""
        if self.sessions is not None and request.session is not None:
            session, request.session = request.session, None
            session.rank = self.rank
            size, hints = self.block_size, request.spec.cache_hints
            num_prompt = request.num_prompt_tokens // size
            session.kept = () if hints.ttl_s is None else ((math.inf, hints.ttl_s),)
            for share, seconds in hints.breakpoints:  # whole blocks are kept
                end = math.ceil(share * request.num_prompt_tokens / size) * size
                session.kept += ((end, seconds),)
            if self.order is not None and hints.breakpoints:
                self.order.part(session)
            self.sessions.ended(
                session, request.block_keys, request.num_shared, num_prompt, request.calls
            )

    # --- Blocks to share ----------------------------------------------------------------------------------------------

    def root_key(self, salt: str, adapter: str) -> bytes:
        """First key of the chain that a request's block keys continue."""
        root = root_key(self._salt, "", adapter) if adapter else self._root_key
        return salted(root, salt)

    def use_weights(self, identity: str) -> None:
        """Use new weights: block keys computed from now on differ from those of the old weights."""
        self._salt = f"{self._model}:{identity}"
        self._root_key = root_key(self._salt, "")

    def begin_anew(self, request: Request) -> None:
        """Make a request without blocks look for cached blocks of the current weights."""
        request.root_key = self.root_key(request.spec.prefix_salt, "")
        request.block_keys, request.looked_up, request.is_mixed = [], False, False

    def may_begin_cached(self, request: Request) -> bool:
        """True if the request may start with cached blocks."""
        return self.cache.enable_prefix_caching and request.spec.sampling.prompt_logprobs is None

    def cached_prefix(self, request: Request) -> tuple[list[array[int]], int]:
        if not self.may_begin_cached(request):
            return [], 0
        windows, size = dict(self.windows), self.block_size
        hit = longest_hit(self.pool, request, self.own, windows, size)
        if not self.kinds:
            return hit
        request.num_hit_tokens = hit[1]
        ends = partial(self._have_checkpoints, request.block_keys)
        if not hit[1] or ends(hit[1] // size):
            return hit
        return longest_hit(self.pool, request, self.own, windows, size, ends)

    def waits_for_tiers(
        self, request: Request, cached: Sequence[Sequence[int]], computed: int, spare: int
    ) -> bool:
        """True if the request must wait for blocks from a tier (`Tiers.wants`)."""
        if self.tiers is None or not request.block_keys or not self.may_begin_cached(request):
            return False
        return self._have_room(request) and self.tiers.wants(request, cached, computed, spare)

    def adopt(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks of `tables`, which other requests wrote.

        Null blocks mark unneeded blocks.
        """
        for g, table in enumerate(tables):
            passed = next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table))
            self.pool.hold(table[passed:])
            request.blocks[g], request.num_passed[g] = list(table), passed
        if self.order is not None:
            self.arrived(request)
            if (session := request.session) is not None:
                self._enter_order(self.order, request, tables, session)
                begin, end = session.prefetched
                if end and self.tiers is not None and session.rank == self.rank:
                    hit = len(tables[self.own[0]]) * self.block_size
                    self.tiers.count_used(max(0, min(hit, end) - begin))
                    session.prefetched = 0, 0

    def register(self, request: Request, step_id: int) -> None:
        """Offer blocks to the prefix cache and the tiers.

        These are the full blocks whose tokens are all known and scheduled. The steps up to `step_id` write them.
        """
        if not self.cache.enable_prefix_caching or request.is_mixed:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if full <= request.num_registered or request.status is not Status.RUNNING:
            return
        self.arrived(request)
        media, session = request.spec.media, request.session
        extend_keys(
            request.block_keys, request.root_key, request.token_ids, self.block_size, full, media
        )
        for g in self.own:
            took = list[int]()
            for i in range(max(request.num_registered, request.num_passed[g]), full):
                block, key = request.blocks[g][i], group_key(request.block_keys[i], g)
                is_new = self.pool.register(block, key)
                if is_new:
                    took.append(i)
                if is_new and g == self.full and session is not None and self.order is not None:
                    request.run = self.order.extend(
                        request.run, session, request.request_id, block, i
                    )
                if self.tiers is not None:
                    self.tiers.offer(block, key, step_id)
            # only keys of the first group are reported
            if self.stored is not None and took and not g:
                self.stored(request, took)
        request.num_registered = full

    def planned(self, step_id: int) -> tuple[StateMark, ...]:
        """Checkpoints that the newly planned step keeps (`Slots.planned`)."""
        self._last_step = step_id
        if not self.kinds:
            return ()
        marks, *others = [kind.planned() for kind in self.kinds]
        assert not any(others), (
            "a StateMark is of the first kind: rows carry no other's checkpoints"
        )
        for kind in self.kinds:
            self._offer_slots(kind)
        return marks

    def _offer_slots(self, kind: Slots) -> None:
        """Offer checkpoints to the tiers. The last planned step may still write them."""
        if self.tiers is not None:
            for slot, key in kind.offered:
                self.tiers.offer(slot, slot_key(key, kind.number), self._last_step)
        kind.offered.clear()

    def forget_all(self) -> None:
        """Forget all cached blocks and checkpoints."""
        self.pool.forget_all()
        for kind in self.kinds:
            kind.pool.forget_all()

    # --- Figures ------------------------------------------------------------------------------------------------------

    def num_used_tokens(self) -> int:
        """Token capacity of the allocated blocks."""
        return (self.pool.num_usable - self.pool.num_free) * self.block_size

    def num_wasted_tokens(self, running: Iterable[Request]) -> int:
        """Allocated token slots of the `running` requests that hold no computed token.

        A null block in a table counts as full of computed tokens.
        """
        size, wasted = self.block_size, 0
        for request in running:
            wasted += sum(
                len(request.blocks[g]) * size - request.num_computed_tokens for g in self.own
            )
            if self.cross is not None:
                wasted += len(request.blocks[self.cross]) * size - len(
                    request.spec.encoder_token_ids
                )
        return wasted
