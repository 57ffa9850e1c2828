"""The shape of a step, which determines the graph that it uses, if any. No torch.

Ranks that compute different requests exchange rows in each mixture, so all of them must run a step
in graphs of one size, or all op by op. So they choose by a common shape, the maximum over the
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.messages.steps import ScheduledRequest, StepShape

MIXED_ROWS = 3
"""Number of decode rows that read keys in the same time as one sequence in a mixed graph.

Each row of a decode graph reads the keys again.
"""


def num_leading_decodes(scheduled: Sequence[ScheduledRequest]) -> int:
    """Number of one-token sequences at the front."""
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
    """Smallest shape that covers all ranks' parts of a step.

    A rank without requests computes one token of padding.
    """
    tokens, decodes, prompts, prompt_tokens, _, again = (
        max(numbers) for numbers in zip(*shapes, strict=True)
    )
    return StepShape(
        max(1, tokens), decodes, prompts, prompt_tokens, all(s.only_drafts for s in shapes), again
    )
