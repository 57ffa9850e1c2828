"""Drafters with a trained head, with torch (`draft_head`) and without (`host_drafter`): what both do alike.

1. The states of every token that the engine computes are kept, in the token's KV block. So prefix hits, preemption and copied
   blocks need no code here, and a head computes nothing while no drafts are wanted.
2. A chain reads pairs of the state at position p and the token at p + 1. The pair's keys and values stand at position p of its
   cache. So the last pair of a shared block depends on the token behind the block. Of requests that share a prefix and go on
   differently, the last to draft writes its pair there. Only drafts depend on it, never answers.

Values are torch's tensors or NumPy's arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.model.draft_heads import ChainHead, LoadedHead, MedusaHead
from slipstream.types import ScheduledRequest
from slipstream.worker.drafter import Chain, Drafter, DraftMemory
from slipstream.worker.host_chain import HostChain
from slipstream.worker.input_batch import SampledRows, gather_pairs
from slipstream.worker.rows import RowTable
from slipstream.worker.sampler import sampling_tensors

Sample = Callable[..., Any]
"""`OpSet.sample`"""


class States(Protocol):
    """`forward.StateCache`"""

    kept: Any
    """[B · block_size, E]; None: they are not kept."""

    def read(self, meta: AttentionMetadata) -> Any:
        """[T, E]"""

    def read_array(self, slots: Any) -> Any:
        """float32 [T, E], an array; on a CPU"""

    def copy_blocks(self, source: Any, target: Any) -> None: ...


class HeadDrafter(Drafter):
    """The part that all heads share."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedHead, memory: DraftMemory, states: States, sample: Sample
    ) -> None:
        super().__init__(config, memory)
        self.target_ids, self.weights_bytes = loaded.target_ids, loaded.weights_bytes
        self.vocab_size, self.hidden_size = loaded.head.spec.vocab_size, loaded.head.spec.hidden_size
        self.states, self.sample = states, sample

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.hidden_size * self.memory.itemsize * self.block_size

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.states.kept = self.memory.zeros((num_blocks * self.block_size, self.hidden_size))

    def release(self) -> None:
        super().release()
        self.states.kept = None

    def copy_blocks(self, source: Any, target: Any) -> None:
        super().copy_blocks(source, target)
        self.states.copy_blocks(source, target)

    def own_tokens(self, tokens: Any) -> Any:
        """The model's tokens for those of the head's vocabulary."""
        return tokens if self.target_ids is None else self.target_ids[tokens]

    @abstractmethod
    def logits(self, hidden: Any, place: int) -> Any:
        """[N, E] → float32 [N, the head's vocabulary]"""

    @abstractmethod
    def greedy(self, hidden: Any, place: int) -> Any:
        """[N, E] → int64 [N], the head's tokens whose logits are largest."""

    def write(self, hidden: Any, sampled: SampledRows, rows: RowTable, place: int = 0) -> None:
        """Draw a token of each of `sampled`, and put it where it belongs."""
        if rows.is_greedy(sampled.names):
            tokens = self.own_tokens(self.greedy(hidden, place))
        else:
            logits = self.logits(hidden, place)
            if self.target_ids is not None:
                wide = self.memory.lowest((len(logits), self.vocab_size))
                wide[:, self.target_ids] = logits
                logits = wide
            tokens = self.sample(logits, sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)


class HeadChain(Chain, HeadDrafter):
    """EAGLE-3 and MTP. `ends` has for each row the state for the pair behind its last one."""

    first, keeps_drafts = 1, False
    ends: Any
    head: ChainHead

    def __init__(
        self, config: EngineConfig, loaded: LoadedHead, memory: DraftMemory, states: States, sample: Sample
    ) -> None:
        assert isinstance(loaded.head, ChainHead)
        super().__init__(config, loaded, memory, states, sample)
        self.head, self.layers = loaded.head, (loaded.head.spec.layer,)
        self.host = HostChain(self) if self.head.is_compiled else None

    @property
    def token_bytes(self) -> int:
        return self.head.token_bytes

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        if self.host is not None and self.host.covers(drafted, rows):
            self.host.run(drafted, rows)
        else:
            super().draft(drafted, rows)
        for s in drafted:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
        given = gather_pairs(rows, shares)
        sampled, index = given.sampled, given.sample_index
        assert sampled is not None
        states = self.ends[sampled.rows] if follows else self.states.read(given.meta)
        hidden, following = self.passed(given.token_ids, states, given.meta)
        if not sampled.requests:
            return
        if index is not None:
            hidden, following = hidden[index], following[index]
        self.ends[sampled.rows] = following
        self.write(hidden, sampled, rows)

    @abstractmethod
    def passed(self, token_ids: Any, states: Any, meta: AttentionMetadata) -> tuple[Any, Any]:
        """`ChainHead.forward`. The states for the next pairs are of the type of `ends`."""


class HeadOfPlaces(HeadDrafter):
    """Medusa. All places in one pass, from the state before the last token: what a place holds does not depend on those before
    it."""

    layers = ()

    def __init__(
        self, config: EngineConfig, loaded: LoadedHead, memory: DraftMemory, states: States, sample: Sample
    ) -> None:
        assert isinstance(loaded.head, MedusaHead)
        super().__init__(config, loaded, memory, states, sample)
        self.head = loaded.head

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        last = [ScheduledRequest(s.request_id, s.num_computed_tokens, 1, 1) for s in drafted]
        states = self.states.read(gather_pairs(rows, last).meta)
        for place in range(max(len(s.drafts) for s in drafted)):
            which = [i for i, s in enumerate(drafted) if len(s.drafts) > place]
            shares = [
                ScheduledRequest(drafted[i].request_id, drafted[i].num_computed_tokens + place, 1, 1) for i in which
            ]
            sampled = gather_pairs(rows, shares).sampled
            assert sampled is not None
            self.write(states[which], sampled, rows, place)
