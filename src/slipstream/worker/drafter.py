"""What guesses tokens on the device: the requests whose drafts a plan leaves open (`FROM_MODEL`) get them here.

A drafter proposes at the begin of a step. It samples as the request does: with its filters, penalties and biases, and with the
random number that the engine's model will draw with at that place. So where both think alike they draw the same token, and a
seed gives the answer that it gives without drafts (communication-free coupling: Daliri, Musco and Suresh 2024). The worker then
keeps what the engine's model draws, so the answer's distribution is that of plain sampling, whatever was proposed.

What it keeps of a request stands in the blocks of the request's full group, in tensors of its own. Of a request that has no
drafts it computes nothing. When drafts are wanted it first computes the tokens that it has not seen yet (`Row.num_drafted`),
after a prefix hit or a preemption from the first token on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, cache_tensors
from slipstream.kernels.ops import OpSet
from slipstream.platform import platform_of
from slipstream.spec.model import LayerSpec
from slipstream.types import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.worker.input_batch import RowTable


class Drafter(ABC):
    """`allocate` must come before `propose`."""

    weights_bytes: int
    layers: tuple[LayerSpec, ...]
    """Those whose keys and values it keeps."""
    num_graphs = 0
    """That it captures at the start."""

    def __init__(self, config: EngineConfig, *, ops: OpSet, device: torch.device, dtype: torch.dtype) -> None:
        self.ops, self.device, self.dtype = ops, device, dtype
        self.platform = platform_of(device)
        self.max_tokens = config.scheduling.max_num_batched_tokens
        self.block_size = config.cache.block_size
        self.kv: list[LayerKV] = []

    # --- Memory -------------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """What it adds to a block."""
        return sum(layer.attention.cached_size for layer in self.layers) * self.dtype.itemsize * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes that it takes for each of a step's tokens, where that is known."""
        return 0

    @abstractmethod
    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        """Run it over a step of made-up prompts, whose memory is measured."""

    def allocate(self, num_blocks: int) -> None:
        self.kv = self.make_cache(num_blocks)

    def release(self) -> None:
        self.kv.clear()

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        by_dim = self.ops.values_by_dim(self.dtype)

        def new(shape: tuple[int, ...]) -> Tensor:
            return self.platform.zeros(shape, self.dtype)

        size = self.block_size
        return [
            LayerKV(*cache_tensors(layer.attention, num_blocks, size, new, values_by_dim=by_dim))
            for layer in self.layers
        ]

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:  # noqa: B027 (most have none)
        """Capture what it will run, on a GPU."""

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        for layer in self.kv:
            self.ops.copy_blocks(layer, source, target)

    # --- Drafts -------------------------------------------------------------------------------------------------------

    def propose(self, plan: StepPlan, rows: RowTable) -> Tensor | None:
        """Put drafts behind the last tokens of the requests that want some. All drafts [N], in the plan's order."""
        for s in plan.scheduled:  # wrong drafts are forgotten in the step behind them, before plain ones pass them by
            row = rows.rows[s.request_id]
            row.num_drafted = min(row.num_drafted, s.num_computed_tokens)
        drafted = [s for s in plan.scheduled if FROM_MODEL in s.drafts]
        if not drafted:
            return None
        self.draft(drafted, rows)
        where: list[int] = []
        width = rows.tokens.shape[1]
        for s in drafted:
            first = rows.rows[s.request_id].index * width + s.num_computed_tokens + 1
            where.extend(range(first, first + len(s.drafts)))
        return rows.tokens.view(-1)[self.platform.upload(np.array(where, np.int64))]

    @abstractmethod
    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Write so many tokens behind each request's last one as it has `drafts`."""


class Chain(Drafter):
    """Goes on from its own tokens, one after another."""

    first = 0
    """The first token of a request of which it computes something."""
    keeps_drafts = True
    """What it computed of a draft holds where the draft was right."""

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        self.catch_up(drafted, rows)
        for i in range(1, max(len(s.drafts) for s in drafted)):
            self.step(
                [ScheduledRequest(s.request_id, s.num_computed_tokens + i, 1, 1) for s in drafted if len(s.drafts) > i],
                rows,
                follows=True,
            )
        for s in drafted:
            valid = s.num_computed_tokens + (len(s.drafts) if self.keeps_drafts else 1)
            rows.rows[s.request_id].num_drafted = valid

    def catch_up(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Compute what it has not seen of the requests, up to their last tokens, and draw the first draft of each."""
        begins = {s.request_id: max(self.first, rows.rows[s.request_id].num_drafted) for s in drafted}
        while True:
            room, shares = self.max_tokens, []
            for s in drafted:
                begin, end = begins[s.request_id], s.num_computed_tokens + 1
                if count := min(end - begin, room):
                    shares.append(ScheduledRequest(s.request_id, begin, count, int(begin + count == end)))
                    begins[s.request_id] += count
                    room -= count
            if not shares:
                return
            self.step(sorted(shares, key=lambda s: s.num_tokens > 1), rows)

    @abstractmethod
    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
        """Compute tokens, and draw the one behind each share that is sampled. `follows`: the token before each was a draft."""
