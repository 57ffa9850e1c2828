"""Prefix cache keys (a chain of hashes over full blocks) and the longest cached prefix.

A block's key covers every token from the start of the sequence to the end of the block, the salts, and the cache group
of the block. Blocks with equal keys have equal contents, because the hash is cryptographic (BLAKE2b, 128 bits).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.request import Request
from slipstream.messages.media import MediaSpan
from slipstream.spec.model import CacheGroup

KEY_BYTES, MARK_BYTES = 16, 64
STRETCH, SHORT, MAX_STRETCHES = 32, 4, 8192
"""(blocks whose keys are cached together, blocks at the end of a text, maximum number of either).

A conversation's turns hash their common beginning again and again. With blocks of 16 tokens the
stretches of 4 million tokens take some 30 MB.
"""


def root_key(*salts: str) -> bytes:
    """Key before the first block. The salts (model, adapter, tenant) keep their prefixes apart."""
    digest = blake2b(digest_size=KEY_BYTES)
    for salt in salts:
        encoded = salt.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def salted(root: bytes, cache_salt: str) -> bytes:
    """The root key of requests with a salt. A fleet's gateway has the roots without one from its replicas, and salts them."""
    if not cache_salt:
        return root
    # `person` ensures that no salt makes a root equal to a key of other requests' blocks.
    return blake2b(root + cache_salt.encode(), digest_size=KEY_BYTES, person=b"cache_salt").digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: Sequence[int],
    block_size: int,
    num_blocks: int,
    media: Sequence[MediaSpan] = (),
) -> None:
    """Append chain keys to `keys` until it has `num_blocks`.

    `tokens` must fill all of these blocks.

    All `media` have the same placeholder tokens. A block that overlaps a span therefore also
    hashes the span's key and its offset in the block.
    """
    key, first = keys[-1] if keys else root, len(keys) * block_size
    end = num_blocks * block_size
    if first >= end:
        return
    given = tokens[first:end]
    data, size = (given if isinstance(given, array) else array("i", given)).tobytes(), 4
    if not media:
        each, begin = block_size * size, 0
        while begin < len(data):  # up to the next multiple of STRETCH or SHORT blocks
            whole = len(keys) % STRETCH == 0 and len(data) - begin >= STRETCH * each
            most = STRETCH if whole else SHORT - len(keys) % SHORT
            stretch = data[begin : begin + most * each]
            of = _stretches if whole else _short_stretches
            keys += of.keys(keys[-1] if keys else root, stretch, each)
            begin += len(stretch)
        return
    for start in range(first, num_blocks * block_size, block_size):
        end = start + block_size
        block = data[(start - first) * size : (end - first) * size]
        seen = [i for i in media if i.offset < end and start < i.end]
        block += b"".join(
            [i.key + (i.offset - start).to_bytes(8, "little", signed=True) for i in seen]
        )
        key = blake2b(key + block, digest_size=KEY_BYTES).digest()
        keys.append(key)


def _keys_after(key: bytes, data: bytes, each: int) -> tuple[bytes, ...]:
    """Chain keys of blocks without media, of `each` bytes of `data`, after the block with `key`."""
    keys = list[bytes]()
    for begin in range(0, len(data), each):
        key = blake2b(key + data[begin : begin + each], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class _Stretches:
    """Cache of the keys of recently used stretches of tokens. A stretch is looked up by its two
    ends and then compared as a whole, because hashing all of it takes ten times as long."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, tuple[bytes, ...]]] = {}

    def keys(self, key: bytes, data: bytes, each: int) -> tuple[bytes, ...]:
        mark = key + data[-MARK_BYTES:]
        known = self._known.pop(mark, None)
        if known is None or known[0] != data or len(known[1]) * each != len(data):
            known = data, _keys_after(key, data, each)
            if len(self._known) >= MAX_STRETCHES:
                del self._known[next(iter(self._known))]
        self._known[mark] = known
        return known[1]


_stretches, _short_stretches = _Stretches(), _Stretches()


def group_key(key: bytes, group: int) -> bytes:
    """Key of a block of cache group `group`; `key` is the chain's key.

    Every group has keys of its own.
    """
    return key + bytes((group,)) if group else key


# key bytes from here on don't denote a block's group: 256 minus the number of a `SlotKind`
SLOT_GROUPS = 240


def slot_key(key: bytes, kind: int) -> bytes:
    """Key in the tiers of a checkpoint of a `SlotKind` after a block; `key` is the block's chain key."""
    return group_key(key, 256 - kind)


def kind_of(key: bytes) -> int:
    """The cache kind of a tier's key: 0 for blocks, otherwise the number of the `SlotKind`."""
    return 256 - key[KEY_BYTES] if len(key) > KEY_BYTES and key[KEY_BYTES] >= SLOT_GROUPS else 0


def announced_state(key: bytes) -> bytes:
    """Key under which the recurrent state after a block is reported to routers. It has a block
    key's length, but differs from all block keys. `key`: the block's chain key."""
    return bytes(255 - byte for byte in key)


def longest_hit(
    pool: BlockPool,
    request: Request,
    own: Sequence[int],
    windows: Mapping[int, CacheGroup],
    size: int,
    ends: Callable[[int], bool] | None = None,
) -> tuple[list[array[int]], int]:
    """Find the longest cached prefix of a request.

    Returns (block tables by group, number of tokens); the tables are empty on a miss. `own` are the
    groups that the request's own tokens are written to. With `ends`, only numbers of blocks for which it is true count.
    """
    keys, num_tokens = request.block_keys, request.num_tokens
    extend_keys(
        keys, request.root_key, request.token_ids, size, num_tokens // size, request.spec.media
    )
    found: dict[int, Sequence[int | None]] = {}
    for g in own:
        of_group = [group_key(key, g) for key in keys] if g else keys
        found[g] = pool.lookups(of_group) if g in windows else pool.chain(of_group)
    begins, n = usable_prefix(found, windows, num_tokens, size, ends)
    if not n:
        return [], 0
    tables = [array("i") for _ in request.blocks]
    for g, begin in begins.items():
        tables[g].frombytes(bytes(4 * begin))  # null blocks
        tables[g].extend(found[g][begin:n])  # type: ignore[arg-type]
    return tables, n * size


def usable_prefix(
    found: Mapping[int, Sequence[int | None]],
    windows: Mapping[int, CacheGroup],
    num_tokens: int,
    size: int,
    ends: Callable[[int], bool] | None = None,
) -> tuple[dict[int, int], int]:
    """Number of leading cached blocks that a sequence of `num_tokens` tokens can start with.

    Returns (first needed block of each group, number of blocks). `found`: each group's cached
    blocks, None where one is missing.

    1. A hit of n blocks needs all n blocks of a full group, and those blocks of a window group that
       later tokens attend to. The longest hit is taken.
    2. At least two tokens are left to compute. The last token's logits are needed. A single token
       would run as a decode, whose kernels round differently from a prefill's, and the hit would
       change the answer.
    """
    longest = min(len(blocks) for blocks in found.values())
    for g, blocks in found.items():
        if g not in windows and not isinstance(blocks, array) and None in blocks:
            longest = min(longest, blocks.index(None))
    # runs[n]: length of the run of cached blocks that ends with block n − 1
    runs = {g: _runs(found[g][:longest]) for g in windows}
    for n in range(min(longest, (num_tokens - 2) // size), 0, -1):
        if ends is not None and not ends(n):
            continue
        begins = {g: windows[g].first_block(n * size, size) if g in windows else 0 for g in found}
        if all(runs[g][n] >= n - begins[g] for g in windows):
            return begins, n
    return {}, 0


def _runs(found: Sequence[int | None]) -> list[int]:
    """[n]: length of the run of cached blocks that ends with block n − 1."""
    runs = [0]
    for block in found:
        runs.append(0 if block is None else runs[-1] + 1)
    return runs
