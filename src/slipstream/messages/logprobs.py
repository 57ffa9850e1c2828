"""Log-probabilities in messages. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, in nats: its token's (rank 1 is the most likely), and the
    best alternatives'."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities at the N positions of a step for which they were requested, in plan order.

    They are arrays in the machine's byte order, because a beam search reads only the most likely
    tokens.
    """

    request_ids: tuple[str, ...]  # [N]
    token_ids: tuple[int, ...]  # [N]: the sampled tokens
    # [N]: requested number of alternatives, at most K.
    counts: tuple[int, ...]
    logprobs: bytes  # float32 [N]
    ranks: bytes  # int64 [N]
    top_ids: bytes  # int64 [N, K], the best first
    top_logprobs: bytes  # float32 [N, K]


def as_logprobs(
    tokens: Iterable[int], best: Iterable[Any], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Convert tensors or arrays on the host, as returned by `best_logprobs`, to log-probabilities.
    Row i has counts[i] alternatives."""
    chosen, rank, ids, values = (t.tolist() for t in best)
    return [
        TokenLogprobs(token, chosen[i], rank[i], tuple(zip(ids[i][:k], values[i][:k], strict=True)))
        for i, (token, k) in enumerate(zip(tokens, counts, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a request's prompt: for each position from `start` on, that of the token
    that *follows* it. If a prompt is computed again, its positions are sent again."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]
