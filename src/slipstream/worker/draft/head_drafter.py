"""Drafters with a trained head, on any platform.

1. The hidden states of all computed tokens are kept in the tokens' KV blocks. So prefix hits,
   preemption and copied blocks need no code here, and a head computes nothing while no drafts are
   wanted.
2. A head with layers reads pairs of the state at position p and the token at p + 1. The pair's keys
   and values are at position p of its cache. So the last pair of a shared block depends on the
   token after the block. Among requests that share a prefix and continue differently, the last to
   draft writes its pair there. Only drafts depend on it, never answers.

No torch: values are tensors or NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import EngineConfig
from slipstream.config.forms import LearnedDrafts
from slipstream.costs.graph_sizes import chain_bytes
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.model.draft_heads import LayeredHead, LoadedHead, MedusaHead
from slipstream.spec.drafts.heads import HeadDescription
from slipstream.spec.reason import NotCovered, Reason
from slipstream.worker.draft.drafter import Chain, Drafter
from slipstream.worker.draft.head_inputs import gather_pairs
from slipstream.worker.draft.host_chain import HostChain, check_num_drafts, head_scheme
from slipstream.worker.draft.memory import DraftMemory
from slipstream.worker.forward.state_cache import StateCache
from slipstream.worker.inputs.input_batch import SampledRows, gather
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.sampler import sampling_tensors

if TYPE_CHECKING:
    from torch import Tensor


class HeadDrafter(Drafter):
    """Base of the drafters of all heads."""

    head: LayeredHead | MedusaHead

    def __init__(self, config: EngineConfig, loaded: LoadedHead, memory: DraftMemory) -> None:
        super().__init__(config, memory)
        self.head, self.layers = loaded.head, ()
        if isinstance(self.head, LayeredHead):
            self.layers = self.head.spec.layers
        self.target_ids, self.weights_bytes = loaded.target_ids, loaded.weights_bytes
        self.vocab_size = loaded.head.spec.vocab_size
        self.hidden_size = loaded.head.spec.hidden_size
        self.states, self.sample = StateCache(memory.platform.values), memory.ops.sample

    @property
    def token_bytes(self) -> int:
        return self.head.token_bytes if isinstance(self.head, LayeredHead) else 0

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.hidden_size * self.memory.itemsize * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self.states.kept = self.memory.zeros((num_blocks * self.block_size, self.hidden_size))
        super().allocate(num_blocks)

    def release(self) -> None:
        super().release()
        self.states.kept = None

    def block_parts(self) -> list[Any]:
        return [
            *super().block_parts(),
            self.states.kept.reshape(-1, self.block_size, self.hidden_size),
        ]

    def write(self, hidden: Any, sampled: SampledRows, rows: RowTable, place: int = 0) -> None:
        """Sample a token for each of `sampled`, and write it to its row."""
        if rows.is_greedy(sampled.names):
            tokens = self.head.greedy(hidden, place, self.target_ids)
        else:
            logits = self.head.logits(hidden, place)
            if self.target_ids is not None:
                wide = self.memory.platform.values.full((len(logits), self.vocab_size), -np.inf)
                wide[:, self.target_ids] = logits
                logits = wide
            tokens = self.sample(logits, sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)


class HeadChain(Chain, HeadDrafter):
    """Drafter for EAGLE and MTP heads, which propose token by token. `ends` [rows, E]: for each row
    the state of its next pair."""

    first, keeps_drafts = 1, False
    head: LayeredHead

    def __init__(self, config: EngineConfig, loaded: LoadedHead, memory: DraftMemory) -> None:
        super().__init__(config, loaded, memory)
        self.values = values = memory.platform.values
        self._dtype = values.dtype("float32") if memory.platform.kind == "cpu" else memory.dtype
        shape = config.scheduling.max_num_seqs + 1, self.hidden_size
        self.ends: Any = memory.platform.zeros(shape, self._dtype)
        self.host = HostChain(self) if self.head.is_compiled else None

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        shape = len(token_ids), self.hidden_size
        states = self.memory.platform.zeros(shape, self._dtype)
        self.head.forward(token_ids, states, self.make_cache(1), meta)

    def graph_bytes(self, config: EngineConfig) -> int:
        return chain_bytes(config, len(self.layers))

    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: Tensor | None, num: int
    ) -> tuple[Tensor, Tensor]:
        """Run the head, and find the most likely tokens after the last `num` pairs."""
        hidden, following = self.forward(
            token_ids, self.states.read(meta) if states is None else states, meta
        )
        return self.head.greedy(hidden[-num:], token_ids=self.target_ids), following[-num:]

    def run_passes(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        if self.host is not None and self.host.covers(drafted, rows):
            self.host.run(drafted, rows)
        else:
            super().run_passes(drafted, rows)

    def step(
        self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False
    ) -> None:
        given = gather_pairs(rows, shares)
        sampled, index = given.sampled, given.sample_index
        states = self.ends[sampled.rows] if follows else self.states.read(given.meta)
        hidden, following = self.forward(given.token_ids, states, given.meta)
        if not sampled.requests:
            return
        if index is not None:
            hidden, following = hidden[index], following[index]
        self.ends[sampled.rows] = following
        self.write(hidden, sampled, rows)

    def forward(self, token_ids: Any, states: Any, meta: AttentionMetadata) -> tuple[Any, Any]:
        """Run the head over pairs of token and state. Returns its outputs and the states for the
        next pass, cast to the type of `ends`."""
        hidden, following = self.head.forward(token_ids, states, self.kv, meta)
        return hidden, self.values.cast(following, self._dtype)


class HeadBlock(HeadDrafter):
    """Drafter for P-EAGLE and DFlash heads: one pass proposes all drafts. Each unknown token is
    replaced by a mask token.

    1. P-EAGLE: pairs of masks follow the pairs of known tokens. Each pair attends to those before
       it.
    2. DFlash: the states before the last token are a context. That token and one mask per draft
       attend to the context and to each other. Each mask is at the position of the token that is
       predicted from it.
    """

    first = 1
    head: LayeredHead

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        kv = self.make_cache(1)
        states: Any = self.memory.zeros((len(token_ids), self.hidden_size))
        if self.head.spec.join == "context":
            self.head.remember(states, kv, meta)
            states = None
        self.head.forward(token_ids, states, kv, meta)

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        spec, counts = self.head.spec, [len(s.drafts) for s in drafted]
        if spec.join == "context":
            for shares in self.unseen(drafted, rows, [1] * len(drafted)):
                meta = gather_pairs(rows, shares).meta
                self.head.remember(self.states.read(meta), self.kv, meta)
            self._draw_block(drafted, rows)
        else:
            last = {s.request_id: s.num_computed_tokens for s in drafted}
            for shares in self.unseen(drafted, rows, counts):
                self._draw_pairs(shares, [last[s.request_id] for s in shares], rows)
        for s in drafted:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

    def _draw_pairs(
        self, shares: Sequence[ScheduledRequest], last: Sequence[int], rows: RowTable
    ) -> None:
        """Run a pass over pairs, with masks for tokens after the `last` ones."""
        given = gather_pairs(rows, shares)
        sampled, index = given.sampled, given.sample_index
        states, ends = self.states.read(given.meta), np.cumsum([s.num_tokens for s in shares])
        known = [
            min(max(p + 1 - s.num_computed_tokens, 0), s.num_tokens)
            for s, p in zip(shares, last, strict=True)
        ]
        masks = [
            np.arange(end - s.num_tokens + n, end)
            for s, end, n in zip(shares, ends, known, strict=True)
        ]
        token_ids = self._masked(given.token_ids, masks, states, rows)
        hidden, _ = self.head.forward(token_ids, states, self.kv, given.meta)
        if sampled.requests:
            self.write(hidden if index is None else hidden[index], sampled, rows)

    def _draw_block(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Run a pass over the last tokens and the masks after them.

        Each token is a decode over all its request's tokens, so the tokens of a request attend to
        each other.
        """
        shares = [
            ScheduledRequest(s.request_id, s.num_computed_tokens, n := len(s.drafts) + 1, n - 1)
            for s in drafted
        ]
        given = gather(rows, StepPlan(0, tuple(shares)))
        lengths = np.array([s.num_tokens for s in shares])
        sampled, index, meta = given.sampled, given.sample_index, given.meta
        total, ends = int(lengths.sum()), lengths.cumsum()
        token_ids = self._masked(
            given.token_ids,
            [np.arange(end - n + 1, end) for end, n in zip(ends, lengths, strict=True)],
            None,
            rows,
        )
        which = rows.upload(np.arange(len(shares)).repeat(lengths))
        meta = dataclasses.replace(
            meta,
            query_start_loc=rows.upload(np.arange(total + 1, dtype=np.int32)),
            seq_lens=meta.seq_lens[which],
            block_table=meta.block_table[which],
            num_decodes=total,
            max_query_len=1,
            groups=(),
        )
        hidden, _ = self.head.forward(token_ids, None, self.kv, meta)
        self.write(
            hidden[index], dataclasses.replace(sampled, positions=sampled.positions - 1), rows
        )

    def _masked(self, token_ids: Any, masks: Sequence[Any], states: Any, rows: RowTable) -> Any:
        """Write the mask token to the indices `masks` of `token_ids`, and the head's state for
        masks to the same indices of `states`."""
        places = np.concatenate(masks)
        if len(places):
            where = rows.upload(places)
            token_ids[where] = self.head.spec.mask_token
            if states is not None:
                values = self.memory.platform.values
                states[where] = values.cast(self.head.mask_state, states.dtype)
        return token_ids


class MedusaDrafter(HeadDrafter):
    """Drafter for Medusa heads: one pass proposes all drafts from the state before the last token,
    independently of each other.
    """

    computes_all = False

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        last = [ScheduledRequest(s.request_id, s.num_computed_tokens, 1, 1) for s in drafted]
        states = self.states.read(gather_pairs(rows, last).meta)
        for place in range(max(len(s.drafts) for s in drafted)):
            which = [i for i, s in enumerate(drafted) if len(s.drafts) > place]
            shares = [
                ScheduledRequest(
                    drafted[i].request_id, drafted[i].num_computed_tokens + place, 1, 1
                )
                for i in which
            ]
            sampled = gather_pairs(rows, shares).sampled
            self.write(states[which], sampled, rows, place)


def load_drafter(
    config: EngineConfig,
    speculation: LearnedDrafts,
    description: HeadDescription,
    memory: DraftMemory,
    load: Callable[..., LoadedHead],
) -> HeadDrafter:
    """Load a draft head with `load`, its linear layers quantized by a scheme.

    ConfigError if more drafts are wanted than the head has. NotCovered without torch if the head does
    not compile to a program.
    """
    check_num_drafts(speculation, description)
    ops, device = memory.ops, memory.platform.device
    default, rows = ops.eight_bits(device), ops.output_multiple
    loaded = load(scheme=head_scheme(speculation, description, default, rows=rows))
    head = loaded.head
    if not isinstance(head, LayeredHead):
        return MedusaDrafter(config, loaded, memory)
    if device is None and isinstance(head.program, Reason):
        raise NotCovered(head.program)
    kind = HeadChain if head.spec.mask_token is None else HeadBlock
    return kind(config, loaded, memory)
