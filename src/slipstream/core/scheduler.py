"""Decides what each step computes. No torch, no clock but the one given.

There are no phases. A request has `num_tokens` and `num_computed_tokens`, and a step spends a budget of tokens bringing the
second up to the first. Prefill, chunks of it, decode, prefix hits, checks of guessed tokens, and resumption after preemption
are all that rule.

Order within a step:

1. Requests that need one token (decodes). A long prompt never holds them up. A step that has decodes has at most
   `max_num_mixed_tokens` tokens of any kind, so that no request waits longer for its next token than such a step takes. With
   an objective for that time (`target_itl_ms`) prompts get at most what `core/budget.py` says.
2. Prompts under way, in order. They get what the decodes leave, which is at least one token.
3. New requests, strictly by (priority, arrival).

When blocks run out, the last request in that order is preempted: it gives its blocks back and waits to be computed again.

`schedule()` may be called again before `update()` of the step before. It counts tokens that are sampled but not yet known
(`num_pending`). A request that turns out to have ended is dropped from the results of the step that was launched too much.
Blocks that are freed while a step in flight still uses them may be handed out at once, because the device runs steps in
order.

Tokens that a request's grammar forces are computed with the one before them, and nothing is sampled for them: they are
pending like a sampled one. So the next step may be scheduled ahead as ever.

A pooled request samples nothing and ends when its prompt is computed. An encoder-decoder's prompt is encoded whole in the
step that admits its request.

A request has a block table in each group of layers (`CacheGroup`). All groups take blocks from one pool:

1. In a `window` group blocks that no later token looks at are released when the request next needs blocks.
2. A `cross` group's blocks, with an encoder's keys and values, are held as long as the request's own.
3. A block of a prompt is offered to the prefix cache when it is scheduled, so that requests of one step can share it: the
   worker writes a layer's keys and values before any attention reads them.
4. A request writes only to a block that it holds alone and that is not offered; otherwise the block is copied first. Copies
   run before the step. Only choices that share a prompt need one, and they join after the step that computed it.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from slipstream.config import CacheConfig, SchedulingConfig, SpeculationConfig
from slipstream.core.block_pool import NULL_BLOCK, BlockPool
from slipstream.core.budget import Pace
from slipstream.core.length import check_length
from slipstream.core.policy import make_policy
from slipstream.core.prefix_cache import extend_keys, group_key, longest_hit, root_key
from slipstream.core.request import Request, Status
from slipstream.core.speculation import Speculation
from slipstream.core.step import StepBuilder, tokens_of_each
from slipstream.errors import EngineOverloadedError, RequestError
from slipstream.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PooledVector,
    PromptLogprobs,
    SampledLogprobs,
    ScheduledRequest,
    SchedulerStats,
    StepPlan,
    StepResult,
    TableUpdate,
    TokenOutput,
    VectorOutput,
)


class InFlight(NamedTuple):
    """A step that was scheduled: who sampled in it, the number of guesses of those that have some, and the tokens that grammars
    forced."""

    requests: Sequence[Request] = ()
    drafts: Mapping[Request, int] = MappingProxyType({})
    forced: Mapping[Request, tuple[int, ...]] = MappingProxyType({})


NOTHING = InFlight()
WATERMARK = 0.01
"""Share of the blocks kept free when a request is admitted beside others, so that it is not preempted at once."""


class Scheduler:
    """`num_blocks`: of the pool, with the null block. `salt` keeps its cached prefixes apart from other models'."""

    def __init__(
        self,
        scheduling: SchedulingConfig,
        cache: CacheConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        salt: str = "",
        speculation: SpeculationConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduling = scheduling
        self.cache = cache
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks)
        self.policy = make_policy(scheduling)
        self._pace = None if scheduling.target_itl_ms is None else Pace(scheduling.target_itl_ms / 1e3)
        self.speculation = None if speculation is None else Speculation(speculation)
        self._salt = salt
        self._clock = clock
        self._block_size = cache.block_size
        self._own = tuple(g for g, group in enumerate(cache.groups) if group.kind != "cross")
        self._windows = tuple((g, group) for g, group in enumerate(cache.groups) if group.kind == "window")
        self._cross = next((g for g, group in enumerate(cache.groups) if group.kind == "cross"), None)
        self._root_key = root_key(salt, "")  # of requests without a salt; others' are not kept
        self._requests: dict[str, Request] = {}
        self._waiting: list[tuple[tuple[int, float, int], Request]] = []  # a heap; finished ones are dropped lazily
        self._running: list[Request] = []  # in order
        self._forked: list[Request] = []  # may be admitted from the next step on
        self._deadlines: list[tuple[float, int, Request]] = []
        self._released: list[str] = []
        self._outputs: list[EngineOutput] = []
        self.forced: Callable[[str, int], tuple[int, ...]] | None = None
        """Of a request with a grammar the tokens that must follow so many pending ones."""
        self._num_forced = 0
        self._in_flight: dict[int, InFlight] = {}
        self._watermark = max(1, int(self.pool.num_usable * WATERMARK))
        self._counter = 0
        self._step_id = 0
        self._prefix_queries = self._prefix_hits = self._num_preemptions = 0

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, spec: EngineRequest, *, held: bool = False) -> None:
        """Queue a request; one that is `held` waits for `release`. EngineOverloadedError if the queue is full (forks come in
        with the request they fork from), ContextLengthError if it could never run."""
        limit = self.scheduling.max_queue
        if spec.request_id in self._requests:
            raise RequestError(f"request_id {spec.request_id!r} is in use; choose another", field="request_id")
        if limit is not None and spec.fork_of is None and self.num_waiting >= limit:
            raise EngineOverloadedError(f"{self.num_waiting} requests are waiting already (max_queue); try again later")
        check_length(spec, self.max_model_len, self.cache, self.scheduling.max_num_batched_tokens, self.pool.num_usable)
        self._counter += 1
        order = (spec.priority, spec.arrival, self._counter)
        root = root_key(self._salt, spec.cache_salt) if spec.cache_salt else self._root_key
        request = Request(spec, order, root, len(self.cache.groups))
        request.held = held
        self._requests[spec.request_id] = request
        if spec.deadline is not None:
            heapq.heappush(self._deadlines, (spec.deadline, self._counter, request))
        parent = self._requests.get(spec.fork_of) if spec.fork_of is not None else None
        if parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens:
            request.status = Status.FORKING
            parent.forks.append(request)
        else:
            self._wait(request)

    def release(self, request_id: str) -> None:
        """A request that was held back may be scheduled."""
        request = self._requests.get(request_id)  # its deadline may have passed
        if request is not None and request.held:
            request.held = False
            if request.status is Status.WAITING:
                self._wait(request)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[EngineOutput]:
        """End requests now; their blocks are free for the next step. Unknown ids are nothing to do."""
        found = [self._requests[i] for i in request_ids if i in self._requests]
        outputs = [self._finish(request, reason) for request in found]
        self._drop_finished()
        return outputs

    def fail_all(self, reason: FinishReason, error: str) -> list[EngineOutput]:
        """End everything, after a step failed. Results of steps in flight are not expected any more."""
        self._in_flight.clear()
        if self._pace is not None:
            self._pace.forget_steps()
        outputs = [self._finish(request, reason, error) for request in list(self._requests.values())]
        self._drop_finished()
        self.pool.forget_all()
        return outputs

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    def drain_outputs(self) -> list[EngineOutput]:
        """Ends that `schedule()` found: requests whose deadline had passed."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_wakeup(self) -> float | None:
        """When `schedule()` may have something to do though nothing arrives: a deadline, or the end of a window."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        oldest = self._waiting[0][1].spec.arrival if self._waiting else None
        window = self.policy.opens_at(oldest)
        return min([*times, window]) if window is not None else min(times, default=None)

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all()

    # --- A step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now, or drafts are to be made from the step in flight."""
        now, scheduling = self._clock(), self.scheduling
        self._expire(now)
        if self.speculation is not None and (
            any(step.drafts for step in self._in_flight.values()) or self.speculation.choose(self._running)
        ):
            return None
        self._admit_forks()
        step = StepBuilder(scheduling.max_num_batched_tokens)
        unfinished: list[Request] = []  # prompts under way
        plain = 0  # decodes that need nothing: no block, copy or check
        for request in self._running.copy():
            position = request.num_computed_tokens
            if position < request.decodes_until:
                request.num_computed_tokens = position + 1
                request.num_pending += 1
                step.decodes.append(ScheduledRequest(request.request_id, position, 1, 1))
                step.sampled_decodes.append(request)
                step.scheduled.add(request)
                plain += 1
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
            step.budget -= scheduling.max_num_batched_tokens - scheduling.max_num_mixed_tokens
            first = unfinished[0] if unfinished else self._next_waiting()
            if self._pace is not None and first is not None:
                age = now - first.spec.arrival
                fits = self._pace.prompt_tokens(len(step.decodes), step.prompts, first.num_computed_tokens, age)
                step.budget = min(step.budget, fits)
        for request in unfinished:
            if request.status is Status.RUNNING:
                self._schedule_prompt(step, request)
        self._admit(step, now)
        return self._plan(step, now) if step.scheduled else None

    def _schedule_one(self, step: StepBuilder, request: Request) -> None:
        """A decode, with what forced tokens or guesses the step has room for. It makes room by preempting whoever is last."""
        position = request.num_computed_tokens
        count, forced = 1, self._forced_tokens(request)
        if forced or request.drafts:
            # Every running request may still want a token of a mixed step, and every token sampled needs a place.
            spare = self.scheduling.max_num_mixed_tokens - self.scheduling.max_num_batched_tokens + step.budget
            spare -= len(self._running) - len(step.scheduled)
            if not forced:
                spare = min(spare, step.room_for_drafts)
            count += max(0, min(len(forced or request.drafts), spare, request.end - request.num_tokens - 1))
            if count > 1 and not self._take_blocks(step, request, position + count):
                count = 1
        while not self._take_blocks(step, request, position + count):
            if self._make_room(step) is request:
                return
        self._advance(step, request, count, forced[: count - 1])

    def _forced_tokens(self, request: Request) -> tuple[int, ...]:
        """Log-probabilities are those of logits, and these tokens have none. What the request allows by itself is not looked at
        by its grammar."""
        sampling = request.spec.sampling
        if self.forced is None or sampling.structured_outputs is None:
            return ()
        if sampling.logprobs is not None or sampling.allowed_token_ids is not None or request.num_pending_drafts:
            return ()
        return self.forced(request.request_id, request.num_pending)

    def _schedule_prompt(self, step: StepBuilder, request: Request) -> None:
        """As much of a prompt under way as the budget allows. It takes blocks from those behind it only: those before it will
        end, and free theirs."""
        wanted = request.num_tokens - request.num_computed_tokens
        count = min(wanted, step.budget)
        if count <= 0 or (count < wanted and not self.scheduling.enable_chunked_prefill):
            return
        while not self._take_blocks(step, request, request.num_computed_tokens + count):
            if step.scheduled and self._last_unscheduled(step) is request:
                return
            if self._make_room(step) is request:
                return
        self._advance(step, request, count)

    def _admit(self, step: StepBuilder, now: float) -> None:
        """New requests in order, while rows, budget and blocks last. The first that does not fit stops the rest."""
        scheduling, num_own = self.scheduling, len(self._own)
        while step.budget > 0 and len(self._running) < scheduling.max_num_seqs:
            request = self._next_waiting()
            if request is None or request.num_pending:
                return
            counts = {"num_running": self.num_running, "num_waiting": self.num_waiting}
            if not self.policy.admits(request, **counts, now=now):
                return
            holds = request.holds_blocks  # a fork does
            cached, computed = ([], request.num_computed_tokens) if holds else self._cached_prefix(request)
            # An encoder reads its text at once, before the first token that looks at it.
            encoded = 0 if holds else len(request.spec.encoder_token_ids)
            wanted = request.num_tokens - computed
            count = min(wanted, step.budget - encoded)
            if count <= 0 or (count < wanted and not scheduling.enable_chunked_prefill):
                return
            num_held = len(request.blocks[0] if holds else cached[0] if cached else ())
            copies = request.needs_copy
            need = (self._blocks_for(computed + count) - num_held + copies) * num_own + self._blocks_for(encoded)
            revived = sum(self.pool.ref_counts[b] == 0 for table in cached for b in table)
            spare = self._watermark if self._running else 0
            if need + revived + spare > self.pool.num_free:
                if not self._running and self._drop_held_forks():
                    continue
                return
            heapq.heappop(self._waiting)
            if cached:
                self._adopt(request, cached)
                request.num_registered = num_held
            request.num_computed_tokens = computed
            if request.num_preemptions == 0 and request.spec.fork_of is None:
                request.num_cached_tokens = min(computed, request.num_prompt_tokens)
                if self.cache.enable_prefix_caching:
                    self._prefix_queries += request.num_prompt_tokens
                    self._prefix_hits += request.num_cached_tokens
            request.status = Status.RUNNING
            insort(self._running, request, key=_order)
            self.policy.admitted(request)
            if encoded:
                assert self._cross is not None, "the model has no encoder"
                request.blocks[self._cross] = self.pool.allocate(self._blocks_for(encoded))
                step.encoding.add(request)
                step.budget -= encoded
            taken = self._take_blocks(step, request, computed + count)
            assert taken, "blocks were counted before"
            self._advance(step, request, count)

    def _take_blocks(self, step: StepBuilder, request: Request, num_tokens: int) -> bool:
        """In every group: release the blocks that no token from now on looks at, copy the one that is written next if it is
        shared, append blocks up to `num_tokens` tokens. False, and nothing is done, if too few blocks are free."""
        pool, size, tables = self.pool, self._block_size, request.blocks
        computed, length = request.num_computed_tokens, len(tables[self._own[0]])
        need = max(0, self._blocks_for(num_tokens) - length)
        first = computed // size  # the block that is written next
        copies = []
        if request.needs_copy and first < length:
            copies = [g for g in self._own if not pool.is_writable(tables[g][first])]
        passed = [(g, group.first_block(computed, size)) for g, group in self._windows]
        passed = [(g, keep) for g, keep in passed if keep > request.num_passed[g]]
        freed = sum(pool.ref_counts[b] == 1 for g, keep in passed for b in tables[g][request.num_passed[g] : keep])
        if need * len(self._own) + len(copies) > pool.num_free + freed:
            return False
        updates: list[TableUpdate] = []
        for g, keep in passed:
            begin = request.num_passed[g]
            pool.release(tables[g][begin:keep])
            tables[g][begin:keep] = [NULL_BLOCK] * (keep - begin)
            request.num_passed[g] = keep
            updates.append(TableUpdate(g, begin, (NULL_BLOCK,) * (keep - begin)))
        for g in copies:
            old, (new,) = tables[g][first], pool.allocate(1)
            step.copies.append((old, new))
            step.copied.append(old)
            tables[g][first] = new
            updates.append(TableUpdate(g, first, (new,)))
        request.needs_copy = False
        if need:
            for g in self._own:
                blocks = pool.allocate(need)
                tables[g] += blocks
                updates.append(TableUpdate(g, length, tuple(blocks)))
        if updates and request.in_worker:
            step.updates.setdefault(request.request_id, []).extend(updates)
        return True

    def _advance(self, step: StepBuilder, request: Request, count: int, forced: tuple[int, ...] = ()) -> None:
        """Put `count` tokens of the request into the step, the last of them `forced`. Its blocks are there."""
        computed, known = request.num_computed_tokens, request.num_tokens
        end = computed + count
        num_sampled = 0 if request.spec.pooled else max(0, end - len(forced) - known + 1)
        request.num_computed_tokens = end
        step.budget -= count
        step.add(request, computed, count, num_sampled, forced or (request.drafts[: num_sampled - 1] if num_sampled else ()))
        if num_sampled:
            request.num_pending += num_sampled + len(forced)
            request.drafts = ()
            if num_sampled > 1:
                step.drafts[request] = request.num_pending_drafts = num_sampled - 1
                step.room_for_drafts -= num_sampled - 1
            elif forced:
                step.forced[request] = forced
            room = len(request.blocks[self._own[0]]) * self._block_size
            is_plain = num_sampled == 1 and request.spec.sampling.structured_outputs is None
            request.decodes_until = min(room, request.end - 1) if is_plain else 0
        if computed < request.num_prompt_tokens:
            self._register(request)
            if request.forks and end >= request.num_prompt_tokens:
                self._fork(request)

    def _plan(self, step: StepBuilder, now: float) -> StepPlan:
        self._step_id += 1
        if self._pace is not None:
            self._pace.launched(self._step_id, now, len(step.decodes), step.prompts)
        self._in_flight[self._step_id] = InFlight(step.sampled_decodes + step.sampled_prompts, step.drafts, step.forced)
        released, self._released = self._released, []
        self.pool.release(step.copied)
        return step.plan(self._step_id, released)

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in what a step gave: tokens, ends, full blocks. Requests that have ended since are passed over.

        Of a request that sampled at several positions the first tokens count, as many as `result` has. Positions behind them
        were computed with wrong guesses and will be computed again, in the same blocks. A token that ends the request cuts
        those behind it.
        """
        if self._pace is not None:
            self._pace.ended(plan.step_id, self._clock())
        outputs: list[EngineOutput] = []
        ended = False
        logprobs = {x.request_id: x.logprobs for x in result.extras if isinstance(x, SampledLogprobs)}
        of_prompts = {x.request_id: x for x in result.extras if isinstance(x, PromptLogprobs)}
        size = self._block_size
        requests, drafts, all_forced = self._in_flight.pop(plan.step_id, NOTHING)
        for request, tokens in zip(requests, tokens_of_each(result), strict=True):
            if request.status is Status.FINISHED:
                continue
            known, request_id = request.token_ids, request.request_id
            first = len(known) == request.num_prompt_tokens
            num_drafts, num_accepted = drafts.get(request, 0), len(tokens) - 1
            if num_drafts:
                self._roll_back(request, num_drafts, len(tokens))
            elif forced := all_forced.get(request, ()):
                tokens = (*forced, *tokens)
                request.num_pending -= len(forced)
                self._num_forced += len(forced)
            request.num_pending -= 1
            reason = stop = None
            for i, token in enumerate(tokens):
                known.append(token)
                if token in request.stops and len(known) - request.num_prompt_tokens >= request.spec.sampling.min_tokens:
                    reason, stop = FinishReason.STOP, token
                elif len(known) >= request.end:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    tokens = tokens[: i + 1]
                    break
            output = TokenOutput(request_id, tokens, reason, stop, request.num_cached_tokens if first else 0)
            if result.extras:
                own = logprobs.get(request_id, ())[: len(tokens)]
                output = output._replace(logprobs=own, prompt_logprobs=of_prompts.pop(request_id, None))
            if num_drafts:
                output = output._replace(num_drafted=num_drafts, num_accepted=min(num_accepted, len(tokens)))
            outputs.append(output)
            if reason is not None:
                ended = True
                self._finish(request, reason)
            elif len(known) // size > request.num_registered:
                self._register(request)
        for extra in result.extras:
            request_id = extra.request_id if isinstance(extra, PooledVector) else ""
            if isinstance(extra, PooledVector) and request_id in self._requests:
                # Wherever it stands: it may have lost its blocks meanwhile.
                ended = True
                self._finish(self._requests[request_id], FinishReason.STOP)
                outputs.append(VectorOutput(request_id, extra.vector, 0, 1, FinishReason.STOP))
        # Chunks of a prompt that did not end in this step have log-probabilities of their own.
        outputs += [TokenOutput(i, prompt_logprobs=x) for i, x in of_prompts.items() if i in self._requests]
        if ended:
            self._drop_finished()
        if self.speculation is not None:
            only_decodes = all(s.num_tokens == s.num_sampled for s in plan.scheduled)
            sizes = len(plan.scheduled), plan.num_tokens
            self.speculation.step_done(self._clock(), *sizes, only_decodes=only_decodes, idle=not self._running)
        return outputs

    # --- Pieces -------------------------------------------------------------------------------------------------------

    def _roll_back(self, request: Request, num_drafts: int, num_tokens: int) -> None:
        """Of the tokens that a step sampled with `num_drafts` drafts only the first `num_tokens` count: the drafts that were
        right, and the token behind them."""
        if self.speculation is not None:
            self.speculation.verified(request, num_drafts, num_tokens - 1)
        request.num_pending_drafts = 0
        request.num_pending -= num_drafts
        if request.status is Status.RUNNING:  # else it has lost its blocks, and nothing is computed
            request.num_computed_tokens -= num_drafts + 1 - num_tokens

    def _cached_prefix(self, request: Request) -> tuple[list[list[int]], int]:
        if not self.cache.enable_prefix_caching or request.spec.sampling.prompt_logprobs is not None:
            return [], 0
        return longest_hit(self.pool, request, self._own, dict(self._windows), self._block_size)

    def _adopt(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks of `tables`, which others have written; null blocks stand where none is needed."""
        for g, table in enumerate(tables):
            passed = next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table))
            self.pool.hold(table[passed:])
            request.blocks[g], request.num_passed[g] = list(table), passed

    def _register(self, request: Request) -> None:
        """Offer to the prefix cache the blocks whose tokens are all known and scheduled."""
        if not self.cache.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // self._block_size
        if full <= request.num_registered or request.status is not Status.RUNNING:
            return
        extend_keys(request.block_keys, request.root_key, request.token_ids, self._block_size, full)
        for g in self._own:
            for i in range(max(request.num_registered, request.num_passed[g]), full):
                self.pool.register(request.blocks[g][i], group_key(request.block_keys[i], g))
        request.num_registered = full

    def _fork(self, parent: Request) -> None:
        """Give the prompt's blocks to the requests that wait for them. They compute its last token again, each in a copy
        of the last block, and so draw their first token for themselves."""
        num_blocks = self._blocks_for(parent.num_prompt_tokens)
        tables = [table if g == self._cross else table[:num_blocks] for g, table in enumerate(parent.blocks)]
        children = [child for child in parent.forks if child.status is Status.FORKING]
        for child in children:
            self._adopt(child, tables)
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_registered = child.num_computed_tokens // self._block_size
            child.needs_copy = parent.needs_copy = True
            parent.decodes_until = 0
        self._forked += children
        parent.forks = []

    def _admit_forks(self) -> None:
        forked, self._forked = self._forked, []
        for child in forked:
            if child.status is Status.FORKING:
                self._wait(child)

    def _drop_held_forks(self) -> bool:
        """Take the prompt blocks back from forks that only wait; they compute the prompt again. Whether there were any."""
        dropped = False
        for request in (*self._forked, *(r for _, r in self._waiting)):
            if request.status is not Status.RUNNING and request.holds_blocks:
                self._give_back(request)
                dropped = True
        return dropped

    def _make_room(self, step: StepBuilder) -> Request | None:
        """Free some blocks: those that waiting forks hold, else those of the last in order that is not yet in this step,
        which is preempted and returned."""
        if self._drop_held_forks():
            return None
        victim = self._last_unscheduled(step)
        self._preempt(victim)
        return victim

    def _last_unscheduled(self, step: StepBuilder) -> Request:
        return next(r for r in reversed(self._running) if r not in step.scheduled)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_back(request)
        self._drop_from_worker(request)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._wait(request)

    def _give_back(self, request: Request) -> None:
        """Release all blocks; nothing is computed any more."""
        for g, table in enumerate(request.blocks):
            self.pool.release(table[request.num_passed[g] :])
            request.blocks[g], request.num_passed[g] = [], 0
        request.num_computed_tokens = request.num_registered = 0
        request.drafts, request.decodes_until = (), 0
        request.needs_copy = False

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> EngineOutput:
        """End a request wherever it stands. `_drop_finished` must follow, to take it off the running list."""
        self._give_back(request)
        self._drop_from_worker(request)
        request.status = Status.FINISHED
        if self.speculation is not None:
            self.speculation.ended(request)
        for child in request.forks:
            if child.status is Status.FORKING:
                self._wait(child)
        request.forks = []
        del self._requests[request.request_id]
        self.policy.finished(request)
        make = VectorOutput if request.spec.pooled else TokenOutput
        return make(request.request_id, finish_reason=reason, error=error)

    def _drop_finished(self) -> None:
        self._running = [r for r in self._running if r.status is Status.RUNNING]

    def _drop_from_worker(self, request: Request) -> None:
        if request.in_worker:
            self._released.append(request.request_id)
            request.in_worker = False

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        if not request.held:
            heapq.heappush(self._waiting, (request.order, request))

    def _next_waiting(self) -> Request | None:
        while self._waiting:
            request = self._waiting[0][1]
            if request.status is Status.WAITING:
                return request
            heapq.heappop(self._waiting)
        return None

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not Status.FINISHED:
                self._outputs.append(self._finish(request, FinishReason.DEADLINE))
                self._drop_finished()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def stats(self) -> SchedulerStats:
        size, pool = self._block_size, self.pool
        used = pool.num_usable - pool.num_free
        # A table's null blocks stand for as many computed tokens, so that they cancel out.
        wasted = sum(len(r.blocks[g]) * size - r.num_computed_tokens for r in self._running for g in self._own)
        if self._cross is not None:
            wasted += sum(len(r.blocks[self._cross]) * size - len(r.spec.encoder_token_ids) for r in self._running)
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            kv_cache_usage=used / pool.num_usable,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self._num_preemptions,
            kv_allocated_tokens=used * size,
            kv_wasted_tokens=wasted,
            forced_tokens=self._num_forced,
            **({} if self.speculation is None else self.speculation.stats()),
        )


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
