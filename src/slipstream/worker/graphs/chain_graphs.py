"""CUDA graphs of a chain of a draft head or model: newly verified tokens, then draft after draft.

A pass of a head is a dozen small kernels, and a pass of a model some hundred. Launched one by one,
K drafts would cost more than the step that verifies them. A graph is a single launch. Its shape is
fixed:

1. Every sequence computes its last tokens, as many as a verified step can leave uncomputed. These
   are K + 1 pairs of a head, or two tokens of a model, whose accepted drafts stay valid. Tokens
   already computed yield the same result again. Each token is a row of its own, like a decode's. If
   more tokens are missing, they are computed op by op first.
2. Padding is the null row. A sequence that needs no more drafts also becomes padding.
3. Drafts are the most likely tokens, also for requests that sample at random. Drafts sampled with
   the same random numbers are accepted somewhat more often, but run op by op: a draft would take
   the host 2 ms.

A chain may be launched right after the draw of the step that verifies the previous drafts
(`run_ahead`). The graph itself then determines which of those were accepted, and so where the chain
begins. So the GPU works while the host processes the step's result and launches the next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import CAUGHT_UP, chain_depths, chain_sizes
from slipstream.kernels.chains import ChainPlaces
from slipstream.kernels.metadata import AttentionMetadata, JoinedSteps
from slipstream.messages.steps import ScheduledRequest
from slipstream.worker.graphs.graph_store import Captured, GraphStore
from slipstream.worker.inputs.device_inputs import gather_inputs
from slipstream.worker.inputs.rows import RowTable

_OF_SEQUENCE = ("seq_lens", "block_table", "positions", "slot_mapping")
"""Metadata fields with one entry per sequence of one token."""


class ChainPasses(Protocol):
    """The methods of `drafter.Chain` that a graph needs."""

    first: int
    keeps_drafts: bool
    num_cold: int

    def see(self, requests: Sequence[ScheduledRequest], rows: RowTable) -> None: ...

    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: Any, num: int
    ) -> tuple[Tensor, Any]:
        """Run a pass on tokens [T], as device work only.

        Returns the likeliest tokens [num] after the last `num` tokens, and the states from which
        the next pass starts. `states` is None in the first pass.
        """


class ChainGraphs(GraphStore):
    """Graphs of chains.

    `depths` are the chain lengths, ascending. `max_model_len` is the longest sequence in tokens.
    """

    def __init__(
        self,
        drafter: ChainPasses,
        rows: RowTable,
        depths: Sequence[int],
        *,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        super().__init__(rows.platform)
        self.drafter, self.rows, self.max_model_len = drafter, rows, max_model_len
        self.depths = tuple(depths)
        self.sizes = chain_sizes(max_num_seqs)
        # Drafts of each row's last chain [C + 1, K]. A step overwrites the row itself with the
        # tokens that it samples.
        self._last_drafts = torch.zeros(
            rows.capacity + 1, max(self.depths, default=1), dtype=torch.int32, device=rows.device
        )

    @classmethod
    def of(cls, drafter: ChainPasses, rows: RowTable, config: EngineConfig) -> ChainGraphs:
        """Create the object, and capture all graphs that are needed."""
        sizes = {
            "max_model_len": config.model.max_model_len,
            "max_num_seqs": config.scheduling.max_num_seqs,
        }
        graphs = cls(drafter, rows, chain_depths(config), **sizes)
        graphs.capture()
        return graphs

    def capture(self) -> None:
        """Capture all sizes, the largest first.

        The first step of an uncaptured size would take so long that the choice of draft counts
        would avoid that size.
        """
        for depth in reversed(self.depths):
            for size in reversed(self.sizes):
                self._graph(size, depth)

    def covers(self, drafted: Sequence[ScheduledRequest]) -> bool:
        """True if a graph can run these requests."""
        depth = self._depth_for(drafted, max(map(self._num_missed, drafted)))
        if depth is None or len(drafted) > self.sizes[-1]:
            return False
        return all(self._is_long_enough(s.num_computed_tokens, depth) for s in drafted)

    def run(self, drafted: Sequence[ScheduledRequest]) -> None:
        """Propose drafts after the requests' last tokens."""
        missed = [self._num_missed(s) for s in drafted]
        depth = self._depth_for(drafted, max(missed))
        assert depth is not None, "`covers` says no"
        if behind := [
            s for s, n in zip(drafted, missed, strict=True) if n >= self._num_again(depth)
        ]:
            self.drafter.see(behind, self.rows)
            self.drafter.num_cold += 1
        self._replay(drafted, [0] * len(drafted), depth)

    def kept_drafts(self, drafted: Sequence[ScheduledRequest]) -> Tensor:
        """Drafts [N] of the requests' last chains."""
        width = self._last_drafts.shape[1]
        begins = [self.rows.rows[s.request_id].index * width for s in drafted]
        where = [
            i
            for begin, s in zip(begins, drafted, strict=True)
            for i in range(begin, begin + len(s.drafts))
        ]
        return self._last_drafts.reshape(-1)[self.rows.upload(np.array(where, np.int64))]

    def run_ahead(self, drafted: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Propose equally many drafts again, right after the step that verifies these has sampled.

        Returns the requests for which this was possible, because they have enough room.
        """
        found = [s for s in drafted if self._has_room(s)]
        if not found or (depth := self._depth_for(found)) is None:
            return []
        found = [s for s in found if self._is_long_enough(s.num_computed_tokens + 1, depth)]
        if not found or len(found) > self.sizes[-1]:
            return []
        depth = self._depth_for(found)
        if depth is None or (self._size_for(len(found)), depth) not in self._captured:
            return []
        self._replay(found, [s.num_sampled for s in found], depth)
        return found

    def _has_room(self, s: ScheduledRequest) -> bool:
        """Whether another chain of the same length fits even if all drafts are accepted.

        It must fit into the context and into the request's blocks. The drafts are compared with
        those kept of the last chain, so all of them must be from that chain.
        """
        last, row = s.num_computed_tokens + s.num_sampled, self.rows.rows[s.request_id]
        if len(s.drafts) + 1 != s.num_sampled or last + len(s.drafts) > self.max_model_len:
            return False
        room = row.num_blocks * self.rows.block_size
        return row.num_kept >= len(s.drafts) and last + len(s.drafts) - self.drafter.first <= room

    def _replay(
        self, drafted: Sequence[ScheduledRequest], sampled: Sequence[int], depth: int
    ) -> None:
        size = self._size_for(len(drafted))
        captured = self._graph(size, depth)
        host, count = self.idle(size, depth), len(drafted)
        host[0, :count] = [self.rows.rows[s.request_id].index for s in drafted]
        host[1, :count] = [s.num_computed_tokens for s in drafted]
        host[2, :count] = [len(s.drafts) for s in drafted]
        host[3, :count] = sampled
        self.platform.upload_into(captured.inputs, host)
        captured.graph.replay()
        for s in drafted:
            self.rows.rows[s.request_id].num_kept = len(s.drafts)

    def _graph(self, size: int, num_drafts: int) -> Captured:
        known = self._captured.get((size, num_drafts))
        idle = self.idle(size, num_drafts)
        return known or self._capture(
            (size, num_drafts), idle, lambda inputs: self.chain(inputs, size, num_drafts)
        )

    def _size_for(self, num_seqs: int) -> int:
        return next(n for n in self.sizes if n >= num_seqs)

    def _depth_for(self, drafted: Sequence[ScheduledRequest], num_missed: int = 0) -> int | None:
        """The shortest chain length that holds all drafts; None if there is none.

        Preferred are lengths whose first pass computes more than `num_missed` tokens.
        """
        most = max(len(s.drafts) for s in drafted)
        found = [d for d in self.depths if d >= most]
        return next(
            (d for d in found if self._num_again(d) > num_missed), found[0] if found else None
        )

    def _num_missed(self, s: ScheduledRequest) -> int:
        """Number of tokens before the last that were not computed."""
        return s.num_computed_tokens - max(
            self.drafter.first, self.rows.rows[s.request_id].num_drafted
        )

    def _num_again(self, num_drafts: int) -> int:
        """Number of tokens per sequence that the first pass computes."""
        return CAUGHT_UP if self.drafter.keeps_drafts else num_drafts + 1

    def _is_long_enough(self, last: int, depth: int) -> bool:
        """True if a sequence has as many tokens as the first pass computes.

        Its last token is at position `last`.
        """
        return last + 1 - self.drafter.first >= self._num_again(depth)

    def idle(self, size: int, num_drafts: int) -> npt.NDArray[np.int32]:
        """Inputs that consist of padding.

        The rows of the array are: table rows, positions of the last known tokens, numbers of
        drafts, and numbers of tokens that the previous step has sampled after the known ones. Each
        begins at a multiple of 16 bytes.
        """
        inputs = np.zeros((4, -(-size // 4) * 4), dtype=np.int32)
        inputs[0], inputs[1] = self.rows.capacity, num_drafts + 1
        return inputs

    def chain(self, inputs: Tensor, size: int, num_drafts: int) -> Tensor:
        """Propose `num_drafts` tokens for each of `size` sequences, and write them to their rows.

        Returns the drafts [S, K]. Device work only.
        """
        drafter, again, ops = self.drafter, self._num_again(num_drafts), self.rows.ops
        sizes = {"num_drafts": num_drafts, "size": size, "num_again": again, "first": drafter.first}
        places = ops.chain_places(self.rows.tokens, self._last_drafts, inputs, **sizes)
        token_ids, every = self._inputs(places)
        count = again * size
        tokens, states = drafter.likeliest(token_ids[:count], _some(every, 0, count), None, size)
        found = [tokens]
        behind = _some(every, places.begin, (num_drafts - 1) * places.room)
        for i in range(num_drafts - 1):
            meta = dataclasses.replace(
                _some(behind, i * places.room, size),
                of_steps=JoinedSteps(behind, i, num_drafts - 1),
            )
            tokens, states = drafter.likeliest(tokens, meta, states, size)
            found.append(tokens)
        drafts = torch.stack(found)
        columns = (
            torch.arange(num_drafts, dtype=torch.int32, device=inputs.device)[:, None]
            .expand(-1, size)
            .flatten()
        )
        self.rows.write(places.draft_rows, places.draft_positions, drafts.flatten())
        self.rows.write_into(self._last_drafts, places.draft_rows, columns, drafts.flatten())
        return drafts.T

    def _inputs(self, places: ChainPlaces) -> tuple[Tensor, AttentionMetadata]:
        """Returns the inputs of the chain's tokens [T]. Each token is treated as a sequence of its
        own, of which only the last token is computed."""
        return gather_inputs(
            self.rows,
            token_rows=places.rows,
            positions=places.positions,
            rows=places.rows,
            query_start_loc=torch.arange(
                len(places.rows) + 1, dtype=torch.int32, device=places.rows.device
            ),
            seq_lens=places.seq_lens,
            num_decodes=len(places.rows),
            max_query_len=1,
            max_seq_len=self.max_model_len,
            ahead=self.drafter.first,
        )


def _some(meta: AttentionMetadata, begin: int, count: int) -> AttentionMetadata:
    """Metadata of `count` sequences from `begin` on, each with one token."""
    parts = {name: getattr(meta, name)[begin : begin + count] for name in _OF_SEQUENCE}
    return dataclasses.replace(
        meta,
        num_decodes=count,
        groups=(),
        query_start_loc=meta.query_start_loc[: count + 1],
        **parts,
    )
