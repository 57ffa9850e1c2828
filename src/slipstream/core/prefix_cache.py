"""Keys of token prefixes: a chain of hashes over whole blocks, and how many cached blocks a sequence can begin with.

The key of a block covers every token from the start of the sequence to the end of the block, the salt, and the group whose
layers' keys and values the block holds. Two blocks with one key hold the same, up to a collision of a 128-bit cryptographic
hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

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


def runs_of(found: Sequence[int | None]) -> list[int]:
    """For each n from 0 on how many of the first n, counted from the last of them, are there without a gap."""
    runs = [0]
    for block in found:
        runs.append(0 if block is None else runs[-1] + 1)
    return runs
