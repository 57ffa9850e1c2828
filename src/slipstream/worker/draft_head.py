"""A `Drafter` with a trained head, which predicts tokens from the states of the engine's model (`model.draft_heads`).

1. `StateCache` keeps the states of every token that the engine computes, in the token's KV block. So prefix hits,
   preemption and copied blocks need no code here, and a head computes nothing while no drafts are wanted.
2. A chain reads pairs of the state at position p and the token at p + 1. The pair's keys and values stand at position p of its
   cache. So the last pair of a shared block depends on the token behind the block. Of requests that share a prefix and go on
   differently, the last to draft writes its pair there. Only drafts depend on it, never answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import ChainHead, MedusaHead
from slipstream.model.draft_loader import LoadedHead, load_head
from slipstream.platform import platform_of
from slipstream.spec.draft_heads import HeadDescription
from slipstream.types import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.worker.chain_graphs import DEPTHS, FIRST_SIZES, ChainGraphs
from slipstream.worker.draft_memory import DeviceMemory
from slipstream.worker.drafter import Chain, Drafter
from slipstream.worker.forward import StateCache
from slipstream.worker.host_chain import HostChain, check_num_drafts, head_scheme
from slipstream.worker.input_batch import SampledRows, gather_pairs
from slipstream.worker.rows import RowTable
from slipstream.worker.sampler import sampling_tensors


class HeadDrafter(Drafter):
    """The part that all heads share."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedHead,
        hidden_size: int,
        *,
        ops: OpSet,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, DeviceMemory(ops, device, dtype))
        self.ops, self.device, self.dtype = ops, device, dtype
        ids = loaded.target_ids
        self.target_ids = None if ids is None else ids.to(device)
        self.vocab_size = loaded.head.spec.vocab_size
        self.weights_bytes, self.hidden_size = loaded.weights_bytes, hidden_size
        self.states = StateCache(self.block_size, hidden_size, dtype)

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.hidden_size * self.memory.itemsize * self.block_size

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.states.tensor = self.memory.zeros((num_blocks * self.block_size, self.hidden_size))

    def release(self) -> None:
        super().release()
        self.states.tensor = None

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        super().copy_blocks(source, target)
        self.states.copy_blocks(source, target)

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """The model's tokens for those of the head's vocabulary."""
        return tokens if self.target_ids is None else self.target_ids[tokens]

    def own_logits(self, logits: Tensor) -> Tensor:
        """[N, the head's vocabulary] → float32 [N, V]"""
        if self.target_ids is None:
            return logits.float()
        wide = torch.full((len(logits), self.vocab_size), -torch.inf, device=logits.device)
        wide[:, self.target_ids] = logits.float()
        return wide


class ChainDrafter(Chain, HeadDrafter):
    """EAGLE-3 and MTP. `ends` has for each row the state for the pair behind its last one."""

    first, keeps_drafts = 1, False
    num_graphs = len(DEPTHS) * len(FIRST_SIZES)

    def __init__(self, config: EngineConfig, loaded: LoadedHead, **more: torch.device | torch.dtype | OpSet) -> None:
        assert isinstance(loaded.head, ChainHead)
        super().__init__(config, loaded, loaded.head.spec.hidden_size, **more)  # type: ignore[arg-type]
        self.head, self.layers = loaded.head, (loaded.head.spec.layer,)
        rows = config.scheduling.max_num_seqs + 1
        self.ends = torch.zeros(
            rows, self.hidden_size, dtype=torch.float32 if self.device.type == "cpu" else self.dtype
        )
        self.ends = self.ends.to(self.device)
        self.graphs: ChainGraphs | None = None
        self.host = HostChain(self) if self.head.is_compiled else None

    def release(self) -> None:
        super().release()
        self.graphs = None

    @property
    def token_bytes(self) -> int:
        return self.head.token_bytes

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        states = torch.zeros(len(token_ids), self.hidden_size, dtype=self.ends.dtype, device=self.device)
        self.head.forward(token_ids, states, self.make_cache(1), meta)

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:
        """Capture chains of the fixed number of drafts, or of several."""
        assert config.speculation is not None
        fixed = config.speculation.num_speculative_tokens
        sizes = {"max_model_len": config.model.max_model_len, "max_num_seqs": config.scheduling.max_num_seqs}
        self.graphs = ChainGraphs(self, rows, DEPTHS if fixed is None else (fixed,), **sizes)
        self.graphs.capture()

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        left = [s for s in drafted if not self._is_ahead(s, rows)]
        for s in left:
            rows.rows[s.request_id].num_kept = 0
        if left:
            self._draft_now(left, rows)
        for s in drafted:
            row = rows.rows[s.request_id]
            row.num_drafted, row.ahead = s.num_computed_tokens + 1, range(0)

    def _draft_now(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        if self.graphs is not None and self.graphs.covers(drafted):
            self.graphs.run(drafted)
        elif self.host is not None and self.host.covers(drafted, rows):
            self.host.run(drafted, rows)
        else:
            super().draft(drafted, rows)

    @staticmethod
    def _is_ahead(s: ScheduledRequest, rows: RowTable) -> bool:
        """Whether its drafts are proposed already."""
        row = rows.rows[s.request_id]
        return s.num_computed_tokens in row.ahead and len(s.drafts) <= row.num_kept

    def go_ahead(self, plan: StepPlan, rows: RowTable) -> None:
        if self.graphs is None:
            return
        for s in self.graphs.run_ahead([s for s in plan.scheduled if FROM_MODEL in s.drafts]):
            computed = s.num_computed_tokens
            rows.rows[s.request_id].ahead = range(computed + 1, computed + 1 + s.num_sampled)

    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
        given = gather_pairs(rows, shares)
        sampled, index = given.sampled, given.sample_index
        assert sampled is not None
        states = self.ends[sampled.rows] if follows else self.states.read(given.meta)
        hidden, following = self.head.forward(given.token_ids, states, self.kv, given.meta)
        if not sampled.requests:
            return
        if index is not None:
            hidden, following = hidden.index_select(0, index), following.index_select(0, index)
        self.ends[sampled.rows] = following.to(self.ends.dtype)
        self.write(hidden, sampled, rows)

    def write(self, hidden: Tensor, sampled: SampledRows, rows: RowTable) -> None:
        """Draw a token of each of `sampled`, and put it where it belongs."""
        if rows.is_greedy(sampled.names):
            tokens = self.own_tokens(self.head.greedy(hidden))
        else:
            tokens = self.ops.sample(self.own_logits(self.head.logits(hidden)), sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)


class MedusaDrafter(HeadDrafter):
    """All places in one pass, from the state before the last token: what a place holds does not depend on those before it."""

    layers = ()

    def __init__(self, config: EngineConfig, loaded: LoadedHead, **more: torch.device | torch.dtype | OpSet) -> None:
        assert isinstance(loaded.head, MedusaHead)
        super().__init__(config, loaded, loaded.head.spec.hidden_size, **more)  # type: ignore[arg-type]
        self.head = loaded.head

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        """Its passes have a row for each sequence: nothing beside the model's."""

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        last = [ScheduledRequest(s.request_id, s.num_computed_tokens, 1, 1) for s in drafted]
        states = self.states.read(gather_pairs(rows, last).meta)
        for place in range(max(len(s.drafts) for s in drafted)):
            which = [i for i, s in enumerate(drafted) if len(s.drafts) > place]
            logits = self.head.logits(states[which], place)
            shares = [
                ScheduledRequest(drafted[i].request_id, drafted[i].num_computed_tokens + place, 1, 1) for i in which
            ]
            sampled = gather_pairs(rows, shares).sampled
            assert sampled is not None
            if rows.is_greedy(sampled.names):
                tokens = self.own_tokens(self.ops.argmax(logits))
            else:
                tokens = self.ops.sample(self.own_logits(logits), sampling_tensors(rows, sampled))
            rows.write(sampled.rows, sampled.positions, tokens)


def load_drafter(
    config: EngineConfig, description: HeadDescription, decoder: Decoder, *, device: torch.device, dtype: torch.dtype
) -> ChainDrafter | MedusaDrafter:
    """ConfigError if more drafts are wanted than the head has."""
    check_num_drafts(config, description)
    loaded = load_head(
        description,
        decoder,
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        scheme=head_scheme(config, description, _default_scheme(decoder.ops, device)),
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    kind = ChainDrafter if isinstance(loaded.head, ChainHead) else MedusaDrafter
    return kind(config, loaded, ops=decoder.ops, device=device, dtype=dtype)


def _default_scheme(ops: OpSet, device: torch.device) -> str | None:
    """What heads are rounded by here."""
    if ops.name == "triton":
        return "fp8" if device.type == "cuda" and platform_of(device).arch.fp8 else None
    return "int8" if ops.name == "cpu" else None
