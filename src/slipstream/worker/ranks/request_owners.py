"""Distribution of requests over ranks: each rank's part of a step, and joining of their results.

No torch. Each request belongs to one rank, which alone has its row, its keys and values, and its
result (`NewRequest.rank`). A preempted request may return to another rank.

A *part* of a plan has one rank's requests. Block numbers refer to that rank's cache. A part has its
requests in the plan's order, so walking through the plan restores the order of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from slipstream.messages.logprobs import SampledLogprobs
from slipstream.messages.steps import (
    FROM_MODEL,
    Extra,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenMask,
)
from slipstream.worker.inputs.step_shape import largest_shape, shape_of


class RequestOwners:
    """Stores to which of `num_ranks` ranks each request belongs."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rank_of: dict[str, int] = {}

    def forget(self) -> None:
        """Forget all requests; they have ended."""
        self._rank_of.clear()

    def parts(self, plan: StepPlan) -> list[StepPlan]:
        """Split the next plan into the parts of the ranks."""
        ranks, of = range(self.num_ranks), self._rank_of
        released: list[list[str]] = [[] for _ in ranks]
        for name in plan.released:
            # before the new ones, because a request may return to another rank in the same step
            if (rank := of.pop(name, None)) is not None:  # None if `forget` was called since
                released[rank].append(name)
        of.update((new.request_id, new.rank) for new in plan.new)
        scheduled: list[list[ScheduledRequest]] = [[] for _ in ranks]
        for s in plan.scheduled:
            scheduled[of[s.request_id]].append(s)
        largest = largest_shape([shape_of(own) for own in scheduled])
        copies = [
            *zip(plan.block_copies, plan.copy_ranks or (0,) * len(plan.block_copies), strict=True)
        ]
        return [
            StepPlan(
                plan.step_id,
                scheduled=tuple(scheduled[rank]),
                new=tuple([new for new in plan.new if new.rank == rank]),
                released=tuple(released[rank]),
                block_copies=tuple([copy for copy, owner in copies if owner == rank]),
                largest=largest,
                state_marks=tuple([m for m in plan.state_marks if of[m.request_id] == rank]),
                unmasked=plan.unmasked,
            )
            for rank in ranks
        ]


def masks_of_parts(parts: Sequence[StepPlan], plan: StepPlan, mask: TokenMask) -> list[TokenMask]:
    """Split a plan's `mask` into the masks of its parts."""
    rank_of = {s.request_id: rank for rank, part in enumerate(parts) for s in part.scheduled}
    # (rank, index among the rank's sampled positions) of each sampled position
    places: list[tuple[int, int]] = []
    counts = [0] * len(parts)
    for s in plan.scheduled:
        rank = rank_of[s.request_id]
        places += [(rank, counts[rank] + i) for i in range(s.num_sampled)]
        counts[rank] += s.num_sampled
    which = mask.which or tuple(range(len(mask.positions)))
    size = len(mask.bits) // (max(which, default=0) + 1)
    positions: list[list[int]] = [[] for _ in parts]
    # by rank: index of a row of bits in the plan, to its index in the part
    rows: list[dict[int, int]] = [{} for _ in parts]
    own_rows: list[list[int]] = [[] for _ in parts]
    bits = [bytearray() for _ in parts]
    for row, position in zip(which, mask.positions, strict=True):
        rank, place = places[position]
        positions[rank].append(place)
        if row not in rows[rank]:
            bits[rank] += mask.bits[row * size : (row + 1) * size]
        own_rows[rank].append(rows[rank].setdefault(row, len(rows[rank])))
    return [
        TokenMask(tuple(own), own_bits, tuple(own_which))
        for own, own_bits, own_which in zip(positions, bits, own_rows, strict=True)
    ]


def joined_drafts(
    parts: Sequence[StepPlan], plan: StepPlan, proposed: Sequence[Sequence[int]]
) -> list[int]:
    """Joins the drafts that ranks propose for their parts, in the plan's order. A rank whose
    requests have no grammars may send none, because its drafts are not needed before sampling.
    """
    drafts = {
        s.request_id: [next(own, FROM_MODEL) for token in s.drafts if token == FROM_MODEL]
        for part, own in zip(parts, map(iter, proposed), strict=True)
        for s in part.scheduled
    }
    return [token for s in plan.scheduled for token in drafts[s.request_id]]


def joined_result(
    parts: Sequence[StepPlan], plan: StepPlan, results: Sequence[StepResult]
) -> StepResult:
    """Join the results of a plan's parts."""
    tokens_of = {
        s.request_id: tokens
        for part, result in zip(parts, results, strict=True)
        for s, tokens in zip(
            [s for s in part.scheduled if s.num_sampled], result.tokens_of_each, strict=True
        )
    }
    of_each = [tokens_of[s.request_id] for s in plan.scheduled if s.num_sampled]
    num_tokens = (
        None
        if all(result.num_tokens is None for result in results)
        else [len(tokens) for tokens in of_each]
    )
    extras: list[Extra] = [
        extra
        for result in results
        for extra in result.extras
        if not isinstance(extra, SampledLogprobs)
    ]
    if sampled := [
        extra for result in results for extra in result.extras if isinstance(extra, SampledLogprobs)
    ]:
        extras.append(_joined_logprobs(sampled, plan))
    is_cold = any(result.is_cold for result in results)
    return StepResult(
        plan.step_id, [*chain.from_iterable(of_each)], num_tokens, tuple(extras), is_cold
    )


def _joined_logprobs(parts: Sequence[SampledLogprobs], plan: StepPlan) -> SampledLogprobs:
    """Join log-probabilities in the plan's order.

    Each part has as many top tokens as its most demanding request needs.
    """
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.request_ids]
    at = {s.request_id: i for i, s in enumerate(plan.scheduled)}
    order = sorted(range(len(names)), key=lambda i: at[names[i]])
    widths = [len(part.top_ids) // 8 // len(part.request_ids) for part in parts]

    def joined(field: str, dtype: type[np.generic]) -> bytes:
        arrays = [
            np.frombuffer(getattr(part, field), dtype).reshape(len(part.request_ids), -1)
            for part in parts
        ]
        if field.startswith("top_"):
            arrays = [
                np.pad(a, ((0, 0), (0, max(widths) - width)))
                for a, width in zip(arrays, widths, strict=True)
            ]
        return np.concatenate(arrays)[order].tobytes()

    tokens, counts = (
        [x for part in parts for x in getattr(part, field)] for field in ("token_ids", "counts")
    )
    return replace(
        parts[0],
        request_ids=tuple([names[i] for i in order]),
        token_ids=tuple([tokens[i] for i in order]),
        counts=tuple([counts[i] for i in order]),
        logprobs=joined("logprobs", np.float32),
        ranks=joined("ranks", np.int64),
        top_ids=joined("top_ids", np.int64),
        top_logprobs=joined("top_logprobs", np.float32),
    )
