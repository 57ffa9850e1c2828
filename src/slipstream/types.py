"""The messages between front end, engine core, scheduler and worker. No torch.

1. They consist of plain Python values, so that msgpack can carry them.
2. Requests, plans and results are frozen: nobody can change a request that the scheduler has.
3. Messages made for each request of each step are named tuples, which cost a third of a frozen
   dataclass.

    user ── SamplingParams ──> EngineRequest ──> Scheduler ── StepPlan ──> ModelRunner
    user <── RequestOutput <── EngineOutput  <── Scheduler <── StepResult <──┘
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, TypeAlias, TypedDict

from slipstream.answer_forms import ReasoningMarkers as ReasoningMarkers
from slipstream.answer_forms import StructuredOutputsParams as StructuredOutputsParams
from slipstream.beam_messages import BeamsOutput, LikeliestTokens
from slipstream.cache_hints import NO_HINTS, CacheHints
from slipstream.errors import RequestError
from slipstream.logprob_messages import PromptLogprobs, SampledLogprobs, TokenLogprobs
from slipstream.lora_request import LoRARequest
from slipstream.media import AudioWindow, ImageSpan, PicturesPrompt
from slipstream.request_fields import FinishReason as FinishReason
from slipstream.request_fields import Share as Share
from slipstream.sampling_params import MAX_CHOICES as MAX_CHOICES
from slipstream.sampling_params import MAX_LOGPROBS as MAX_LOGPROBS
from slipstream.sampling_params import SamplingParams as SamplingParams
from slipstream.sampling_params import SpeechRules as SpeechRules
from slipstream.search_params import BeamSearchParams as BeamSearchParams
from slipstream.search_params import PoolingParams as PoolingParams
from slipstream.suggesting import suggesting_init
from slipstream.text_messages import PooledVector, TextsPlan, TextVectors, VectorOutput


class TokensPrompt(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt that is text, as vLLM writes it."""

    prompt: str


Prompt: TypeAlias = str | TokensPrompt | TextPrompt | PicturesPrompt


Reserve: TypeAlias = Callable[[int, int], None]
"""Called with the tokens of a prompt and of its longest answer before a request is queued. It may
raise."""


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of serving a request: everything but its prompt and the parameters of its answer.

    `reserve` is called before the request is queued; an exception from it ends the request.
    `answer_token_ids` continues an answer that another engine began; its sink gets these tokens
    first.
    """

    request_id: str | None = None  # None: one is made up
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # from now
    add_special_tokens: bool = True  # add the tokenizer's own around a text prompt
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    cache_hints: CacheHints = NO_HINTS
    lora_request: LoRARequest | None = None
    share: Share | None = None  # None: shares equally with weight 1
    client: str = ""  # the grammars of one client are compiled one after the other
    reserve: Reserve | None = None
    answer_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise RequestError("deadline_s must be above 0", field="deadline_s")


DEFAULT_OPTIONS = RequestOptions()


TokenIds: TypeAlias = tuple[int, ...] | bytes
"""Token ids. As bytes they are an int32 array in the machine's order: a process reads 8,000 of them in 1 µs, and a tuple in
500, before which its engine makes no step."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """The ids as bytes. `struct.error` if one is no integer of 32 bits."""
    return struct.pack(f"{len(ids)}i", *ids)


def count_ids(ids: TokenIds) -> int:
    return len(ids) // 4 if isinstance(ids, bytes) else len(ids)


def ids_of(ids: TokenIds) -> array[int]:
    return array("i", ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence for the engine core, with its `RequestOptions`.

    A request with n > 1 arrives as n of these: `fork_of` is the id of the first, whose prompt
    blocks the others share. `eos_token_ids` is empty if the caller ignores end-of-sequence.
    `deadline` and `arrival` are in seconds of the machine's time.monotonic(); lower `priority` goes
    first.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int  # resolved: within the context
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None
    fork_of: str | None = None
    cache_salt: str = ""
    cache_hints: CacheHints = NO_HINTS
    pooled: bool = False  # asks for an embedding or scores, not tokens: max_tokens is 0
    # An encoder-decoder's prompt; prompt_token_ids then begin its answer. With `audio` it has a 0 for each state.
    encoder_token_ids: tuple[int, ...] = ()
    audio: AudioWindow | None = None
    lora: LoRARequest | None = None
    share: Share | None = None
    client: str = ""
    # The start of an answer that began elsewhere and continues here.
    answer_token_ids: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()  # in the order of their offsets
    # A beam of the same search; itself for the first one. `Scheduler.go_on` gives each token.
    beam_of: str | None = None
    # Positions of the prompt after which requests may differ: recurrent states are kept there.
    marks: tuple[int, ...] = ()

    @classmethod
    def of(cls, options: RequestOptions, **own: Any) -> EngineRequest:
        """A request that arrives now. `own` are the fields that `options` lacks."""
        now = time.monotonic()
        wait_s = options.deadline_s
        return cls(
            arrival=now,
            priority=options.priority,
            deadline=None if wait_s is None else now + wait_s,
            cache_salt=options.cache_salt,
            cache_hints=options.cache_hints,
            lora=options.lora_request,
            share=options.share,
            client=options.client,
            answer_token_ids=tuple(options.answer_token_ids),
            **own,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return count_ids(self.prompt_token_ids)

    @property
    def parent(self) -> str | None:
        """The request whose tokens this one begins with; it has been queued before."""
        return self.fork_of or (None if self.beam_of == self.request_id else self.beam_of)


# --- A step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the worker, or comes back after preemption (then `token_ids` has its
    answer so far).

    `encoder_token_ids` are to be encoded into the blocks of its `cross` group. A fork has none of
    these: its blocks hold `num_encoder_tokens` already.
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
    mirostat_mu: float | None = None  # state of its sampler, if it was here before
    images: tuple[ImageSpan, ...] = ()
    rank: int = 0  # its rank, if requests are distributed

    @classmethod
    def of(
        cls,
        spec: EngineRequest,
        token_ids: TokenIds,
        *,
        encodes: bool,
        mirostat_mu: float | None,
        rank: int,
    ) -> Self:
        """Make it from an engine's request, whose known tokens are `token_ids`. `encodes`: the
        encoder runs in the request's first step."""
        return cls(
            request_id=spec.request_id,
            token_ids=token_ids,
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=spec.sampling,
            eos_token_ids=spec.eos_token_ids,
            pooled=spec.pooled,
            encoder_token_ids=spec.encoder_token_ids if encodes else (),
            num_encoder_tokens=len(spec.encoder_token_ids),
            audio=spec.audio if encodes else None,
            lora=spec.lora,
            mirostat_mu=mirostat_mu,
            images=spec.images,
            rank=rank,
        )


STATES = -1
"""The group of a `TableUpdate` of a request's state slots: the one to read, then those to write (`RowTable.states`)."""


class StateMark(NamedTuple):
    """A step keeps a recurrent state: after the first `num_tokens` tokens of a request's part, in `slot`."""

    request_id: str
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """New entries of a request's block table: these blocks replace or extend `group`'s table from
    `index` on.

    Used for blocks that are appended, that replace shared ones (copy on write), or that are
    released (the null block).
    """

    group: int
    index: int
    block_ids: tuple[int, ...]


FROM_MODEL = -1
"""Placeholder for a draft that the worker's draft model will propose."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute positions [num_computed_tokens, num_computed_tokens +
    num_tokens).

    The last `num_sampled` of these positions are sampled: none while a prompt is incomplete, one
    for a decode, one more for each guess. `drafts` are the last tokens to compute; the worker has
    all others. A draft at a sampled position is a guess: the result has the sampled tokens up to
    the first that differs from the guess after its position. Other drafts are forced by a grammar
    or chosen by a beam search, and known to be right.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_sampled: int
    table_updates: tuple[TableUpdate, ...] = ()
    drafts: tuple[int, ...] = ()


class SharedPrefix(NamedTuple):
    """Decodes [first, end) of a step that begin with the same blocks of `num_tokens` tokens. A
    kernel may read these once."""

    first: int
    end: int
    num_tokens: int


class StepShape(NamedTuple):
    """The properties of a step that decide how it runs (`worker/step_shape.py`)."""

    num_tokens: int
    num_decodes: int  # sequences of one token at the front
    num_prompts: int  # sequences after these
    num_prompt_tokens: int
    only_drafts: bool  # all prompts sample at each token: they verify drafts
    num_keys_again: int  # number of keys that they read more often than a mixed graph does


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, as a difference to the worker's state.

    1. The rows of `released` requests are dropped.
    2. Rows for `new` ones are made.
    3. `block_copies` (source, target) are carried out.
    4. The tables of `scheduled` requests are updated.
    5. Every request in `scheduled` is computed. Those with num_tokens == 1 come first.

    If requests are distributed over ranks, a rank gets its part of the plan
    (`worker/ranks/request_owners.py`). `state_marks` are kept inside of requests' parts.
    `copy_ranks` says in whose cache each of `block_copies` is (empty: all are in rank 0's).
    `largest` has the largest numbers of all parts, because all ranks must run the step in the same
    way; a part may have no request at all. `unmasked` are requests whose tokens need no mask from
    the host any more.
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
    """Tokens that may be drawn at some of a step's sampled positions. `bits` are int32
    [rows, words] in the machine's byte order: token t's is bit t % 32 of word t // 32."""

    positions: tuple[int, ...]  # indices among the N sampled ones, in plan order
    bits: bytes | bytearray
    which: tuple[int, ...] | None = None  # row of bits of each position; None: the i-th has row i


Plan: TypeAlias = StepPlan | TextsPlan


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Mirostat's state of a request after this step's token."""

    request_id: str
    mirostat_mu: float


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A failure of the request's own function. Its token of this step is invalid."""

    request_id: str
    error: str


Extra: TypeAlias = (
    SampledLogprobs | PromptLogprobs | PooledVector | TextVectors | SamplerState | RequestFailure
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
        """The new tokens of each request that sampled."""
        if self.num_tokens is None:
            return [(token,) for token in self.token_ids]
        ends = [0, *accumulate(self.num_tokens)]
        return [tuple(self.token_ids[begin:end]) for begin, end in pairwise(ends)]


class StepTime(NamedTuple):
    """The time of a step in which every token is sampled."""

    num_seqs: int
    num_tokens: int
    seconds: float


class TokenOutput(NamedTuple):
    """New output of a generating request, from the engine core to the detokenizer."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache; set with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    num_drafted: int = 0  # draft tokens verified for this output
    num_accepted: int = 0  # draft tokens that are in this output


EngineOutput: TypeAlias = TokenOutput | VectorOutput | BeamsOutput
StepOutput: TypeAlias = EngineOutput | LikeliestTokens


def tokens_of(outputs: Iterable[EngineOutput]) -> list[TokenOutput]:
    return [output for output in outputs if isinstance(output, TokenOutput)]


def vectors_of(outputs: Iterable[EngineOutput]) -> list[VectorOutput]:
    return [output for output in outputs if isinstance(output, VectorOutput)]
