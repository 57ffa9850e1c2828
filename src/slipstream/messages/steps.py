"""Step plans, from the scheduler to the worker, and their results. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from slipstream.messages.logprobs import PromptLogprobs, SampledLogprobs
from slipstream.messages.media import AudioWindow, MediaSpan
from slipstream.messages.requests import TokenIds
from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.texts import PooledVector, TextsPlan, TextVectors
from slipstream.params.lora_request import LoRARequest
from slipstream.params.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is new to the worker, or returns after preemption (then `token_ids` includes its answer so far).

    `encoder_token_ids` are to be encoded into the blocks of its `cross` group. A fork has none of these: its blocks
    already hold `num_encoder_tokens`.
    """

    request_id: str
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    pooled: bool = False
    encoder_token_ids: tuple[int, ...] = ()
    num_encoder_tokens: int = 0
    audio: AudioWindow | None = None
    lora: LoRARequest | None = None
    mirostat_mu: float | None = None  # state of its sampler before preemption, if any
    media: tuple[MediaSpan, ...] = ()
    rank: int = 0  # its rank, if requests are distributed


class StateMark(NamedTuple):
    """A recurrent state that a step stores: after the first `num_tokens` tokens of a request's part, in `slot`."""

    request_id: str
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """New entries of a request's block table: these blocks replace or extend `group`'s table from `index` on.

    Used for blocks that are appended, that replace shared ones (copy on write), or that are
    released (the null block). With a negative `group` it names the request's slots of the `SlotKind`
    with the number −`group`: the one to read, then those to write.
    """

    group: int
    index: int
    block_ids: tuple[int, ...]


FROM_MODEL = -1
"""Placeholder for a draft that the worker's draft model proposes."""


class ScheduledRequest(NamedTuple):
    """One request's part of a step: compute positions [num_computed_tokens, num_computed_tokens + num_tokens).

    The last `num_sampled` of these positions are sampled: none while a prompt is incomplete, one for a decode, one
    more for each draft to verify. `drafts` are the last tokens to compute; the worker has all others. A draft at a
    sampled position is verified: the result has the sampled tokens up to the first that differs from the draft after
    its position. Other drafts are determined by a grammar or chosen by a beam search, and need no verification.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_sampled: int
    table_updates: tuple[TableUpdate, ...] = ()
    drafts: tuple[int, ...] = ()


class SharedPrefix(NamedTuple):
    """Decodes [first, end) of a step that begin with the same blocks of `num_tokens` tokens. A
    kernel may read these only once for all."""

    first: int
    end: int
    num_tokens: int


class StepShape(NamedTuple):
    """Properties of a step that determine how it runs (`worker/inputs/step_shape.py`)."""

    num_tokens: int
    num_decodes: int  # sequences of one token, at the front
    num_prompts: int  # sequences after these
    num_prompt_tokens: int
    only_drafts: bool  # all prompts sample at each token: they verify drafts
    num_keys_again: int  # number of keys read more often than in a mixed graph


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, as changes to the worker's state.

    1. The rows of `released` requests are dropped.
    2. Rows for `new` requests are added.
    3. `block_copies` (source, target) are copied.
    4. The tables of `scheduled` requests are updated.
    5. Every request in `scheduled` is computed. Those with num_tokens == 1 come first.

    If requests are distributed over ranks, a rank gets its part of the plan
    (`worker/ranks/request_owners.py`). `state_marks` are states stored within requests' parts. `copy_ranks`
    are the ranks in whose cache each of `block_copies` is (empty: all are in rank 0's). `largest` has the
    maxima over all parts, because all ranks must run the step in the same way; a part may have no request at
    all. `unmasked` are requests that need no token mask from the host any more.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    released: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    shared: tuple[SharedPrefix, ...] = ()
    copy_ranks: tuple[int, ...] = ()
    largest: StepShape | None = None
    state_marks: tuple[StateMark, ...] = ()
    unmasked: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Mask of tokens that may be sampled at some of a step's sampled positions. `bits` are int32
    [rows, words] in the machine's byte order: token t's is bit t % 32 of word t // 32."""

    positions: tuple[int, ...]  # indices among the N sampled positions, in plan order
    bits: bytes | bytearray
    # row of `bits` for each position; None: row i for the i-th
    which: tuple[int, ...] | None = None


Plan: TypeAlias = StepPlan | TextsPlan


@dataclass(frozen=True, slots=True)
class SamplerState:
    """A request's Mirostat state after this step's token."""

    request_id: str
    mirostat_mu: float


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Failure of a request's own function. Its token in this step is invalid."""

    request_id: str
    error: str


Extra: TypeAlias = (
    SampledLogprobs
    | PromptLogprobs
    | PooledVector
    | TextVectors
    | SamplerState
    | RoutedExperts
    | RequestFailure
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan.

    `token_ids` are the new tokens of all requests that sample, in plan order. `num_tokens` is the
    number of each request's tokens, from one to its `num_sampled` (None: one each). `is_cold`: the
    step captured a graph, ran op by op because its graph is not captured yet, or its drafter caught
    up on missed tokens. The next step of its size will be faster.
    """

    step_id: int
    token_ids: Sequence[int] = ()
    num_tokens: Sequence[int] | None = None
    extras: tuple[Extra, ...] = ()
    is_cold: bool = False

    @property
    def tokens_of_each(self) -> list[tuple[int, ...]]:
        """New tokens of each request that sampled."""
        if self.num_tokens is None:
            return [(token,) for token in self.token_ids]
        ends = [0, *accumulate(self.num_tokens)]
        return [tuple(self.token_ids[begin:end]) for begin, end in pairwise(ends)]


class StepTime(NamedTuple):
    """Time of a step in which every token is sampled."""

    num_seqs: int
    num_tokens: int
    seconds: float
