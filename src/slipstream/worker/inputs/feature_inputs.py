"""Inputs that only some steps have: an encoder's blocks, recurrent states, shared prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import chunk_table
from slipstream.messages.steps import SharedPrefix, StepPlan
from slipstream.worker.inputs.rows import IntArray, LongArray, RowTable

if TYPE_CHECKING:
    from torch import Tensor


def state_places(
    table: RowTable, plan: StepPlan, rows: LongArray, starts: LongArray, num_decodes: int
) -> list[IntArray]:
    """Arrays of `StateMetadata`: the slots to read [S] and to write [T], and the chunks [3 · chunks]."""
    slots, ends = table.host_slots[1][rows], starts[1:]
    write = np.zeros(starts[-1], np.int32)
    write[ends - 1] = slots[:, 1]
    for i in range(num_decodes, len(plan.scheduled)):
        if (count := plan.scheduled[i].num_sampled) > 1:
            write[ends[i] - count : ends[i]] = slots[i, 1 : 1 + count]
    if plan.state_marks:
        at = {s.request_id: starts[i] for i, s in enumerate(plan.scheduled)}
        for mark in plan.state_marks:
            write[at[mark.request_id] + mark.num_tokens - 1] = mark.slot
    chunks = chunk_table(starts.tolist(), write, num_decodes)
    return [slots[:, 0].copy(), write, chunks.reshape(-1)]


def shared_prefixes(shared: Sequence[SharedPrefix], num_decodes: int) -> IntArray:
    """Arrays of `SharedPrefixes` for each decode, [3, num_decodes] with padding.

    Each part begins at a multiple of 16 bytes.
    """
    made = np.zeros((3, -(-num_decodes // 4) * 4), np.int32)
    made[0] = np.arange(made.shape[1])
    made[1] = made[0] + 1
    if shared:
        groups = np.array(shared, np.int32)
        counts = groups[:, 1] - groups[:, 0]
        members = np.arange(counts.sum()) + (groups[:, 0] - counts.cumsum() + counts).repeat(counts)
        made[:, members] = groups.T.repeat(counts, axis=1)
    return made


def cross_groups(
    table: RowTable, meta: AttentionMetadata, rows: Tensor, max_encoder_len: int
) -> list[AttentionMetadata]:
    """Metadata of the group with an encoder's keys and values, if there is one.

    `max_encoder_len` is 0 if unknown.
    """
    if table.cross is None:
        return []
    return [
        dataclasses.replace(
            meta,
            seq_lens=table.encoder_lens[rows],
            block_table=table.of_rows(table.block_tables[table.cross], rows),
            max_seq_len=max_encoder_len or table.max_encoder_len,
        )
    ]
