"""The messages of beam searches. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.messages.finish_reason import FinishReason
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import Share
from slipstream.params.search import BeamSearchParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamsRequest:
    """A beam search. The engine core creates a request of one token for each step. `eos_token_ids`
    end a beam."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: BeamSearchParams
    eos_token_ids: tuple[int, ...] = ()
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    lora: LoRARequest | None = None
    share: Share | None = None


class BeamStep(NamedTuple):
    """The continuation of a beam: the tokens of `source`, which may be itself, and `token`."""

    beam: str
    source: str
    token: int


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """An answer of a beam search. `logprob` is the sum over its tokens in nats; `score` includes
    the length penalty. An end token counts in both but is not among the tokens."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamsOutput:
    """The end of a beam search: its answers, best first."""

    request_id: str
    answers: tuple[BeamAnswer, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LikeliestTokens:
    """Candidates from a step for the beam searches in the engine core: each beam's most likely next
    tokens, best first."""

    request_ids: Sequence[str]  # [N]
    num_cached_tokens: Sequence[int]  # [N]
    token_ids: npt.NDArray[np.int64]  # [N, K]
    logprobs: npt.NDArray[np.float32]  # [N, K]
