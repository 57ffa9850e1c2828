"""Log-probabilities in messages. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: its token's (rank 1 is the most likely), and the best
    ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities at the N positions of a step where requests asked for some, in plan order.

    They are arrays in the machine's byte order, because a beam search looks only at the likeliest
    tokens.
    """

    request_ids: tuple[str, ...]  # [N]
    token_ids: tuple[int, ...]  # [N]: the sampled tokens
    # [N]: the number of alternatives that the request asked for, K at most.
    counts: tuple[int, ...]
    logprobs: bytes  # float32 [N]
    ranks: bytes  # int64 [N]
    top_ids: bytes  # int64 [N, K], the best first
    top_logprobs: bytes  # float32 [N, K]


def as_logprobs(
    tokens: Iterable[int], best: Iterable[Any], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities from tensors or arrays on the host, as `best_logprobs` returns them. Row i
    has counts[i] alternatives."""
    chosen, rank, ids, values = (t.tolist() for t in best)
    return [
        TokenLogprobs(token, chosen[i], rank[i], tuple(zip(ids[i][:k], values[i][:k], strict=True)))
        for i, (token, k) in enumerate(zip(tokens, counts, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a request's prompt: for each position from `start` on, those of the
    token that *follows* it. A prompt that is computed again starts again."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]
