"""Short prompts that wait behind a long one, and their share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from slipstream.core.request import Request

if TYPE_CHECKING:
    from slipstream.core.scheduler import Scheduler
    from slipstream.core.step import StepBuilder

SHARE_BEHIND, MAX_BEHIND = 0.5, 16
"""(fraction of a step's prompt tokens for short prompts behind a long one, maximum number of
waiting prompts examined)."""


def tokens_behind(scheduler: Scheduler, step: StepBuilder, unfinished: Sequence[Request]) -> int:
    """Number of this step's tokens for short prompts behind one that takes many steps; at most the fraction `SHARE_BEHIND`.

    So their first tokens don't wait for its end. All prompts together take as long as in order. Those that wait must
    leave the blocks that the long one needs.
    """
    left, first, kv = step.budget.left, unfinished[0], unfinished[0].kv
    most, rest = int(left * SHARE_BEHIND), first.num_tokens - first.num_computed_tokens
    if rest <= left or not most:
        return 0
    found = [r.num_tokens - r.num_computed_tokens for r in unfinished[1:]]
    free = kv.pool.num_free - scheduler.watermark - kv.blocks_needed(rest)
    rows = scheduler.scheduling.max_num_seqs - len(scheduler.requests.running)
    for request in islice(scheduler.requests.waiting, min(MAX_BEHIND, rows)):
        free -= kv.blocks_needed(request.num_tokens)
        if free < 0:
            break
        cached = 0 if request.holds_blocks else request.kv.cached_prefix(request)[1]
        found.append(request.num_tokens - max(cached, request.num_computed_tokens))
    return min(most, sum(n for n in found if n <= most))
