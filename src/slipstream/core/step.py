"""A step while the scheduler plans it: who is in it with how many tokens, and what the worker is to be told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from slipstream.config import MOST_STEP_DRAFTS
from slipstream.core.request import Request
from slipstream.types import NewRequest, ScheduledRequest, StepPlan, StepResult, TableUpdate


class StepBuilder:
    """`budget`: how many tokens may still be added. Blocks are put down by `Scheduler._take_blocks`, before `add`."""

    __slots__ = (
        "budget",
        "copied",
        "copies",
        "decodes",
        "drafts",
        "encoding",
        "forced",
        "new",
        "prompts",
        "room_for_drafts",
        "sampled_decodes",
        "sampled_prompts",
        "scheduled",
        "updates",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.room_for_drafts = MOST_STEP_DRAFTS
        self.decodes: list[ScheduledRequest] = []  # of one token: first in the plan
        self.prompts: list[ScheduledRequest] = []
        self.sampled_decodes: list[Request] = []
        self.sampled_prompts: list[Request] = []
        self.scheduled: set[Request] = set()
        self.encoding: set[Request] = set()  # whose encoder runs in this step
        self.new: list[NewRequest] = []
        self.drafts: dict[Request, int] = {}  # guessed tokens that are checked, of those that have some
        self.forced: dict[Request, tuple[int, ...]] = {}  # tokens that a grammar forces, of those that have some
        self.updates: dict[str, list[TableUpdate]] = {}  # by request
        self.copies: list[tuple[int, int]] = []
        self.copied: list[int] = []  # the copies' sources, held until the plan is made: none may be a target too

    def add(self, request: Request, computed: int, count: int, num_sampled: int, drafts: tuple[int, ...]) -> None:
        """`count` tokens of the request behind the `computed` ones, the last of them `drafts` or forced, in blocks that it
        has. What the worker does not know of it yet, it is told."""
        request_id = request.request_id
        if request.in_worker:
            updates = tuple(self.updates.pop(request_id, ()))
        else:
            request.in_worker = True
            updates = tuple([TableUpdate(group, 0, tuple(table)) for group, table in enumerate(request.blocks) if table])
            self.new.append(self._introduced(request))
        entry = ScheduledRequest(request_id, computed, count, num_sampled, updates, drafts)
        self.scheduled.add(request)
        (self.decodes if count == 1 else self.prompts).append(entry)
        if num_sampled:
            (self.sampled_decodes if count == 1 else self.sampled_prompts).append(request)

    def _introduced(self, request: Request) -> NewRequest:
        spec = request.spec
        return NewRequest(
            spec.request_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            spec.sampling,
            spec.eos_token_ids,
            spec.pooled,
            spec.encoder_token_ids if request in self.encoding else (),
            len(spec.encoder_token_ids),
        )

    def plan(self, step_id: int, released: Sequence[str]) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            scheduled=(*self.decodes, *self.prompts),
            new=tuple(self.new),
            released=tuple(released),
            block_copies=tuple(self.copies),
        )


def tokens_of_each(result: StepResult) -> list[tuple[int, ...]]:
    """The new tokens of each request that sampled."""
    if result.num_tokens is None:
        return [(token,) for token in result.token_ids]
    ends = [0, *accumulate(result.num_tokens)]
    return [tuple(result.token_ids[begin:end]) for begin, end in pairwise(ends)]
