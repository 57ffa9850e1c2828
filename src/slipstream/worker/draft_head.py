"""Draft heads by torch: `head_drafter`, on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LayeredHead, LoadedHead
from slipstream.model.draft_loader import load_head
from slipstream.platform import platform_of
from slipstream.spec.draft_heads import HeadDescription
from slipstream.types import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.worker.chain_graphs import ChainGraphs, chain_depths, chain_sizes
from slipstream.worker.draft_memory import DeviceMemory
from slipstream.worker.forward import StateCache
from slipstream.worker.head_drafter import HeadBlock, HeadChain, HeadDrafter, HeadOfPlaces
from slipstream.worker.host_chain import check_num_drafts, head_scheme
from slipstream.worker.rows import RowTable


class ChainDrafter(HeadChain):
    states: StateCache

    def __init__(self, config: EngineConfig, loaded: LoadedHead, memory: DeviceMemory, states: StateCache) -> None:
        rows, device = config.scheduling.max_num_seqs + 1, memory.platform.device
        dtype = torch.float32 if device.type == "cpu" else memory.dtype
        ends = torch.zeros(rows, loaded.head.spec.hidden_size, dtype=dtype).to(device)
        super().__init__(config, loaded, memory, states, memory.ops.sample, ends)
        self.graphs: ChainGraphs | None = None
        self.depths = chain_depths(config)
        self.num_graphs = len(self.depths) * len(chain_sizes(config.scheduling.max_num_seqs))

    def release(self) -> None:
        super().release()
        self.graphs = None

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        states = torch.zeros(len(token_ids), self.hidden_size, dtype=self.ends.dtype, device=self.ends.device)
        self.head.forward(token_ids, states, self.make_cache(1), meta)

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:
        sizes = {"max_model_len": config.model.max_model_len, "max_num_seqs": config.scheduling.max_num_seqs}
        self.graphs = ChainGraphs(self, rows, self.depths, **sizes)
        self.graphs.capture()

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        left = [s for s in drafted if not self._is_ahead(s, rows)]
        for s in left:
            rows.rows[s.request_id].num_kept = 0
        if left and self.graphs is not None and self.graphs.covers(left):
            self.graphs.run(left)
        elif left:
            super().draft(left, rows)
        for s in drafted:
            row = rows.rows[s.request_id]
            row.num_drafted, row.ahead = s.num_computed_tokens + 1, range(0)

    @staticmethod
    def _is_ahead(s: ScheduledRequest, rows: RowTable) -> bool:
        """Whether its drafts are proposed already."""
        row = rows.rows[s.request_id]
        return s.num_computed_tokens in row.ahead and len(s.drafts) <= row.num_kept

    def go_ahead(self, plan: StepPlan, rows: RowTable) -> None:
        if self.graphs is None:
            return
        drafting = [s for s in plan.scheduled if FROM_MODEL in s.drafts]
        for s in self.graphs.run_ahead(drafting):
            computed = s.num_computed_tokens
            rows.rows[s.request_id].ahead = range(computed + 1, computed + 1 + s.num_sampled)
        if drafting or all(s.num_tokens > 1 for s in plan.scheduled):  # beside decodes without drafts, prompts get none either
            self._see_prompts(plan, rows)

    def _see_prompts(self, plan: StepPlan, rows: RowTable) -> None:
        """Compute the pairs of the prompts in `plan`, so that their first drafts come out of a graph. That takes the host 2 ms
        op by op, for which it has time while the GPU computes the step; `propose` would keep the GPU waiting."""
        behind = [s._replace(num_computed_tokens=s.num_computed_tokens + s.num_tokens) for s in plan.scheduled if _is_prompt(s)]
        behind = [s for s in behind if s.num_computed_tokens > max(self.first, rows.rows[s.request_id].num_drafted)]
        for shares in self.unseen(behind, rows, [0] * len(behind)):
            self.step(shares, rows)
        for s in behind:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens

    def passed(self, token_ids: Tensor, states: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        hidden, following = self.head.forward(token_ids, states, self.kv, meta)
        return hidden, following.to(self.ends.dtype)


def _is_prompt(s: ScheduledRequest) -> bool:
    return s.num_tokens > 1 and not s.drafts


class BlockDrafter(HeadBlock):
    states: StateCache

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        kv, spec = self.make_cache(1), self.head.spec
        states = torch.zeros(len(token_ids), spec.hidden_size, dtype=self.states.dtype, device=token_ids.device)
        if spec.join == "context":
            self.head.remember(states, kv, meta)
        self.head.forward(token_ids, None if spec.join == "context" else states, kv, meta)


def load_drafter(
    config: EngineConfig, description: HeadDescription, decoder: Decoder, *, device: torch.device, dtype: torch.dtype
) -> HeadDrafter:
    """ConfigError if more drafts are wanted than the head has."""
    check_num_drafts(config, description)
    loaded = load_head(
        description,
        decoder,
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        scheme=head_scheme(
            config, description, _default_scheme(decoder.ops, device), rows=16 if decoder.ops.name == "triton" else 1
        ),
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    states = StateCache(config.cache.block_size, loaded.head.spec.hidden_size, dtype)
    memory = DeviceMemory(decoder.ops, device, dtype)
    if not isinstance(loaded.head, LayeredHead):
        return HeadOfPlaces(config, loaded, memory, states, memory.ops.sample)
    if loaded.head.spec.mask_token is not None:
        return BlockDrafter(config, loaded, memory, states, memory.ops.sample)
    return ChainDrafter(config, loaded, memory, states)


def _default_scheme(ops: OpSet, device: torch.device) -> str | None:
    """What heads are rounded by here."""
    if ops.name == "triton":
        return "fp8" if device.type == "cuda" and platform_of(device).arch.fp8 else None
    return "int8" if ops.name == "cpu" else None
