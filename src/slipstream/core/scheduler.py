"""Decides what each step computes. It uses no torch, and only the clock that it is given.

There are no phases. A request has `num_tokens` and `num_computed_tokens`, and a step spends its
token budget on raising the second to the first. Prefill, chunked prefill, decode, prefix hits,
verification of drafts, and resumption after preemption all follow this one rule.

Order within a step:

1. Requests that need one token (decodes). A long prompt never delays them: a step with decodes has
   at most `max_num_mixed_tokens` tokens, which bounds the time to the next token. `core/budget.py`
   decides how many of these prompts get: a chunk while few tokens wait, or what an objective allows
   (`target_itl_ms`).
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
4. Tokens forced by a request's grammar are computed together with the token before them. They are
   pending, like sampled ones.
5. A pipeline of N stages has N steps in flight. So that no stage waits for another, each step takes
   1/N of the running requests, and a request is in every N-th step: its token leaves the last stage
   while the first works on the steps in between. A request with a grammar waits for its token,
   because the mask depends on it.

A pooled request samples nothing and ends when its prompt is computed. An encoder-decoder's prompt
is encoded whole in the step that admits its request.

Where requests are distributed over ranks, each rank has its own KV cache (`kvs`) and its share of a
step's tokens and sequences, because all ranks wait for the one with the most tokens. A request gets
a rank when it is admitted (`_deal`). Only requests of its own rank are preempted for it. Choices
that share a prompt stay on one rank, and so do a search's beams.

`core/kv_cache_manager.py` decides which blocks a request holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter

from slipstream.config import CacheConfig, SchedulingConfig, SpeculationConfig
from slipstream.core.block_pool import BlockPool
from slipstream.core.budget import Pace, chunk_with_decodes
from slipstream.core.in_flight import StepsInFlight, new_tuple
from slipstream.core.kv_cache_manager import KVCacheManager
from slipstream.core.length import check_length
from slipstream.core.policy import make_policy
from slipstream.core.request import Request, Status
from slipstream.core.request_table import RequestTable
from slipstream.core.speculation import Speculation
from slipstream.core.step import StepBuilder
from slipstream.core.tiers import BlockStore
from slipstream.costs.graph_sizes import Padding
from slipstream.errors import EngineOverloadedError, RequestError
from slipstream.stats import SchedulerStats
from slipstream.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    ScheduledRequest,
    SharedPrefix,
    StepOutput,
    StepPlan,
    StepResult,
)

COPYING_S = 0.001
"""Seconds between checks for blocks from the tiers while there is nothing else to do."""

WATERMARK = 0.01
"""Share of blocks kept free when a request joins others, so that it is not preempted at once."""


UNEVEN_SHARE = 8
"""Tolerated imbalance of ranks for a prefix hit.

A cached prefix decides a request's rank unless that rank runs more requests than another by over
1/`UNEVEN_SHARE`.
"""


MAX_OVERTAKES = 32
"""Maximum number of requests that overtake one whose adapter does not fit or whose rank is full.

After that, no other request is admitted before it.
"""


MAX_PASSED_BY = 128
"""Maximum number of such requests that are passed by in one step."""


class Scheduler:
    """Scheduler of a text-generating model.

    `num_blocks` is the size of a pool (of each rank's, with several ranks), null block included.
    `salt` keeps cached prefixes of different models apart. `drafts_ahead`: the drafter begins the
    next drafts before these are verified. `whole_images`: the tokens of an image attend to one
    another, so one step must hold all of them. `store` has the tiers below the device. `padded`
    maps a step to its graph's size.
    """

    def __init__(
        self,
        scheduling: SchedulingConfig,
        cache: CacheConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        salt: str = "",
        speculation: SpeculationConfig | None = None,
        drafts_ahead: bool = False,
        max_adapters: int = 0,
        whole_images: bool = False,
        store: BlockStore | None = None,
        padded: Padding | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduling = scheduling
        self.cache = cache
        self.max_model_len = max_model_len
        assert store is None or scheduling.num_ranks == 1, "one rank has tiers"
        self.kvs = [
            KVCacheManager(cache, num_blocks, salt, store, clock, rank)
            for rank in range(scheduling.num_ranks)
        ]
        self.kv = self.kvs[0]
        self.tiers = self.kv.tiers
        self.policy = make_policy(scheduling)
        self._pace = (
            None
            if scheduling.target_itl_ms is None
            else Pace(scheduling.target_itl_ms / 1e3, padded)
        )
        self._drafts_ahead = drafts_ahead
        self._pipeline_steps = scheduling.pipeline_steps
        # maximum number of distinct adapters among running requests
        self._max_adapters = max_adapters
        self._whole_images = whole_images
        self._clock = clock
        self.requests = RequestTable(
            self.kv, self.policy, None if speculation is None else Speculation(speculation)
        )
        self.in_flight = StepsInFlight(self.requests, self._pace, clock)
        self._outputs: list[EngineOutput] = []
        self.forced: Callable[[str, int], tuple[int, ...]] | None = None
        """Maps (request id, number of pending tokens) to the tokens that its grammar forces."""
        self._watermark = max(1, int(self.pool.num_usable * WATERMARK))
        self._prefix_queries = self._prefix_hits = 0

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, spec: EngineRequest, *, held: bool = False, adapter: str = "") -> None:
        """Queue a request.

        A `held` request waits for `release`; all beams of a search but the first wait for `go_on`.
        `adapter` identifies the adapter's weights in the prefix keys.

        Raises EngineOverloadedError if the queue is full (forks and beams do not count), and
        ContextLengthError if the request could never run.
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
        check_length(
            spec,
            self.max_model_len,
            self.cache,
            self.scheduling.tokens_of_rank,
            self.pool.num_usable,
        )
        self.requests.add(spec, self.kv.root_key(spec.cache_salt, adapter), held=held)

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
        if self.tiers is not None:
            self.tiers.forget_offers()
        outputs = [
            self.requests.finish(request, reason, error)
            for request in list(self.requests.by_id.values())
        ]
        for pool in self.pools:
            pool.forget_all()
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
    def speculation(self) -> Speculation | None:
        return self.requests.speculation

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

        This is a deadline, the end of a batch's window, or the next check for blocks from the
        tiers.
        """
        deadline = self.requests.next_deadline()
        times = [] if deadline is None else [deadline]
        window = self.policy.opens_at(self.requests.waiting.oldest_arrival())
        if self.tiers is not None and self.tiers.is_copying:  # requests may wait for blocks
            times.append(self._clock() + COPYING_S)
        return min([*times, window]) if window is not None else min(times, default=None)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and the answers in which drafts are looked up."""
        for pool in self.pools:
            pool.forget_all()
        if self.tiers is not None:
            self.tiers.forget_all()
        if self.speculation is not None:
            self.speculation.forget_answers()

    def tend(self, at_once: int | None = None) -> None:
        """Process finished copies of the tiers, and start to store at most `at_once` blocks.

        `schedule` also does this.
        """
        if self.tiers is None:
            return
        for request in self.tiers.take():
            if request.status is Status.LOADING:
                self.requests.wait(request)
        self.tiers.store(
            self.in_flight.last_ended, self._watermark if self.requests.by_id else 0, at_once
        )

    # --- A step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        None if nothing can be computed now, or drafts must wait for the step in flight.
        """
        now, scheduling = self._clock(), self.scheduling
        self._outputs += self.requests.expire(now)
        self.tend()
        if self.speculation is not None:
            if self.in_flight.has_drafts:
                self.speculation.prepare(self.requests.running)
                return None
            if self.speculation.choose(self.requests.running):
                return None
        self.requests.admit_forks()
        step = StepBuilder(scheduling.max_num_batched_tokens, self.requests.table_updates)
        if len(self.kvs) > 1:
            step.rooms = [scheduling.mixed_tokens_of_rank - kv.num_running for kv in self.kvs]
        unfinished: list[Request] = []  # partly computed prompts
        plain = 0  # decodes that need no new block, copy or check
        for request in (
            self.requests.running.copy() if self._pipeline_steps == 1 else self._share_of_step()
        ):
            position = request.num_computed_tokens
            if position < request.decodes_until:
                request.num_computed_tokens = position + 1
                plain += 1
                if request.is_beam:
                    request.held, request.decodes_until = True, 0
                    step.add(request, position, 1, 1, (request.token_ids[position],))
                    continue
                request.num_pending += 1
                step.decodes.append(
                    new_tuple(ScheduledRequest, (request.request_id, position, 1, 1, (), ()))
                )
                step.sampled_decodes.append(request)
                step.scheduled.add(request)
            elif request.held or (request.drafts and self._verifies(step, request, plain)):
                continue
            elif request.status is Status.RUNNING:  # not preempted meanwhile
                wanted = request.num_tokens - position
                if wanted > 1:
                    unfinished.append(request)
                elif wanted == 1 and position < request.end - 1 and not request.num_pending_drafts:
                    step.budget -= plain
                    plain = 0
                    self._schedule_one(step, request)
        step.budget -= plain
        if step.scheduled:
            self._bound_prompts(step, len(step.scheduled), unfinished)
            first = unfinished[0] if unfinished else self.requests.waiting.first()
            if self._pace is not None and first is not None:
                age = now - first.spec.arrival
                fits = self._pace.prompt_tokens(
                    len(step.decodes), step.prompts, first.num_computed_tokens, age
                )
                step.budget = min(step.budget, fits)
        elif step.rooms:
            step.rooms = [scheduling.tokens_of_rank - kv.num_running for kv in self.kvs]
        for request in unfinished:
            if request.status is Status.RUNNING:
                self._schedule_prompt(step, request)
        self._admit(step, now)
        if not (step.scheduled or self.in_flight.by_id) and self.requests.make_way():
            self._admit(step, now)
        return self._plan(step, now) if step.scheduled else None

    def _bound_prompts(
        self, step: StepBuilder, num_decodes: int, unfinished: list[Request]
    ) -> None:
        """Limit the step's budget to the prompt tokens allowed alongside `num_decodes` decodes."""
        scheduling = self.scheduling
        step.budget -= scheduling.max_num_batched_tokens - scheduling.max_num_mixed_tokens
        if scheduling.mixed_chunk is not None:
            most = chunk_with_decodes(
                num_decodes, scheduling.mixed_chunk, chain(unfinished, self.requests.waiting)
            )
            step.budget = step.budget if most is None else min(step.budget, most)

    def _share_of_step(self) -> list[Request]:
        """Running requests for this step of a pipeline; the other steps must get as many.

        With fewer requests than stages, each is in a step of its own, in turns.
        """
        running, found = self.requests.running, list[Request]()
        slots = [-(-kv.num_running // self._pipeline_steps) for kv in self.kvs]
        busy = self.in_flight.sampling(min(self._pipeline_steps, len(running)) - 1)
        for request in running:
            if request.num_pending and (
                request in busy or request.spec.sampling.structured_outputs is not None
            ):
                continue
            if request.num_tokens - request.num_computed_tokens == 1:
                slots[request.kv.rank] -= 1
                if slots[request.kv.rank] < 0:
                    continue
            found.append(request)
        return found

    def _schedule_one(self, step: StepBuilder, request: Request) -> None:
        """Schedule a decode, with as many forced tokens or drafts as the step has room for.

        If blocks are missing, the last request is preempted.
        """
        position = request.num_computed_tokens
        count, forced, kv = 1, self._forced_tokens(request), request.kv
        if forced or request.drafts:
            # Each running request that is not yet in the step keeps one token of the budget.
            spare = (
                self.scheduling.max_num_mixed_tokens
                - self.scheduling.max_num_batched_tokens
                + step.budget
            )
            spare -= len(self.requests.running) - len(step.scheduled)
            if not forced:
                spare = min(spare, step.room_for_drafts)
            if step.rooms:
                spare = min(spare, step.rooms[kv.rank])
            count += max(
                0, min(len(forced or request.drafts), spare, request.end - request.num_tokens - 1)
            )
            ahead = len(request.drafts) if self._drafts_ahead else 0
            if count > 1 and kv.holds(request, min(position + count + ahead, request.end)):
                self._advance(step, request, count, forced[: count - 1])
                return
            if count > 1 and not kv.allocate(step, request, position + count):
                count = 1
            elif count > 1 and self._drafts_ahead and request.drafts:
                self._allocate_ahead(step, request, position + count)
        while not kv.allocate(step, request, position + count):
            if self._make_room(step, kv) is request:
                return
        self._advance(step, request, count, forced[: count - 1])

    def _verifies(self, step: StepBuilder, request: Request, plain: int) -> bool:
        """Schedule a decode with its drafts if that needs no new block, copy or check.

        True if scheduled. This is a fast path, because the GPU waits for it; `_schedule_one`
        handles all other cases. `plain` are decodes that the step's budget does not count yet.
        """
        position, drafts = request.num_computed_tokens, request.drafts
        num_drafts = len(drafts)
        count = 1 + num_drafts
        held = position + count + (num_drafts if self._drafts_ahead else 0)
        if (
            held > request.verifies_until
            or request.num_pending
            or num_drafts > step.room_for_drafts
        ):
            return False
        spare = (
            self.scheduling.max_num_mixed_tokens
            - self.scheduling.max_num_batched_tokens
            + step.budget
            - plain
        )
        if num_drafts > spare - len(self.requests.running) + len(step.scheduled):
            return False
        if step.rooms:
            if num_drafts > step.rooms[request.kv.rank]:
                return False
            step.rooms[request.kv.rank] -= num_drafts
        request.num_computed_tokens = position + count
        request.num_pending = count
        request.num_pending_drafts = step.drafts[request] = num_drafts
        request.drafts = ()
        step.room_for_drafts -= num_drafts
        step.budget -= count
        step.prompts.append(
            ScheduledRequest(request.request_id, position, count, count, (), drafts)
        )
        step.sampled_prompts.append(request)
        step.scheduled.add(request)
        return True

    def _allocate_ahead(self, step: StepBuilder, request: Request, num_tokens: int) -> None:
        """Allocate blocks for the next drafts too, if many blocks are free."""
        wanted = min(num_tokens + len(request.drafts), request.end)
        kv = request.kv
        if kv.pool.num_free > self._watermark + kv.blocks_for(len(request.drafts)) * len(kv.own):
            kv.allocate(step, request, wanted)

    def _forced_tokens(self, request: Request) -> tuple[int, ...]:
        """Tokens that the request's grammar forces now.

        There are none with log-probabilities and the sampler chain, which need logits, and none
        with `allowed_token_ids`, which the grammar does not know.
        """
        sampling = request.spec.sampling
        if self.forced is None or sampling.structured_outputs is None:
            return ()
        if (
            sampling.logprobs is not None
            or sampling.allowed_token_ids is not None
            or sampling.by_chain
        ):
            return ()
        if request.num_pending_drafts:
            return ()
        return self.forced(request.request_id, request.num_pending)

    def _schedule_prompt(self, step: StepBuilder, request: Request) -> None:
        """Schedule as much of a partly computed prompt as the budget allows.

        It preempts only requests after it: those before it will end and free their blocks.
        """
        computed = request.num_computed_tokens
        wanted = min(request.num_tokens - computed, request.most_at(computed))
        count = self._prompt_tokens(step, request, request.num_computed_tokens, wanted)
        if count <= 0 or (count < wanted and not self.scheduling.enable_chunked_prefill):
            return
        kv = request.kv
        while not kv.allocate(step, request, request.num_computed_tokens + count):
            if step.scheduled and self._last_unscheduled(step, kv) is request:
                return
            if self._make_room(step, kv) is request:
                return
        self._advance(step, request, count)

    def _prompt_tokens(
        self, step: StepBuilder, request: Request, computed: int, wanted: int
    ) -> int:
        """Number of tokens, up to `wanted`, that the step takes after the first `computed` ones.

        This is what is left of the budget. An image whose tokens attend to each other is not split.
        It may exceed the limit of a step with decodes, but not that of a step.
        """
        count = min(wanted, step.room(request))
        if self._whole_images and 0 < count < wanted:
            end = computed + count
            cut = next(
                (image for image in request.spec.images if image.offset < end < image.end), None
            )
            if cut is not None and cut.offset > computed:
                return cut.offset - computed
            if cut is not None:
                count = cut.end - computed
                return (
                    count
                    if step.num_tokens + count <= self.scheduling.max_num_batched_tokens
                    else 0
                )
        return count

    def _admit(self, step: StepBuilder, now: float) -> None:
        """Admit new requests in order, while rows, budget and blocks last.

        The first that does not fit stops the rest, with two exceptions: a request whose adapter
        does not fit alongside those of the running requests, and a request whose rank has no free
        row. They are overtaken, at most `MAX_OVERTAKES` times.
        """
        passed: list[Request] = []
        self._admit_fitting(step, now, passed)
        for request in passed:
            self.requests.wait(request)

    def _admit_fitting(self, step: StepBuilder, now: float, passed: list[Request]) -> None:
        """Do the work of `_admit`.

        `passed` collects the overtaken requests, which have left the queue.
        """
        scheduling = self.scheduling
        adapters = (
            {r.spec.lora.id for r in self.requests.running if r.spec.lora is not None}
            if self._max_adapters
            else set()
        )
        while step.budget > 0 and len(self.requests.running) < scheduling.max_num_seqs:
            request = self.requests.waiting.first()
            if request is None or request.num_pending:
                return
            lora = request.spec.lora
            if lora is not None and lora.id not in adapters and len(adapters) >= self._max_adapters:
                if not self._pass_by(request, passed):
                    return
                continue
            counts = {"num_running": self.num_running, "num_waiting": self.num_waiting}
            if not self.policy.admits(request, **counts, now=now):
                return
            holds = request.holds_blocks  # true for forks
            cached, computed = (
                ([], request.num_computed_tokens) if holds else self._deal(step, request)
            )
            kv = request.kv
            if kv.num_running >= scheduling.seqs_of_rank:
                # mostly a fork or a beam; others get another rank
                if not self._pass_by(request, passed):
                    return
                continue
            spare = self._watermark if kv.num_running else 0
            if not holds and kv.waits_for_tiers(request, cached, computed, spare):
                self.requests.waiting.pop()
                request.status = Status.LOADING
                continue
            # An encoder reads its whole text at once, before the first token that attends to it.
            encoded = 0 if holds else len(request.spec.encoder_token_ids)
            wanted = min(request.num_tokens - computed, request.most_at(computed))
            count = (
                min(wanted, step.budget - encoded)
                if encoded
                else self._prompt_tokens(step, request, computed, wanted)
            )
            if count <= 0 or (count < wanted and not scheduling.enable_chunked_prefill):
                return
            if not self._has_room(request, cached, computed + count, encoded, spare):
                if not kv.num_running and self.requests.drop_waiting_blocks(kv):
                    continue
                return
            self.requests.waiting.pop()
            for other in passed:
                other.num_overtaken += 1
            if lora is not None:
                adapters.add(lora.id)
            self._start(request, cached, computed)
            if step.rooms:
                step.rooms[kv.rank] -= 1
            if encoded:
                kv.allocate_encoder(request, encoded)
                step.encoding.add(request)
                step.budget -= encoded
            taken = kv.allocate(step, request, computed + count)
            assert taken, "blocks were counted before"
            self._advance(step, request, count)

    def _pass_by(self, request: Request, passed: list[Request]) -> bool:
        """Let others overtake the first request of the queue. False if enough have already."""
        if request.num_overtaken >= MAX_OVERTAKES or len(passed) == MAX_PASSED_BY:
            return False
        passed.append(self.requests.waiting.pop())
        return True

    def _deal(self, step: StepBuilder, request: Request) -> tuple[list[list[int]], int]:
        """Choose a request's rank, and find the cached prefix there.

        Returns (block tables by group, number of cached tokens). The rank is chosen by these
        criteria, in order:

        1. It has room now.
        2. It does not run many more requests than another (`UNEVEN_SHARE`).
        3. It has the longest cached prefix.
        4. It runs the fewest requests.

        A beam stays on the rank where it was before.
        """
        if len(self.kvs) == 1 or (
            request.is_beam and (request.num_preemptions or request.spec.parent is not None)
        ):
            return request.kv.cached_prefix(request)
        least = min(kv.num_running for kv in self.kvs)
        most = least + max(1, least // UNEVEN_SHARE)
        found = []
        for kv in self.kvs:
            request.kv = kv  # to ask what it would get there
            cached, computed = kv.cached_prefix(request)
            wanted = min(request.num_tokens - computed, request.most_at(computed))
            count = self._prompt_tokens(step, request, computed, wanted)
            fits = count > 0 and kv.num_running < self.scheduling.seqs_of_rank
            fits = fits and self._has_room(
                request, cached, computed + count, 0, self._watermark if kv.num_running else 0
            )
            merits = (
                fits,
                kv.num_running <= most,
                computed,
                -kv.num_running,
                kv.pool.num_free,
                -kv.rank,
            )
            found.append((merits, kv, cached, computed))
        _, request.kv, cached, computed = max(found, key=itemgetter(0))
        return cached, computed

    def _has_room(
        self, request: Request, cached: list[list[int]], num_tokens: int, encoded: int, spare: int
    ) -> bool:
        """True if a waiting request fits with `spare` blocks left.

        It needs blocks for `num_tokens` tokens, and for `encoded` tokens of an encoder's text.
        `cached` are the blocks of its prefix, by group.
        """
        num_held = len(request.blocks[0] or (cached[0] if cached else ()))
        kv = request.kv
        own = (kv.blocks_for(num_tokens) - num_held + request.needs_copy) * len(kv.own)
        revived = sum(kv.pool.ref_counts[b] == 0 for table in cached for b in table)
        return own + kv.blocks_for(encoded) + revived + spare <= kv.pool.num_free

    def _start(self, request: Request, cached: list[list[int]], computed: int) -> None:
        """Run a request from this step on.

        Its first `computed` tokens are in blocks that it holds, or in the `cached` ones.
        """
        if cached:
            request.kv.adopt(request, cached)
            request.num_registered = len(cached[0])
        if self.tiers is not None:
            self.tiers.let_go(request)
        request.num_computed_tokens = computed
        if request.num_preemptions == 0 and request.spec.parent is None:
            request.num_cached_tokens = min(computed, request.num_prompt_tokens)
            if self.cache.enable_prefix_caching:
                self._prefix_queries += request.num_prompt_tokens
                self._prefix_hits += request.num_cached_tokens
        self.requests.admit(request)

    def _advance(
        self, step: StepBuilder, request: Request, count: int, forced: tuple[int, ...] = ()
    ) -> None:
        """Put `count` tokens of the request into the step; the last of them may be `forced`.

        The request already holds the blocks for them.
        """
        computed, known = request.num_computed_tokens, request.num_tokens
        end = computed + count
        num_sampled = 0 if request.spec.pooled else max(0, end - len(forced) - known + 1)
        request.num_computed_tokens = end
        step.budget -= count
        given = forced or (request.drafts[: num_sampled - 1] if num_sampled else ())
        if request.is_beam and computed >= request.num_prompt_tokens:
            given = tuple(request.token_ids[computed:end])
        step.add(request, computed, count, num_sampled, given)
        if request.is_beam:
            request.held = num_sampled > 0  # until `go_on` is called
        elif num_sampled:
            request.num_pending += num_sampled + len(forced)
            request.drafts = ()
            room = min(len(request.blocks[self.kv.own[0]]) * self.kv.block_size, request.end - 1)
            has_grammar = request.spec.sampling.structured_outputs is not None
            request.decodes_until = room if num_sampled == 1 and not has_grammar else 0
            request.verifies_until = 0
            if num_sampled > 1:
                step.drafts[request] = request.num_pending_drafts = num_sampled - 1
                step.room_for_drafts -= num_sampled - 1
                if not (forced or has_grammar):
                    request.verifies_until = room
            elif forced:
                step.forced[request] = forced
        if computed < request.num_prompt_tokens:
            if request.account is not None and not request.num_preemptions:
                request.account.charge(min(end, request.num_prompt_tokens) - computed)
            request.kv.register(request, self.in_flight.last_id + 1)
            if request.forks and end >= request.num_prompt_tokens:
                self.requests.fork(request)

    def _plan(self, step: StepBuilder, now: float) -> StepPlan:
        self.in_flight.launched(step, now)
        released, self.requests.released = self.requests.released, []
        shared: tuple[SharedPrefix, ...] = ()
        if len(self.kvs) > 1:
            copies = [(copy, kv.rank) for kv in self.kvs for copy in kv.begin_copies()]
            pairs, ranks = tuple([copy for copy, _ in copies]), tuple([rank for _, rank in copies])
            return step.plan(self.in_flight.last_id, released, pairs, shared, ranks)
        if self.requests.num_joined:
            shared = self.kv.shared_prefixes(
                [(self.requests.by_id[s.request_id], s.num_computed_tokens) for s in step.decodes]
            )
        return step.plan(self.in_flight.last_id, released, self.kv.begin_copies(), shared)

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
        self._preempt(victim)
        return victim

    def _preempt(self, request: Request) -> None:
        """Preempt a request. `simulate/sleeping.py` overrides this."""
        self.requests.preempt(request)

    def _last_unscheduled(self, step: StepBuilder, kv: KVCacheManager) -> Request:
        return next(
            r for r in reversed(self.requests.running) if r.kv is kv and r not in step.scheduled
        )

    def stats(self) -> SchedulerStats:
        num_usable, num_free = (
            sum(pool.num_usable for pool in self.pools),
            sum(pool.num_free for pool in self.pools),
        )
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
            forced_tokens=self.in_flight.num_forced,
            tiers=None if self.tiers is None else self.tiers.stats(),
            **({} if self.speculation is None else self.speculation.stats()),
        )
