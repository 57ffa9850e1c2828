"""The messages between front end, engine core, scheduler and worker, and what a user gets. No torch.

1. They are made of plain Python values, so that msgpack can carry them.
2. Requests, plans and results are frozen: nobody can change a request that the scheduler has.
3. What is made for each request of each step is a named tuple, which costs a third of a frozen dataclass.

    user ── SamplingParams ──> EngineRequest ──> Scheduler ── StepPlan ──> ModelRunner
    user <── RequestOutput <── EngineOutput  <── Scheduler <── StepResult <──┘
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self, TypeAlias, TypedDict

from slipstream.sampling_params import MAX_CHOICES as MAX_CHOICES
from slipstream.sampling_params import MAX_LOGPROBS as MAX_LOGPROBS
from slipstream.sampling_params import SamplingParams as SamplingParams
from slipstream.sampling_params import StructuredOutputsParams as StructuredOutputsParams


class TokensPrompt(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt that is text, as vLLM writes it."""

    prompt: str


Prompt: TypeAlias = str | TokensPrompt | TextPrompt


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # cancelled by the caller
    DEADLINE = "deadline"  # its deadline passed before it was done
    ERROR = "error"  # the engine failed
    INVALID = "invalid"  # what it asks for turned out to be impossible


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence for the engine core. A request with n > 1 arrives as n of these: `fork_of` is the id of the first,
    whose prompt blocks the others share. `eos_token_ids` is empty if the caller ignores end-of-sequence.
    `deadline` and `arrival` are in seconds of time.monotonic() of the machine; lower `priority` goes first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int  # resolved: never beyond the end of the context
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None
    fork_of: str | None = None
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    pooled: bool = False  # wanted is an embedding, or scores, and no token: max_tokens is 0
    encoder_token_ids: tuple[int, ...] = ()  # an encoder-decoder's prompt; prompt_token_ids then begin its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRequest:
    """The texts of one call, of each of which a vector or scores are wanted: one request, however many they are. What is said
    of each token or text are int32 in the machine's order, since Python's own integers cost more than an encoder's products.
    """

    request_id: str
    token_ids: bytes  # [T], one text behind the other
    lengths: bytes  # [N], none of them 0
    num_first: bytes = b""  # [N]: how many tokens are the first's, where texts are pairs and the model tells the two apart
    arrival: float = 0.0
    priority: int = 0


# --- A step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the worker, or comes back after preemption (then `token_ids` holds its answer so far).

    `encoder_token_ids` are to be encoded into the blocks of its `cross` group. A fork has no such tokens: its blocks hold
    `num_encoder_tokens` already.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    pooled: bool = False
    encoder_token_ids: tuple[int, ...] = ()
    num_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """From `index` on, the request's block table of `group` has these blocks.

    The one form for blocks that are appended, put in place of shared ones (copy on write) or released (the null block).
    """

    group: int
    index: int
    block_ids: tuple[int, ...]


FROM_MODEL = -1
"""A draft that the worker's draft model is to propose."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute positions [num_computed_tokens, num_computed_tokens + num_tokens).

    The last `num_sampled` of these positions are sampled: none while a prompt is not complete, one for a decode, one more for
    each guess. `drafts` are the last of the tokens to compute; the worker has all others. Those behind which something is
    sampled are guesses: of what is sampled the tokens up to the first that is not the guess behind its position come back.
    Those before are forced by a grammar, and known to be right.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_sampled: int
    table_updates: tuple[TableUpdate, ...] = ()
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the worker does in one step, as a difference to what it knows.

    1. The rows of `released` requests are dropped.
    2. Rows for `new` ones are made.
    3. `block_copies` (source, target) are carried out.
    4. The tables of `scheduled` requests are updated.
    5. Every request in `scheduled` is computed. Those with num_tokens == 1 stand first.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    released: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens may be drawn at some of a step's sampled positions. `bits` are int32 [len(positions), words] in the
    machine's order: token t's is bit t % 32 of word t // 32."""

    positions: tuple[int, ...]  # of the N sampled ones, in plan order
    bits: bytes


@dataclass(frozen=True, slots=True)
class TextsPlan:
    """A step of an encoder: whole texts, of which nothing is kept. int32 as in `TextsRequest`."""

    step_id: int
    token_ids: bytes  # [T]
    lengths: bytes  # [S]
    num_first: bytes = b""  # [S], or empty: no text is a pair

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


Plan: TypeAlias = StepPlan | TextsPlan


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there (rank 1 is the most likely), and of the best."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of a request that asked: one entry for each of its new tokens."""

    request_id: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a request in prefill that asked: for each position from `start` on, those of the token that *follows* it. A prompt
    that is computed again begins anew."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PooledVector:
    """Of a pooled request that is complete: its vector or its scores, float32 in the machine's order."""

    request_id: str
    vector: bytes


@dataclass(frozen=True, slots=True)
class TextVectors:
    """Of a TextsPlan: float32 [S, E] in the machine's order."""

    vectors: bytes


Extra: TypeAlias = SampledLogprobs | PromptLogprobs | PooledVector | TextVectors


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    `token_ids` are the new tokens of all requests that sample, in plan order; `num_tokens` says how many each of them got, at
    least one and at most its `num_sampled` (None: one each).
    """

    step_id: int
    token_ids: Sequence[int] = ()
    num_tokens: Sequence[int] | None = None
    extras: tuple[Extra, ...] = ()


class TokenOutput(NamedTuple):
    """News of a request that generates, from the engine core to whoever turns tokens into text."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache; with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    num_drafted: int = 0  # tokens that were guessed and verified for these
    num_accepted: int = 0  # and how many of them are among these


@dataclass(frozen=True, slots=True)
class VectorOutput:
    """News of a request for vectors or scores: of `num_texts` of its texts from `first_text` on, float32 in the machine's
    order. The end of a request that failed brings none."""

    request_id: str
    vectors: bytes = b""
    first_text: int = 0
    num_texts: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


EngineOutput: TypeAlias = TokenOutput | VectorOutput


def tokens_of(outputs: Iterable[EngineOutput]) -> list[TokenOutput]:
    return [output for output in outputs if isinstance(output, TokenOutput)]


def vectors_of(outputs: Iterable[EngineOutput]) -> list[VectorOutput]:
    return [output for output in outputs if isinstance(output, VectorOutput)]


# --- What a user gets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative at one position, decoded."""

    token_id: int
    token: str
    logprob: float
    rank: int | None = None
    token_bytes: bytes = b""  # what the token stands for, also where it is part of a character


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position and its best alternatives."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()

    def __getitem__(self, token_id: int) -> Logprob:
        """By token id, as vLLM has it: `logprobs[i][token_id].logprob`. KeyError for a token that is not among them."""
        for entry in (self.chosen, *self.top):
            if entry.token_id == token_id:
                return entry
        raise KeyError(token_id)

    def __contains__(self, token_id: object) -> bool:
        return any(entry.token_id == token_id for entry in (self.chosen, *self.top))

    def __iter__(self) -> Iterator[int]:
        """The token ids, the chosen one first."""
        return iter(dict.fromkeys(entry.token_id for entry in (self.chosen, *self.top)))


@dataclass(slots=True)
class CompletionOutput:
    """One answer (of n). `stop_reason` is the stop string or stop token id that ended it, if one did."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_drafted: int = 0  # tokens that speculative decoding guessed
    num_accepted: int = 0  # and of them those that the model confirmed


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened, in seconds of time.monotonic(); None for what has not."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request. From `LLM.generate` it is complete; from `AsyncLLM.generate` each one is what is *new*."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # None for the first token, which nothing precedes
    num_cached_tokens: int = 0
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """What a model says of the texts of one call, in their order. `data`: float32 [N, E] in the machine's order."""

    prompts: list[str | None]
    prompt_token_ids: list[list[int]]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A text as a vector. `data` holds it as float32 in the machine's order, as it goes over the wire in base64. Where tokens
    were given, `prompt_token_ids` is the caller's own list: copies of many cost as much as a small encoder's products."""

    prompt: str | None
    prompt_token_ids: list[int]
    data: bytes = field(repr=False)

    @property
    def embedding(self) -> list[float]:
        return array("f", self.data).tolist()

    @property
    def outputs(self) -> Self:
        """As vLLM has it: `outputs.embedding`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput:
    """How well two texts go together: the higher the better."""

    score: float
    num_tokens: int  # that were computed for it

    @property
    def outputs(self) -> Self:
        """As vLLM has it: `outputs.score`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """A document and how well it answers the query: the higher the better. `index`: its place among those given."""

    index: int
    document: str
    relevance_score: float
    num_tokens: int  # that were computed for it


ExpertTokens: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""For each layer that has experts its index, and how many tokens each of them was chosen for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler's state at a moment, and totals since it started. Counts of tokens and blocks."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # that sequences can hold
    num_free_blocks: int = 0
    kv_cache_usage: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of them found
    num_preemptions: int = 0
    kv_allocated_tokens: int = 0  # that the blocks in use have room for, each in the layers of its group
    kv_wasted_tokens: int = 0  # of them allocated and not written
    spec_num_drafts: int = 0  # runs of guessed tokens that steps verified
    spec_draft_tokens: int = 0  # the tokens in them
    spec_accepted_tokens: int = 0  # those that were right
    spec_accepted_by_position: tuple[int, ...] = ()  # how often the first of a run was, the second, …
    forced_tokens: int = 0  # that grammars forced, and for which nothing was sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """The scheduler's figures and the engine's own. `_s` are seconds. `expert_load` is there if it was asked for."""

    num_steps: int = 0
    last_step_age_s: float = 0.0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    uptime_s: float = 0.0
    expert_load: ExpertTokens = ()
    is_sleeping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """What a checkpoint's canary said at the start: how far this model, with these kernels and this form of the cache, is from
    what was stored when the checkpoint was made (KL in nats, over `num_tokens`)."""

    ok: bool
    kl_mean: float
    kl_max: float
    top1_agreement: float
    limit: float  # for kl_mean
    num_tokens: int

    def describe(self) -> str:
        verdict = "sings as it should" if self.ok else "is dead: the model gives something else here than where it was made"
        return (
            f"the checkpoint's canary {verdict} (mean KL {self.kl_mean:.4g} nats, {self.limit:g} at most; the same likeliest "
            f"token at {self.top1_agreement:.0%} of {self.num_tokens})"
        )
