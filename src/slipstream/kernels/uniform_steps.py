"""Metadata of steps whose sequences are all alike, as measurements, captures and checks have them.
No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import state_metadata
from slipstream.platform import Platform


def single_sequence(
    start: int,
    num_tokens: int,
    *,
    block_size: int,
    platform: Platform,
    scales: Sequence[int] = (1,),
) -> AttentionMetadata:
    """Makes the metadata of one sequence, in blocks 1, 2, … which the groups take in turn. There are as many `scales`
    (`ModelSpec.block_scales`).

    Its tokens are start … start + num_tokens − 1. Those before are in the cache.
    """
    length = start + num_tokens
    return uniform(1, num_tokens, length, block_size=block_size, platform=platform, scales=scales)


def uniform(
    num_seqs: int,
    num_new: int,
    length: int,
    *,
    block_size: int,
    platform: Platform,
    scales: Sequence[int] = (1,),
    num_slots: int = 2,
) -> AttentionMetadata:
    """Makes `num_seqs` sequences of `length` tokens, the last `num_new` of them new.

    Each has its own blocks in every group, from block 1 on. Sequence i has slot i + 1 for its states, if it is one of
    `num_slots`; otherwise it begins with zeros, and keeps nothing.
    """
    upload, num_blocks = platform.upload, -(-length // block_size)
    blocks = np.arange(num_seqs * num_blocks, dtype=np.int32).reshape(num_seqs, num_blocks)
    blocks = blocks * np.int32(len(scales)) + np.int32(1)
    starts = np.arange(0, num_seqs * num_new + 1, num_new, dtype=np.int32)
    positions = np.tile(np.arange(length - num_new, length), num_seqs)
    rows = np.repeat(np.arange(num_seqs), num_new)

    def of_group(group: int) -> dict[str, Any]:
        own = (blocks + np.int32(group)) * np.int32(scales[group])
        slots = own[rows, positions // block_size].astype(np.int64) * block_size
        return {"block_table": upload(own), "slot_mapping": upload(slots + positions % block_size)}

    first = AttentionMetadata(
        query_start_loc=upload(starts),
        seq_lens=upload(np.full(num_seqs, length, np.int32)),
        positions=upload(positions),
        **of_group(0),
        num_decodes=num_seqs if num_new == 1 else 0,
        max_query_len=num_new,
        max_seq_len=length,
        from_start=num_new == length,
        states=state_metadata(
            starts.tolist(),
            upload,
            slots=[i + 1 if i + 1 < num_slots else 0 for i in range(num_seqs)],
            goes_on=num_new < length,
        ),
    )
    others = (dataclasses.replace(first, **of_group(g)) for g in range(1, len(scales)))
    return first.with_groups(*others)
