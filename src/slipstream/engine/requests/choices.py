"""Answers that share a prompt, and answers that go on elsewhere. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slipstream.engine.requests.prompts import PromptReader
from slipstream.errors import RequestError
from slipstream.messages.requests import EngineRequest
from slipstream.params.sampling import SamplingParams


def fork(first: EngineRequest, index: int) -> EngineRequest:
    """Makes the request of choice `index`. It has the same prompt and its own seed, and does not ask again for the
    prompt's log-probabilities."""
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
    """Raise RequestError if an answer that has begun with these tokens can't go on."""
    prompts.check_ids("answer_token_ids", begun)
    if len(begun) >= max_tokens:
        raise RequestError(
            f"{len(begun)} tokens of at most {max_tokens} are there already",
            field="answer_token_ids",
        )
    if sampling.n > 1 or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        message = "an answer of several choices or with log-probabilities can't go on elsewhere; ask again for all of it"
        raise RequestError(message, field="answer_token_ids")
