"""Inputs of a step, gathered on a GPU from the rows there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import StateMetadata
from slipstream.worker.inputs.feature_inputs import cross_groups
from slipstream.worker.inputs.rows import LongArray, RowTable
from slipstream.worker.inputs.uploads import upload_together

if TYPE_CHECKING:
    from torch import Tensor


def gather_inputs_after_upload(
    table: RowTable, arrays: list[LongArray], **sizes: Any
) -> tuple[Tensor, AttentionMetadata, list[Tensor]]:
    """`gather_inputs` of host arrays, after one upload of all of them.

    `sizes` are its other parameters.
    """
    token_rows, positions, starts, seq_lens, rows, *more = upload_together(arrays, table.device)
    token_ids, meta = gather_inputs(
        table,
        token_rows=token_rows,
        positions=positions,
        rows=rows,
        query_start_loc=starts,
        seq_lens=seq_lens,
        **sizes,
    )
    num_long = len(more) - (0 if table.states is None else 3)
    return token_ids, meta, [*more[:2], *(t.long() for t in more[2:num_long]), *more[num_long:]]


def gather_inputs(
    table: RowTable,
    *,
    token_rows: Tensor,
    positions: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    from_start: bool = False,
    max_encoder_len: int = 0,
    ahead: int = 0,
) -> tuple[Tensor, AttentionMetadata]:
    """Gather tokens [T], and metadata with slots and block tables, from the rows.

    This is device work only, so that a graph can capture it.
    """
    num_blocks, size = -(-max_seq_len // table.block_size), table.block_size
    first = table.block_tables[0]
    ids, positions, slots = table.ops.gather_inputs(
        table.tokens[:, ahead:], first, token_rows, positions, size
    )
    turned = positions  # positions by which these tokens are rotated
    if table.position_shifts is not None:
        turned = positions + table.position_shifts.index_select(0, token_rows)
    meta = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=first[:, :num_blocks].index_select(0, rows),
        positions=turned,
        slot_mapping=slots,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        from_start=from_start,
        states=_states_of_decodes(table, rows) if max_query_len == 1 else None,
    )
    others = []
    if table.num_own > 1:  # one launch for all groups
        more = table.block_tables[1 : table.num_own]
        tables = more[:, :, :num_blocks].index_select(1, rows)
        slots_of = more[:, token_rows.long(), positions // size].long() * size + positions % size
        others = [
            dataclasses.replace(meta, block_table=t, slot_mapping=s)
            for t, s in zip(tables, slots_of, strict=True)
        ]
    return ids, meta.with_groups(*others, *cross_groups(table, meta, rows, max_encoder_len))


def _states_of_decodes(table: RowTable, rows: Tensor) -> StateMetadata | None:
    """Slots of the states of sequences with one token each, from the rows on the device."""
    if table.states is None:
        return None
    read, write = table.states[:, :2].index_select(0, rows).t().contiguous()
    return StateMetadata(read=read, write=write, chunks=table.no_chunks)
