"""The best of the answers that were drawn for a request."""

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
    """A complete answer with the `n` best of the choices that were drawn, the best first, in place."""
    # of equals the first stays first
    ranked = sorted(output.outputs, key=lambda choice: -mean_logprob(choice.logprobs))
    output.outputs = ranked[: request.sampling.n]
    for index, choice in enumerate(output.outputs):
        choice.index = index
        choice.logprobs = None if request.hides_logprobs else choice.logprobs
    return output


def refuse_best_of() -> NoReturn:
    """Raise RequestError for a stream with `best_of`: the best answers are known at their end."""
    raise RequestError(
        "a stream can't have best_of above n: the best are known at the end", field="best_of"
    )
