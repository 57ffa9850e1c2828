"""Requests for several answers to one prompt, and answers that another engine has begun. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slipstream.engine.requests.prompts import PromptReader
from slipstream.errors import RequestError
from slipstream.messages.requests import EngineRequest
from slipstream.params.sampling import SamplingParams


def fork(first: EngineRequest, index: int) -> EngineRequest:
    """Makes the request of choice `index`: the same prompt with another seed, without the prompt's
    log-probabilities."""
    sampling = first.sampling
    seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
    return dataclasses.replace(
        first,
        request_id=f"{first.request_id}/{index}",
        fork_of=first.request_id,
        media=tuple(dataclasses.replace(span, data=b"") for span in first.media),
        sampling=dataclasses.replace(sampling, seed=seed, prompt_logprobs=None),
    )


def check_answer(
    prompts: PromptReader, begun: Sequence[int], sampling: SamplingParams, max_tokens: int
) -> None:
    """Raise RequestError if an answer that began with these tokens can't be continued."""
    prompts.check_ids("answer_token_ids", begun)
    if len(begun) >= max_tokens:
        raise RequestError(
            f"{len(begun)} tokens of at most {max_tokens} are there already",
            field="answer_token_ids",
        )
    if sampling.n > 1 or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        message = "an answer of several choices or with log-probabilities can't go on elsewhere; ask again for all of it"
        raise RequestError(message, field="answer_token_ids")
