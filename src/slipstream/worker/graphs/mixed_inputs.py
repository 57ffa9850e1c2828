"""Input layout of a captured step with decodes and prompts: one array, one copy to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.states import CHUNK, SHORT, StateMetadata, chunk_table
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.worker.inputs.device_inputs import gather_inputs
from slipstream.worker.inputs.input_batch import laid_out
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.step_shape import num_leading_decodes

Size: TypeAlias = tuple[int, int]
"""(decodes or texts, tokens after them) that a graph has room for."""


def padded_room(num_tokens: int) -> int:
    """Round up to 4 int32 values, so that the next part begins at a multiple of 16 bytes."""
    return -(-num_tokens // 4) * 4


class MixedInputs:
    """The parts of a mixed step's inputs (an array or a tensor).

    There is room for D decodes and P prompt tokens: T = D + P tokens of S = D + `most_prompts`
    sequences. Each part begins at a multiple of 16 bytes.
    """

    def __init__(
        self, inputs: Any, size: Size, most_prompts: int, has_states: bool = False
    ) -> None:
        num_seqs = size[0] + most_prompts
        chunks = chunk_room(size, most_prompts) if has_states else 0
        parts = [inputs[begin:end] for begin, end in _bounds(size, num_seqs, chunks)]
        self.token_rows, self.positions = parts[:2]  # [T]
        # [T]: indices of sampled tokens, and the rows and positions to which they are written
        self.sample_index, self.sample_rows, self.sample_positions = parts[2:5]
        self.seq_lens, self.rows = (part[:num_seqs] for part in parts[5:7])  # [S]
        self.starts = parts[7][: num_seqs + 1]  # [S + 1]: starts of the sequences
        # with recurrent layers: slots to read [S] and to write [T], and chunks (`StateMetadata`)
        self.read, self.write = parts[8][:num_seqs], parts[9]
        self.chunks = parts[10].reshape(-1, 3)

    @staticmethod
    def sampled(inputs: Any, size: Size) -> Any:
        """The parts `sample_index`, `sample_rows` and `sample_positions` as one array [3, T]."""
        (begin, _), _, (_, end) = _bounds(size, 0)[2:5]
        return inputs[begin:end].reshape(3, -1)

    @staticmethod
    def length(size: Size, most_prompts: int, has_states: bool = False) -> int:
        chunks = chunk_room(size, most_prompts) if has_states else 0
        return _bounds(size, size[0] + most_prompts, chunks)[-1][1]


MAX_MARKS = 64
"""Maximum states that a mixed graph stores besides those of sequences' last tokens, each an additional chunk."""


def chunk_room(size: Size, most_prompts: int) -> int:
    """Number of chunks of recurrent states that a graph has room for; a multiple of 4."""
    return padded_room(size[1] // CHUNK + most_prompts + MAX_MARKS)


def num_marks(plan: StepPlan) -> int:
    """Number of states that a step stores besides those of its sequences' last tokens."""
    drafts = (s.num_sampled - 1 for s in plan.scheduled if s.num_tokens > SHORT and s.num_sampled)
    return len(plan.state_marks) + sum(drafts)


@cache
def _bounds(size: Size, num_seqs: int, num_chunks: int = 0) -> tuple[tuple[int, int], ...]:
    """(begin, end) of each part of `MixedInputs` in the array. The parts of states are empty if
    there are no chunks."""
    room, starts, num_tokens = padded_room(num_seqs), padded_room(num_seqs + 1), sum(size)
    of_states = (room, num_tokens, 3 * num_chunks) if num_chunks else (0, 0, 0)
    ends = accumulate((*(5 * [num_tokens]), room, room, starts, *of_states))
    return tuple(pairwise((0, *ends)))


def mixed_inputs(
    table: RowTable, plan: StepPlan, size: Size, most_prompts: int
) -> tuple[npt.NDArray[np.int32], tuple[ScheduledRequest, ...], int]:
    """Build a step's inputs for the graph of `size`.

    Returns (inputs, sequences that sample, number of sampled positions). Unused entries of decodes
    and of sampled tokens have the null row. Padding tokens of prompts form one sequence of the null
    row, all at position 0.
    """
    scheduled, has_states = plan.scheduled, table.states is not None
    num_decodes = num_leading_decodes(scheduled)
    host = np.zeros(MixedInputs.length(size, most_prompts, has_states), np.int32)
    to, first = MixedInputs(host, size, most_prompts, has_states), size[0]
    own = np.array([table.rows[s.request_id].index for s in scheduled], np.int64)
    computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
    ones = num_decodes * [1]
    lengths = np.array(ones + [s.num_tokens for s in scheduled[num_decodes:]], np.int64)
    to.token_rows[:] = to.rows[:] = to.sample_rows[:] = table.capacity
    to.token_rows[:num_decodes] = to.rows[:num_decodes] = own[:num_decodes]
    to.positions[:num_decodes] = computed[:num_decodes]
    to.seq_lens[:num_decodes] = computed[:num_decodes] + 1
    to.starts[: first + 1] = np.arange(first + 1)
    of_tokens, at, begins = laid_out(
        own[num_decodes:], computed[num_decodes:], lengths[num_decodes:]
    )
    total, num_prompts = len(at), len(scheduled) - num_decodes
    to.token_rows[first : first + total] = of_tokens
    to.positions[first : first + total] = at
    prompts = slice(first, first + num_prompts)
    to.rows[prompts] = own[num_decodes:]
    to.seq_lens[prompts] = (computed + lengths)[num_decodes:]
    to.seq_lens[first + num_prompts] = size[1] - total
    to.starts[first : first + num_prompts + 1] = first + begins
    to.starts[first + num_prompts + 1 :] = sum(size)
    counts = np.array([s.num_sampled for s in scheduled], np.int64)
    # end of each sequence's tokens
    ends = np.concatenate((np.arange(1, num_decodes + 1), first + begins[1:]))
    rows, index, _ = laid_out(own, ends - counts, counts)
    n = len(rows)
    to.sample_rows[:n], to.sample_index[:n] = rows, index
    to.sample_positions[:n] = laid_out(own, computed + lengths - counts, counts)[1] + 1
    if has_states:
        _put_states(table, plan, to, first, num_decodes)
    return host, tuple(s for s in scheduled if s.num_sampled), n


def _put_states(
    table: RowTable, plan: StepPlan, to: MixedInputs, first: int, num_decodes: int
) -> None:
    """Write the slots of recurrent states that the sequences read and write."""
    starts, cuts = to.starts, np.zeros_like(to.write)
    for i, s in enumerate(plan.scheduled):
        place = i if i < num_decodes else first + i - num_decodes
        slots = table.host_slots[1][table.rows[s.request_id].index]
        end, count = starts[place + 1], max(1, s.num_sampled)
        to.read[place], to.write[end - count : end] = slots[0], slots[1 : 1 + count]
        if s.num_tokens > SHORT:
            cuts[end - count : end] = 1
    at = {s.request_id: first + i - num_decodes for i, s in enumerate(plan.scheduled)}
    for mark in plan.state_marks:
        token = starts[at[mark.request_id]] + mark.num_tokens - 1
        to.write[token], cuts[token] = mark.slot, 1
    chunks = chunk_table(starts.tolist(), cuts, first)
    to.chunks[: len(chunks)] = chunks


def mixed_step(
    table: RowTable, kv: Sequence[LayerKV], given: MixedInputs, size: Size, max_model_len: int
) -> tuple[Tensor, Sequence[LayerKV], AttentionMetadata]:
    """Arguments of `Forwards.hidden` for a mixed step: tokens [T], the cache, and the metadata."""
    token_ids, meta = gather_inputs(
        table,
        token_rows=given.token_rows,
        positions=given.positions,
        rows=given.rows,
        query_start_loc=given.starts,
        seq_lens=given.seq_lens,
        num_decodes=size[0],
        max_query_len=size[1],
        max_seq_len=max_model_len,
    )
    if table.states is not None:
        states = StateMetadata(read=given.read, write=given.write, chunks=given.chunks)
        meta = dataclasses.replace(meta, states=states)
    return token_ids, kv, meta
