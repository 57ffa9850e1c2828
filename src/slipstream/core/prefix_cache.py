"""Keys of token prefixes: a chain of hashes over whole blocks, and how many cached blocks a sequence can begin with.

The key of a block covers every token from the start of the sequence to the end of the block, the salt, and the group whose
layers' keys and values the block holds. Two blocks with one key hold the same, up to a collision of a 128-bit cryptographic
hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from slipstream.core.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.request import Request
from slipstream.spec.model import CacheGroup

KEY_BYTES = 16


def root_key(*salts: str) -> bytes:
    """The key before the first block. Salts (model, adapter, tenant) keep prefixes apart."""
    digest = blake2b(digest_size=KEY_BYTES)
    for salt in salts:
        encoded = salt.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append the chain's keys up to that of block `num_blocks` − 1, whose tokens are there."""
    key = keys[-1] if keys else root
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        block = array("i", tokens[start : start + block_size])
        key = blake2b(key + block.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(key)


def group_key(key: bytes, group: int) -> bytes:
    """The key of the block in `group` where `key` is the chain's: no two groups share one."""
    return key + bytes((group,)) if group else key


def longest_hit(
    pool: BlockPool, request: Request, own: Sequence[int], windows: Mapping[int, CacheGroup], size: int
) -> tuple[list[list[int]], int]:
    """Tables of the cached blocks that the request can begin with, one a group (or nothing), and how many tokens are computed
    so. `own` are the groups that it writes to.

    A hit of n blocks needs all n in a full group, and in a window group those that later tokens look at; the longest such
    hit is taken. At least two tokens are always computed. The last one's logits are wanted, and a token that is alone in
    its step is computed as a decode, whose kernels round otherwise than a prompt's: a hit would then change the answer.
    """
    keys, num_tokens = request.block_keys, request.num_tokens
    extend_keys(keys, request.root_key, request.token_ids, size, num_tokens // size)
    found = {g: [pool.lookup(group_key(key, g)) for key in keys] for g in own}
    longest = len(keys)
    for g in own:
        if g not in windows and None in found[g]:
            longest = min(longest, found[g].index(None))
    # runs[n]: how many of the n first blocks, counted from the last, are cached without a gap
    runs = {g: _runs(found[g][:longest]) for g in windows}
    for n in range(min(longest, (num_tokens - 2) // size), 0, -1):
        computed = n * size
        begins = {g: windows[g].first_block(computed, size) if g in windows else 0 for g in own}
        if any(runs[g][n] < n - begins[g] for g in windows):
            continue
        tables: list[list[int]] = [[] for _ in request.blocks]
        for g, begin in begins.items():
            tables[g] = [NULL_BLOCK] * begin + [b for b in found[g][begin:n] if b is not None]
        return tables, computed
    return [], 0


def _runs(found: Sequence[int | None]) -> list[int]:
    """For each n from 0 on how many of the first n, counted from the last of them, are there without a gap."""
    runs = [0]
    for block in found:
        runs.append(0 if block is None else runs[-1] + 1)
    return runs
