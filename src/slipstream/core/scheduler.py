"""Decides what each step computes. No torch, no clock but the one given.

There are no phases. A request has `num_tokens` and `num_computed_tokens`; a step spends a budget of tokens bringing the
second up to the first. Prefill, chunks of it, decode, prefix hits, and resumption after preemption are all that rule.

Order within a step: sequences that need one token (decodes) always go first, so a long prompt never holds them up; then
prompts under way; then new ones, strictly by (priority, arrival). A step that holds decodes has at most
`max_num_mixed_tokens` tokens, of any kind, so that no running sequence waits for its next token longer than such a step
takes. Prompts get what the decodes leave, at least one token, since a prompt under way is itself one of `max_num_seqs`;
they fill it in order, several in a step if they are short. When blocks run out, the last in that order is preempted:
its blocks go, and it waits to be computed again.

`schedule()` may be called again before `update()` of the step before: it counts tokens that are sampled but not yet known
(`num_pending`). Whoever turns out to have ended is dropped from the results of the step that was launched too much.
Blocks that are freed while a step in flight still uses them may be handed out at once, because the device runs steps in
order.

A pooled request samples nothing and ends when its prompt is computed. An encoder-decoder's prompt is encoded whole in the
step that admits its request; the blocks of its keys and values are held as long as the request's own.

Shared blocks: a prompt block is offered to the prefix cache when it is scheduled, so that requests in one step can share
it (the worker writes a layer's keys and values before any attention reads them). A block is written only by a sequence
that holds it alone and only while it is not offered; otherwise it is copied first. Such a copy runs before the step, so it
is never made from a block that the same step computes.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from slipstream.core.block_pool import BlockPool
from slipstream.core.prefix_cache import extend_keys, root_key
from slipstream.core.request import Request, Status
from slipstream.core.step import Step
from slipstream.errors import ContextLengthError, EngineOverloadedError, RequestError
from slipstream.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    StepPlan,
    StepResult,
)

WATERMARK = 0.01
"""Share of the blocks kept free when a request is admitted beside others, so that it is not preempted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int  # from max_num_seqs to max_num_batched_tokens
    max_model_len: int
    block_size: int
    num_blocks: int  # with the null block
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["inflight", "dynamic", "static"] = "inflight"
    batch_window_s: float = 0.05
    max_queue: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    num_blocks: int  # that sequences can hold
    num_free_blocks: int
    kv_usage: float
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of them found
    num_preemptions_total: int
    kv_allocated_tokens: int
    kv_wasted_tokens: int  # allocated and not written


class Scheduler:
    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        from slipstream.core.policy import make_policy

        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.policy = make_policy(config)
        self._clock = clock
        self._root_key = root_key(config.cache_salt, "")  # of requests without a salt; others' are not kept
        self._requests: dict[str, Request] = {}
        self._waiting: list[tuple[tuple[int, float, int], Request]] = []  # a heap; finished ones are dropped lazily
        self._running: list[Request] = []  # in order
        self._forked: list[Request] = []  # may be admitted from the next step on
        self._deadlines: list[tuple[float, int, Request]] = []
        self._released: list[str] = []
        self._outputs: list[EngineOutput] = []
        self._in_flight: dict[int, list[Request]] = {}  # step -> who sampled
        self._watermark = max(1, int(self.pool.num_usable * WATERMARK))
        self._counter = 0
        self._step_id = 0
        self._prefix_queries = self._prefix_hits = self._num_preemptions = 0

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, spec: EngineRequest) -> None:
        """Queue a request. EngineOverloadedError if the queue is full (forks come in with the request they fork from),
        ContextLengthError if it could never run."""
        config = self.config
        total = len(spec.prompt_token_ids) + spec.max_tokens
        if spec.request_id in self._requests:
            raise RequestError(f"request_id {spec.request_id!r} is in use; choose another", field="request_id")
        if config.max_queue is not None and spec.fork_of is None and self.num_waiting >= config.max_queue:
            raise EngineOverloadedError(f"{self.num_waiting} requests are waiting already (max_queue); try again later")
        if total > config.max_model_len:
            raise ContextLengthError(
                f"prompt and answer are {total} tokens, more than max_model_len={config.max_model_len}", field="prompt"
            )
        if len(spec.encoder_token_ids) > config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(spec.encoder_token_ids)} tokens, more than max_model_len={config.max_model_len}",
                field="prompt",
            )
        computed = total if spec.pooled else total - 1  # a last token that is sampled is never computed
        if self._blocks_for(computed) + self._blocks_for(len(spec.encoder_token_ids)) > self.pool.num_usable:
            raise ContextLengthError(
                f"prompt and answer are {total + len(spec.encoder_token_ids)} tokens and the KV cache holds "
                f"{self.pool.num_usable * config.block_size}; "
                "ask for fewer, or give the cache more memory",
                field="prompt",
            )
        self._counter += 1
        order = (spec.priority, spec.arrival, self._counter)
        root = root_key(config.cache_salt, spec.cache_salt) if spec.cache_salt else self._root_key
        request = Request(spec, order, root)
        self._requests[spec.request_id] = request
        if spec.deadline is not None:
            heapq.heappush(self._deadlines, (spec.deadline, self._counter, request))
        parent = self._requests.get(spec.fork_of) if spec.fork_of is not None else None
        if parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens:
            request.status = Status.FORKING
            parent.forks.append(request)
        else:
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
        outputs = [self._finish(request, reason, error=error) for request in list(self._requests.values())]
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
        """The next step, or None if there is nothing to compute now."""
        now = self._clock()
        self._expire(now)
        self._admit_forks()
        step = Step(self.config.max_num_batched_tokens)

        unfinished: list[Request] = []  # prompts under way
        for request in list(self._running):
            wanted = len(request.token_ids) + request.num_pending - request.num_computed_tokens
            if wanted == 1 and request.status is Status.RUNNING and request.num_computed_tokens < request.end - 1:
                self._schedule_one(step, request)
            elif wanted > 1:
                unfinished.append(request)
        if step.decodes:
            step.budget -= self.config.max_num_batched_tokens - self.config.max_num_mixed_tokens
        for request in unfinished:
            if request.status is Status.RUNNING:  # not preempted meanwhile
                self._schedule_prompt(step, request)
        self._admit(step, now)
        if not step.decodes and not step.prompts:
            return None
        return self._plan(step)

    def _schedule_one(self, step: Step, request: Request) -> None:
        """A decode: one token, one block now and then. Makes room by preempting whoever is last."""
        position = request.num_computed_tokens
        if request.needs_copy or position // self.config.block_size >= len(request.block_ids):
            while not self._take_blocks(step, request, position + 1):
                if self._make_room(step) is request:
                    return
        step.budget -= 1
        self._advance(step, request, 1)

    def _schedule_prompt(self, step: Step, request: Request) -> None:
        """As much of a prompt under way as the budget allows. It takes blocks from those behind it only."""
        wanted = request.num_tokens - request.num_computed_tokens
        count = min(wanted, step.budget)
        if count <= 0 or (count < wanted and not self.config.enable_chunked_prefill):
            return
        while not self._take_blocks(step, request, request.num_computed_tokens + count):
            if self._last_unscheduled(step) is request and (step.decodes or step.prompts):
                return  # those before it will end, and free theirs
            if self._make_room(step) is request:
                return
        step.budget -= count
        self._advance(step, request, count)

    def _admit(self, step: Step, now: float) -> None:
        """New requests in order, while rows, budget and blocks last. The first that does not fit stops the rest."""
        while step.budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._next_waiting()
            if request is None or request.num_pending or not self.policy.admits(request, self, now):
                return
            cached, computed = self._cached_prefix(request)
            # An encoder reads its text at once, before the first token that looks at it.
            encoded = 0 if request.encoder_block_ids else len(request.spec.encoder_token_ids)
            wanted = request.num_tokens - computed
            count = min(wanted, step.budget - encoded)
            if count <= 0:
                return
            if count < wanted and not self.config.enable_chunked_prefill:
                return
            copies = int(request.needs_copy)
            held = len(request.block_ids) or len(cached)
            need = self._blocks_for(computed + count) - held + copies + self._blocks_for(encoded)
            revived = 0 if request.block_ids else sum(self.pool.ref_counts[b] == 0 for b in cached)
            spare = self._watermark if self._running else 0
            if need + revived + spare > self.pool.num_free:
                if not self._running and self._drop_held_forks():
                    continue
                return
            heapq.heappop(self._waiting)
            if not request.block_ids:
                self.pool.hold(cached)
                request.block_ids = cached
                request.num_computed_tokens = computed
                request.num_registered = len(cached)
            if request.num_preemptions == 0 and request.spec.fork_of is None:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
                if self.config.enable_prefix_caching:
                    self._prefix_queries += request.num_prompt_tokens
                    self._prefix_hits += request.num_cached_tokens
            request.status = Status.RUNNING
            insort(self._running, request, key=_order)
            self.policy.admitted(request)
            if encoded:
                request.encoder_block_ids = self.pool.allocate(self._blocks_for(encoded))
                step.encoding.add(request)
            taken = self._take_blocks(step, request, request.num_computed_tokens + count)
            assert taken, "blocks were counted before"
            step.budget -= count + encoded
            self._advance(step, request, count)

    def _take_blocks(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens, and a copy of the one it writes next if that is shared; False if too few are free."""
        blocks = request.block_ids
        need = self._blocks_for(num_tokens) - len(blocks)
        index = request.num_computed_tokens // self.config.block_size
        copy = request.needs_copy and index < len(blocks) and not self.pool.is_writable(blocks[index])
        if need + copy > self.pool.num_free:
            return False
        if copy:
            old, (new,) = blocks[index], self.pool.allocate(1)
            step.copies.append((old, new))
            step.copied.append(old)
            blocks[index] = new
            if request.in_worker:
                step.replaced[request.request_id] = ((index, new),)
        request.needs_copy = False
        if need > 0:
            new_blocks = self.pool.allocate(need)
            blocks.extend(new_blocks)
            step.new_blocks[request.request_id] = tuple(new_blocks)
        return True

    def _advance(self, step: Step, request: Request, count: int) -> None:
        """Put `count` tokens of the request into the step. Its blocks are there."""
        computed = request.num_computed_tokens
        known = request.num_tokens
        samples = computed + count == known and not request.spec.pooled
        request.num_computed_tokens = computed + count
        step.add(request, computed, count, samples)
        if samples:
            request.num_pending += 1
        if computed < request.num_prompt_tokens:
            self._register(request)
            if request.forks and request.num_computed_tokens >= request.num_prompt_tokens:
                self._fork(request)

    def _plan(self, step: Step) -> StepPlan:
        self._step_id += 1
        self._in_flight[self._step_id] = step.sampled_decodes + step.sampled_prompts
        released, self._released = self._released, []
        self.pool.release(step.copied)
        return step.plan(self._step_id, released)

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in what a step gave: tokens, ends, full blocks. Sequences that have ended since are passed over."""
        outputs: list[EngineOutput] = []
        ended = False
        logprobs, prompt_logprobs = result.logprobs, dict(result.prompt_logprobs)
        starts = {s.request_id: s.num_computed_tokens for s in plan.scheduled} if prompt_logprobs else {}
        for request, tokens in zip(self._in_flight.pop(plan.step_id, ()), result.token_ids, strict=True):
            if request.status is Status.FINISHED:
                continue
            request.num_pending -= 1
            request.token_ids.extend(tokens)
            request_id = request.spec.request_id
            reason, stop = self._end_of(request)
            first = len(request.token_ids) == request.num_prompt_tokens + 1
            outputs.append(
                EngineOutput(
                    request_id,
                    tokens,
                    logprobs.get(request_id, ()) if logprobs else (),
                    prompt_logprobs.pop(request_id, ()) if prompt_logprobs else (),
                    reason,
                    stop,
                    request.num_cached_tokens if first else 0,
                    request.num_preemptions,
                    prompt_logprobs_start=starts.get(request_id, 0),
                )
            )
            if reason is not None:
                ended = True
                self._finish(request, reason)
            elif len(request.token_ids) // self.config.block_size > request.num_registered:
                self._register(request)
        for request_id, embedding in result.embeddings.items():
            pooled = self._requests.get(request_id)
            if pooled is not None:  # wherever it stands: it may have lost its blocks meanwhile
                ended = True
                cached = pooled.num_cached_tokens
                done = self._finish(pooled, FinishReason.STOP)
                outputs.append(dataclasses.replace(done, embedding=embedding, num_cached_tokens=cached))
        # Chunks of a prompt that did not end in this step have log-probabilities of their own.
        outputs += [
            EngineOutput(request_id, prompt_logprobs=values, prompt_logprobs_start=starts[request_id])
            for request_id, values in prompt_logprobs.items()
            if request_id in self._requests
        ]
        if ended:
            self._drop_finished()
        return outputs

    # --- Pieces -------------------------------------------------------------------------------------------------------

    def _end_of(self, request: Request) -> tuple[FinishReason | None, int | None]:
        last = request.token_ids[-1]
        num_generated = len(request.token_ids) - request.num_prompt_tokens
        if last in request.stops and num_generated >= request.spec.sampling.min_tokens:
            return FinishReason.STOP, last
        if len(request.token_ids) >= request.end:
            return FinishReason.LENGTH, None
        return None, None

    def _cached_prefix(self, request: Request) -> tuple[list[int], int]:
        """Blocks of the prefix cache that begin the request, and how many tokens need not be computed.

        At least two tokens are always computed. The last one's logits are wanted, and a token that is alone in its step is
        computed as a decode, whose kernels round otherwise than a prompt's: a hit would then change the answer.
        """
        if request.block_ids:  # a fork holds its blocks already
            return [], request.num_computed_tokens
        if not self.config.enable_prefix_caching or request.spec.sampling.prompt_logprobs is not None:
            return [], 0
        size = self.config.block_size
        extend_keys(request.block_keys, request.root_key, request.token_ids, size)
        found: list[int] = []
        for key in request.block_keys:
            block = self.pool.lookup(key)
            if block is None:
                break
            found.append(block)
        while found and request.num_tokens - len(found) * size < 2:
            found.pop()
        return found, len(found) * size

    def _register(self, request: Request) -> None:
        """Offer to the prefix cache the blocks whose tokens are all known and scheduled."""
        if not self.config.enable_prefix_caching:
            return
        size = self.config.block_size
        full = min(request.num_computed_tokens, len(request.token_ids)) // size
        if full <= request.num_registered or request.status is not Status.RUNNING:
            return
        extend_keys(request.block_keys, request.root_key, request.token_ids[: full * size], size)
        for i in range(request.num_registered, full):
            self.pool.register(request.block_ids[i], request.block_keys[i])
        request.num_registered = full

    def _fork(self, parent: Request) -> None:
        """Give the prompt's blocks to the sequences that wait for them. They compute its last token again, each in a copy
        of the last block, and so draw their first token for themselves."""
        blocks = parent.block_ids[: self._blocks_for(parent.num_prompt_tokens)]
        children = [child for child in parent.forks if child.status is Status.FORKING]
        for child in children:
            self.pool.hold(blocks)
            child.block_ids = list(blocks)
            self.pool.hold(parent.encoder_block_ids)
            child.encoder_block_ids = list(parent.encoder_block_ids)
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_registered = child.num_computed_tokens // self.config.block_size
            child.needs_copy = parent.needs_copy = True
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
            if request.status is not Status.RUNNING and request.block_ids:
                self._give_back(request)
                dropped = True
        return dropped

    def _make_room(self, step: Step) -> Request | None:
        """Free some blocks: those that waiting forks hold, else those of the last in order that is not yet in this step,
        which is preempted and returned."""
        if self._drop_held_forks():
            return None
        victim = self._last_unscheduled(step)
        self._preempt(victim)
        return victim

    def _last_unscheduled(self, step: Step) -> Request:
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
        self.pool.release(request.block_ids)
        self.pool.release(request.encoder_block_ids)
        request.block_ids, request.encoder_block_ids = [], []
        request.num_computed_tokens = request.num_registered = 0
        request.needs_copy = False

    def _finish(self, request: Request, reason: FinishReason, *, error: str | None = None) -> EngineOutput:
        """End a request wherever it stands. `_drop_finished` must follow, to take it off the running list."""
        self._give_back(request)
        self._drop_from_worker(request)
        request.status = Status.FINISHED
        for child in request.forks:
            if child.status is Status.FORKING:
                self._wait(child)
        request.forks = []
        del self._requests[request.request_id]
        self.policy.finished(request)
        return EngineOutput(
            request.request_id, finish_reason=reason, num_preemptions=request.num_preemptions, error=error
        )

    def _drop_finished(self) -> None:
        self._running = [r for r in self._running if r.status is Status.RUNNING]

    def _drop_from_worker(self, request: Request) -> None:
        if request.in_worker:
            self._released.append(request.request_id)
            request.in_worker = False

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
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
        return -(-num_tokens // self.config.block_size)

    def stats(self) -> SchedulerStats:
        size, pool = self.config.block_size, self.pool
        used = pool.num_usable - pool.num_free
        blocks = sum(len(r.block_ids) + len(r.encoder_block_ids) for r in self._running)
        wasted = blocks * size - sum(r.num_computed_tokens + len(r.spec.encoder_token_ids) for r in self._running)
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            kv_usage=used / pool.num_usable,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions_total=self._num_preemptions,
            kv_allocated_tokens=used * size,
            kv_wasted_tokens=wasted,
        )


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
