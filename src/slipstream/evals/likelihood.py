"""Computes the likelihood of a given continuation of a given context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError
from slipstream.params.lora_request import LoRARequest
from slipstream.params.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Sum of ln p over a continuation's tokens, and whether each of them is the most likely token at its position."""

    logprob: float
    is_greedy: bool


def loglikelihoods(
    llm: LLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    lora_request: LoRARequest | None = None,
) -> list[Likelihood]:
    """Likelihood of each continuation after its context, both as token ids. The beginning of a context that is too
    long is cut off. ConfigError if a context or a continuation is empty, or if a continuation alone does not fit."""
    room = llm.config.model.max_model_len - 1  # the engine always generates at least one token
    prompts = []
    for i, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise ConfigError(
                f"pair {i}: a continuation of {len(continuation)} tokens after {len(context)}",
                field="pairs",
            )
        if len(continuation) >= room:
            raise ConfigError(
                f"pair {i}: {len(continuation)} tokens are too many to score in a context of {room + 1}; raise max_model_len",
                field="max_model_len",
            )
        prompts.append(list((*context, *continuation)[-room:]))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers = llm.generate(
        prompts,
        sampling,
        progress=False,
        lora_request=lora_request,
    )
    found = []
    for answer, (_, continuation) in zip(answers, pairs, strict=True):
        scored = [
            p.chosen for p in (answer.prompt_logprobs or [])[-len(continuation) :] if p is not None
        ]
        assert len(scored) == len(continuation)
        found.append(
            Likelihood(
                logprob=sum(p.logprob for p in scored), is_greedy=all(p.rank == 1 for p in scored)
            )
        )
    return found
