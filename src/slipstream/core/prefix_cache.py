"""Keys of prompt prefixes: a chain of hashes over whole blocks.

The key of a block covers every token from the start of the sequence to the end of the block, and the salt. Two blocks
with one key hold the same keys and values, up to a collision of a 128-bit cryptographic hash.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


@functools.lru_cache(maxsize=1024)
def root_key(*salts: str) -> bytes:
    """The key before the first block. Salts (model, adapter, tenant) keep prefixes apart."""
    digest = blake2b(digest_size=KEY_BYTES)
    for salt in salts:
        encoded = salt.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append the keys of all whole blocks of `tokens` that `keys` does not have yet."""
    key = keys[-1] if keys else root
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        block = array("i", tokens[start : start + block_size])
        key = blake2b(key + block.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(key)
