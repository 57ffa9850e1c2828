"""Input layout of a captured step with decodes and prompts: one array, one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.types import ScheduledRequest
from slipstream.worker.input_batch import gather_inputs, laid_out
from slipstream.worker.rows import RowTable
from slipstream.worker.step_shape import num_leading_decodes

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

    def __init__(self, inputs: Any, size: Size, most_prompts: int) -> None:
        num_seqs = size[0] + most_prompts
        parts = [inputs[begin:end] for begin, end in _bounds(size, num_seqs)]
        self.token_rows, self.positions = parts[:2]  # [T]
        # [T]: sampled tokens, and the rows and positions to write them to
        self.sample_index, self.sample_rows, self.sample_positions = parts[2:5]
        self.seq_lens, self.rows = (part[:num_seqs] for part in parts[5:7])  # [S]
        self.starts = parts[7]  # [S + 1]: starts of the sequences

    @staticmethod
    def sampled(inputs: Any, size: Size) -> Any:
        """`sample_index`, `sample_rows` and `sample_positions` as one array [3, T]."""
        (begin, _), _, (_, end) = _bounds(size, 0)[2:5]
        return inputs[begin:end].reshape(3, -1)

    @staticmethod
    def length(size: Size, most_prompts: int) -> int:
        num_seqs = size[0] + most_prompts
        return 5 * sum(size) + 2 * padded_room(num_seqs) + num_seqs + 1


@cache
def _bounds(size: Size, num_seqs: int) -> tuple[tuple[int, int], ...]:
    """Begin and end of each part of `MixedInputs`."""
    room = padded_room(num_seqs)
    ends = accumulate((*(5 * [sum(size)]), room, room, num_seqs + 1))
    return tuple(pairwise((0, *ends)))


def mixed_inputs(
    table: RowTable, scheduled: Sequence[ScheduledRequest], size: Size, most_prompts: int
) -> tuple[npt.NDArray[np.int32], tuple[ScheduledRequest, ...], int]:
    """Build a step's inputs for the graph of `size`.

    Returns (inputs, sequences that sample, number of sampled positions). Free places of decodes and
    of sampled tokens have the null row. Padding tokens of prompts form one sequence of the null
    row, all at position 0.
    """
    num_decodes = num_leading_decodes(scheduled)
    host = np.zeros(MixedInputs.length(size, most_prompts), np.int32)
    to, first = MixedInputs(host, size, most_prompts), size[0]
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
    return host, tuple(s for s in scheduled if s.num_sampled), n


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
    return token_ids, kv, meta
