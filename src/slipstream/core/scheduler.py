"""Decides what each step computes. It uses no torch, and only the clock that it is given.

There are no phases. A request has `num_tokens` and `num_computed_tokens`, and a step spends its
token budget on raising the second to the first. Prefill, chunked prefill, decode, prefix hits,
verification of drafts, and resumption after preemption all follow this one rule.

Features are participants (`core/participants/base.py`), of which nothing here knows one by name.
They may add tokens to the one that a decode computes. These are *certain*, or *drafts*: then the
step samples at each position, and takes the tokens up to the first that is not the draft.

Order within a step:

1. Requests that need one token (decodes). A long prompt never delays them: a step with decodes has
   at most `max_num_mixed_tokens` tokens, which bounds the time to the next token. Of
   these prompts get a chunk while few tokens wait, or what an objective allows (`target_itl_ms`,
   `core/pace.py`).
2. Partly computed prompts, in order. They get the tokens left by the decodes, which is at least
   one.
3. New requests, by priority. Within a priority, owners take turns by weight, and an owner's
   requests go in order of arrival (`core/queue.py`).

When blocks run out, the last request in that order is preempted: its blocks are released, and it
waits to be computed again.

`schedule()` may be called again before `update()` of the previous step:

1. It counts tokens that are sampled but not yet known (`num_pending`).
2. If a request has ended meanwhile, its results of the later step are dropped.
3. Blocks that are freed while a step in flight uses them may be reallocated at once, since the
   device runs steps in order.
4. Certain tokens are computed together with the token before them. They are pending, like sampled
   ones. After drafts nothing of the request is scheduled until they are verified.
5. A pipeline of N stages has N steps in flight. So that no stage waits for another, each step takes
   1/N of the running requests, and a request is in every N-th step: its token leaves the last stage
   while the first works on the steps in between. A request that a participant guides waits for
   its token, because what it may sample next depends on it.

A pooled request samples nothing and ends when its prompt is computed. An encoder-decoder's prompt
is encoded whole in the step that admits its request.

Where requests are distributed over ranks, each rank has its own KV cache (`kvs`) and its share of a step's tokens and
sequences, because all ranks wait for the one with the most tokens. A request gets a rank when it is admitted
(`_deal`). Only requests of its own rank are preempted for it. Choices that share a prompt stay on one rank.

`core/cache/kv_cache_manager.py` decides which blocks a request holds.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import not_
from typing import TypeVar

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.core.batched import make_policy
from slipstream.core.behind import tokens_behind
from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.cache.sessions import Sessions
from slipstream.core.cache.shared_blocks import shared_prefixes
from slipstream.core.in_flight import StepsInFlight
from slipstream.core.length import Lengths
from slipstream.core.pace import Pace
from slipstream.core.participants.base import Participant
from slipstream.core.policy import MAX_OVERTAKES
from slipstream.core.ranks import deal, share_of_step
from slipstream.core.request import Request, Status
from slipstream.core.request_table import RequestTable
from slipstream.core.step import StepBuilder, chunk_with_decodes, new_tuple
from slipstream.core.tiers.block_store import BlockStore
from slipstream.core.tiers.returning import prefetch
from slipstream.core.tiers.tiers import make_tiers, total_stats
from slipstream.costs.graph_sizes import Padding
from slipstream.errors import EngineOverloadedError, RequestError, SlipstreamError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, StepOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.stats import SchedulerStats
from slipstream.messages.steps import ScheduledRequest, SharedPrefix, StepPlan, StepResult

COPYING_S = 0.001
"""Seconds between checks for blocks from the tiers when there is nothing else to do."""

WATERMARK = 0.01
"""Fraction of blocks kept free when a request joins others, so that it is not preempted at once."""

MAX_PASSED_BY = 128
"""Maximum number of such requests overtaken in one step."""

MAX_ADOPTED, ENOUGH_TOKENS = 8192, 512
"""(cached blocks that one step's new requests may adopt, prompt tokens after which further requests wait for the next step).

The host takes 0.4 ms for 1,000 of these blocks. So the device computes the first requests' tokens while the host plans the
others. Fewer tokens would not keep it busy.
"""


CROWDED_CHUNKS = 2
"""Number of prompt chunks in a step with decodes while waiting requests need more cache than is free.

Then requests join when others end, so large prompt-only steps would be followed by decode-only steps.
Computing both together takes less time."""


P = TypeVar("P", bound=Participant)


class Scheduler:
    """Scheduler of a text-generating model.

    `num_blocks` is the size of a pool (of each rank's, with several ranks), null block included.
    `salt` keeps cached prefixes of different models apart. `drafts_ahead`: where many blocks are
    free, a step with drafts also gets those for as many drafts of the next one. `stores` has the
    tiers, if there are any, by rank with requests of its own. `padded` maps a step to its graph's
    size. A step verifies up to `max_drafts` drafts of a request. `core/make.py` chooses the
    participants.
    """

    def __init__(
        self,
        scheduling: SchedulingConfig,
        cache: CacheConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        salt: str = "",
        participants: Iterable[Participant] = (),
        drafts_ahead: bool = False,
        stores: Sequence[BlockStore] = (),
        padded: Padding | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_drafts: int = 0,
    ) -> None:
        self.scheduling = scheduling
        self.cache = cache
        self.max_model_len = max_model_len
        sessions = None
        if cache.eviction == "value" and cache.enable_prefix_caching:
            sessions = Sessions(clock, cache.attention_tokens)
        self.kvs = [
            KVCacheManager(cache, num_blocks, salt, rank, max_drafts, sessions)
            for rank in range(scheduling.num_ranks)
        ]
        self.kv = self.kvs[0]
        self.tiers = make_tiers(self.kvs, stores, clock)
        self.policy = make_policy(scheduling, self.kvs)
        objective = scheduling.target_itl_ms
        self._pace = None if objective is None else Pace(objective / 1e3, padded)
        self._drafts_ahead = drafts_ahead
        self.max_drafts = max_drafts
        self.pipeline_steps = scheduling.pipeline_steps
        self._clock = clock
        self.participants = list(participants)
        self.requests = RequestTable(self.kv, self.policy, self.participants)
        self.in_flight = StepsInFlight(self.requests, self.participants, self._pace, clock)
        step_tokens = scheduling.tokens_of_rank
        self._lengths = Lengths(max_model_len, cache, step_tokens, self.pool.num_usable)
        self._outputs: list[EngineOutput] = []
        self.watermark = max(1, int(self.pool.num_usable * WATERMARK))
        self._prefix_queries = self._prefix_hits = 0

    # --- Requests -----------------------------------------------------------------------------------------------------

    def part(self, kind: type[P]) -> P:
        """The participant of the given class, which must exist."""
        return next(part for part in self.participants if isinstance(part, kind))

    def join(self, part: Participant) -> None:
        """Add a participant for requests that are added from now on."""
        part.requests = self.requests
        self.participants.append(part)

    def add(self, spec: EngineRequest, *, held: bool = False) -> None:
        """Queue a request. A `held` one waits for `RequestTable.release`.

        Raises EngineOverloadedError if the queue is full (requests with a parent do not count),
        ContextLengthError if the request could never run, and what its participants refuse it for.
        """
        limit = self.scheduling.max_queue
        if spec.request_id in self.requests.by_id:
            raise RequestError(
                f"request_id {spec.request_id!r} is in use; choose another", field="request_id"
            )
        if limit is not None and spec.parent is None and self.num_waiting >= limit:
            raise EngineOverloadedError(
                f"{self.num_waiting} requests are waiting already (max_queue); try again later"
            )
        self._lengths.check(spec)
        self.requests.add(spec, held=held)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineOutput]:
        """End requests now. Their blocks are free for the next step. Unknown ids are ignored."""
        found = [self.requests.by_id[i] for i in request_ids if i in self.requests.by_id]
        return [self.requests.finish(request, reason) for request in found]

    def fail_all(self, reason: FinishReason, error: str) -> list[EngineOutput]:
        """End all requests after a step failed.

        Results of steps in flight are not expected any more.
        """
        self.in_flight.forget()
        for tiers in self.tiers:
            tiers.forget_offers()
        outputs = [
            self.requests.finish(request, reason, error)
            for request in list(self.requests.by_id.values())
        ]
        for kv in self.kvs:
            kv.forget_all()
        return outputs

    @property
    def pool(self) -> BlockPool:
        """Block pool of the first or only rank."""
        return self.kv.pool

    @property
    def pools(self) -> list[BlockPool]:
        """Block pools by rank."""
        return [kv.pool for kv in self.kvs]

    @property
    def slot_pools(self) -> list[BlockPool]:
        """Pools of all kinds of cache besides blocks, of all ranks."""
        return [kind.pool for kv in self.kvs for kind in kv.kinds]

    @property
    def has_requests(self) -> bool:
        return bool(self.requests.by_id)

    @property
    def num_running(self) -> int:
        return len(self.requests.running)

    @property
    def num_waiting(self) -> int:
        return self.requests.num_waiting

    def drain_outputs(self) -> list[EngineOutput]:
        """Take the outputs of requests that `schedule()` ended at their deadlines."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_wakeup(self) -> float | None:
        """Time at which `schedule()` may have work although nothing arrives; None if never.

        This is a deadline, the end of a batch's window, or the next check for blocks from the tiers.
        """
        deadline = self.requests.next_deadline()
        times = [] if deadline is None else [deadline]
        window = self.policy.opens_at(self.requests.waiting.oldest_arrival())
        times += [] if window is None else [window]
        if any(tiers.is_copying for tiers in self.tiers):  # requests may wait for blocks
            times.append(self._clock() + COPYING_S)
        return min(times, default=None)

    def close(self) -> None:
        """Drop the participants, which refer to the requests and to the executor. The scheduler can't be used afterwards."""
        self.participants.clear()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and participants' data of ended requests."""
        for kv in self.kvs:
            kv.forget_all()
        for tiers in self.tiers:
            tiers.forget_all()
        for part in self.participants:
            part.reset()

    def tend(self, at_once: int | None = None) -> None:
        """Process finished copies of the tiers, and start to store at most `at_once` blocks.

        `schedule` also does this.
        """
        if not self.tiers:
            return
        for request in chain.from_iterable(tiers.take() for tiers in self.tiers):
            if request.status is Status.LOADING:
                self.requests.wait(request)
        spare = self.watermark if self.requests.by_id else 0
        prefetch(self.kvs, spare)
        for tiers in self.tiers:
            tiers.store(self.in_flight.last_ended, spare, at_once)

    # --- A step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        None if nothing can be computed now, or the step must wait for the one in flight.
        """
        now, scheduling = self._clock(), self.scheduling
        self._outputs += self.requests.expire(now)
        self.tend()
        for part in self.participants:
            if not part.is_ready(self.requests.running, self.in_flight):
                return None
        self.requests.admit_forks()
        step = StepBuilder(scheduling, self.requests.table_updates, self.requests.running)
        unfinished: list[Request] = []  # partly computed prompts
        for request in (
            self.requests.running.copy() if self.pipeline_steps == 1 else share_of_step(self)
        ):
            position = request.num_computed_tokens
            if position < request.lease:
                request.num_computed_tokens = position + 1
                request.num_pending += 1
                step.decodes.append(
                    new_tuple(ScheduledRequest, (request.request_id, position, 1, 1, (), ()))
                )
                step.sampled_decodes.append(request)
                step.scheduled.add(request)
            elif request.status is Status.RUNNING and not request.held:
                wanted = request.num_tokens - position
                if wanted > 1:
                    unfinished.append(request)
                elif wanted == 1 and position < request.end - 1:
                    self._schedule_one(step, request)
        if step.scheduled:
            self._bound_prompts(step, len(step.scheduled), unfinished)
            first = unfinished[0] if unfinished else self.requests.waiting.first()
            if self._pace is not None and first is not None:
                age = now - first.spec.arrival
                fits = self._pace.prompt_tokens(
                    len(step.decodes), step.prompts, first.num_computed_tokens, age
                )
                step.budget.bound(fits)
        else:
            step.budget.widen()
        self._place_prompts(step, unfinished, now)
        if not (step.scheduled or self.in_flight.by_id) and any(
            part.make_way() for part in self.participants
        ):
            self._admit(step, now)
        return self._plan(step, now) if step.scheduled else None

    def _place_prompts(self, step: StepBuilder, unfinished: list[Request], now: float) -> None:
        """Schedule prompts, those that are `unfinished` first, and admit requests."""
        if unfinished and (behind := tokens_behind(self, step, unfinished)):
            kept = step.budget.left - behind
            step.budget.take_others(kept)
            is_long = [r.num_tokens - r.num_computed_tokens > behind for r in unfinished]
            self._schedule_prompts(step, compress(unfinished, map(not_, is_long)))
            self._admit(step, now, behind)
            step.budget.take_others(-kept)
            unfinished = [*compress(unfinished, is_long)]
        self._schedule_prompts(step, unfinished)
        self._admit(step, now)

    def _bound_prompts(
        self, step: StepBuilder, num_decodes: int, unfinished: list[Request]
    ) -> None:
        """Limit the step's budget to the prompt tokens allowed alongside `num_decodes` decodes."""
        if (chunk := self.scheduling.mixed_chunk) is not None:
            backlog = chain(unfinished, self.requests.waiting)
            most = chunk_with_decodes(num_decodes, chunk, backlog)
            if most is None and self.policy.is_crowded(self.requests.waiting):
                most = max(CROWDED_CHUNKS * chunk, 2 * num_decodes)
            if most is not None:
                step.budget.bound(most)

    def _schedule_one(self, step: StepBuilder, request: Request) -> None:
        """Schedule a decode, with as many certain tokens or drafts as the step has room for.

        If blocks are missing, the last request is preempted.
        """
        position, kv = request.num_computed_tokens, request.kv
        added, is_certain = request.drafts, False
        if (
            (guide := request.guide) is not None
            and guide.adds
            and (tokens := guide.certain(request))
        ):
            added, is_certain = tokens, True
        if added:
            room = step.budget.spare(kv, is_draft=not is_certain)
            if room > (left := request.end - position - 2):
                room = left
            if room < len(added):
                added = added[: max(0, room)]
        if added:
            end = position + 1 + len(added)
            ahead = end + len(request.drafts) if self._drafts_ahead else end
            if not kv.holds(request, ahead if ahead < request.end else request.end):
                if not kv.allocate(step, request, end):
                    added, is_certain = (), False
                elif kv.pool.num_free > self.watermark + kv.blocks_needed(ahead - end):
                    kv.allocate(step, request, min(ahead, request.end))
        if not (added or kv.holds(request, position + 1)):
            while not kv.allocate(step, request, position + 1):
                if self._make_room(step, kv) is request:
                    return
        self._place(step, request, 1 + len(added), added, is_certain)

    def _schedule_prompts(self, step: StepBuilder, unfinished: Iterable[Request]) -> None:
        for request in unfinished:
            if request.status is Status.RUNNING:
                self._schedule_prompt(step, request)

    def _schedule_prompt(self, step: StepBuilder, request: Request) -> None:
        """Schedule as much of a partly computed prompt as the budget allows.

        It preempts only requests after it: those before it will end and free their blocks.
        """
        computed = request.num_computed_tokens
        wanted = min(request.num_tokens - computed, request.most_at(computed))
        count = self.prompt_tokens(step, request, request.num_computed_tokens, wanted)
        if count <= 0 or (count < wanted and not self.scheduling.enable_chunked_prefill):
            return
        kv = request.kv
        while not kv.allocate(step, request, request.num_computed_tokens + count):
            if step.scheduled and self._last_unscheduled(step, kv) is request:
                return
            if self._make_room(step, kv) is request:
                return
        self._place(step, request, count)

    def prompt_tokens(self, step: StepBuilder, request: Request, computed: int, wanted: int) -> int:
        """Number of tokens, up to `wanted`, that the step takes after the first `computed` ones.

        This is what is left of the budget, unless a participant does not let the prompt be split there.
        """
        count = min(wanted, step.budget.room(request))
        if 0 < count < wanted and request.participants:
            room = self.scheduling.max_num_batched_tokens - step.num_tokens
            for part in request.participants:
                count = part.chunk(request, computed, count, room)
        return count

    def _admit(self, step: StepBuilder, now: float, behind: int = 0) -> None:
        """Admit new requests in order, while rows, budget and blocks last.

        The first that does not fit stops the rest, with three exceptions: a request that lacks a
        resource of one of its participants, a request whose rank has no free row, and a long prompt
        where `behind` tokens are for short ones. They are overtaken, at most `MAX_OVERTAKES` times.
        """
        passed: list[Request] = []  # the overtaken requests, which have left the queue
        scheduling = self.scheduling
        num_adopted = num_placed = 0
        while step.budget.left > 0 and len(self.requests.running) < scheduling.max_num_seqs:
            if num_adopted >= MAX_ADOPTED and num_placed >= ENOUGH_TOKENS:
                break
            request = self.policy.first(self.requests.waiting, now)
            if request is None or request.num_pending:
                break
            if _is_closed(passed) and request.spec.parent is None:
                if not self._pass_by(request, passed):
                    break
                continue
            if request.participants and (may := self._may_run(request)) is not True:
                if may is False and not self._pass_by(request, passed):
                    break
                continue
            counts = {"num_running": self.num_running, "num_waiting": self.num_waiting}
            if not self.policy.admits(request, **counts, now=now):
                break
            holds = request.holds_blocks  # true for forks
            cached, computed = (
                ([], request.num_computed_tokens) if holds else self._deal(step, request)
            )
            kv = request.kv
            if kv.num_running >= scheduling.seqs_of_rank:
                # mostly one with a parent; others get another rank
                if not self._pass_by(request, passed):
                    break
                continue
            spare = self.watermark if kv.num_running else 0
            if not holds and kv.waits_for_tiers(request, cached, computed, spare):
                self.requests.waiting.pop(request)
                request.status = Status.LOADING
                continue
            # An encoder reads its whole text at once, before the first token that attends to it.
            encoded = 0 if holds else len(request.spec.encoder_token_ids)
            wanted = min(request.num_tokens - computed, request.most_at(computed))
            if wanted > behind > 0 and self._pass_by(request, passed):
                continue
            count = (
                min(wanted, step.budget.left - encoded)
                if encoded
                else self.prompt_tokens(step, request, computed, wanted)
            )
            if count <= 0 or (count < wanted and not scheduling.enable_chunked_prefill):
                break
            if not kv.has_room(request, cached, computed + count, encoded, spare):
                if not kv.num_running and self.requests.drop_waiting_blocks(kv):
                    continue
                break
            self.requests.waiting.pop(request)
            if request.spec.parent is None:
                for other in passed:
                    other.num_overtaken += 1
            self._start(request, cached, computed)
            if encoded:
                kv.allocate_encoder(request, encoded)
                step.encoding.add(request)
                step.budget.take_others(encoded)
            taken = kv.allocate(step, request, computed + count)
            assert taken, "blocks were counted before"
            self._place(step, request, count)
            num_adopted += len(cached[0]) if cached else 0
            num_placed += count
        for request in passed:
            self.requests.wait(request)

    def _may_run(self, request: Request) -> bool | None:
        """Return whether the participants of a waiting request admit it. None if that ended it."""
        try:
            return all(part.admits(request) for part in request.participants)
        except SlipstreamError as error:
            self._outputs.append(self.requests.finish(request, FinishReason.INVALID, error.message))
            return None

    def _pass_by(self, request: Request, passed: list[Request]) -> bool:
        """Let others overtake the first request of the queue. False if enough have done so.

        Choices whose first was admitted may still do so.
        """
        is_closed = _is_closed([request, *passed]) and not self.requests.num_joined
        if is_closed or len(passed) == MAX_PASSED_BY:
            return False
        passed.append(self.requests.waiting.pop(request))
        return True

    def _deal(self, step: StepBuilder, request: Request) -> tuple[list[array[int]], int]:
        """Choose a request's rank (`core/ranks.py`), and find the cached prefix there.

        Returns (block tables by group, number of cached tokens). A request that a participant guides
        may have to stay on the rank where it was before.
        """
        if len(self.kvs) == 1 or (request.guide is not None and request.guide.stays(request)):
            return request.kv.cached_prefix(request)
        return deal(self, step, request)

    def _start(self, request: Request, cached: Sequence[Sequence[int]], computed: int) -> None:
        """Run a request from this step on.

        Its first `computed` tokens are in blocks that it holds, or in the `cached` ones.
        """
        request.kv.begin(request, cached, computed)
        if request.num_preemptions == 0 and request.spec.parent is None:
            request.num_cached_tokens = min(computed, request.num_prompt_tokens)
            if self.cache.enable_prefix_caching:
                self._prefix_queries += request.num_prompt_tokens
                self._prefix_hits += request.num_cached_tokens
            request.num_cached_tokens = max(0, request.num_cached_tokens - request.num_peer_tokens)
        self.requests.admit(request)

    def _place(
        self,
        step: StepBuilder,
        request: Request,
        count: int,
        added: tuple[int, ...] = (),
        is_certain: bool = False,
    ) -> None:
        """Put the request's next `count` tokens into the step, for which it holds the blocks.

        The last of them may be `added` after the known ones: drafts, or with `is_certain` tokens
        that are known to follow.
        """
        computed = request.num_computed_tokens
        end = request.num_computed_tokens = computed + count
        num_drafts = 0 if is_certain else len(added)
        is_sampled = end - len(added) >= len(request.token_ids) + request.num_pending
        num_sampled = 1 + num_drafts if is_sampled and not request.spec.pooled else 0
        given, guide = added, request.guide
        if guide is not None and not added:
            given = guide.placed(request, computed, end, num_sampled)
        is_steady = request.kv.place(request, computed, end, num_drafts)
        step.add(request, computed, count, num_sampled, given)
        if num_drafts:
            step.drafts[request] = num_drafts
            request.num_pending += num_drafts
            request.drafts = ()
        elif num_sampled:
            request.num_pending += 1 + len(added)
            request.drafts = ()
            if guide is None and is_steady:
                request.kv.lease(request)
            elif added:
                step.certain[request] = added
        if computed < request.num_prompt_tokens:
            if request.account is not None and not request.num_preemptions:
                request.account.charge(min(end, request.num_prompt_tokens) - computed)
            request.kv.register(request, self.in_flight.last_id + 1)
            if request.forks and end >= request.num_prompt_tokens:
                self.requests.fork(request)

    def _plan(self, step: StepBuilder, now: float) -> StepPlan:
        self.in_flight.launched(step, now)
        requests, step_id = self.requests, self.in_flight.last_id
        released, requests.released = requests.released, []
        unmasked, requests.unmasked = requests.unmasked, []
        marks = tuple(mark for kv in self.kvs for mark in kv.planned(step_id))
        shared: tuple[SharedPrefix, ...] = ()
        if self.requests.num_joined and len(self.kvs) == 1:
            shared = shared_prefixes(
                self.kv,
                [(self.requests.by_id[s.request_id], s.num_computed_tokens) for s in step.decodes],
            )
        copies = [(copy, kv.rank) for kv in self.kvs for copy in kv.begin_copies()]
        return StepPlan(
            step_id=step_id,
            scheduled=(*step.decodes, *step.prompts),
            new=tuple(step.new),
            released=tuple(released),
            block_copies=tuple([copy for copy, _ in copies]),
            shared=shared,
            copy_ranks=tuple([rank for _, rank in copies]) if len(self.kvs) > 1 else (),
            state_marks=marks,
            unmasked=tuple(unmasked),
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Process a step's result: new tokens, ends, full blocks. See `core/in_flight.py`."""
        return self.in_flight.ended(plan, result)

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _make_room(self, step: StepBuilder, kv: KVCacheManager) -> Request | None:
        """Free some blocks of `kv`.

        These are the blocks held by waiting requests. If there are none, the last request that is
        not in this step yet is preempted and returned.
        """
        if self.requests.drop_waiting_blocks(kv):
            return None
        victim = self._last_unscheduled(step, kv)
        self.requests.preempt(victim)
        return victim

    def _last_unscheduled(self, step: StepBuilder, kv: KVCacheManager) -> Request:
        return next(
            r for r in reversed(self.requests.running) if r.kv is kv and r not in step.scheduled
        )

    def stats(self) -> SchedulerStats:
        num_usable = sum(pool.num_usable for pool in self.pools)
        num_free = sum(pool.num_free for pool in self.pools)
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=num_usable,
            num_free_blocks=num_free,
            kv_cache_usage=(num_usable - num_free) / num_usable,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self.requests.num_preemptions,
            kv_allocated_tokens=sum(kv.num_used_tokens() for kv in self.kvs),
            kv_wasted_tokens=self.kv.num_wasted_tokens(self.requests.running),
            forced_tokens=self.in_flight.num_certain,
            tiers=total_stats(self.tiers),
            **{name: n for part in self.participants for name, n in part.stats().items()},
        )


def _is_closed(passed: Iterable[Request]) -> bool:
    """True if one of the requests was overtaken as often as the limit allows."""
    return any(request.num_overtaken >= MAX_OVERTAKES for request in passed)
