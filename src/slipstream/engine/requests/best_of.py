"""Selection of the best of a request's sampled answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from slipstream.engine.requests.processor import PreparedRequest
from slipstream.errors import RequestError
from slipstream.outputs import PositionLogprobs, RequestOutput


def mean_logprob(logprobs: Sequence[PositionLogprobs] | None) -> float:
    """Mean log-probability of an answer's tokens, by which `best_of` chooses; −inf without any."""
    return sum(p.chosen.logprob for p in logprobs) / len(logprobs) if logprobs else float("-inf")


def best_of(output: RequestOutput, request: PreparedRequest) -> RequestOutput:
    """Reduces a complete answer to the `n` best of its sampled choices, best first, in place."""
    # among equals the first stays first
    ranked = sorted(output.outputs, key=lambda choice: -mean_logprob(choice.logprobs))
    output.outputs = ranked[: request.sampling.n]
    for index, choice in enumerate(output.outputs):
        choice.index = index
        choice.logprobs = None if request.hides_logprobs else choice.logprobs
    return output


def refuse_best_of() -> NoReturn:
    """Raise RequestError for a stream with `best_of`, because the best answers are only known at the end."""
    raise RequestError(
        "a stream can't have best_of above n: the best are known at the end", field="best_of"
    )
