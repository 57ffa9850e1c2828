"""All requests of the scheduler, by id and by status.

    add ──> waiting ──> running ──> finished
              ^ │ ^        │
              │ │ └────────┘  preempt
       forks ─┘ └─> loading ─┘   from a tier

1. `running` is in the scheduler's order. Preemption takes requests from its end.
2. A held request that is waiting is not in the queue. One that is running keeps its row.
3. A waiting request may hold blocks if it is a fork, was suspended, or had its blocks loaded from a
   tier. It loses them when running requests need them, and computes the tokens again.
4. `released` lists requests whose rows the worker must drop, and `unmasked` those that need no masks
   any more. The next plan passes them on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.cache.shared_blocks import share_prompt
from slipstream.core.participants.base import Participant
from slipstream.core.policy import InFlightPolicy
from slipstream.core.queue import WaitingQueue
from slipstream.core.request import Request, Status
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import TableUpdate
from slipstream.messages.texts import VectorOutput

_ORDER = attrgetter("order")
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestTable:
    def __init__(
        self, kv: KVCacheManager, policy: InFlightPolicy, participants: Sequence[Participant]
    ) -> None:
        """`kv` is the cache manager of the first or only rank."""
        self.kv = kv
        self.policy = policy
        self.participants = participants
        for part in participants:
            part.requests = self
        self.by_id: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.released: list[str] = []
        self.unmasked: list[str] = []
        # block table changes that the worker does not have yet, by request
        self.table_updates: dict[str, list[TableUpdate]] = {}
        self.num_joined = 0  # requests that share another request's prompt
        self.num_preemptions = 0
        self._forked: list[Request] = []  # forks that may be admitted from the next step on
        # (deadline, number, request id); requests that have ended may still be listed
        self._deadlines: list[tuple[float, int, str]] = []
        self._counter = 0

    @property
    def num_waiting(self) -> int:
        return len(self.by_id) - len(self.running)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def add(self, spec: EngineRequest, *, held: bool) -> None:
        """Queue a request. A participant may refuse it by an error."""
        self._counter += 1
        order = (spec.priority, spec.arrival, self._counter)
        root_key = self.kv.root_key(spec.prefix_salt, "")
        request = Request(spec, order, root_key, len(self.kv.cache.groups), held)
        request.kv = self.kv
        if concerned := [part for part in self.participants if part.concerns(request)]:
            request.participants = tuple(concerned)
            request.guide = next((part for part in concerned if part.guides), None)
            for part in concerned:
                part.entered(request)
        # an adapter's keys are known when it is admitted
        if spec.lora is None and spec.parent is None:
            self.kv.arrived(request)
        self.waiting.enter(request)
        self.by_id[spec.request_id] = request
        self.num_joined += spec.parent is not None
        if spec.deadline is not None:
            heapq.heappush(self._deadlines, (spec.deadline, self._counter, spec.request_id))
        parent = self.by_id.get(spec.fork_of) if spec.fork_of is not None else None
        if parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens:
            request.status = Status.FORKING
            parent.forks.append(request)
        else:
            self.wait(request)

    def wait(self, request: Request) -> None:
        request.status = Status.WAITING
        if not request.held:
            self.waiting.push(request)

    def release(self, request_id: str) -> None:
        """Allow a held request to be scheduled. Does nothing if the request has ended."""
        request = self.by_id.get(request_id)  # it may have ended at its deadline
        if request is not None and request.held:
            request.held = False
            if request.status is Status.WAITING:
                self.wait(request)

    def drop_waiting_blocks(self, kv: KVCacheManager) -> bool:
        """Release the blocks of `kv` that waiting requests hold. True if there were any."""
        dropped = kv.tiers is not None and kv.tiers.give_way()
        for request in self.by_id.values():
            if request.status is not Status.RUNNING and request.holds_blocks and request.kv is kv:
                kv.release(request)
                dropped = True
        return dropped

    # --- Forks ----------------------------------------------------------------------------------------------

    def fork(self, parent: Request) -> None:
        """Share the prompt's blocks with the requests that wait for them."""
        children = [child for child in parent.forks if child.status is Status.FORKING]
        for child in children:
            child.kv = parent.kv
        share_prompt(parent.kv, parent, children)
        self._forked += children
        parent.forks = []

    def admit_forks(self) -> None:
        """Queue the forks whose parents' prompts are computed."""
        forked, self._forked = self._forked, []
        for child in forked:
            if child.status is Status.FORKING:
                self.wait(child)

    # --- Running ------------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Run a request from this step on. It has already left the queue."""
        request.status = Status.RUNNING
        request.kv.num_running += 1
        for part in request.participants:
            part.started(request)
        insort(self.running, request, key=_ORDER)
        self.policy.admitted(request)

    def _stop(self, request: Request) -> None:
        """Remove a request from the running ones."""
        del self.running[bisect_left(self.running, request.order, key=_ORDER)]
        request.kv.num_running -= 1
        for part in request.participants:
            part.stopped(request)

    def preempt(self, request: Request) -> None:
        self._stop(request)
        request.kv.release(request)
        self._drop_from_worker(request)
        request.num_preemptions += 1
        request.looked_up = False
        self.num_preemptions += 1
        self.wait(request)

    def suspend(self, request: Request) -> None:
        """Stop a running request, which keeps its blocks until others need them."""
        self._stop(request)
        self._drop_from_worker(request)
        request.num_preemptions += 1
        self.wait(request)

    def _drop_from_worker(self, request: Request) -> None:
        self.table_updates.pop(request.request_id, None)
        if request.in_worker:
            self.released.append(request.request_id)
            request.in_worker = False

    # --- Ends ---------------------------------------------------------------------------------------------------------

    def finish(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> EngineOutput:
        """End a request of any status. Returns its last output."""
        if request.status is Status.RUNNING:
            self._stop(request)
            hands_over = request.spec.hands_over and reason in _COMPLETE
            if hands_over and request.kv.tiers is not None:
                request.kv.tiers.hand_over(request)
        request.kv.release(request)
        self._drop_from_worker(request)
        request.kv.ended(request)
        request.status = Status.FINISHED
        if request.kv.tiers is not None:
            request.kv.tiers.let_go(request)
        for part in request.participants:
            part.ended(request)
        for child in request.forks:
            if child.status is Status.FORKING:
                self.wait(child)
        request.forks = []
        del self.by_id[request.request_id]
        self.num_joined -= request.spec.parent is not None
        self.waiting.leave(request)
        self.policy.finished(request)
        make = VectorOutput if request.spec.pooled else TokenOutput
        return make(request.request_id, finish_reason=reason, error=error)

    def expire(self, now: float) -> list[EngineOutput]:
        """End the requests whose deadlines have passed."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.by_id.get(heapq.heappop(self._deadlines)[2])
            if (
                request is not None
                and request.spec.deadline is not None
                and request.spec.deadline <= now
            ):
                outputs.append(self.finish(request, FinishReason.DEADLINE))
        return outputs
