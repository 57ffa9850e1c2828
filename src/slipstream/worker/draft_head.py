"""A trained head that guesses tokens from the states of the engine's model (`model.draft_heads`), as a `Drafter`.

The states of every token that the engine computes are kept in its blocks (`StateCache`), so prefix hits, preemption and copied
blocks are no cases of their own, and a head computes nothing while no drafts are wanted. A chain's pair of the state at place p
and the token at p + 1 stands at place p of its cache. So the last pair of a shared block depends on the token behind the block:
of requests that share a prefix and go on differently, the one that drafted last has its own there. Only guesses depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import ChainHead, LoadedHead, MedusaHead, load_head
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.scheme import SCHEMES
from slipstream.types import ScheduledRequest
from slipstream.worker.chain_graphs import DEPTHS, FIRST_SIZES, ChainGraphs
from slipstream.worker.drafter import Chain, Drafter
from slipstream.worker.forward import StateCache
from slipstream.worker.input_batch import RowTable, SampledRows, gather_pairs
from slipstream.worker.sampler import sampling_tensors


class HeadDrafter(Drafter):
    """What heads have in common."""

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
        super().__init__(config, ops=ops, device=device, dtype=dtype)
        ids = loaded.target_ids
        self.target_ids = None if ids is None else ids.to(device)
        self.vocab_size = loaded.head.spec.vocab_size
        self.weights_bytes, self.hidden_size = loaded.weights_bytes, hidden_size
        self.states = StateCache(self.block_size, hidden_size, dtype)

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.hidden_size * self.dtype.itemsize * self.block_size

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.states.tensor = self.platform.zeros((num_blocks * self.block_size, self.hidden_size), self.dtype)

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
        if self.graphs is None or not self.graphs.covers(drafted):
            super().draft(drafted, rows)
            return
        self.graphs.run(drafted)
        for s in drafted:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

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
                tokens = self.own_tokens(logits.argmax(-1))
            else:
                tokens = self.ops.sample(self.own_logits(logits), sampling_tensors(rows, sampled))
            rows.write(sampled.rows, sampled.positions, tokens)


def load_drafter(
    config: EngineConfig, description: HeadDescription, decoder: Decoder, *, device: torch.device, dtype: torch.dtype
) -> ChainDrafter | MedusaDrafter:
    """ConfigError if more drafts are wanted than the head has."""
    assert config.speculation is not None
    quantization, most = config.speculation.quantization, description.spec.most_drafts
    wanted = config.speculation.num_speculative_tokens
    if most is not None and wanted is not None and wanted > most:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={wanted}, but {description.path} has {most} heads; lower it",
            field="speculative_config",
        )
    loaded = load_head(
        description,
        decoder,
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        scheme=SCHEMES[quantization] if quantization is not None else None,
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    kind = ChainDrafter if isinstance(loaded.head, ChainHead) else MedusaDrafter
    return kind(config, loaded, ops=decoder.ops, device=device, dtype=dtype)
