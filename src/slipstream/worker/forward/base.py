"""Interface of forward paths, the ways to run a model on a step's tokens: inputs, outputs, and `Forward`. No torch.

Values are tensors or NumPy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.steps import Extra, StepPlan, StepShape, TokenMask
from slipstream.model.decoder import Decoder
from slipstream.platform import Event
from slipstream.spec.reason import Reason
from slipstream.worker.forward.state_cache import StateCache
from slipstream.worker.inputs.input_batch import (
    NOTHING_SAMPLED,
    GatheredInputs,
    SampledRows,
    gather,
)
from slipstream.worker.inputs.media_rows import needs_media
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.step_shape import shape_of
from slipstream.worker.sampling.draws import BestLogprobs, DrawnTokens

if TYPE_CHECKING:
    from torch import Tensor

HAS_ADAPTERS = Reason("a request of the step has an adapter")


class InputBatch:
    """Input of one forward: a scheduled step whose sequences have rows, or plain tokens.

    The tensors of a scheduled step are gathered at first use, because a graph gathers its own.
    """

    def __init__(
        self,
        kv: Sequence[LayerKV],
        plan: StepPlan | None,
        table: RowTable | None,
        gathered: GatheredInputs | None = None,
        *,
        adapted: bool = True,
    ) -> None:
        """Take a step's inputs. If `adapted` is False, requests' adapters are ignored (for a draft model)."""
        self.kv, self.plan, self.table, self._adapted = kv, plan, table, adapted
        if gathered is not None:
            self.gathered = gathered

    @classmethod
    def of(cls, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> InputBatch:
        """Make a batch of tokens [T] without a plan, for a canary, a measurement or a capture."""
        given = GatheredInputs(
            token_ids=token_ids, meta=meta, sample_index=None, sampled=NOTHING_SAMPLED
        )
        return cls(kv, None, None, given)

    @property
    def step(self) -> tuple[StepPlan, RowTable]:
        """The plan of a scheduled step and its rows."""
        if self.plan is None or self.table is None:
            raise ValueError("the tokens are not a scheduled step")
        return self.plan, self.table

    @cached_property
    def gathered(self) -> GatheredInputs:
        plan, table = self.step
        return gather(table, plan)

    @property
    def token_ids(self) -> Tensor:
        return self.gathered.token_ids

    @property
    def meta(self) -> AttentionMetadata:
        return self.gathered.meta

    @cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.plan is None else self.plan.num_tokens

    @cached_property
    def shape(self) -> StepShape:
        """Shape of a scheduled step; the largest over the ranks if ranks compute different requests."""
        if self.plan is None:
            raise ValueError("the tokens are not a scheduled step")
        return self.plan.largest or shape_of(self.plan.scheduled)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the requests only need the index of the largest logit."""
        plan, table = self.step
        return table.is_greedy([s.request_id for s in plan.scheduled if s.num_sampled])

    @cached_property
    def has_adapters(self) -> bool:
        """True if some request has an adapter."""
        if (
            self.plan is None
            or self.table is None
            or not self._adapted
            or not self.table.wanting["adapter"]
        ):
            return False
        return self.table.wanted("adapter", [s.request_id for s in self.plan.scheduled])

    @cached_property
    def has_media(self) -> bool:
        """True if some request has placeholders of media in this step."""
        if self.plan is None or self.table is None or not self.table.wanting["media"]:
            return False
        wanting, rows = self.table.wanting["media"], self.table.rows
        return any(
            needs_media(rows[s.request_id], s)
            for s in self.plan.scheduled
            if s.request_id in wanting
        )

    @property
    def has_grammar(self) -> bool:
        """True if a request samples with a grammar."""
        plan, table = self.step
        return table.wanted("grammar", [s.request_id for s in plan.scheduled if s.num_sampled])


@dataclass(slots=True)
class Output:
    """Result of a forward.

    Token i of the plan is in row `row(i)` of `hidden` [T or more, E]: after `num_decodes` rows
    there are `padding` rows without tokens.
    """

    forward: Forward
    hidden: Tensor
    sampled: SampledRows = NOTHING_SAMPLED
    # rows of `hidden` that are sampled, int32 or int64 [N]; None: all
    sample_index: Tensor | None = None
    # int64 [N], if the forward has sampled them; already in the rows
    tokens: Tensor | None = None
    # with `tokens`, if requests want them: packed log-probabilities (`OpSet.packed_logprobs`)
    logprobs: Tensor | None = None
    # with grammars, if a graph samples: sets `tokens` and `logprobs`, unless there are too many masks
    end: Callable[[TokenMask], None] | None = None
    num_decodes: int = 0
    padding: int = 0
    extras: Sequence[Callable[[], Extra]] = ()  # further results of the step, valid once it is done

    @property
    def sampled_states(self) -> Tensor:
        """Sampled rows of `hidden`, [N, E]."""
        if self.sample_index is None:
            return self.hidden
        return self.forward.take(self.hidden, self.sample_index)

    def row(self, token: int) -> int:
        return token + (self.padding if token >= self.num_decodes else 0)


@dataclass(slots=True)
class BegunStep:
    """A step of greedy decodes that a CPU's threads compute, up to its tokens.

    `tokens`, int64 [N], and the `states` for the `StateCache` are valid after `done`.
    """

    sampled: SampledRows
    tokens: Tensor
    done: Event | None  # None if the step is done
    cache: StateCache | None
    states: tuple[Tensor, AttentionMetadata]
    logprobs: BestLogprobs | None = None

    def goes_on_in(self, plan: StepPlan) -> bool:
        """Whether the next plan computes exactly the tokens that this step samples: one for each of
        the same requests."""
        return (
            not (plan.new or plan.released or plan.block_copies)
            and self.sampled.num_tokens is None
            and [s.request_id for s in plan.scheduled] == self.sampled.names
            and all(s.num_tokens == 1 and not s.drafts for s in plan.scheduled)
        )

    def finish(self) -> None:
        """Wait for the step, and store its states."""
        if self.done is not None:
            self.done.synchronize()
            self.done = None
        if self.cache is not None:
            self.cache.write(*self.states)
            self.cache = None


class Forward(ABC):
    name: str
    num_cold = 0
    """Number of steps that captured a graph, or ran op by op because theirs is not captured yet."""

    @abstractmethod
    def covers(self, batch: InputBatch) -> Reason | None:
        """Reason why this path can't run `batch`; None if it can. No side effects."""

    def passed_over(self, batch: InputBatch, reason: Reason) -> None:  # noqa: B027
        """Called when `Forwards` ran `batch` another way, because `covers` returned this reason."""

    @abstractmethod
    def run(self, batch: InputBatch) -> Output | BegunStep | None:
        """Run the step. None if memory ran out before it began; then the next path is tried."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E] from this path's `run`."""

    def take(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The given rows of hidden states."""
        return hidden.index_select(0, rows)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Tokens with the largest logits, int64 [N], from hidden states [N, E].

        The logits are not written to memory. Of equal logits the first wins. None if this path must write logits.
        """
        return None

    def drawn(
        self, hidden: Tensor, table: RowTable, sampled: SampledRows, mask: TokenMask | None
    ) -> DrawnTokens | None:
        """Tokens of hidden states [N, E], sampled among those that `mask` allows.

        None if this path can't sample as the requests need without computing logits.
        """
        return None


class PlainForward(Forward):
    """A path that can run any tokens without adapters, not only those of a scheduled step.
    `states`: cache of the hidden states that a draft head reads.
    """

    def __init__(self, decoder: Decoder, states: StateCache | None = None) -> None:
        self.decoder, self.states = decoder, states

    def covers(self, batch: InputBatch) -> Reason | None:
        return HAS_ADAPTERS if batch.has_adapters else None

    def run(self, batch: InputBatch) -> Output | BegunStep:
        given = batch.gathered
        hidden = self._hidden(given.token_ids, batch.kv, given.meta)
        return Output(self, hidden, given.sampled, given.sample_index)

    @abstractmethod
    def _hidden(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> Tensor: ...

    def _keep(self, hidden: Tensor, states: Tensor, meta: AttentionMetadata) -> Tensor:
        if self.states is not None:
            self.states.write(states, meta)
        return hidden

    @abstractmethod
    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Run the encoder of an encoder-decoder over whole prompts: token ids [T], or frames of audio.

        The keys and values that the decoder's layers read go into the cache.
        """
