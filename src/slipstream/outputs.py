"""Outputs for users: answers, their log-probabilities, vectors and scores. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slipstream.base.other_engines import FIELDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slipstream.params.lora_request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability at one position, with its text."""

    token_id: int
    token: str
    logprob: float
    rank: int | None = None
    token_bytes: bytes = b""  # the token's bytes, even if they are part of a character

    @property
    def decoded_token(self) -> str:
        """vLLM's name of `token`."""
        return self.token


class _Hinting:
    """A mixin for answers: reading a field of vLLM's answer that this one lacks raises an error
    with the field to read instead."""

    __slots__ = ()

    if not TYPE_CHECKING:  # checkers would take every name

        def __getattr__(self, name: str) -> Any:
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{said}; {hint}" if (hint := FIELDS.get(name)) else said)


class _Late:
    """Base of objects whose fields are made when they are first read: holds the function and its
    argument until then."""

    __slots__ = ("_late",)
    _late: tuple[Callable[[Any], tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class PositionLogprobs(_Late):
    """The token at one position and its best alternatives."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()

    @classmethod
    def late(
        cls, made: Callable[[Any], tuple[Logprob, tuple[Logprob, ...]]], given: Any
    ) -> PositionLogprobs:
        """Returns log-probabilities whose fields are made by `made(given)` when they are first
        read.

        Their texts take several microseconds, which a step of many requests does not have.
        """
        self = object.__new__(cls)
        object.__setattr__(self, "_late", (made, given))
        return self

    def __getattr__(self, name: str) -> Any:  # of a field that is not made yet
        if name not in ("chosen", "top"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made, given = self._late
        for field_name, value in zip(("chosen", "top"), made(given), strict=True):
            object.__setattr__(self, field_name, value)
        return getattr(self, name)

    def __getitem__(self, token_id: int) -> Logprob:
        """Log-probability by token id, as in vLLM: `logprobs[i][token_id].logprob`. KeyError for a
        token that is not among them."""
        for entry in (self.chosen, *self.top):
            if entry.token_id == token_id:
                return entry
        raise KeyError(token_id)

    def __contains__(self, token_id: object) -> bool:
        return any(entry.token_id == token_id for entry in (self.chosen, *self.top))

    def __iter__(self) -> Iterator[int]:
        """Iterates over the token ids, the chosen one first."""
        return iter(dict.fromkeys(entry.token_id for entry in (self.chosen, *self.top)))


@dataclass(slots=True)
class CompletionOutput(_Hinting):
    """One answer (of n). `stop_reason` is the stop string or stop token id that ended it, if one
    did.

    `weight_versions` are (version, number of tokens): which weights made the tokens of `token_ids`,
    run by run. Weights that never changed have the version "0".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_drafted: int = 0  # tokens proposed by speculative decoding
    num_accepted: int = 0  # proposed tokens that the model confirmed
    message: ChatMessage | None = None  # of `LLM.chat`: the answer in its parts
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    # with the last token, if `enable_return_routed_experts`: int16 [prompt + answer − 1, layers with
    # experts, k]; −1: not known
    routed_experts: npt.NDArray[np.int16] | None = None

    def finished(self) -> bool:
        """Whether the answer has its end, as in vLLM."""
        return self.finish_reason is not None

    @property
    def token_weight_versions(self) -> list[str]:
        """The version of the weights that made each of `token_ids`."""
        return [version for version, count in self.weight_versions for _ in range(count)]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the answer's token log-probabilities (nats). None without `logprobs`, as in
        vLLM."""
        return (
            None
            if self.logprobs is None
            else sum(position.chosen.logprob for position in self.logprobs)
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to call. `arguments` are JSON as the model wrote it; without
    a grammar it may be broken."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An answer in its parts. `content` is None if there are calls and no text."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The message in the format of OpenAI's API, for the next turn's messages."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            made["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return made


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request, in seconds of time.monotonic(). None: not reached yet."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics(_Hinting):
    """Times of a request by vLLM's names. Those that end with `_time` or `_ts` are of
    time.monotonic(), so that only their differences mean something."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    num_generation_tokens: int

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        first = self.first_token_time
        return None if first is None else first - self.arrival_time


@dataclass(slots=True)
class RequestOutput(_Hinting):
    """The state of a request. From `LLM.generate` it is complete; from `AsyncLLM.generate` it has
    only what is *new*."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # The first entry is None: nothing precedes the first token.
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    lora_request: LoRARequest | None = None

    # vLLM's of its connectors and of its encoder-decoder models, which other models leave None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """The request's `times` as vLLM has them. Tokens are those of `outputs`."""
        if (times := self.times) is None:
            return None
        return RequestMetrics(
            arrival_time=times.arrival,
            first_token_time=times.first_token,
            last_token_time=times.last_token,
            finished_time=times.last_token if self.finished else None,
            num_generation_tokens=sum(len(output.token_ids) for output in self.outputs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """A model's vectors for the texts of one call, in order. `data`: float32 [N, E] in the
    machine's byte order."""

    prompts: list[str | None]
    prompt_token_ids: list[list[int]]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a text. `data` is float32 in the machine's byte order, which base64 sends as it
    is.

    If tokens were given, `prompt_token_ids` is the caller's list itself: copying many costs as much
    as a small encoder's products.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    data: bytes = field(repr=False)

    @property
    def embedding(self) -> list[float]:
        return array("f", self.data).tolist()

    @property
    def outputs(self) -> Self:
        """An alias, as in vLLM: `outputs.embedding`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput:
    """The score of a pair of texts: a higher one is a better match."""

    score: float
    num_tokens: int  # computed for it

    @property
    def outputs(self) -> Self:
        """An alias, as in vLLM: `outputs.score`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """A document and its score for the query: a higher score means more relevant. `index`: its index
    in the request."""

    index: int
    document: str
    relevance_score: float
    num_tokens: int  # computed for it
