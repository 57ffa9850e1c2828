"""Proposes draft tokens on the device, for requests whose drafts a plan leaves open (`FROM_MODEL`).

1. A drafter proposes at the beginning of a step. It samples like the request: with its filters,
   penalties and biases, and with the random number that the engine's model will use at that
   position. If both models have the same distribution they sample the same token, and a seed gives
   the same answer as without drafts (communication-free coupling: Daliri, Musco and Suresh 2024).
2. The worker keeps the tokens that the engine's model samples. So the answer's distribution is that
   of plain sampling, whatever was proposed.
3. A drafter keeps its state of a request in its own tensors, in the blocks of the request's full
   group. It computes nothing for a request without drafts. When drafts are wanted, it first
   computes the tokens that it has not processed yet (`Row.num_drafted`). After a prefix hit or a
   preemption these are all tokens.

No torch here: a drafter's caller gives it tensors or arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import EngineConfig
from slipstream.kernels.cache.tensors import cache_parts
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.steps import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.spec.model import LayerSpec
from slipstream.worker.draft.memory import DraftMemory
from slipstream.worker.inputs.rows import RowTable

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.platform.collectives import Pipe
    from slipstream.worker.graphs.chain_graphs import ChainGraphs


class Drafter(ABC):
    """Base of all drafters. `allocate` must precede `write_drafts`."""

    weights_bytes: int
    layers: tuple[LayerSpec, ...]
    """Layers of the drafter that have keys and values, which are kept in the requests' blocks."""
    first = 0
    """Index of the first token of a request that the drafter computes. This token's keys and values
    are at position 0."""
    computes_all = True
    """True if it computes all tokens of a request, and must catch up after steps without drafts."""
    num_cold = 0
    """Number of proposals that first caught up on more tokens than a step with drafts adds.

    The counterpart of `Forward.num_cold`.
    """
    pipe: Pipe | None = None
    """Set on a pipeline's last stage: connection over which the first stage gets the drafts (`worker/draft/stages.py`)."""

    def __init__(self, config: EngineConfig, memory: DraftMemory) -> None:
        self.memory = memory
        self.max_tokens = config.scheduling.max_num_batched_tokens
        self.block_size = config.cache.block_size
        self.kv: list[LayerKV] = []
        self._block_rows: Any = None

    # --- Memory -------------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes that the drafter adds to each KV block."""
        return (
            sum(layer.self_attention.cached_size for layer in self.layers)
            * self.memory.itemsize
            * self.block_size
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of activations per token of a step; 0 if unknown."""
        return 0

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:  # noqa: B027 (where bytes are known beforehand)
        """Run on a step of dummy prompts, while memory is measured."""

    def allocate(self, num_blocks: int) -> None:
        self.kv = self.make_cache(num_blocks)
        self._block_rows = self.memory.ops.block_rows(self.block_parts())

    def release(self) -> None:
        self.kv.clear()
        self._block_rows = None

    def block_parts(self) -> list[Any]:
        """Arrays that hold a part of every block each."""
        return cache_parts(self.kv)

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        return [self.memory.layer(layer, num_blocks, self.block_size) for layer in self.layers]

    def graph_bytes(self, config: EngineConfig) -> int:
        """Bytes of memory to reserve for the drafter's graphs."""
        return 0

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:  # noqa: B027 (most have none)
        """Capture the drafter's graphs, on a GPU."""

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        self.memory.ops.copy_blocks(self._block_rows, self._block_rows, source, target)

    # --- Drafts -------------------------------------------------------------------------------------------------------

    def write_drafts(self, plan: StepPlan, rows: RowTable) -> list[ScheduledRequest]:
        """Write drafts after the last tokens of the requests that want some.

        Returns these requests.
        """
        for s in plan.scheduled:
            # forget the rejected drafts of the previous step, even if this step wants none
            row = rows.rows[s.request_id]
            row.num_drafted = min(row.num_drafted, s.num_computed_tokens)
            if FROM_MODEL not in s.drafts:
                row.ahead = range(0)
        drafted = [s for s in plan.scheduled if FROM_MODEL in s.drafts]
        if drafted and self.computes_all:
            added = 1 + max(len(s.drafts) for s in drafted)
            seen = (max(self.first, rows.rows[s.request_id].num_drafted) for s in drafted)
            self.num_cold += any(
                s.num_computed_tokens - n > added for s, n in zip(drafted, seen, strict=True)
            )
        if drafted:
            self.draft(drafted, rows)
            if self.pipe is not None:
                self.pipe.send_back(self.tokens_of(drafted, rows).long())
        return drafted

    def tokens_of(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> Tensor:
        """Drafts [N] of the requests, which are in their rows until the step has sampled."""
        where: list[int] = []
        width = rows.tokens.shape[1]
        for s in drafted:
            first = rows.rows[s.request_id].index * width + s.num_computed_tokens + 1
            where.extend(range(first, first + len(s.drafts)))
        return rows.tokens.reshape(-1)[rows.upload(np.array(where, np.int64))]

    def kept_drafts(
        self, drafted: Sequence[ScheduledRequest], rows: RowTable
    ) -> Callable[[], Tensor] | None:
        """Function that returns the drafts even after sampling, which overwrites those in the rows.
        None if the drafter keeps no copies.
        """
        return None

    def go_ahead(self, plan: StepPlan, rows: RowTable) -> None:  # noqa: B027 (most do not)
        """Launch the part of the next `write_drafts` that is already known after `plan` has
        sampled. The GPU is busy now, so the launch delays nothing; during `write_drafts` it would
        be idle.
        """

    @abstractmethod
    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Propose drafts and write them after each request's last token. A request gets as many as
        its entry in the plan has `drafts`."""

    def unseen(
        self, drafted: Sequence[ScheduledRequest], rows: RowTable, counts: Sequence[int]
    ) -> Iterator[list[ScheduledRequest]]:
        """Yields steps that compute the tokens which the drafter has not computed yet.

        In the last of these steps a request computes `counts` tokens, the first of which is its
        last known token. A token is sampled after each of them.
        """
        begins = {
            s.request_id: max(self.first, rows.rows[s.request_id].num_drafted) for s in drafted
        }
        while True:
            room, shares = self.max_tokens, []
            for s, own in zip(drafted, counts, strict=True):
                begin, last = begins[s.request_id], s.num_computed_tokens
                if count := min(last + own - begin, room):
                    shares.append(
                        ScheduledRequest(
                            s.request_id, begin, count, max(0, begin + count - max(begin, last))
                        )
                    )
                    begins[s.request_id] += count
                    room -= count
            if not shares:
                return
            yield sorted(shares, key=lambda s: s.num_tokens > 1)


class Chain(Drafter):
    """Drafter that proposes token by token, each from the previous ones.

    On a GPU a chain is a CUDA graph (`worker/graphs/chain_graphs.py`).
    """

    keeps_drafts = True
    """True if the chain's state of a draft stays valid when the draft is accepted."""
    graphs: ChainGraphs | None = None

    def release(self) -> None:
        super().release()
        self.graphs = None

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:
        from slipstream.worker.graphs.chain_graphs import ChainGraphs

        self.graphs = ChainGraphs.of(self, rows, config)

    @abstractmethod
    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: Any, num: int
    ) -> tuple[Tensor, Any]:
        """Run one pass. Returns (the most likely tokens [num] after the last ones, states from
        which the next pass starts)."""

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        left = [s for s in drafted if not self._is_ahead(s, rows)]
        for s in left:
            rows.rows[s.request_id].num_kept = 0
        if left and self.graphs is not None and self.graphs.covers(left):
            self.graphs.run(left)
        elif left:
            self.run_passes(left, rows)
        for s in drafted:
            row = rows.rows[s.request_id]
            row.num_drafted = s.num_computed_tokens + (len(s.drafts) if self.keeps_drafts else 1)
            row.ahead = range(0)

    def go_ahead(self, plan: StepPlan, rows: RowTable) -> None:
        if self.graphs is None:
            return
        drafting = [s for s in plan.scheduled if FROM_MODEL in s.drafts]
        for s in self.graphs.run_ahead(drafting):
            computed = s.num_computed_tokens
            rows.rows[s.request_id].ahead = range(computed + 1, computed + 1 + s.num_sampled)
        if drafting or all(s.num_tokens > 1 for s in plan.scheduled):
            # in steps with decodes without drafts, prompts get none either
            self._see_prompts(plan, rows)

    def kept_drafts(
        self, drafted: Sequence[ScheduledRequest], rows: RowTable
    ) -> Callable[[], Tensor] | None:
        if self.graphs is None or any(
            len(s.drafts) > rows.rows[s.request_id].num_kept for s in drafted
        ):
            return None
        return partial(self.graphs.kept_drafts, drafted)

    def see(self, requests: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Compute the tokens that the drafter has not processed, except each request's last one."""
        for shares in self.unseen(requests, rows, [0] * len(requests)):
            self.step(shares, rows)
        for s in requests:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens

    def run_passes(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Run a chain without a graph."""
        self.catch_up(drafted, rows)
        for i in range(1, max(len(s.drafts) for s in drafted)):
            self.step(
                [
                    ScheduledRequest(s.request_id, s.num_computed_tokens + i, 1, 1)
                    for s in drafted
                    if len(s.drafts) > i
                ],
                rows,
                follows=True,
            )

    def catch_up(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Compute the requests' unprocessed tokens, and sample each one's first draft."""
        for shares in self.unseen(drafted, rows, [1] * len(drafted)):
            self.step(shares, rows)

    @abstractmethod
    def step(
        self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False
    ) -> None:
        """Compute each request's share of tokens, and sample the next token if the share samples.

        `follows`: the share's single token is a draft of the previous step.
        """

    @staticmethod
    def _is_ahead(s: ScheduledRequest, rows: RowTable) -> bool:
        """Tells whether a chain launched ahead has already proposed this request's drafts."""
        row = rows.rows[s.request_id]
        return s.num_computed_tokens in row.ahead and len(s.drafts) <= row.num_kept

    def _see_prompts(self, plan: StepPlan, rows: RowTable) -> None:
        """Compute the prompts in `plan`, so that their first drafts can be computed by a graph.

        Op by op this takes the host 2 ms. It has that time while the GPU computes the step, whereas
        `write_drafts` would keep the GPU waiting.
        """
        behind = [
            s._replace(num_computed_tokens=s.num_computed_tokens + s.num_tokens)
            for s in plan.scheduled
            if _is_prompt(s)
        ]
        self.see(
            [
                s
                for s in behind
                if s.num_computed_tokens > max(self.first, rows.rows[s.request_id].num_drafted)
            ],
            rows,
        )


def _is_prompt(s: ScheduledRequest) -> bool:
    return s.num_tokens > 1 and not s.drafts
