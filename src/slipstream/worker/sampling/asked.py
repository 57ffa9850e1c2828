"""Log-probabilities of prompts, and embeddings, which requests ask for besides tokens. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slipstream.messages.logprobs import PromptLogprobs, TokenLogprobs, as_logprobs
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.worker.inputs.rows import Row, RowTable

if TYPE_CHECKING:
    from slipstream.worker.sampling.draws import Sampler


def completed_prompts(rows: RowTable, plan: StepPlan) -> tuple[tuple[str, ...], list[int]]:
    """Pooled requests whose last prompt token is in the step.

    Returns (request ids, index of that token among the step's tokens).
    """
    wanted, end = rows.wanting["vector"], 0
    found: dict[str, int] = {}
    for s in plan.scheduled if wanted else ():
        end += s.num_tokens
        if (
            s.request_id in wanted
            and s.num_computed_tokens + s.num_tokens == rows.rows[s.request_id].num_prompt_tokens
        ):
            found[s.request_id] = end - 1
    return tuple(found), list(found.values())


def prompt_logprobs(
    by: Sampler, rows: RowTable, plan: StepPlan, logits_of: Callable[[int, int, int], Any]
) -> list[PromptLogprobs]:
    """Log-probabilities of prompt tokens after this step's positions, for requests that want them.

    `logits_of(start, i, n)` returns the logits of n positions, from the i-th on, of the sequence
    whose tokens begin at `start` in the step.
    """
    found: list[PromptLogprobs] = []
    start = 0
    for s in plan.scheduled:
        row = rows.rows[s.request_id]
        count = row.sampling.prompt_logprobs
        if count is not None and (num := prompt_positions(row, s)):
            entries: list[TokenLogprobs] = []
            first = s.num_computed_tokens + 1
            for i in range(0, num, PROMPT_LOGPROB_ROWS):
                n = min(PROMPT_LOGPROB_ROWS, num - i)
                tokens = rows.tokens[row.index, first + i : first + i + n]
                found_best = by.best_logprobs(logits_of(start, i, n), tokens, count)
                best: Any = tuple(by.on_host(x) for x in found_best)
                entries += as_logprobs(by.on_host(tokens).tolist(), best, [count] * n)
            found.append(PromptLogprobs(s.request_id, s.num_computed_tokens, tuple(entries)))
        start += s.num_tokens
    return found


PROMPT_LOGPROB_ROWS = 256
"""Positions whose logits are computed at once for prompt log-probabilities."""


def prompt_positions(row: Row, s: ScheduledRequest) -> int:
    """Number of this step's positions that precede a *prompt* token."""
    return max(
        0,
        min(s.num_computed_tokens + s.num_tokens, row.num_prompt_tokens - 1)
        - s.num_computed_tokens,
    )
