"""Inputs of one step, gathered from the rows of its requests (`worker/inputs/rows.py`).

`text_inputs.py` has an encoder's. Without a device (`device=None`) there is no torch, and NumPy
arrays replace tensors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels.metadata import AttentionMetadata, SharedPrefixes
from slipstream.kernels.states import StateMetadata
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.worker.inputs.device_inputs import gather_inputs_after_upload
from slipstream.worker.inputs.feature_inputs import cross_groups, shared_prefixes, state_places
from slipstream.worker.inputs.rows import IntArray, LongArray, RowTable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The requests of a step that sample, in the plan's order, and rows and positions of their N tokens.

    A request has `num_sampled` tokens, in the order of their positions.
    """

    requests: tuple[ScheduledRequest, ...]
    rows: Tensor  # int32 or int64 [N]
    positions: Tensor  # the same

    @property
    def names(self) -> list[str]:
        """Id of each request."""
        return [s.request_id for s in self.requests]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Request id of each of the N tokens."""
        return tuple([s.request_id for s in self.requests for _ in range(s.num_sampled)])

    @property
    def num_tokens(self) -> tuple[int, ...] | None:
        """Number of tokens of each request; None: one each."""
        counts = tuple([s.num_sampled for s in self.requests])
        return None if len(counts) == len(self.rows) else counts

    def wanted_logprobs(self, table: RowTable) -> tuple[list[int], list[int]]:
        """(indices of tokens with log-probabilities, number of alternatives that each needs)."""
        if not table.wanted("logprobs", self.names):
            return [], []
        wanted = [table.rows[i].sampling.logprobs for i in self.request_ids]
        which = [i for i, k in enumerate(wanted) if k is not None]
        return which, [wanted[i] or 0 for i in which]


NO_ROWS: Any = np.empty(0, np.int64)
NOTHING_SAMPLED = SampledRows(requests=(), rows=NO_ROWS, positions=NO_ROWS)
"""`SampledRows` for tokens that belong to no plan: nothing is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredInputs:
    """One step's inputs, on the device."""

    token_ids: Tensor  # int32 [T]
    meta: AttentionMetadata
    # int64 [N]: indices of the tokens whose logits are sampled; None: all tokens
    sample_index: Tensor | None
    sampled: SampledRows


def laid_out(
    rows: LongArray, computed: LongArray, lengths: LongArray
) -> tuple[LongArray, LongArray, LongArray]:
    """Concatenate requests' tokens: `lengths` tokens after `computed` ones, in `rows`, each [S].

    Returns the row [T] and position [T] of each token, and the starts of the requests [S + 1].
    """
    starts = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    request_of = np.arange(len(rows)).repeat(lengths)
    return rows[request_of], np.arange(starts[-1]) + (computed - starts[:-1])[request_of], starts


PADDING = ScheduledRequest("", 0, 1, 0)
"""A rank's share of a step if it has no requests: one token of the null row."""


def gather(table: RowTable, plan: StepPlan, *, ahead: int = 0) -> GatheredInputs:
    """Gather the inputs of `plan`, whose rows are in `table`.

    The token of position p is the one at p + `ahead`. On a GPU this is one upload, and the rows are
    read on the device. On a CPU NumPy reads them: its calls cost a tenth of torch's, and a step of
    one request takes only about 2 ms.
    """
    scheduled = plan.scheduled or (PADDING,)
    num_seqs = len(scheduled)
    rows = np.array(
        [table.rows[s.request_id].index for s in plan.scheduled] or [table.capacity], np.int64
    )
    computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
    num_new = [s.num_tokens for s in scheduled]
    max_query_len = max(num_new)
    lengths = np.array(num_new, np.int64)
    seq_lens = computed + lengths
    requests = tuple([s for s in scheduled if s.num_sampled])
    if max_query_len == 1:
        token_rows, positions, num_decodes, from_start = rows, computed, num_seqs, False
        starts = np.arange(num_seqs + 1)
    else:
        token_rows, positions, starts = laid_out(rows, computed, lengths)
        num_decodes = int(np.argmax(lengths != 1))
        from_start = not computed[num_decodes:].any()
    index = None
    if max_query_len == 1 and len(requests) == num_seqs:
        sample_rows, sample_positions = rows, seq_lens + ahead
    else:
        counts = np.array([s.num_sampled for s in scheduled], np.int64)
        sample_rows, last, _ = laid_out(rows, seq_lens - counts, counts)
        sample_positions = last + 1 + ahead  # the positions of the tokens that follow
        if len(last) < len(positions):
            index = laid_out(rows, starts[1:] - counts, counts)[1]
    arrays: list[Any] = [token_rows, positions, starts, seq_lens, rows]
    arrays += [sample_rows, sample_positions]
    if index is not None:
        arrays.append(index)
    of_states: list[IntArray] = (
        [] if table.states is None else state_places(table, plan, rows, starts, num_decodes)
    )
    arrays += of_states
    longest = 0
    if table.cross is not None:
        longest = max([table.rows[s.request_id].num_encoder_tokens for s in scheduled])
    on_host = table.platform.kind == "cpu"
    look = _gather_inputs_on_host if on_host else gather_inputs_after_upload
    token_ids, meta, (sample_rows_d, sample_positions_d, *indices) = look(
        table,
        arrays,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max(seq_lens.tolist()),
        from_start=from_start,
        max_encoder_len=longest,
        ahead=ahead,
    )
    if of_states:
        *indices, read, write, chunks = indices
        states = StateMetadata(read=read, write=write, chunks=chunks.reshape(-1, 3))
        meta = dataclasses.replace(meta, states=states)
    if plan.shared and table.ops.shares_prefixes:
        meta = meta.sharing(
            SharedPrefixes(*table.upload(shared_prefixes(plan.shared, num_decodes)).unbind(0))
        )
    if plan.largest is not None:
        meta = dataclasses.replace(meta, most_tokens=plan.largest.num_tokens)
    return GatheredInputs(
        token_ids=token_ids,
        meta=meta,
        sample_index=indices[0] if indices else None,
        sampled=SampledRows(requests=requests, rows=sample_rows_d, positions=sample_positions_d),
    )


def _gather_inputs_on_host(
    table: RowTable,
    arrays: list[LongArray],
    *,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    from_start: bool,
    max_encoder_len: int,
    ahead: int,
) -> tuple[Tensor, AttentionMetadata, list[Tensor]]:
    """`gather_inputs` with NumPy."""
    numpy, made = table.platform.values.array, table.upload
    token_rows, positions, starts, seq_lens, rows, *more = arrays
    tokens, size, own = numpy(table.tokens), table.block_size, range(table.num_own)
    columns, offsets = positions // size, positions % size
    first, *others = [numpy(table.block_tables[g]) for g in own]
    num_blocks = -(-max_seq_len // size)

    def tables(blocks: IntArray) -> tuple[Tensor, Tensor]:
        slots = blocks[token_rows, columns] * np.int64(size) + offsets
        return made(blocks[rows, :num_blocks]), made(slots)

    block_table, slot_mapping = tables(first)
    meta = AttentionMetadata(
        query_start_loc=made(starts.astype(np.int32)),
        seq_lens=made(seq_lens.astype(np.int32)),
        block_table=block_table,
        slot_mapping=slot_mapping,
        positions=made(
            positions
            if table.position_shifts is None
            else positions + numpy(table.position_shifts)[token_rows]
        ),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        from_start=from_start,
    )
    meta = meta.with_groups(
        *(dataclasses.replace(meta, block_table=t, slot_mapping=s) for t, s in map(tables, others)),
        *(() if table.cross is None else cross_groups(table, meta, made(rows), max_encoder_len)),
    )
    num_long = len(more) - (0 if table.states is None else 3)
    of_states = [made(a.astype(np.int32)) for a in more[num_long:]]
    return (
        made(tokens[token_rows, positions + ahead]),
        meta,
        [*(made(a) for a in more[:num_long]), *of_states],
    )
