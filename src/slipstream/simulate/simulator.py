"""Simulates an engine, or several with a router, on a virtual clock.

The engine's own scheduler, block pool and prefix cache plan the steps, and a table says how long
each takes. The loop is `EngineCore`'s (`engine/engine_core.py`):

1. Take the arrived requests, plan a step, launch it.
2. A GPU has up to two steps in flight. A CPU computes a step at its launch, except for steps of a
   few decodes.
3. When enough steps are in flight, wait for the oldest and take its tokens.

The host's own work overlaps with steps if steps overlap, else its time is added. A client sees a
token after an additional front-end delay. Answers have exactly the number of tokens given by the
workload. The number of correct drafts is sampled (`simulate/drafts.py`); the engine's own code
chooses how many to verify. All times are in seconds from the start.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from slipstream.bench.session_metrics import AgentSummary
from slipstream.bench.sessions import PromptPiece
from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.core.cache.prefix_cache import extend_keys, group_key
from slipstream.core.request import Request
from slipstream.core.scheduler import Scheduler
from slipstream.costs.graph_sizes import Padding
from slipstream.costs.metrics import (
    RequestTiming,
    Summary,
    distribution,
    steady_rate,
    summarize,
    weighted_distribution,
)
from slipstream.costs.step_cost import LABELS, Label, StepCost, StepCounts, attention_pairs, worst
from slipstream.errors import ConfigError, EngineOverloadedError, RequestError
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepPlan, StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.simulate.drafts import Drafts, DraftSteps, SimulatedSpeculation, drawn
from slipstream.simulate.routing import Router, RouterName, make_router
from slipstream.simulate.sessions import summarize_sessions
from slipstream.simulate.sleeping import ANY_TOKEN, SleepingScheduler
from slipstream.simulate.traffic import PREFIX_TOKENS, Traffic, TrafficRequest
from slipstream.spec.cache import blocks_of_sequence

LABEL_EVERY = 64
"""Interval, in steps, at which the label (measured, interpolated, estimated) of a step's time is sampled."""

LABEL_SHARE = 0.02
"""Minimum fraction of the sampled steps for a label to count."""


MANY_BLOCKS = 2**17
"""Number of blocks above which a cache is simulated with only as many blocks as the requests can use."""

APART_S = 0.0002
"""Seconds between the starts of a closed loop's users.

A front end takes requests one after another (0.03 to 0.3 ms each,
benchmarks/results/serving_cost.json). So the first step has few requests, and the answers don't all
end at once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """Settings and costs that the simulator needs of an engine.

    `run_ahead` is the maximum number of sequences of a decode step that runs while the host goes
    on; None: every step runs in this way (GPU). `padded` maps (decodes, prompt tokens,
    prompts) to the (decodes, prompt tokens) that the step's graph computes. It returns None for a
    step without a graph, whose operators are launched one by one. `drafts` has the acceptance and
    cost of drafts; None without speculation.
    """

    scheduling: SchedulingConfig
    cache: CacheConfig
    max_model_len: int
    num_blocks: int
    cost: StepCost
    run_ahead: int | None = None
    padded: Padding | None = None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of a simulation.

    `busy` is the fraction of time in which a device computes. `seconds` is the CPU time that the simulation
    took. `mean_decodes` and `mean_prompt_tokens` are per step. `max_waiting` is the longest queue.
    `tokens_per_verification` is the mean number of tokens per verification of drafts, or None without drafts.
    `agents` has the figures of sessions, if the traffic consists of sessions.
    """

    summary: Summary
    label: Label
    num_replicas: int
    num_steps: int
    num_preemptions: int
    prefix_hit_rate: float
    busy: float
    mean_decodes: float
    mean_prompt_tokens: float
    max_waiting: int
    peak_cache_usage: float
    tokens_per_verification: float | None
    seconds: float
    records: tuple[RequestTiming, ...] = field(repr=False)
    agents: AgentSummary | None = None

    @property
    def speed(self) -> float:
        """Simulated seconds per second of CPU time."""
        return self.summary.wall_s / self.seconds if self.seconds else float("inf")


class _InFlight(NamedTuple):
    plan: StepPlan
    end: float
    is_done: bool  # computed when launched
    num_tokens: int  # number of sampled tokens


class _Progress:
    """State of a request whose answer is not complete."""

    __slots__ = ("cached", "first", "first_step", "index", "sent", "worst")

    def __init__(self, index: int, sent: float) -> None:
        self.index, self.sent = index, sent
        self.first = self.worst = 0.0  # time of its first token; longest gap caused by preemption
        self.first_step = -1
        self.cached = 0


class SimulatedReplica:
    """One simulated engine. `now` is the clock of its host, in seconds."""

    def __init__(
        self,
        engine: SimulatedEngine,
        traffic: Sequence[TrafficRequest],
        on_end: Callable[[int, float], None],
        *,
        exact: bool,
        with_prompts: bool = False,
    ) -> None:
        self.now = 0.0
        self._with_prompts = with_prompts
        kind: Any = SleepingScheduler
        if exact:
            parts = [] if engine.drafts is None else [SimulatedSpeculation(engine.drafts)]
            kind = partial(Scheduler, participants=parts)
        self.engine, self.traffic, self._on_end = engine, traffic, on_end
        self.scheduler: Scheduler = kind(
            engine.scheduling,
            engine.cache,
            max_model_len=engine.max_model_len,
            num_blocks=engine.num_blocks,
            padded=engine.padded,
            clock=lambda: self.now,
        )
        self._exact = exact
        self._acceptance, self._draft_steps = None, None
        if engine.drafts is not None:
            assert exact, "drafts are simulated by the Scheduler itself"
            self._acceptance = engine.drafts.acceptance
            self._draft_steps = (
                None if engine.drafts.cost is None else DraftSteps(engine.drafts.cost)
            )
        self.device_free = self.busy_s = 0.0
        self._in_flight: deque[_InFlight] = deque()
        self._planned: StepPlan | None = None
        self._open: dict[str, _Progress] = {}
        # (first step without the request, time of its last token)
        self._preempted: dict[str, tuple[int, float]] = {}
        self.records: dict[int, RequestTiming] = {}
        self.ends: list[float] = []  # end time of each step
        self.gaps: list[float] = []  # gap between each step's end and the previous one's
        self.deliveries: list[tuple[float, float]] = []
        self.weighted_gaps: list[tuple[float, int]] = []
        self.worst_gaps: list[float] = []
        self.labels: dict[Label, int] = dict.fromkeys(LABELS, 0)
        self.num_decodes = self.num_prompt_tokens = self.max_waiting = 0
        self.peak_usage = 0.0

    @property
    def can_step(self) -> bool:
        return bool(self._in_flight or self._planned or self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, index: int, at: float) -> None:
        """Add request `index` of the traffic. Requests must be added in order of `at`, their arrival time."""
        self.now = max(self.now, at) if not self.can_step else self.now
        r = self.traffic[index]
        # a longer request is refused anyway
        prompt = r._replace(input_tokens=min(r.input_tokens, self.engine.max_model_len + 1))
        try:
            self.scheduler.add(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=_tokens(index, prompt),
                    sampling=_ANY,
                    max_tokens=r.output_tokens,
                    arrival=at,
                )
            )
        except (RequestError, EngineOverloadedError) as error:
            refused = isinstance(error, EngineOverloadedError)
            cut, whole = (f"{x.input_tokens + x.output_tokens} tokens" for x in (prompt, r))
            said = str(error).replace(cut, whole)
            self.records[index] = RequestTiming(
                input_tokens=r.input_tokens, output_tokens=0, sent=at, error=said, refused=refused
            )
            self._on_end(index, at)
        else:
            if self._with_prompts:
                self._cache_prompt(self.scheduler.requests.by_id[str(index)])
            self._open[str(index)] = _Progress(index, at)
            self.max_waiting = max(self.max_waiting, self.scheduler.num_waiting)

    def _cache_prompt(self, request: Request) -> None:
        """Put a prompt's blocks into the cache, if there is room, as if another replica had
        computed and sent them."""
        kv, keys, pool = self.scheduler.kv, request.block_keys, self.scheduler.pool
        num_blocks = (request.num_prompt_tokens - 2) // kv.block_size
        extend_keys(keys, request.root_key, request.token_ids, kv.block_size, num_blocks)
        own = [group_key(key, g) for g in kv.own for key in keys]
        wanted = [key for key in own if pool.lookup(key) is None]
        if len(wanted) <= pool.num_free:
            blocks = pool.allocate(len(wanted))
            for block, key in zip(blocks, wanted, strict=True):
                pool.register(block, key)
            pool.release(blocks)

    def step(self) -> None:
        """Run one iteration of the loop, like `EngineCore._step`."""
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        limit = 0 if plan is None else self._max_in_flight(plan)
        if plan is not None and len(self._in_flight) >= limit:
            plan, self._planned = None, plan
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight and self._planned is None:
            raise ConfigError(
                "the simulated scheduler makes no progress; please report this with the settings used"
            )
        waits = plan is None or len(self._in_flight) >= limit
        while self._in_flight and (waits or self._in_flight[0].is_done):
            self._finish(self._in_flight.popleft())
            waits = False

    def _max_in_flight(self, plan: StepPlan) -> int:
        if self.engine.run_ahead is None:
            return 2
        return 1 if plan.scheduled and plan.scheduled[-1].num_tokens > 1 else 2

    def _launch(self, plan: StepPlan) -> None:
        if plan.released:
            self._note_preempted(plan)
        shape = self._shape(plan)
        engine, cost = self.engine, self.engine.cost
        padded, in_graph = shape, None
        if engine.padded is not None:
            # with prompts in the step, the graph treats sequences with drafts as prompts
            if shape.num_drafts:
                alone = sum(s.num_tokens == 1 for s in plan.scheduled)
                others = len(plan.scheduled) - alone
                in_graph = engine.padded(
                    alone, shape.num_tokens - alone, others, by_rows=not shape.num_prompts
                )
                room = 0 if in_graph is None else sum(in_graph) - shape.num_tokens
                padded = shape._replace(num_prompt_tokens=shape.num_prompt_tokens + room)
            else:
                in_graph = engine.padded(
                    shape.num_decodes, shape.num_prompt_tokens, shape.num_prompts
                )
                decodes, prompt = in_graph or (shape.num_decodes, shape.num_prompt_tokens)
                padded = shape._replace(num_decodes=decodes, num_prompt_tokens=prompt)
        seconds = cost.seconds(padded)
        host = cost.host.seconds(shape.num_decodes + shape.num_prompts)
        label = cost.label(padded) if plan.step_id % LABEL_EVERY == 1 else None
        if shape.num_drafts and self._draft_steps is not None:
            seconds += self._draft_steps.seconds([s for s in plan.scheduled if s.drafts])
            label = None if label is None else worst(label, self._draft_steps.label)
        if label is not None:
            self.labels[label] += 1
        self.busy_s += seconds
        self.num_decodes += shape.num_decodes
        self.num_prompt_tokens += shape.num_prompt_tokens
        ahead = engine.run_ahead is None or (
            not shape.num_prompts and shape.num_decodes <= engine.run_ahead
        )
        if ahead and engine.run_ahead is not None:
            seconds += cost.host.ahead_s
        launch_s = 0.0 if in_graph else cost.host.launch_s
        begin = max(self.now, self.device_free)
        self.device_free = begin + seconds
        if engine.run_ahead is not None:
            self.now = begin if ahead else self.device_free  # a CPU's host thread computes too
        self.now += host + launch_s
        self._in_flight.append(_InFlight(plan, self.device_free, not ahead, shape.num_sampled))

    def _shape(self, plan: StepPlan) -> StepCounts:
        decodes = context = prompt_tokens = num_prompts = pairs = num_sampled = drafts = 0
        for s in plan.scheduled:
            num_sampled += s.num_sampled
            if s.num_tokens == 1:
                decodes += 1
                context += s.num_computed_tokens + 1
            elif s.drafts:
                decodes += 1
                context += s.num_computed_tokens + s.num_tokens
                drafts += len(s.drafts)
            else:
                prompt_tokens += s.num_tokens
                num_prompts += 1
                pairs += attention_pairs(s.num_computed_tokens, s.num_tokens)
        scheduler = self.scheduler
        if isinstance(scheduler, SleepingScheduler):
            decodes += scheduler.num_asleep
            num_sampled += scheduler.num_asleep
            context += scheduler.asleep_context
        return StepCounts(decodes, context, prompt_tokens, num_prompts, pairs, num_sampled, drafts)

    def _finish(self, step: _InFlight) -> None:
        """Process a step's tokens and record their times."""
        now = self.now = max(self.now, step.end)
        number = len(self.ends)
        gap = now - self.ends[-1] if self.ends else 0.0
        self.ends.append(now)
        self.gaps.append(gap)
        result = self._result(step)
        num_tokens = usual = step.num_tokens
        pool = self.scheduler.pool
        self.peak_usage = max(self.peak_usage, 1 - pool.num_free / pool.num_usable)
        outputs = self.scheduler.update(step.plan, result)
        if result.num_tokens is not None:
            usual = len(outputs)
            num_tokens = sum(len(o.token_ids) for o in outputs if isinstance(o, TokenOutput))
        for output in outputs:
            assert isinstance(output, TokenOutput)
            request_id = output.request_id
            request = self._open[request_id]
            if request.first_step < 0:
                request.first = now
                request.first_step = number
                request.cached = output.num_cached_tokens
                usual -= 1
            elif (
                self._preempted and self._preempted.get(request_id, _NEVER)[0] <= step.plan.step_id
            ):
                since = now - self._preempted.pop(request_id)[1]
                request.worst = max(request.worst, since)
                self.weighted_gaps.append((since, 1))
                usual -= 1
            if output.finish_reason is not None:
                self._end(request_id, request, number)
        if usual > 0:
            self.weighted_gaps.append((gap, usual))
        if num_tokens:
            self.deliveries.append((now, float(num_tokens)))

    def _result(self, step: _InFlight) -> StepResult:
        """Result with as many tokens as the step samples, counting only correct drafts."""
        if not self._exact:
            return StepResult(step.plan.step_id)
        counts = None
        if self._acceptance is not None and any(s.drafts for s in step.plan.scheduled):
            counts = [
                1
                + self._acceptance.num_accepted(
                    len(s.drafts), drawn(s.request_id, s.num_computed_tokens)
                )
                for s in step.plan.scheduled
                if s.num_sampled
            ]
        num_tokens = step.num_tokens if counts is None else sum(counts)
        return StepResult(step.plan.step_id, [ANY_TOKEN] * num_tokens, counts)

    def _note_preempted(self, plan: StepPlan) -> None:
        """Record the unanswered requests that `plan` preempts. Their latest token is from the
        previous step."""
        for request_id in plan.released:
            request = self._open.get(request_id)
            if request is not None and request.first_step >= 0:
                last = self._in_flight[-1].end if self._in_flight else self.ends[-1]
                self._preempted.setdefault(request_id, (plan.step_id, last))

    def _end(self, request_id: str, request: _Progress, number: int) -> None:
        del self._open[request_id]
        if self._draft_steps is not None:
            self._draft_steps.forget(request_id)
        r, front = self.traffic[request.index], self.engine.cost.host.request_s
        worst = max(self.gaps[request.first_step + 1 : number + 1], default=0.0)
        self.records[request.index] = RequestTiming(
            input_tokens=r.input_tokens,
            output_tokens=r.output_tokens,
            sent=request.sent,
            first_token=request.first + front,
            last_token=self.now + front,
            cached_tokens=request.cached,
        )
        self.worst_gaps.append(max(worst, request.worst))
        self._on_end(request.index, self.now + front)


_ANY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
_NEVER = (1 << 62, 0.0)


def _token(part: PromptPiece) -> int:
    """Token id that all tokens of a prompt part have. Ids of parts of requests without a session
    are negative."""
    return ANY_TOKEN if part.kind in ("answer", "summary") else part.key % 2**30 + ANY_TOKEN + 1


def _tokens(index: int, request: TrafficRequest) -> tuple[int, ...]:
    """Makes the tokens of a request's prompt: the shared prefix, then tokens that no other request
    has. A session's turn is made of its parts. Answers in it have the simulated engine's token,
    other parts a token determined by their key."""
    if request.parts:
        return tuple(
            itertools.islice(
                itertools.chain.from_iterable(
                    itertools.repeat(_token(part), part.num_tokens) for part in request.parts
                ),
                request.input_tokens,
            )
        )
    shared = list(
        itertools.chain.from_iterable(
            (number & 0x3FFFFFFF,) * PREFIX_TOKENS for number in request.prefix
        )
    )
    shared = shared[: request.input_tokens]
    return (*shared, *((-1 - index,) * (request.input_tokens - len(shared))))


def simulate(
    engine: SimulatedEngine,
    traffic: Traffic,
    *,
    num_replicas: int = 1,
    router: RouterName = "round-robin",
    objectives: dict[str, float] | None = None,
    exact: bool = False,
    with_prompts: bool = False,
) -> Simulation:
    """Simulates the traffic on `num_replicas` replicas. `router` is one of `simulate/routing.py`.

    `with_prompts`: prompts come with their blocks, which other replicas have computed.

    `exact` plans every step with the `Scheduler` itself, which gives the same result at a tenth of
    the speed. It is required for drafts, and for an objective of the time between tokens.
    """
    begin = time.process_time()
    requests = traffic.requests
    users = traffic.users
    arrivals: list[tuple[float, int]] = []
    followers: dict[int, list[tuple[int, float]]] = {}
    num_before: dict[int, int] = {}  # number of turns that must end before each request
    ready: dict[int, float] = {}
    for index, request in enumerate(requests):
        if request.after:
            num_before[index], ready[index] = len(request.after), 0.0
            for before, pause_s in request.after:
                followers.setdefault(before, []).append((index, pause_s))
    waiting = deque(i for i in range(len(requests)) if i not in ready)
    for i in range(len(waiting) if users is None else min(users, len(waiting))):
        index = waiting.popleft()
        arrivals.append((requests[index].arrival if users is None else i * APART_S, index))
    heapq.heapify(arrivals)

    def on_end(index: int, at: float) -> None:
        for after, pause_s in followers.get(index, ()):
            ready[after] = max(ready[after], at + pause_s)
            num_before[after] -= 1
            if not num_before[after]:
                heapq.heappush(arrivals, (ready[after], after))
        if users is not None and waiting and requests[index].ends_session:
            heapq.heappush(arrivals, (at, waiting.popleft()))

    # no prefix can be in the cache, so all its blocks count as free
    if not traffic.shares_prefixes and not with_prompts:
        engine = replace(engine, cache=replace(engine.cache, enable_prefix_caching=False))
    exact = exact or engine.scheduling.target_itl_ms is not None or engine.drafts is not None
    whole, engine = engine, with_blocks_for(engine, requests)
    replicas = [
        SimulatedReplica(engine, requests, on_end, exact=exact, with_prompts=with_prompts)
        for _ in range(num_replicas)
    ]
    cached = whole.num_blocks * engine.cache.block_size // PREFIX_TOKENS
    with _no_garbage_collection():
        _run(replicas, arrivals, make_router(router, num_replicas, cached))
    result = _result(replicas, len(requests), objectives, time.process_time() - begin)
    agents = None
    if traffic.turns is not None:
        agents = summarize_sessions(traffic, result.records, objectives=objectives)
    return replace(
        result,
        agents=agents,
        peak_cache_usage=result.peak_cache_usage
        * (engine.num_blocks - 1)
        / max(1, whole.num_blocks - 1),
    )


def with_blocks_for(engine: SimulatedEngine, requests: Sequence[TrafficRequest]) -> SimulatedEngine:
    """Limit a very large number of blocks to what all requests could use at once, because each
    block costs memory and time."""
    if engine.num_blocks <= MANY_BLOCKS:
        return engine
    groups = engine.cache.groups
    size = engine.cache.block_size
    step = engine.scheduling.max_num_batched_tokens
    lengths = Counter(
        min(r.input_tokens + r.output_tokens, engine.max_model_len) + size for r in requests
    )
    most = 1 + sum(
        count * blocks_of_sequence(groups, length, size, step) for length, count in lengths.items()
    )
    return replace(engine, num_blocks=min(engine.num_blocks, max(MANY_BLOCKS, most)))


def _run(
    replicas: Sequence[SimulatedReplica], arrivals: list[tuple[float, int]], route: Router
) -> None:
    """Run the replicas in time order: the one with the earliest clock makes a step, unless a
    request arrives before that."""
    only = replicas[0] if len(replicas) == 1 else None
    while True:
        if only is not None:
            first = only if only.can_step else None
        else:
            first = min((r for r in replicas if r.can_step), key=lambda r: r.now, default=None)
        if arrivals and (first is None or arrivals[0][0] <= first.now):
            at, index = heapq.heappop(arrivals)
            to = (
                only
                or replicas[
                    route(replicas[0].traffic[index].prefix, [r.num_open for r in replicas])
                ]
            )
            to.add(index, at)
        elif first is not None:
            first.step()
        else:
            return


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context manager that disables garbage collection, which would scan all requests again and
    again. They contain no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _result(
    replicas: list[SimulatedReplica],
    count: int,
    objectives: dict[str, float] | None,
    seconds: float,
) -> Simulation:
    found = {index: record for replica in replicas for index, record in replica.records.items()}
    records = tuple(found[i] for i in range(count))
    deliveries = sorted(itertools.chain.from_iterable(r.deliveries for r in replicas))
    summary = replace(
        summarize(records, objectives),
        itl_s=weighted_distribution(
            itertools.chain.from_iterable(r.weighted_gaps for r in replicas)
        ),
        worst_gap_s=distribution(itertools.chain.from_iterable(r.worst_gaps for r in replicas)),
        steady_throughput=steady_rate(deliveries),
    )
    labels = {label: sum(r.labels[label] for r in replicas) for label in LABELS}
    seen = [label for label in LABELS if labels[label] > LABEL_SHARE * sum(labels.values())]
    stats = [r.scheduler.stats() for r in replicas]
    runs = sum(s.spec_num_drafts for s in stats)
    num_steps, queries = sum(len(r.ends) for r in replicas), sum(s.prefix_queries for s in stats)
    return Simulation(
        summary=summary,
        label=seen[-1] if seen else "estimated",
        num_replicas=len(replicas),
        num_steps=num_steps,
        num_preemptions=sum(s.num_preemptions for s in stats),
        prefix_hit_rate=sum(s.prefix_hits for s in stats) / queries if queries else 0.0,
        busy=sum(r.busy_s for r in replicas) / (summary.wall_s * len(replicas))
        if summary.wall_s
        else 0.0,
        mean_decodes=sum(r.num_decodes for r in replicas) / max(1, num_steps),
        mean_prompt_tokens=sum(r.num_prompt_tokens for r in replicas) / max(1, num_steps),
        max_waiting=max(r.max_waiting for r in replicas),
        peak_cache_usage=max(r.peak_usage for r in replicas),
        tokens_per_verification=1 + sum(s.spec_accepted_tokens for s in stats) / runs
        if runs
        else None,
        seconds=seconds,
        records=records,
    )
