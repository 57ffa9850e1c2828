"""A step while the scheduler plans it: who is in it with how many tokens, and what the worker is to be told."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.types import NewSequence, ScheduledSequence, StepPlan


class Step:
    """`budget`: how many tokens may still be added. Blocks are put down by `Scheduler._take_blocks`, before `add`."""

    __slots__ = (
        "budget",
        "copied",
        "copies",
        "decodes",
        "encoding",
        "new",
        "new_blocks",
        "prompts",
        "replaced",
        "sampled_decodes",
        "sampled_prompts",
        "scheduled",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[ScheduledSequence] = []  # of one token: first in the plan
        self.prompts: list[ScheduledSequence] = []
        self.sampled_decodes: list[Request] = []
        self.sampled_prompts: list[Request] = []
        self.scheduled: set[Request] = set()
        self.encoding: set[Request] = set()  # whose encoder runs in this step
        self.new: list[NewSequence] = []
        self.new_blocks: dict[str, tuple[int, ...]] = {}
        self.replaced: dict[str, tuple[tuple[int, int], ...]] = {}
        self.copies: list[tuple[int, int]] = []
        self.copied: list[int] = []  # the copies' sources, held until the plan is made: none may be a target too

    def add(self, request: Request, computed: int, count: int, samples: bool) -> None:
        """`count` tokens of the request behind the `computed` ones, in blocks that it has. What the worker does not know of it
        yet, it is told."""
        request_id = request.spec.request_id
        if request.in_worker:
            new_blocks = self.new_blocks.get(request_id, ())
        else:
            request.in_worker = True
            new_blocks = tuple(request.block_ids)
            self.new.append(self._introduced(request))
        replaced = self.replaced.get(request_id, ()) if self.replaced else ()
        entry = ScheduledSequence(request_id, computed, count, samples, new_blocks, replaced)
        self.scheduled.add(request)
        (self.decodes if count == 1 else self.prompts).append(entry)
        if samples:
            (self.sampled_decodes if count == 1 else self.sampled_prompts).append(request)

    def _introduced(self, request: Request) -> NewSequence:
        spec = request.spec
        return NewSequence(
            spec.request_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            spec.sampling,
            spec.eos_token_ids,
            spec.pooled,
            spec.encoder_token_ids if request in self.encoding else (),
            tuple(request.encoder_block_ids),
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
