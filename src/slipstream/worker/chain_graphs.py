"""A draft head's whole chain as one CUDA graph: the pairs of the tokens that were verified since, then draft after draft.

A pass of a head is a dozen small kernels, so from the host K drafts would cost more than the step that verifies them. Here they
are one replay. For that the shape is fixed: every sequence computes its last K + 1 pairs, as many as a verified run can have
left behind; those that it has computed before come out the same. Sequences too many are the null row, and so is one from its
last wanted draft on. Drafts are the likeliest tokens: other ways of drawing depend on the request, and run op by op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.plan.graph_sizes import ladder
from slipstream.types import ScheduledRequest
from slipstream.worker.graphs import PATIENCE, Captured, Graphs
from slipstream.worker.input_batch import RowTable, gather_inputs

if TYPE_CHECKING:
    from slipstream.worker.draft_head import ChainDrafter

MOST_SEQS = 64
"""Sequences of the largest graph. With more the GPU is busy for longer than the host launches it."""

DEPTHS = (1, 3, 5, 8)
"""Lengths of chains where the number of drafts is chosen at each step. A chain runs in the next longer graph; beyond, op by
op."""

FIRST_SIZES = (1, 8)
"""Numbers of sequences that are captured at the start; the others when they are wanted."""


class ChainGraphs(Graphs):
    """`max_model_len` tokens are the longest sequence. `depths`: the lengths of chains."""

    def __init__(
        self, drafter: ChainDrafter, rows: RowTable, depths: Sequence[int], *, max_model_len: int, max_num_seqs: int
    ) -> None:
        super().__init__(rows.device)
        self.drafter, self.rows, self.max_model_len = drafter, rows, max_model_len
        self.depths = sorted(d for d in depths if 2 * d < max_model_len)
        self.sizes = [n for n in ladder(max_num_seqs) if n <= MOST_SEQS]
        self._wanted: Counter[tuple[int, int]] = Counter()

    def capture(self) -> None:
        """Some sizes, the largest first."""
        for depth in reversed(self.depths):
            for size in reversed(FIRST_SIZES):
                if size in self.sizes:
                    self._graph(size, depth)

    def covers(self, drafted: Sequence[ScheduledRequest]) -> bool:
        """Whether a graph can run these. It counts the sizes that are wanted and not captured."""
        most = self._depth_for(drafted)
        if most is None or len(drafted) > self.sizes[-1]:
            return False
        if not self.rows.is_greedy([s.request_id for s in drafted]):
            return False
        for s in drafted:
            seen = max(1, self.rows.rows[s.request_id].num_drafted)
            if s.num_computed_tokens < most + 1 or s.num_computed_tokens + 1 - seen > most + 1:
                return False
        size = self._size_for(len(drafted)), most
        self._wanted[size] += 1
        return size in self._captured or self._wanted[size] >= PATIENCE

    def run(self, drafted: Sequence[ScheduledRequest]) -> None:
        size, most = self._size_for(len(drafted)), self._depth_for(drafted)
        assert most is not None, "`covers` says no"
        captured = self._graph(size, most)
        host = self.idle(size, most)
        host[0, : len(drafted)] = [self.rows.rows[s.request_id].index for s in drafted]
        host[1, : len(drafted)] = [s.num_computed_tokens for s in drafted]
        host[2, : len(drafted)] = [len(s.drafts) for s in drafted]
        captured.inputs.copy_(self.platform.upload(host), non_blocking=True)
        captured.graph.replay()

    def _graph(self, size: int, num_drafts: int) -> Captured:
        known = self._captured.get((size, num_drafts))
        idle = self.idle(size, num_drafts)
        return known or self._capture((size, num_drafts), idle, lambda inputs: self.chain(inputs, size, num_drafts))

    def _size_for(self, num_seqs: int) -> int:
        return next(n for n in self.sizes if n >= num_seqs)

    def _depth_for(self, drafted: Sequence[ScheduledRequest]) -> int | None:
        most = max(len(s.drafts) for s in drafted)
        return next((d for d in self.depths if d >= most), None)

    def idle(self, size: int, num_drafts: int) -> npt.NDArray[np.int32]:
        """Rows, places of the last tokens, and drafts that are wanted, of nothing but padding; each begins at a multiple of 16
        bytes."""
        inputs = np.zeros((3, -(-size // 4) * 4), dtype=np.int32)
        inputs[0], inputs[1] = self.rows.capacity, num_drafts + 1
        return inputs

    def chain(self, inputs: Tensor, size: int, num_drafts: int) -> Tensor:
        """Device work only: `num_drafts` tokens behind each of `size` sequences' last one, written to their rows; [S, K]."""
        rows, last, wanted = inputs[:, :size].unbind(0)
        drafter, head, count, device = self.drafter, self.drafter.head, num_drafts + 1, inputs.device
        steps = torch.arange(count, dtype=torch.int32, device=device)
        token_ids, meta = gather_inputs(
            self.rows,
            token_rows=rows[:, None].expand(-1, count).reshape(-1),
            positions=(last[:, None] - count + steps).flatten(),
            rows=rows,
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device) * count,
            seq_lens=last.contiguous(),
            num_decodes=0,
            max_query_len=count,
            max_seq_len=self.max_model_len,
            ahead=1,
        )
        hidden, following = head.forward(token_ids, drafter.states.read(meta), drafter.kv, meta)
        hidden, following = (x[count - 1 :: count].contiguous() for x in (hidden, following))
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        found = []
        for i in range(num_drafts):
            if i:
                own = self._wanting(rows, wanted, i)  # no block is theirs beyond what they want
                place = (last + (i - 1)).masked_fill(wanted <= i, 0)  # nor a place, which may be beyond the context
                token_ids, meta = gather_inputs(
                    self.rows,
                    token_rows=own,
                    positions=place,
                    rows=own,
                    query_start_loc=starts,
                    seq_lens=place + 1,
                    num_decodes=size,
                    max_query_len=1,
                    max_seq_len=self.max_model_len,
                    ahead=1,
                )
                hidden, following = head.forward(token_ids, following, drafter.kv, meta)
            tokens = drafter.own_tokens(head.greedy(hidden))
            self.rows.write(self._wanting(rows, wanted, i), (last + (i + 1)).masked_fill(wanted <= i, 0), tokens)
            found.append(tokens)
        return torch.stack(found, 1)

    def _wanting(self, rows: Tensor, wanted: Tensor, i: int) -> Tensor:
        """The rows that want a draft i; the null row in the others' places. `torch.where` with a number would copy it from host
        memory, which is gone when the graph is replayed."""
        return rows.masked_fill(wanted <= i, self.rows.capacity)
