"""Draft heads on a device, with torch: the drafters of `head_drafter`."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import chain_bytes
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LayeredHead, LoadedHead
from slipstream.model.draft_loader import load_head
from slipstream.spec.draft_heads import HeadDescription
from slipstream.worker.draft.head_drafter import HeadBlock, HeadChain, HeadDrafter, MedusaDrafter
from slipstream.worker.draft.host_chain import check_num_drafts, head_scheme
from slipstream.worker.draft.memory import DeviceMemory
from slipstream.worker.forward.forwards import StateCache
from slipstream.worker.graphs.chain_graphs import ChainGraphs
from slipstream.worker.rows import RowTable


class ChainDrafter(HeadChain):
    states: StateCache

    def __init__(
        self, config: EngineConfig, loaded: LoadedHead, memory: DeviceMemory, states: StateCache
    ) -> None:
        rows, device = config.scheduling.max_num_seqs + 1, memory.platform.device
        dtype = torch.float32 if device.type == "cpu" else memory.dtype
        ends = torch.zeros(rows, loaded.head.spec.hidden_size, dtype=dtype).to(device)
        super().__init__(config, loaded, memory, states, memory.ops.sample, ends)

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        states = torch.zeros(
            len(token_ids), self.hidden_size, dtype=self.ends.dtype, device=self.ends.device
        )
        self.head.forward(token_ids, states, self.make_cache(1), meta)

    def graph_bytes(self, config: EngineConfig) -> int:
        return chain_bytes(config, len(self.layers))

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:
        self.graphs = ChainGraphs.of(self, rows, config)

    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: Tensor | None, num: int
    ) -> tuple[Tensor, Tensor]:
        hidden, following = self.passed(
            token_ids, self.states.read(meta) if states is None else states, meta
        )
        return self.head.greedy(hidden[-num:], token_ids=self.target_ids), following[-num:]

    def passed(
        self, token_ids: Tensor, states: Tensor, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, following = self.head.forward(token_ids, states, self.kv, meta)
        return hidden, following.to(self.ends.dtype)


class BlockDrafter(HeadBlock):
    states: StateCache

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        kv, spec = self.make_cache(1), self.head.spec
        states = torch.zeros(
            len(token_ids), spec.hidden_size, dtype=self.states.dtype, device=token_ids.device
        )
        if spec.join == "context":
            self.head.remember(states, kv, meta)
        self.head.forward(token_ids, None if spec.join == "context" else states, kv, meta)


def load_drafter(
    config: EngineConfig,
    description: HeadDescription,
    decoder: Decoder,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> HeadDrafter:
    """Load a draft head. ConfigError if more drafts are wanted than the head has."""
    check_num_drafts(config, description)
    loaded = load_head(
        description,
        decoder,
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        scheme=head_scheme(
            config, description, decoder.ops.eight_bits(device), rows=decoder.ops.output_multiple
        ),
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    states = StateCache(config.cache.block_size, loaded.head.spec.hidden_size, dtype)
    memory = DeviceMemory(decoder.ops, device, dtype)
    if not isinstance(loaded.head, LayeredHead):
        return MedusaDrafter(config, loaded, memory, states, memory.ops.sample)
    if loaded.head.spec.mask_token is not None:
        return BlockDrafter(config, loaded, memory, states, memory.ops.sample)
    return ChainDrafter(config, loaded, memory, states)
