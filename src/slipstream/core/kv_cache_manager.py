"""The blocks that requests hold: their tables, the prefixes that they share, and the tiers below the device.

A request has a block table in each group of layers (`CacheGroup`). All groups take blocks from one pool:

1. In a `window` group the blocks that no later token looks at are released when the request next needs blocks.
2. A `cross` group's blocks, with an encoder's keys and values, are held as long as the request's own.
3. A block of a prompt is offered to the prefix cache when it is scheduled, so that requests of one step can share it: the
   worker writes a layer's keys and values before any attention reads them.
4. A request writes only to a block that it holds alone and that is not cached; otherwise the block is copied first. Only beams
   need a copy, and choices that share a prompt, which join after the step that computed it. Copies run before the next step.
   Until it is planned, `copies` has them, and a copy holds its source: no source is a target, too.

Ranks that have requests of their own have a manager each (`Request.kv`). Nothing is shared between two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from slipstream.config import CacheConfig
from slipstream.core.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.prefix_cache import extend_keys, group_key, longest_hit, root_key, salted
from slipstream.core.request import Request, Status
from slipstream.core.step import StepBuilder
from slipstream.core.tiers import BlockStore, Tiers
from slipstream.types import SharedPrefix, TableUpdate

LEAST_SHARED = 128
"""The fewest common tokens of requests that a step marks as a shared prefix."""


class KVCacheManager:
    """`num_blocks` is the size of the pool, with the null block. `salt` separates cached prefixes from other models'. `store`
    has the tiers below the device. `rank`: whose cache it is, where requests are dealt out."""

    def __init__(
        self,
        cache: CacheConfig,
        num_blocks: int,
        salt: str,
        store: BlockStore | None,
        clock: Callable[[], float],
        rank: int = 0,
    ) -> None:
        self.cache = cache
        self.rank = rank
        self.num_running = 0  # requests with blocks here that run
        self.pool = BlockPool(num_blocks)
        self.block_size = cache.block_size
        self.own = tuple(g for g, group in enumerate(cache.groups) if group.kind != "cross")
        """The groups that a request's own tokens are written to."""
        self.windows = tuple(
            (g, group) for g, group in enumerate(cache.groups) if group.kind == "window"
        )
        self.full = next((g for g, group in enumerate(cache.groups) if group.kind == "full"), None)
        self.cross = next(
            (g for g, group in enumerate(cache.groups) if group.kind == "cross"), None
        )
        self.copies: dict[int, int] = {}  # blocks that are to be written, and what is copied there
        self._copied = Counter[int]()  # how often a block is
        self.tiers = None
        if store is not None:
            self.tiers = Tiers(
                store, self.pool, self.own, dict(self.windows), cache.block_size, clock
            )
        self._salt = salt
        self._root_key = root_key(salt, "")  # for requests without a salt

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- Blocks to write ----------------------------------------------------------------------------------------------

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether `allocate` would change nothing."""
        if request.needs_copy or self.windows:
            return False
        return num_tokens <= len(request.blocks[self.own[0]]) * self.block_size

    def allocate(self, step: StepBuilder, request: Request, num_tokens: int) -> bool:
        """In every group: release the blocks that no later token looks at, copy the block that is written next if it is
        shared, and append blocks for `num_tokens` tokens. False, and nothing is changed, if too few blocks are free."""
        pool, size, tables = self.pool, self.block_size, request.blocks
        if self.holds(request, num_tokens):
            return True
        computed, length = request.num_computed_tokens, len(tables[self.own[0]])
        need = max(0, self.blocks_for(num_tokens) - length)
        first = computed // size  # the block that is written next
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
            pool.release(tables[g][begin:keep])
            tables[g][begin:keep] = [NULL_BLOCK] * (keep - begin)
            request.num_passed[g] = keep
            updates.append(TableUpdate(g, begin, (NULL_BLOCK,) * (keep - begin)))
        for g in copies:
            old, (new,) = tables[g][first], pool.allocate(1)
            self._copy(old, new)
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

    def _is_writable(self, block: int) -> bool:
        """Whether one request alone holds it, beside the copies."""
        return self.pool.is_writable(block, self._copied[block])

    def _copy(self, source: int, target: int) -> None:
        self.pool.hold([source])
        self.copies[target] = source
        self._copied[source] += 1

    def begin_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target), for the step that is planned."""
        if not self.copies:
            return ()
        found = tuple([(source, target) for target, source in self.copies.items()])
        self.pool.release([*self.copies.values()])
        self.copies.clear()
        self._copied.clear()
        return found

    def allocate_encoder(self, request: Request, num_tokens: int) -> None:
        """Blocks for what an encoder reads. They must be free."""
        assert self.cross is not None, "the model has no encoder"
        request.blocks[self.cross] = self.pool.allocate(self.blocks_for(num_tokens))

    def release(self, request: Request) -> None:
        """Release all blocks. None of the request's tokens is computed any more."""
        for g, table in enumerate(request.blocks):
            for target in self.copies.keys() & table if self.copies else ():
                source = self.copies.pop(target)
                self._copied[source] -= 1
                self.pool.release([source])
            self.pool.release(table[request.num_passed[g] :])
            request.blocks[g], request.num_passed[g] = [], 0
        request.num_computed_tokens = request.num_registered = 0
        request.drafts, request.decodes_until, request.verifies_until = (), 0, 0
        request.needs_copy = False

    # --- Blocks to share ----------------------------------------------------------------------------------------------

    def root_key(self, cache_salt: str, adapter: str) -> bytes:
        """What the keys of a request's blocks begin with."""
        root = root_key(self._salt, "", adapter) if adapter else self._root_key
        return salted(root, cache_salt)

    def may_begin_cached(self, request: Request) -> bool:
        """Whether it may begin with cached blocks."""
        return self.cache.enable_prefix_caching and request.spec.sampling.prompt_logprobs is None

    def cached_prefix(self, request: Request) -> tuple[list[list[int]], int]:
        if not self.may_begin_cached(request):
            return [], 0
        return longest_hit(self.pool, request, self.own, dict(self.windows), self.block_size)

    def waits_for_tiers(
        self, request: Request, cached: list[list[int]], computed: int, spare: int
    ) -> bool:
        """`Tiers.wants`"""
        if self.tiers is None or not request.block_keys or not self.may_begin_cached(request):
            return False
        return self.tiers.wants(request, cached, computed, spare)

    def adopt(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks of `tables`, which other requests have written. A null block stands where none is needed."""
        for g, table in enumerate(tables):
            passed = next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table))
            self.pool.hold(table[passed:])
            request.blocks[g], request.num_passed[g] = list(table), passed

    def register(self, request: Request, step_id: int) -> None:
        """Offer to the prefix cache, and to the tiers, the blocks whose tokens are all known and scheduled. The steps up to
        `step_id` write them."""
        if not self.cache.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if full <= request.num_registered or request.status is not Status.RUNNING:
            return
        images = request.spec.images
        extend_keys(
            request.block_keys, request.root_key, request.token_ids, self.block_size, full, images
        )
        for g in self.own:
            for i in range(max(request.num_registered, request.num_passed[g]), full):
                block, key = request.blocks[g][i], group_key(request.block_keys[i], g)
                self.pool.register(block, key)
                if self.tiers is not None:
                    self.tiers.offer(block, key, step_id)
        request.num_registered = full

    def share_prompt(self, parent: Request, children: Sequence[Request]) -> None:
        """The `children` hold the blocks of their parent's prompt. Each computes the last token again in a copy of the last
        block, and so draws its own first token."""
        num_blocks = self.blocks_for(parent.num_prompt_tokens)
        tables = [
            table if g == self.cross else table[:num_blocks]
            for g, table in enumerate(parent.blocks)
        ]
        for child in children:
            self.adopt(child, tables)
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_registered = child.num_computed_tokens // self.block_size
            child.needs_copy = parent.needs_copy = True
            parent.decodes_until = parent.verifies_until = 0

    def take_over(self, beam: Request, source: Request) -> list[TableUpdate]:
        """`beam` goes on from `source`, of the same prompt: it holds the same blocks, and has computed the same tokens. If both
        have begun a block, the source's is copied to the beam's. Otherwise they share the last, and each copies it before it
        writes to it, unless all others have left it. Returns the changes of the beam's tables."""
        whole, updates = beam.num_prompt_tokens // self.block_size, list[TableUpdate]()
        written, shares = source.num_computed_tokens // self.block_size, False
        for g, theirs in enumerate(source.blocks):
            own = beam.blocks[g]
            both, same = min(len(own), len(theirs)), 0
            if (
                0 < whole <= both
                and own[whole - 1] == theirs[whole - 1]
                and beam.num_passed[g] == source.num_passed[g]
            ):
                # With the same last block of the prompt, all blocks before it are equal, too, but for those of a window that
                # only one of them has passed: a beam that was computed again passes fewer in that step.
                same = whole
            while same < both and own[same] == theirs[same]:
                same += 1
            stop = None
            if (
                len(own) == len(theirs) == written + 1
            ):  # both have written to their last blocks, and so hold them alone
                assert self.pool.is_writable(own[written])
                self._copy(theirs[written], own[written])
                stop = written
            shares = shares or stop is None
            if same == stop:
                continue
            self.pool.hold(theirs[max(same, source.num_passed[g]) : stop])
            self.pool.release(own[max(same, beam.num_passed[g]) : stop])
            own[same:stop] = changed = theirs[same:stop]
            beam.num_passed[g] = source.num_passed[g]
            if changed:
                updates.append(TableUpdate(g, same, tuple(changed)))
        beam.num_computed_tokens = source.num_computed_tokens
        if len(beam.block_keys) != min(whole, len(source.block_keys)):
            beam.block_keys = source.block_keys[:whole]
        beam.num_registered = min(source.num_registered, whole)
        beam.needs_copy = shares
        source.needs_copy = source.needs_copy or shares
        return updates

    def shared_prefixes(self, decodes: Iterable[tuple[Request, int]]) -> tuple[SharedPrefix, ...]:
        """Which neighbours begin with the same blocks of a prompt that is long enough, for requests with so many computed
        tokens each."""
        found, first, last = list[SharedPrefix](), 0, None
        for i, (request, computed) in enumerate((*decodes, (None, 0))):
            block = None
            if request is not None and self.full is not None and self.cross is None:
                whole = min(request.num_prompt_tokens, computed) // self.block_size
                if (
                    whole * self.block_size >= LEAST_SHARED
                ):  # with the same last block, all blocks before it are equal, too
                    block = whole, request.blocks[self.full][whole - 1]
            if block != last or block is None:
                if last is not None and i - first > 1:
                    found.append(SharedPrefix(first, i, last[0] * self.block_size))
                first, last = i, block
        return tuple(found)

    # --- Figures ------------------------------------------------------------------------------------------------------

    def num_used_tokens(self) -> int:
        """That the blocks in use have room for."""
        return (self.pool.num_usable - self.pool.num_free) * self.block_size

    def num_wasted_tokens(self, running: Iterable[Request]) -> int:
        """That the blocks of the `running` requests have room for and that are not computed. A null block in a table counts as
        full of computed tokens."""
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
