"""The values that cross boundaries: what a user asks for, what a step does, what comes back.

All are frozen and made of plain Python values: they pass through msgpack unchanged, and nobody can alter a request behind
the scheduler's back. What is made for each request of each step is a named tuple, which costs a third of a frozen
dataclass. No torch here.

    user ── SamplingParams ──> EngineRequest ──> Scheduler ── StepPlan ──> ModelRunner
    user <── RequestOutput <── EngineOutput  <── Scheduler <── StepResult <──┘
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeAlias, TypedDict

from slipstream.errors import RequestError

MAX_LOGPROBS = 20
"""The most alternatives a request may ask for at each token (OpenAI's limit for chat)."""

MAX_CHOICES = 128
"""The largest `n` (OpenAI's limit)."""


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
class StructuredOutputsParams:
    """What the answer must look like: exactly one of `json` (a JSON schema, as text, a dict or a bool), `regex` (the whole
    answer), `choice` (one of these texts), `grammar` (EBNF as llama.cpp writes it, or Lark) and `json_object` (any).

    Of JSON, `whitespace_pattern` is a regular expression of what may stand between two tokens of it, and
    `disable_any_whitespace` allows nothing there. `around` is a Lark grammar in which @answer is what the others describe: so
    that reasoning may come before it, for one.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    around: str | None = None

    def __post_init__(self) -> None:
        def refuse(message: str, name: str) -> RequestError:
            return RequestError(message, field=f"structured_outputs.{name}")

        if isinstance(self.json, (dict, bool)):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise refuse(f"json is not a JSON schema: {error}", "json") from None
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        texts = ("json", "regex", "grammar", "whitespace_pattern", "around")
        for name in texts:
            if not isinstance(value := getattr(self, name), (str, type(None))):
                raise refuse(f"{name} must be a text, got {value!r}", name)
        choice = self.choice
        if choice is not None and not (isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)):
            raise refuse(f"choice must be a list of non-empty texts, got {choice!r}", "choice")
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            message = f"give exactly one of json, regex, choice, grammar and json_object, got {found}"
            raise RequestError(message, field="structured_outputs")
        if given[0] not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    raise refuse(f"{name} is for json and json_object", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    The order is the usual one: allowed_token_ids, bad_words and logit_bias, penalties, temperature, min_p, top_k, top_p, then
    one draw. `temperature=0` is greedy. `top_k=0` and `top_p=1` switch those filters off.
    `repetition_penalty` looks at prompt and answer (Keskar et al. 2019, CTRL); `presence_penalty` and
    `frequency_penalty` at the answer only (OpenAI). `logprobs=k` returns the chosen token's log-probability and the k
    best at each step, before temperature and filters; `prompt_logprobs=k` the same for the prompt.
    With a `seed`, the draw at each position depends on the seed and the position alone. With `structured_outputs` only tokens
    that its grammar allows are drawn.

    Nothing but `allowed_token_ids` is drawn. A token that would complete one of `bad_words` in the answer is not drawn while
    another one is allowed; words are compared as the tokenizer splits them, at the beginning of a text and after a space
    (`bad_words_token_ids` gives them as tokens). `truncate_prompt_tokens=k` keeps the prompt's last k tokens; −1 those for
    which there is room. `detokenize=False` leaves texts empty. `best_of` may only equal `n`, and
    `spaces_between_special_tokens` changes nothing: no tokenizer that we read puts any there.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    best_of: int | None = None  # None once it was checked

    def __post_init__(self) -> None:
        # Callers pass what they know from other libraries: a string or list for stop, -1 for "no top_k".
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(f"stop must be a string or a list of strings, got {self.stop!r}", field="stop")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in (self.logit_bias or {}).items()})
        for name in ("bad_words", "bad_words_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name) or ()))
        words = tuple(_items("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        object.__setattr__(self, "bad_words_token_ids", words)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids))
        self._check()
        object.__setattr__(self, "best_of", None)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check(self) -> None:
        def require(ok: bool, name: str, need: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {need}, got {getattr(self, name)!r}", field=name)

        def finite(value: float) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        def whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        require(whole(self.n) and 1 <= self.n <= MAX_CHOICES, "n", f"a whole number from 1 to {MAX_CHOICES}")
        require(finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        require(whole(self.top_k) and self.top_k >= 0, "top_k", "a whole number ≥ 1, or 0 or -1 for no limit")
        require(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(finite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(finite(value) and -2 <= value <= 2, name, "between -2 and 2")
        require(
            all(t >= 0 and finite(b) for t, b in self.logit_bias.items()),
            "logit_bias",
            "a map of token ids to finite numbers",
        )
        require(
            self.seed is None or (whole(self.seed) and -(2**63) <= self.seed < 2**63), "seed", "a 64-bit whole number"
        )
        require(
            self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "a whole number ≥ 1",
        )
        require(whole(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "a whole number ≥ 0")
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "made of non-empty strings")
        require(all(whole(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "made of token ids")
        require(all(isinstance(w, str) and w.strip() for w in self.bad_words), "bad_words", "made of words")
        words = self.bad_words_token_ids
        fits = all(w and all(whole(t) and t >= 0 for t in w) for w in words)
        require(fits, "bad_words_token_ids", "lists of token ids")
        allowed = self.allowed_token_ids
        found = allowed is None or (len(allowed) > 0 and all(whole(t) and t >= 0 for t in allowed))
        require(found, "allowed_token_ids", "None, or at least one token id")
        kept = self.truncate_prompt_tokens
        kept_fits = kept is None or (whole(kept) and (kept == -1 or kept >= 1))
        require(kept_fits, "truncate_prompt_tokens", "−1 or a whole number ≥ 1")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of={self.best_of!r} is supported only when it equals n ({self.n}); for the best of several ask for n "
                "answers with logprobs, and choose",
                field="best_of",
            )
        if self.stop and not self.detokenize:
            message = "stop strings are looked for in the text; leave detokenize on, or use stop_token_ids"
            raise RequestError(message, field="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or (whole(value) and 0 <= value <= MAX_LOGPROBS), name, f"from 0 to {MAX_LOGPROBS}")


def _items(name: str, given: Any) -> tuple[Any, ...]:
    """A list's items; a string, whose items are letters, is no list."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {given!r}", field=name)
    return tuple(given)


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
