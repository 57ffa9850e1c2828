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
from slipstream.types import ImageSpan

KEY_BYTES = 16


def root_key(*salts: str) -> bytes:
    """The key before the first block. Salts (model, adapter, tenant) keep prefixes apart."""
    digest = blake2b(digest_size=KEY_BYTES)
    for salt in salts:
        encoded = salt.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def salted(root: bytes, cache_salt: str) -> bytes:
    """The root key of requests with a salt. A fleet's gateway has the roots without one from its replicas, and salts them."""
    if not cache_salt:
        return root
    # `person`: no salt makes a root that is the key of a block of other requests.
    return blake2b(root + cache_salt.encode(), digest_size=KEY_BYTES, person=b"cache_salt").digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: Sequence[int],
    block_size: int,
    num_blocks: int,
    images: Sequence[ImageSpan] = (),
) -> None:
    """Append the chain's keys up to that of block `num_blocks` − 1, whose tokens are there. Placeholders are the same tokens
    for all `images`, so a block with some has the picture's key in its own, and where the picture begins."""
    key, first = keys[-1] if keys else root, len(keys) * block_size
    words = array("i", tokens[first : num_blocks * block_size])
    data, size = words.tobytes(), words.itemsize
    for start in range(first, num_blocks * block_size, block_size):
        end = start + block_size
        block = data[(start - first) * size : (end - first) * size]
        seen = [i for i in images if i.offset < end and start < i.end] if images else ()
        block += b"".join(
            [i.key + (i.offset - start).to_bytes(8, "little", signed=True) for i in seen]
        )
        key = blake2b(key + block, digest_size=KEY_BYTES).digest()
        keys.append(key)


def group_key(key: bytes, group: int) -> bytes:
    """The key of the block in `group` where `key` is the chain's: no two groups share one."""
    return key + bytes((group,)) if group else key


def longest_hit(
    pool: BlockPool,
    request: Request,
    own: Sequence[int],
    windows: Mapping[int, CacheGroup],
    size: int,
) -> tuple[list[list[int]], int]:
    """The tables of cached blocks that the request can begin with, one for each group (or no tables), and the number of
    tokens that they hold. `own` are the groups that it writes to."""
    keys, num_tokens = request.block_keys, request.num_tokens
    extend_keys(
        keys, request.root_key, request.token_ids, size, num_tokens // size, request.spec.images
    )
    found = {g: [pool.lookup(group_key(key, g)) for key in keys] for g in own}
    begins, n = usable_prefix(found, windows, num_tokens, size)
    if not n:
        return [], 0
    tables: list[list[int]] = [[] for _ in request.blocks]
    for g, begin in begins.items():
        tables[g] = [NULL_BLOCK] * begin + [b for b in found[g][begin:n] if b is not None]
    return tables, n * size


def usable_prefix(
    found: Mapping[int, Sequence[int | None]],
    windows: Mapping[int, CacheGroup],
    num_tokens: int,
    size: int,
) -> tuple[dict[int, int], int]:
    """Of `found`, by group: how many leading blocks a sequence of `num_tokens` can begin with, and the first of them that it
    needs in each group.

    1. A hit of n blocks needs all n in a full group, and in a window group those that later tokens look at. The longest hit is
       taken.
    2. At least two tokens are computed. The last one's logits are needed. A token alone in its step would be computed as a
       decode, whose kernels round otherwise than a prompt's, and the hit would change the answer.
    """
    longest = min(len(blocks) for blocks in found.values())
    for g, blocks in found.items():
        if g not in windows and None in blocks:
            longest = min(longest, blocks.index(None))
    # runs[n]: how many blocks are cached without a gap, counted back from block n − 1
    runs = {g: _runs(found[g][:longest]) for g in windows}
    for n in range(min(longest, (num_tokens - 2) // size), 0, -1):
        begins = {g: windows[g].first_block(n * size, size) if g in windows else 0 for g in found}
        if all(runs[g][n] >= n - begins[g] for g in windows):
            return begins, n
    return {}, 0


def _runs(found: Sequence[int | None]) -> list[int]:
    """For each n from 0 on: how many of the first n blocks are cached without a gap, counted back from block n − 1."""
    runs = [0]
    for block in found:
        runs.append(0 if block is None else runs[-1] + 1)
    return runs
