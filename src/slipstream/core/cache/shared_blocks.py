"""Blocks shared by several requests: choices with one prompt, and beams of a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.request import Request
from slipstream.messages.steps import SharedPrefix, TableUpdate

MIN_SHARED = 128
"""Minimum number of common tokens that a step marks as a shared prefix."""


def share_prompt(kv: KVCacheManager, parent: Request, children: Sequence[Request]) -> None:
    """Share the blocks of a parent's prompt with its `children`.

    Each child computes the last prompt token again, in a copy of the last block, to sample its
    own first token.
    """
    if not all(kind.may_share(parent) for kind in kv.kinds):
        return  # they compute the prompt themselves
    for kind in kv.kinds:
        kind.share(parent, children)
    num_blocks = kv.blocks_for(parent.num_prompt_tokens)
    tables = [
        table if g == kv.cross else table[:num_blocks] for g, table in enumerate(parent.blocks)
    ]
    for child in children:
        kv.adopt(child, tables)
        # weights may have changed since one of them was added
        child.root_key, child.is_mixed = parent.root_key, parent.is_mixed
        child.num_computed_tokens = parent.num_prompt_tokens - 1
        child.num_registered = child.num_computed_tokens // kv.block_size
        child.needs_copy = parent.needs_copy = True
        kv.drop_lease(parent)


def take_over(kv: KVCacheManager, beam: Request, source: Request) -> list[TableUpdate]:
    """Let `beam` continue from `source`, a beam of the same prompt.

    Returns the changes of the beam's block tables.

    The beam then holds the same blocks and has the same computed tokens. If both have begun a
    block, the source's block is copied into the beam's. Otherwise they share the last block,
    and each copies it before writing to it, unless all others have left it by then.
    """
    whole, updates = beam.num_prompt_tokens // kv.block_size, list[TableUpdate]()
    written, shares = source.num_computed_tokens // kv.block_size, False
    for g, theirs in enumerate(source.blocks):
        own = beam.blocks[g]
        both, same = min(len(own), len(theirs)), 0
        if (
            0 < whole <= both
            and own[whole - 1] == theirs[whole - 1]
            and beam.num_passed[g] == source.num_passed[g]
        ):
            # If the prompt's last block is the same, all blocks before it are, too, except window
            # blocks that only one of the two has released: a recomputed beam releases fewer blocks
            # in that step.
            same = whole
        while same < both and own[same] == theirs[same]:
            same += 1
        stop = None
        if len(own) == len(theirs) == written + 1:
            # both have written to their last blocks, so each holds its own exclusively
            assert kv.pool.is_writable(own[written])
            kv.copy_block(theirs[written], own[written])
            stop = written
        shares = shares or stop is None
        if same == stop:
            continue
        kv.pool.hold(theirs[max(same, source.num_passed[g]) : stop])
        kv.pool.release(own[max(same, beam.num_passed[g]) : stop])
        own[same:stop] = changed = theirs[same:stop]
        beam.num_passed[g] = source.num_passed[g]
        if changed:
            updates.append(TableUpdate(g, same, tuple(changed)))
    for kind in kv.kinds:
        kind.take_over(beam, source)
    beam.num_computed_tokens, beam.root_key = source.num_computed_tokens, source.root_key
    beam.is_mixed = source.is_mixed
    if len(beam.block_keys) != min(whole, len(source.block_keys)):
        beam.block_keys = source.block_keys[:whole]
    beam.num_registered = min(source.num_registered, whole)
    beam.needs_copy = shares
    source.needs_copy = source.needs_copy or shares
    return updates


def shared_prefixes(
    kv: KVCacheManager, decodes: Iterable[tuple[Request, int]]
) -> tuple[SharedPrefix, ...]:
    """Find runs of adjacent decodes that begin with the same prompt blocks.

    `decodes` are (request, number of computed tokens). A run counts from `MIN_SHARED` common
    tokens.
    """
    found, first, last = list[SharedPrefix](), 0, None
    for i, (request, computed) in enumerate((*decodes, (None, 0))):
        block = None
        if request is not None and kv.full is not None and kv.cross is None:
            whole = min(request.num_prompt_tokens, computed) // kv.block_size
            if whole * kv.block_size >= MIN_SHARED:
                # equal last blocks mean that all blocks before them are equal, too
                block = whole, request.blocks[kv.full][whole - 1]
        if block != last or block is None:
            if last is not None and i - first > 1:
                found.append(SharedPrefix(first, i, last[0] * kv.block_size))
            first, last = i, block
    return tuple(found)
