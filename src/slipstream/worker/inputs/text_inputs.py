"""Inputs of an encoder, whole texts or windows of audio, in one upload. They need no rows.

Without a device (`device=None`) there is no torch, and NumPy arrays replace tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.messages.steps import StepPlan
from slipstream.messages.texts import TextsPlan
from slipstream.worker.inputs.rows import IntArray, RowTable
from slipstream.worker.inputs.uploads import upload_together

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def encoder_batch(table: RowTable, plan: StepPlan) -> tuple[Tensor, AttentionMetadata] | None:
    """Inputs of an encoder for a step's new requests: whole texts as tokens [T], or frames of audio, and metadata.

    None if there are none. This is one upload.
    """
    new = [s for s in plan.new if s.encoder_token_ids]
    if not new:
        return None
    audio = [s.audio for s in new if s.audio is not None]
    blocks = {
        s.request_id: u.block_ids
        for s in plan.scheduled
        for u in s.table_updates
        if u.group == table.cross
    }
    lengths = np.fromiter((len(s.encoder_token_ids) for s in new), np.int32, len(new))
    tables = np.zeros((len(new), max(len(blocks[s.request_id]) for s in new)), np.int32)
    for line, s in zip(tables, new, strict=True):
        line[: len(blocks[s.request_id])] = blocks[s.request_id]
    tokens = np.concatenate([np.asarray(s.encoder_token_ids, dtype=np.int32) for s in new])
    given, meta = _whole_texts(tokens, lengths, tables, None, table.block_size, table.device)
    return (table.upload(np.concatenate([x.frames() for x in audio])) if audio else given), meta


def text_batch(
    plan: TextsPlan, block_size: int, device: torch.device | None
) -> tuple[Tensor, AttentionMetadata]:
    """Inputs of an encoder's step: tokens [T] and metadata.

    The texts' keys and values go to the blocks 1, 2, … in order. Every step uses the same blocks,
    since steps run one after another. This is one upload.
    """
    lengths = np.frombuffer(plan.lengths, np.int32)
    num_blocks = -(-lengths // block_size)
    ends = np.cumsum(num_blocks, dtype=np.int32)
    tables = np.minimum(
        (ends - num_blocks)[:, None] + np.arange(1, num_blocks.max() + 1, dtype=np.int32),
        ends[:, None],
    )
    num_first = np.frombuffer(plan.num_first, np.int32) if plan.num_first else None
    return _whole_texts(
        np.frombuffer(plan.token_ids, np.int32), lengths, tables, num_first, block_size, device
    )


def _whole_texts(
    tokens: IntArray,
    lengths: IntArray,
    tables: IntArray,
    num_first: IntArray | None,
    block_size: int,
    device: torch.device | None,
) -> tuple[Tensor, AttentionMetadata]:
    """Inputs of `tokens` [T], which are texts of `lengths` [S]; text i has the blocks tables[i].

    In pairs of texts the first `num_first` [S] tokens have type 0, and the others have type 1.
    """
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    text = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.arange(len(tokens), dtype=np.int32) - starts[text]
    slots = tables[text, positions // block_size] * np.int32(block_size) + positions % block_size
    parts = [
        tokens,
        starts,
        lengths,
        tables.reshape(-1),
        positions,
        slots,
        np.repeat(starts[1:], lengths),
    ]
    if num_first is not None:
        parts.append((positions >= num_first[text]).astype(np.int32))
    token_ids, starts_d, lens, table, at, slot, ends, *types = upload_together(parts, device)
    longest = int(lengths.max())
    meta = AttentionMetadata(
        query_start_loc=starts_d,
        seq_lens=lens,
        block_table=table.reshape(tables.shape),
        positions=_int64(at),
        slot_mapping=_int64(slot),
        num_decodes=0,
        max_query_len=longest,
        max_seq_len=longest,
        token_types=_int64(types[0]) if types else None,
        text_ends=ends,
    )
    return token_ids, meta


def _int64(x: Any) -> Any:
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x.long()
