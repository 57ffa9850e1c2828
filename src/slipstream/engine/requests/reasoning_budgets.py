"""Parameters of an answer whose reasoning has a budget. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slipstream.engine.grammars.reasoning import counter
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tools import Formats, OfferedTools, no_reasoning, reading
from slipstream.errors import RequestError
from slipstream.params.sampling import SamplingParams


def with_reasoning(
    sampling: SamplingParams, prompt: Sequence[int], formats: Formats, tokenizer: Tokenizer | None
) -> SamplingParams:
    """Adds reasoning markers to sampling parameters with a reasoning budget. A grammar then applies
    after the reasoning. RequestError if the model has no reasoning, or the end can't be forced."""
    markers = sampling.reasoning
    if tokenizer is None:
        message = "a budget of reasoning needs a tokenizer (skip_tokenizer_init is set)"
        raise RequestError(message, field="thinking_token_budget")
    if markers is None:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        how = reading(
            *(formats, OfferedTools(), tokenizer.chat_template, lambda: text),
            to_name="",
            begun=text,
        )
        if how is None:
            raise no_reasoning()
        made = how.applied(sampling, tokenizer)
        asked, markers = sampling.structured_outputs, made.reasoning
        around = asked is not None and asked.around is not None
        sampling = dataclasses.replace(
            sampling,
            reasoning=markers,
            structured_outputs=asked if around else made.structured_outputs,
        )
        if markers is None:
            raise no_reasoning()
    forced = counter(markers, tokenizer, sampling.thinking_token_budget).forced
    allowed = sampling.allowed_token_ids
    if allowed is not None and (lacking := forced - set(allowed)):
        raise RequestError(
            f"allowed_token_ids must have the tokens that end the reasoning, since thinking_token_budget forces them; add "
            f"{sorted(lacking)}",
            field="allowed_token_ids",
        )
    return sampling
