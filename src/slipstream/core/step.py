"""A step under construction: its requests, their token counts, and the changes for the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import islice
from typing import TYPE_CHECKING

from slipstream.config import SchedulingConfig
from slipstream.config.forms import MAX_STEP_DRAFTS
from slipstream.core.request import Request, Status
from slipstream.messages.steps import NewRequest, ScheduledRequest, TableUpdate

if TYPE_CHECKING:
    from slipstream.core.cache.kv_cache_manager import KVCacheManager

new_tuple = tuple.__new__
"""Builds a NamedTuple from all its fields in half the time of its constructor."""

FEW_CHUNKS, FEW_REQUESTS = 4, 64
"""(maximum prompt chunks, maximum requests) of a small backlog."""


def chunk_with_decodes(num_decodes: int, chunk: int, waiting: Iterable[Request]) -> int | None:
    """Maximum number of prompt tokens in a step with `num_decodes` decodes; None for no limit.

    With a small backlog it is one chunk, or twice the number of decodes, since a step with many decodes takes long
    anyway. With a large backlog there is no limit: the sooner the prompts are computed, the better for all. `waiting`
    are requests with prompt tokens left, and perhaps some that have ended since.
    """
    num_tokens = 0
    for i, request in enumerate(islice(waiting, FEW_REQUESTS + 1)):
        num_tokens += request.num_tokens - request.num_computed_tokens
        if i == FEW_REQUESTS or num_tokens > FEW_CHUNKS * chunk:
            return None
    return max(chunk, 2 * num_decodes)


class StepBudget:
    """Number of tokens, and of drafts among them, that a step may still take, in all and by rank.

    Every running request has one token of its own, so a plain decode takes nothing from the budget.
    Only tokens beyond these are counted, in `_extra`. What is left follows from that count, so a
    preempted request gives its token back by itself.
    """

    def __init__(self, scheduling: SchedulingConfig, running: Sized, scheduled: Sized) -> None:
        """Begin with the limits of a step with decodes.

        `running` are the scheduler's running requests, `scheduled` those in the step.
        """
        self._scheduling = scheduling
        self._limit = scheduling.max_num_mixed_tokens
        self._limit_of_rank = scheduling.mixed_tokens_of_rank
        self._running = running
        self._scheduled = scheduled
        self._extra = 0
        self._extra_of_rank = [0] * scheduling.num_ranks if scheduling.num_ranks > 1 else []
        self.drafts_left = MAX_STEP_DRAFTS

    @property
    def left(self) -> int:
        """Number of tokens that the step may still take."""
        return self._limit - self._extra - len(self._scheduled)

    def spare(self, kv: KVCacheManager, is_draft: bool = False) -> int:
        """Number of tokens that requests of the rank may take beyond their own.

        The other running requests keep theirs. Drafts have a limit of their own.
        """
        spare = self._limit - self._extra - len(self._running)
        if is_draft and spare > self.drafts_left:
            spare = self.drafts_left
        return min(spare, self._spare_of(kv)) if self._extra_of_rank else spare

    def room(self, request: Request) -> int:
        """Number of prompt tokens of the request that the step may still take."""
        if not self._extra_of_rank:
            return self.left
        return min(self.left, self._spare_of(request.kv) + (request.status is Status.RUNNING))

    def _spare_of(self, kv: KVCacheManager) -> int:
        return self._limit_of_rank - self._extra_of_rank[kv.rank] - kv.num_running

    @property
    def busiest_share(self) -> float:
        """Share of the tokens beyond requests' own that is of the rank with the most."""
        return max(self._extra_of_rank, default=self._extra) / self._extra if self._extra else 1.0

    def take(self, kv: KVCacheManager, count: int, num_sampled: int) -> None:
        """Take `count` tokens of a request that runs there, of which `num_sampled` are sampled."""
        self._extra += count - 1
        if num_sampled > 1:
            self.drafts_left -= num_sampled - 1
        if self._extra_of_rank:
            self._extra_of_rank[kv.rank] += count - 1

    def take_others(self, count: int) -> None:
        """Take tokens that are in no request's entry: an encoder's, for example."""
        self._extra += count

    def bound(self, most: int) -> None:
        """Limit the step to at most `most` more tokens."""
        self._limit -= max(0, self.left - most)

    def widen(self) -> None:
        """Set the limits of a step without decodes."""
        self._limit = self._scheduling.max_num_batched_tokens
        self._limit_of_rank = self._scheduling.tokens_of_rank


class StepBuilder:
    """Collects one step.

    `KVCacheManager.allocate` records new blocks before `add` is called.
    """

    def __init__(
        self,
        scheduling: SchedulingConfig,
        updates: dict[str, list[TableUpdate]],
        running: Sized = (),
    ) -> None:
        """`updates`: block table changes that the worker does not have yet, by request id."""
        # requests with one token; they come first in the plan
        self.decodes: list[ScheduledRequest] = []
        self.prompts: list[ScheduledRequest] = []
        self.sampled_decodes: list[Request] = []
        self.sampled_prompts: list[Request] = []
        self.scheduled: set[Request] = set()
        self.budget = StepBudget(scheduling, running, self.scheduled)
        self.encoding: set[Request] = set()  # requests whose encoder runs in this step
        self.new: list[NewRequest] = []
        # number of drafts to verify, by request with drafts
        self.drafts: dict[Request, int] = {}
        # certain tokens after the last one, by request that has some
        self.certain: dict[Request, tuple[int, ...]] = {}
        self.updates = updates

    def add(
        self, request: Request, computed: int, count: int, num_sampled: int, given: tuple[int, ...]
    ) -> None:
        """Add `count` tokens of the request after its first `computed` tokens.

        The request holds blocks for them. `given` are the last of them, which the worker does not
        have. The entry also carries the block table changes that the worker lacks.
        """
        request_id = request.request_id
        updates: tuple[TableUpdate, ...] = ()
        if not request.in_worker:
            updates = self._introduce(request)
        elif self.updates:
            updates = tuple(self.updates.pop(request_id, ()))
        if request.slot_updates:
            updates += request.slot_updates
            request.slot_updates = ()
        entry = new_tuple(
            ScheduledRequest, (request_id, computed, count, num_sampled, updates, given)
        )
        self.scheduled.add(request)
        if count == 1:
            self.decodes.append(entry)
            if num_sampled:
                self.sampled_decodes.append(request)
        else:
            self.budget.take(request.kv, count, num_sampled)
            self.prompts.append(entry)
            if num_sampled:
                self.sampled_prompts.append(request)

    def _introduce(self, request: Request) -> tuple[TableUpdate, ...]:
        """Describe to the worker a request that it does not have. Returns its block tables."""
        request.in_worker = True
        spec, encodes = request.spec, request in self.encoding
        new = NewRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.tobytes(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=spec.sampling,
            eos_token_ids=spec.eos_token_ids,
            pooled=spec.pooled,
            encoder_token_ids=spec.encoder_token_ids if encodes else (),
            num_encoder_tokens=len(spec.encoder_token_ids),
            audio=spec.audio if encodes else None,
            lora=spec.lora,
            mirostat_mu=request.mirostat_mu,
            media=spec.media,
            rank=request.kv.rank,
        )
        self.new.append(new)
        return tuple([TableUpdate(g, 0, tuple(t)) for g, t in enumerate(request.blocks) if t])

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return sum(s.num_tokens for s in self.decodes) + sum(s.num_tokens for s in self.prompts)
