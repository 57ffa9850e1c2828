"""The scheduler of a simulation. It plans the same steps as `Scheduler`, but spends no time on
decodes that only need their next token.

Nearly all requests in a step are decodes that only get one more token. Here such a request *sleeps*
until it needs a block or has all its tokens, so it is visited once in `block_size` steps. Its state
follows from the number of steps since it fell asleep, and is updated when it wakes (`_wake`).

1. All decisions are the `Scheduler`'s own code: admission, blocks, prefix cache, budget,
   preemption.
2. `schedule()` returns a plan of the awake requests. The step also has `num_asleep` others, which
   attend to `asleep_context` tokens.
3. A request that needs a block takes it asleep if there are blocks for everyone. Without a prefix
   cache and windows all blocks are alike, so they are only counted (`BlockCount`). Sleepers that
   need one in the same step form a group, by that step's number modulo `block_size`, and the group
   takes its blocks at once.
4. Steps hold the same requests, tokens and cached prefixes as the `Scheduler`'s, with at most two
   in flight (tests/plan/test_sleeping.py). That holds for answers that end by their length, as in
   simulations, without drafts, forks, deadlines or an objective for the time between tokens, which
   need `Scheduler` itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.in_flight import NOTHING
from slipstream.core.participants.base import Participant
from slipstream.core.request import Request, Status
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import StepBuilder
from slipstream.errors import ConfigError
from slipstream.messages.outputs import StepOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepPlan, StepResult

ANY_TOKEN = 7
"""Placeholder for every sampled token."""

_order = attrgetter("order")


class SimulatedSleep(NamedTuple):
    """A sleep during steps (since, last], in which a request only gets its next token.

    It had `computed` tokens before. If blocks are only counted, it takes one in step `due` and in
    every `block_size`-th step after that; 0: it needs none.
    """

    since: int
    computed: int
    last: int
    due: int = 0


class BlockCount(BlockPool):
    """A pool of blocks without a prefix cache, which only counts them. Blocks are never shared, so
    all of them are block 1."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.ref_counts[1] = 1

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_free, "allocate() beyond num_free"
        self.num_free -= count
        return [1] * count

    def release(self, blocks: Sequence[int]) -> None:
        self.num_free += len(blocks)


class Waker(Participant):
    """Wakes a sleeper that is preempted."""

    def __init__(self, scheduler: SleepingScheduler) -> None:
        self._scheduler = scheduler

    def concerns(self, request: Request) -> bool:
        return True

    def stopped(self, request: Request) -> None:
        self._scheduler.wake(request)


class SleepingScheduler(Scheduler):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, participants=[Waker(self)])
        if self._pace is not None:
            raise ConfigError(
                "target_itl_ms is simulated by the Scheduler itself", field="target_itl_ms"
            )
        self.num_asleep = 0  # sleepers in the latest planned step
        self.asleep_context = 0
        self._next_asleep = self._next_context = 0  # the same for the next step
        self._asleep: dict[Request, SimulatedSleep] = {}
        # sleepers by the step for which they need a block
        self._due: defaultdict[int, list[tuple[Request, SimulatedSleep]]] = defaultdict(list)
        # sleepers by the step with their last token
        self._last: defaultdict[int, list[tuple[Request, SimulatedSleep]]] = defaultdict(list)
        self._awake: list[Request] = []  # the awake requests among `running`
        self._in_decodes = False  # sleepers after the current request are not in the step yet
        self._counts = not self.cache.enable_prefix_caching and not self.kv.windows
        if self._counts:
            self.kv.pool = BlockCount(self.pool.num_blocks)
        self._groups: tuple[dict[Request, None], ...] = tuple({} for _ in range(self.kv.block_size))
        """Sleepers by the step for which they need a block, modulo `block_size`."""

    def add(self, spec: EngineRequest, *, held: bool = False) -> None:
        assert spec.fork_of is None, "no forks"
        assert spec.deadline is None, "no deadlines"
        super().add(spec, held=held)

    def schedule(self) -> StepPlan | None:
        this = self.in_flight.last_id + 1
        idle = not (
            self._awake or self.requests.num_waiting or self.requests.released or this in self._due
        )
        if idle and self._next_asleep and self._take_for_group(this):
            return self._schedule_sleepers(this)
        now = self._clock()
        step = StepBuilder(self.scheduling, self.requests.table_updates, self.requests.running)
        awake = [r for r in self._awake if r.status is Status.RUNNING] + self._take_due(this)
        awake.sort(key=_order)
        unfinished: list[Request] = []  # prompts in progress
        for request in awake:
            if request.status is not Status.RUNNING:  # preempted meanwhile
                continue
            wanted = request.num_tokens - request.num_computed_tokens
            if wanted > 1:
                unfinished.append(request)
            elif wanted == 1 and request.num_computed_tokens < request.end - 1:
                self._in_decodes = True
                self._schedule_one(step, request)
        self._in_decodes = False
        num_decodes = self._next_asleep + len(step.scheduled)
        if self._next_asleep:  # one sleeper represents all
            step.budget.take_others(self._next_asleep - 1)
            step.scheduled.add(next(r for r, sleep in self._asleep.items() if sleep.last >= this))
        if step.scheduled:
            self._bound_prompts(step, num_decodes, unfinished)
        else:
            step.budget.widen()
        self._place_prompts(step, unfinished, now)
        if not step.scheduled:
            self._awake = awake
            return None
        self.num_asleep, self.asleep_context = self._next_asleep, self._next_context
        plan = self._plan(step, now)
        self._pass(this)
        for request in (*step.sampled_decodes, *step.sampled_prompts):
            if request.lease > request.num_computed_tokens:
                self._fall_asleep(request, this, request.num_computed_tokens)
        self._awake = [
            r
            for r in {*awake, *step.scheduled}
            if r.status is Status.RUNNING and r not in self._asleep
        ]
        return plan

    def _schedule_sleepers(self, this: int) -> StepPlan:
        """Plans a step in which no request is awake."""
        self.num_asleep, self.asleep_context = self._next_asleep, self._next_context
        self.in_flight.last_id = this
        self.in_flight.by_id[this] = NOTHING
        self._pass(this)
        return StepPlan(this, ())

    def update(self, plan: StepPlan, result: StepResult | None = None) -> list[StepOutput]:
        """Append one placeholder token to each request that the plan samples. `result` is
        ignored."""
        last, caching = self._last, self.cache.enable_prefix_caching
        nobody = (
            not plan.scheduled
            and plan.step_id not in last
            and not (caching and plan.step_id + 1 in last)
        )
        if nobody and not self.in_flight.by_id[plan.step_id].requests:  # and none woke since
            del self.in_flight.by_id[plan.step_id]
            return []
        self._wake_last(plan.step_id)
        requests = self.in_flight.by_id.get(plan.step_id, NOTHING).requests
        outputs = super().update(plan, StepResult(plan.step_id, [ANY_TOKEN] * len(requests)))
        if caching and plan.step_id + 1 in self.in_flight.by_id:
            # All tokens but the last are known now, so the full blocks can be registered in the prefix cache.
            for request in self._wake_last(plan.step_id + 1):
                self.kv.register(request, self.in_flight.last_id)
        return outputs

    # --- Sleep ---

    def _fall_asleep(self, request: Request, since: int, computed: int) -> None:
        """Put the request to sleep after step `since`, with `computed` tokens by then."""
        last = since + request.lease - computed
        sleep = SimulatedSleep(since, computed, last)
        if self._counts and request.lease < request.end - 1:
            sleep = SimulatedSleep(since, computed, since + request.end - 1 - computed, last + 1)
            self._groups[sleep.due % self.kv.block_size][request] = None
            request.lease = request.end - 1
        self._asleep[request] = sleep
        self._next_asleep += 1
        self._next_context += computed + 1
        if request.lease == request.end - 1:
            self._last[sleep.last].append((request, sleep))
        else:
            self._due[sleep.last + 1].append((request, sleep))

    def _pass(self, this: int) -> None:
        """Update the counts of sleepers after step `this` was planned.

        Each sleeper attends to one more token in the next step, and some sleepers wake.
        """
        self._next_context += self._next_asleep
        for request, sleep in (*self._due.get(this + 1, ()), *self._last.get(this, ())):
            if self._asleep.get(request) is sleep:
                self._next_asleep -= 1
                self._next_context -= request.lease + 1
                if sleep is not None and sleep.due:
                    self._groups[sleep.due % self.kv.block_size].pop(request)

    def _take_for_group(self, this: int) -> bool:
        """Allocate the blocks that the group needs for step `this`.

        Returns False, and allocates none, if too few would remain for the awake requests.
        """
        num_own, group = len(self.kv.own), self._groups[this % self.kv.block_size]
        if group and (len(group) + len(self._awake)) * num_own > self.pool.num_free:
            return False
        self.pool.num_free -= len(group) * num_own
        return True

    def _wake_group(self, this: int) -> list[Request]:
        """Wake the group that needs blocks for step `this`."""
        found = list(self._groups[this % self.kv.block_size])
        for request in found:
            self._leave(this, self._asleep[request])
            self._wake(request, this - 1)
        return found

    def _leave(self, this: int, sleep: SimulatedSleep) -> None:
        """Remove a request that would have slept through step `this` from the counts."""
        self._next_asleep -= 1
        self._next_context -= sleep.computed + this - sleep.since

    def _take_due(self, this: int) -> list[Request]:
        """Wake the requests that need a block for step `this`, and return them.

        If there are blocks for all, they get their blocks without waking, and none is returned.
        """
        if self._counts:
            return [] if self._take_for_group(this) else self._wake_group(this)
        due = [
            request
            for request, sleep in self._due.pop(this, ())
            if self._asleep.get(request) is sleep
        ]
        num_own, pool = len(self.kv.own), self.pool
        if self.kv.windows or (len(due) + len(self._awake)) * num_own > pool.num_free:
            for request in due:
                self._wake(request, this - 1)
                self.kv.register(request, self.in_flight.last_id)
            return due
        caching, size, asleep = self.cache.enable_prefix_caching, self.kv.block_size, self._asleep
        blocks = pool.allocate(len(due) * num_own)
        for request in due:
            since, computed, last, _ = asleep[request]
            room = request.lease
            if caching:
                request.num_computed_tokens = room
                request.token_ids.extend([ANY_TOKEN] * (room - len(request.token_ids)))
                self.kv.register(request, self.in_flight.last_id)
            for g in self.kv.own:
                request.blocks[g].append(blocks.pop())
            if request.end - 1 > room + size:
                request.lease = room + size
                asleep[request] = sleep = SimulatedSleep(since, computed, last + size)
                self._due[last + size + 1].append((request, sleep))
            else:
                request.lease = request.end - 1
                asleep[request] = sleep = SimulatedSleep(
                    since, computed, last + request.end - 1 - room
                )
                self._last[sleep.last].append((request, sleep))
            self._next_context += room + 1
        self._next_asleep += len(due)
        return []

    def _wake_last(self, step_id: int) -> list[Request]:
        """Wake the requests whose last token comes from step `step_id`.

        They are added to those that sampled in the step, in the Scheduler's order: decodes in
        running order, then prompts.
        """
        found = [
            request
            for request, sleep in self._last.pop(step_id, ())
            if self._asleep.get(request) is sleep
        ]
        if found:
            requests = self.in_flight.by_id[step_id].requests
            before = len(requests)
            for request in found:
                self._wake(request, step_id)
            decodes = [r for r in requests[:before] if r.num_computed_tokens > r.num_prompt_tokens]
            others = [r for r in requests[:before] if r.num_computed_tokens <= r.num_prompt_tokens]
            ordered = sorted([*decodes, *found], key=_order) + others
            self.in_flight.by_id[step_id] = self.in_flight.by_id[step_id]._replace(requests=ordered)
        return found

    def _wake(self, request: Request, this: int) -> None:
        """Update the request's state to that after step `this`, and add it to the steps in flight
        in which it sampled."""
        sleep = self._asleep.pop(request)
        last = min(this, sleep.last)
        request.num_computed_tokens = sleep.computed + last - sleep.since
        if sleep.due:
            # Nobody is preempted in a step whose group got its blocks: there were enough for all
            # decodes.
            size = self.kv.block_size
            self._groups[sleep.due % size].pop(request, None)
            if last >= sleep.due:
                for g in self.kv.own:
                    request.blocks[g] += [1] * ((last - sleep.due) // size + 1)
            request.lease = min(len(request.blocks[self.kv.own[0]]) * size, request.end - 1)
        for step_id, step in self.in_flight.by_id.items():
            if sleep.since < step_id <= last:
                self.in_flight.by_id[step_id] = step._replace(requests=[*step.requests, request])
                request.num_pending += 1
        known = request.num_computed_tokens + 1 - request.num_pending
        request.token_ids.extend([ANY_TOKEN] * (known - len(request.token_ids)))

    def wake(self, request: Request) -> None:
        """Wake a request, if it sleeps, before the next step."""
        sleep = self._asleep.get(request)
        if sleep is not None:
            this = self.in_flight.last_id + 1
            if sleep.last >= this:
                self._leave(this, sleep)
            self._wake(request, this - 1)

    def _last_unscheduled(self, step: StepBuilder, kv: KVCacheManager) -> Request:
        """The last running request that is not in the step yet; it is preempted.

        While decodes are scheduled, sleepers after the current one are not in the step yet. Later
        all sleepers are, except those that have all their tokens.
        """
        this = self.in_flight.last_id + 1
        for request in reversed(self.requests.running):
            sleep = self._asleep.get(request)
            if request in step.scheduled or (
                sleep is not None and sleep.last >= this and not self._in_decodes
            ):
                continue
            return request
        raise AssertionError("the one that asks is not scheduled")
