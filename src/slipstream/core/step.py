"""A step under construction: its requests, their token counts, and the changes for the worker."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config import MAX_STEP_DRAFTS
from slipstream.core.request import Request, Status
from slipstream.types import NewRequest, ScheduledRequest, SharedPrefix, StepPlan, TableUpdate


class StepBuilder:
    """Collects one step.

    `budget` is the number of tokens that may still be added. `rooms` is the same per rank, not
    counting one token of each request that runs there; it is empty with a single rank.
    `KVCacheManager.allocate` records new blocks before `add` is called.
    """

    __slots__ = (
        "budget",
        "decodes",
        "drafts",
        "encoding",
        "forced",
        "new",
        "prompts",
        "room_for_drafts",
        "rooms",
        "sampled_decodes",
        "sampled_prompts",
        "scheduled",
        "updates",
    )

    def __init__(self, budget: int, updates: dict[str, list[TableUpdate]]) -> None:
        """`updates`: block table changes that the worker does not have yet, by request id."""
        self.budget = budget
        self.rooms: list[int] = []
        self.room_for_drafts = MAX_STEP_DRAFTS
        # requests with one token; they come first in the plan
        self.decodes: list[ScheduledRequest] = []
        self.prompts: list[ScheduledRequest] = []
        self.sampled_decodes: list[Request] = []
        self.sampled_prompts: list[Request] = []
        self.scheduled: set[Request] = set()
        self.encoding: set[Request] = set()  # requests whose encoder runs in this step
        self.new: list[NewRequest] = []
        # number of drafts to verify, of requests that have some
        self.drafts: dict[Request, int] = {}
        # tokens that a grammar forces, of requests that have some
        self.forced: dict[Request, tuple[int, ...]] = {}
        self.updates = updates

    def add(
        self, request: Request, computed: int, count: int, num_sampled: int, drafts: tuple[int, ...]
    ) -> None:
        """Add `count` tokens of the request after its first `computed` tokens.

        The request holds blocks for them. `drafts` are the last of them: drafts, forced tokens, or
        a beam's tokens. The entry also carries the block table changes that the worker lacks.
        """
        request_id = request.request_id
        if request.in_worker:
            updates = tuple(self.updates.pop(request_id, ()))
        else:
            request.in_worker = True
            updates = tuple(
                [
                    TableUpdate(group, 0, tuple(table))
                    for group, table in enumerate(request.blocks)
                    if table
                ]
            )
            self.new.append(self._introduced(request))
        if self.rooms:
            self.rooms[request.kv.rank] -= count - 1
        entry = ScheduledRequest(request_id, computed, count, num_sampled, updates, drafts)
        self.scheduled.add(request)
        (self.decodes if count == 1 else self.prompts).append(entry)
        if num_sampled:
            (self.sampled_decodes if count == 1 else self.sampled_prompts).append(request)

    def room(self, request: Request) -> int:
        """Number of prompt tokens of the request that the step can still take."""
        if not self.rooms:
            return self.budget
        return min(self.budget, self.rooms[request.kv.rank] + (request.status is Status.RUNNING))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return sum(s.num_tokens for s in self.decodes) + sum(s.num_tokens for s in self.prompts)

    def _introduced(self, request: Request) -> NewRequest:
        spec = request.spec
        return NewRequest(
            request_id=spec.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=spec.sampling,
            eos_token_ids=spec.eos_token_ids,
            pooled=spec.pooled,
            encoder_token_ids=spec.encoder_token_ids if request in self.encoding else (),
            num_encoder_tokens=len(spec.encoder_token_ids),
            lora=spec.lora,
            mirostat_mu=request.mirostat_mu,
            images=spec.images,
            rank=request.kv.rank,
        )

    def plan(
        self,
        step_id: int,
        released: Sequence[str],
        copies: tuple[tuple[int, int], ...],
        shared: tuple[SharedPrefix, ...],
        copy_ranks: tuple[int, ...] = (),
    ) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            scheduled=(*self.decodes, *self.prompts),
            new=tuple(self.new),
            released=tuple(released),
            block_copies=copies,
            shared=shared,
            copy_ranks=copy_ranks,
        )
