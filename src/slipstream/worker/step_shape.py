"""What of a step decides in which graph it runs, and whether in one. No torch.

Ranks that have requests of their own exchange rows in each mixture, so all of them run a step in graphs of one size, or all op
by op. So they choose by one shape, which has the largest of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import ScheduledRequest, StepShape

MIXED_ROWS = 3
"""A mixed graph's kernel reads a sequence's keys in the time of so many rows of a decode graph, of which each reads them."""


def num_leading_decodes(scheduled: Sequence[ScheduledRequest]) -> int:
    """The number of sequences of one token at the front."""
    return next((i for i, s in enumerate(scheduled) if s.num_tokens > 1), len(scheduled))


def shape_of(scheduled: Sequence[ScheduledRequest]) -> StepShape:
    num_decodes = num_leading_decodes(scheduled)
    behind = scheduled[num_decodes:]
    num_behind = sum(s.num_tokens for s in behind)
    only_drafts = all(s.num_tokens == s.num_sampled for s in behind if s.num_tokens > 1)
    again = (
        sum((s.num_tokens - MIXED_ROWS) * s.num_computed_tokens for s in behind if s.num_tokens > 1)
        if only_drafts
        else 0
    )
    return StepShape(
        num_decodes + num_behind, num_decodes, len(behind), num_behind, only_drafts, again
    )


def largest_shape(shapes: Sequence[StepShape]) -> StepShape:
    """Of the ranks' parts of a step. One without requests computes a token of padding."""
    tokens, decodes, prompts, prompt_tokens, _, again = (
        max(numbers) for numbers in zip(*shapes, strict=True)
    )
    return StepShape(
        max(1, tokens), decodes, prompts, prompt_tokens, all(s.only_drafts for s in shapes), again
    )
