"""Outputs of the engine core, for the front end that sent the requests. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from slipstream.messages.beams import BeamsOutput, LikeliestTokens
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import PromptLogprobs, TokenLogprobs
from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.texts import VectorOutput


class TokenOutput(NamedTuple):
    """New output of a generating request, from the engine core to the detokenizer."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended the answer, if any
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache; set with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    num_drafted: int = 0  # draft tokens verified for this output
    num_accepted: int = 0  # draft tokens that are in this output
    routed_experts: RoutedExperts | None = None  # with the last token, if they are kept


EngineOutput: TypeAlias = TokenOutput | VectorOutput | BeamsOutput
StepOutput: TypeAlias = EngineOutput | LikeliestTokens


def tokens_of(outputs: Iterable[EngineOutput]) -> list[TokenOutput]:
    return [output for output in outputs if isinstance(output, TokenOutput)]


def vectors_of(outputs: Iterable[EngineOutput]) -> list[VectorOutput]:
    return [output for output in outputs if isinstance(output, VectorOutput)]
