"""Comparison of drafts with the tokens that the model sampled."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.messages.steps import FROM_MODEL, ScheduledRequest


def verified(
    requests: Sequence[ScheduledRequest], tokens: Sequence[int], from_model: Sequence[int] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """Compare sampled tokens with drafts. Returns (tokens that count, number of them per request).

    `tokens` are sampled at all positions of `requests`. Each request gets its drafts up to the
    first that was not sampled, and the token sampled there. `from_model` are the drafts that the
    plan left to the draft model.

    This is rejection sampling (Leviathan et al. 2023) of drafts proposed with probability 1. That
    accepts a draft d with probability p(d), and otherwise samples a token from p without d.
    Sampling one token from p and comparing it with d is equivalent. So a seed gives the same answer
    with and without drafts.
    """
    kept: list[int] = []
    counts = []
    begin = 0
    proposed = iter(from_model)
    for s in requests:
        # the other drafts are forced tokens
        unverified = s.drafts[max(0, len(s.drafts) + 1 - s.num_sampled) :]
        drafts = [next(proposed) if draft == FROM_MODEL else draft for draft in unverified]
        end = begin + s.num_sampled
        last = end - 1 - len(drafts)  # the position before the first draft
        pairs = zip(drafts, tokens[last:end], strict=False)
        last += next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        kept += tokens[begin : last + 1]
        counts.append(last + 1 - begin)
        begin = end
    return kept, tuple(counts)
