"""Recommends hardware and settings, with reasons.

The recommendations follow ENOVA (Huang et al. 2024, arXiv:2407.09486):

1. As many sequences as the objectives allow.
2. No more memory than those sequences need.
3. Replicas for the rest of the traffic.
4. Each replica's weight in a load balancer in proportion to its capacity.

The capacity of every candidate is simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.load import ClosedLoop
from slipstream.bench.session_metrics import AgentSummary
from slipstream.config import EngineArgs
from slipstream.costs.analytic import binds
from slipstream.costs.devices import Hardware
from slipstream.costs.step_cost import StepCounts, worst
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.simulate.apart import note_apart
from slipstream.simulate.capacity import (
    Capacity,
    LatencyObjectives,
    carried,
    find_capacity,
    saturated,
    with_limits,
)
from slipstream.simulate.drafts import AcceptanceRates
from slipstream.simulate.engines import PlannedEngine, plan_engine
from slipstream.simulate.routing import RouterName
from slipstream.simulate.simulator import Simulation, simulate
from slipstream.simulate.traffic import SessionWorkload, Traffic, Workload
from slipstream.spec.description import ModelDescription

STEP_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Token limits of steps with decodes that are tried, below the engine's own choice."""

MORE = 1.1
"""Minimum ratio of the new rate to the old one for which a setting is changed. A smaller gain is
within a simulation's error."""

KEEPS_PREFIXES = 0.95
"""Fraction of cacheable prefix tokens found in the cache, below which memory counts as the
bottleneck of sessions."""

LONG_CONTEXT = 8192
"""Minimum mean length of a request, in tokens, for which context parallelism is tried."""

SPARE = 1.25
"""Headroom factor over the peak number of sequences and the peak cache use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """A setting, its recommended value, and the reason."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """A plan of one kind of device for the model and the traffic.

    `replicas` is None if no load was given, or if the objectives can't be met under it.
    """

    engine: PlannedEngine
    capacity: Capacity
    full: Simulation
    # limits of steps that give more throughput than the engine's own; None: none were tried
    limits: dict[str, int] | None
    replicas: int | None
    # at the given load, with the fewest replicas that meet the objectives, else with the maximum
    run: Simulation | None
    binds: str
    settings: tuple[Recommended, ...]
    notes: tuple[str, ...]
    nearest: dict[str, float] | None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the simulation from which this plan's figures come."""
        return self.engine.num_gpus * self.load.num_replicas

    @property
    def load(self) -> Simulation:
        """Simulation from which this plan's figures come."""
        return self.run or self.capacity.run or self.full

    @property
    def throughput(self) -> float:
        """Output tokens per second while the load lasts."""
        summary = self.load.summary
        return summary.steady_throughput or summary.output_throughput

    def cost_per_million(self, price: float) -> float:
        """Cost of a million output tokens, at `price` per device and hour."""
        rate = self.throughput
        return self.num_gpus * price / 3600 / rate * 1e6 if rate else math.inf

    @property
    def joules_per_token(self) -> float | None:
        """Energy in joules per output token, from the power of a device weighted by the time it is
        busy. None if the power is unknown."""
        h, rate = self.engine.hardware, self.throughput
        if h.watts is None or h.idle_watts is None or not rate:
            return None
        return (
            self.num_gpus
            * (h.idle_watts + (h.watts - h.idle_watts) * min(1.0, self.load.busy))
            / rate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The load: `rate` requests per second, or `users` concurrent users. With neither, it is the
    capacity of one replica."""

    workload: Workload
    objectives: LatencyObjectives
    rate: float | None = None
    users: int | None = None
    seed: int = 0
    router: RouterName = "least-loaded"

    def at_rate(self, replicas: int) -> Traffic:
        """Traffic at `rate`, with enough requests to measure `replicas` replicas."""
        assert self.rate is not None
        count = max(400 * min(replicas, 4), min(6000, math.ceil(self.rate * 15)))
        return self.workload.at_rate(self.rate, count, seed=self.seed)

    def run(self, engine: PlannedEngine, replicas: int) -> Simulation:
        count, limits = 400 * min(replicas, 4), self.objectives.limits
        if self.rate is not None:
            traffic = self.at_rate(replicas)
        else:
            assert self.users is not None
            if isinstance(self.workload, SessionWorkload):
                count = 0  # one session per user
            traffic = self.workload.traffic(
                ClosedLoop(concurrency=self.users),
                max(count, 3 * self.users) if count else 0,
                seed=self.seed,
            )
        return simulate(
            engine.simulated, traffic, num_replicas=replicas, router=self.router, objectives=limits
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """An engine, its capacity, and the limits that a search changed (None: no search was made)."""

    engine: PlannedEngine
    capacity: Capacity
    limits: dict[str, int] | None


def plan_device(
    args: EngineArgs,
    description: ModelDescription,
    hardware: Hardware,
    load: OfferedLoad,
    *,
    max_gpus: int = 8,
    search: bool = True,
    acceptance: AcceptanceRates | None = None,
    on_run: Callable[[], None] = lambda: None,
) -> DevicePlan:
    """Plans one kind of device. `search` also searches the limits of steps.

    OutOfMemoryError if the model does not fit with any parallel size up to `max_gpus`.
    """
    engine, notes = smallest(args, description, hardware, max_gpus, acceptance)
    capacity = find_capacity(
        engine.simulated, load.workload, load.objectives, seed=load.seed, on_run=on_run
    )
    most = max_gpus if hardware.is_gpu and args.weights_bytes is None else 1
    for num_gpus in sizes(args, description, most):
        if capacity.rate is not None or num_gpus <= engine.num_gpus:
            continue
        wider = plan_engine(args, description, hardware, num_gpus=num_gpus, acceptance=acceptance)
        found = find_capacity(
            wider.simulated, load.workload, load.objectives, seed=load.seed, on_run=on_run
        )
        if found.rate is not None:
            engine, capacity = wider, found
            notes.append(
                f"one GPU alone does not meet the objectives; {num_gpus} that share the model do"
            )
    of_sessions = isinstance(load.workload, SessionWorkload)

    def tune(engine: PlannedEngine, capacity: Capacity) -> Tuned:
        if capacity.rate is None or of_sessions or not search:
            return Tuned(engine, capacity, None)
        return best_limits(engine, capacity, load, on_run)

    tuned = tune(engine, capacity)
    if args.context_parallel_size == 1 and hardware.is_gpu:
        tuned, said = by_context(tuned, load, most, acceptance, on_run, tune)
        notes += said
    engine, capacity, limits = tuned.engine, tuned.capacity, tuned.limits
    if of_sessions:  # the search ended when more sessions gained nothing
        full = capacity.run or capacity.alone
    else:
        full = saturated(engine.simulated, load.workload, seed=load.seed)
        on_run()
    replicas, run, nearest = None, None, None
    if capacity.rate is None:
        nearest = load.objectives.reached(capacity.alone)
    elif load.rate is not None or load.users is not None:
        replicas, run = enough_replicas(engine, capacity, load, max_gpus, on_run)
        if replicas is None and run is not None:
            nearest = load.objectives.reached(run)
    if not of_sessions and nearest is None:
        notes += [note for note in (note_apart(engine, load, replicas),) if note]
    if engine.num_gpus > 1:
        notes.append("figures of several devices are estimated: no step of theirs was measured")
    found_run = run or capacity.run or full
    bound = what_binds(engine, found_run)
    return DevicePlan(
        engine=engine,
        capacity=capacity,
        full=full,
        limits=limits,
        replicas=replicas,
        run=run,
        binds=bound,
        settings=tuple(
            recommended(
                engine,
                capacity,
                found_run,
                replicas,
                bound,
                limits,
                rate=load.rate,
                context_is_given=args.context_parallel_size > 1,
            )
        ),
        notes=tuple(notes),
        nearest=nearest,
    )


def sizes(args: EngineArgs, description: ModelDescription, max_gpus: int) -> list[int]:
    """Tensor parallel sizes to try: those that divide the heads of all layers, or only the given
    size."""
    if args.context_parallel_size > 1:
        return [args.context_parallel_size]
    heads = [a.num_heads for a in description.spec.attentions]
    return [n for n in (1, 2, 4, 8, 16) if n <= max_gpus and all(h % n == 0 for h in heads)]


def smallest(
    args: EngineArgs,
    description: ModelDescription,
    hardware: Hardware,
    max_gpus: int,
    acceptance: AcceptanceRates | None,
) -> tuple[PlannedEngine, list[str]]:
    """Engine on the fewest devices that fit the model, and notes. OutOfMemoryError if none do."""
    refused: OutOfMemoryError | None = None
    most = max_gpus if hardware.is_gpu and args.weights_bytes is None else 1
    for num_gpus in sizes(args, description, most):
        try:
            engine = plan_engine(
                args, description, hardware, num_gpus=num_gpus, acceptance=acceptance
            )
        except OutOfMemoryError as error:
            refused = error
            continue
        return engine, [] if num_gpus in (1, args.context_parallel_size) else [
            f"one GPU does not hold the model; {num_gpus} that share it do"
        ]
    assert refused is not None
    raise OutOfMemoryError(
        f"{hardware.title}: {refused}; {max_gpus} such devices are not enough either: take more (--max-gpus), larger ones, or "
        "fewer bits (--quantization)",
        field="max_gpus",
    )


def by_context(
    given: Tuned,
    load: OfferedLoad,
    max_gpus: int,
    acceptance: AcceptanceRates | None,
    on_run: Callable[[], None],
    tune: Callable[[PlannedEngine, Capacity], Tuned],
) -> tuple[Tuned, list[str]]:
    """Try context parallelism. Returns (its engine, if that serves more requests per device within
    the objectives, else the given one; a note for the user).

    `tune` searches an engine's limits; those of `given` are searched. Only for long contexts: each
    device reads all weights, so short ones gain nothing.
    """
    engine, capacity, limits = given.engine, given.capacity, given.limits
    n_in, n_out = load.workload.mean_lengths
    if n_in + n_out < LONG_CONTEXT:
        return given, []
    others = [n for n in (2, 4, 8) if engine.num_gpus <= n <= max_gpus]
    # compare with the same number of devices: two devices against two replicas
    if capacity.rate is not None:
        others = others[:1]
    for n in others:
        args = dataclasses.replace(engine.args, context_parallel_size=n)
        try:
            tried = plan_engine(
                args, engine.description, engine.hardware, num_gpus=n, acceptance=acceptance
            )
        except (ConfigError, OutOfMemoryError):  # a model or cache that does not support such ranks
            return given, []
        found = find_capacity(
            tried.simulated, load.workload, load.objectives, seed=load.seed, on_run=on_run
        )
        if found.rate is None:
            continue
        tuned = tune(tried, found)
        if limits is not None:
            tuned = dataclasses.replace(tuned, limits=limits | (tuned.limits or {}))
        rate = tuned.capacity.rate or 0.0
        what = (
            f"estimated (by an 8B's times on two H200s): keys shared out by tokens over {n} devices carry "
            f"{rate:.3g} requests/s"
        )
        if capacity.rate is None:
            return tuned, [f"{what}, and no other form meets the objectives: that pays"]
        same = capacity.rate * n / engine.num_gpus
        form = "replicas" if engine.num_gpus == 1 else "devices that share heads"
        what += f", {n} {form} {same:.3g}"
        if rate > MORE * same:
            return tuned, [f"{what}: context parallelism pays"]
        return given, [f"{what}: context parallelism does not pay"]
    return given, []


def best_limits(
    engine: PlannedEngine, capacity: Capacity, load: OfferedLoad, on_run: Callable[[], None]
) -> Tuned:
    """Try lower token limits for steps with decodes, and keep one that raises the rate by the
    factor `MORE`.

    Shorter steps give more even times between tokens; longer ones give more tokens per second.
    """
    scheduling, rate = engine.config.scheduling, capacity.rate
    assert rate is not None
    for tokens in STEP_TOKENS:
        if not scheduling.max_num_seqs <= tokens < scheduling.max_num_batched_tokens:
            continue
        tried = with_limits(engine.simulated, max_num_mixed_tokens=tokens, mixed_chunk=None)
        if (
            carried(
                tried, load.workload, load.objectives, rate * MORE, seed=load.seed, on_run=on_run
            )
            is not None
        ):
            limits = {"max_num_mixed_tokens": tokens}
            found = find_capacity(
                tried, load.workload, load.objectives, seed=load.seed, on_run=on_run
            )
            return Tuned(
                engine.with_settings(**limits),
                found if (found.rate or 0.0) > rate else capacity,
                limits,
            )
    return Tuned(engine, capacity, {})


def enough_replicas(
    engine: PlannedEngine,
    capacity: Capacity,
    load: OfferedLoad,
    max_gpus: int,
    on_run: Callable[[], None],
) -> tuple[int | None, Simulation | None]:
    """Find the fewest replicas that meet the objectives at the load. Returns (their number, their run).

    If none do, the number is None, and the run has the maximum of replicas.
    """
    most = max(1, max_gpus // engine.num_gpus) if engine.hardware.is_gpu else max_gpus
    assert capacity.rate is not None
    first = 1 if load.rate is None else max(1, math.ceil(load.rate / capacity.rate))
    run = None
    for replicas in range(min(first, most), most + 1):
        run = load.run(engine, replicas)
        on_run()
        if load.objectives.met_by(run):
            return replicas, run
    return None, run


def what_binds(engine: PlannedEngine, run: Simulation) -> str:
    """Name the bottleneck: memory, host, or the largest part of a step."""
    agents = run.agents
    if agents is not None and (agents.hits_of_cacheable or 0.0) < KEEPS_PREFIXES:
        return "memory"
    if run.num_preemptions or (run.max_waiting > 0 and run.peak_cache_usage > 0.97):
        return "memory"
    shape = mean_shape(run)
    if engine.simulated.cost.host.seconds(shape.num_decodes) > engine.simulated.cost.seconds(shape):
        return "host"
    return binds(engine.analytic.parts(shape))


def mean_shape(run: Simulation) -> StepCounts:
    """Shape of a step with the run's mean numbers of tokens."""
    summary = run.summary
    decodes, prompt = round(run.mean_decodes), round(run.mean_prompt_tokens)
    count = max(1, summary.num_requests - summary.num_failed)
    context = round((summary.input_tokens + summary.output_tokens / 2) / count)
    shape = StepCounts.of((context,) * decodes, ((0, prompt),) if prompt else ())
    return shape if shape.num_tokens else StepCounts.of((context,))


def recommended(
    engine: PlannedEngine,
    capacity: Capacity,
    run: Simulation,
    replicas: int | None,
    bound: str,
    limits: dict[str, int] | None,
    *,
    rate: float | None,
    context_is_given: bool,
) -> list[Recommended]:
    ledger, scheduling = engine.ledger, engine.config.scheduling
    found: list[Recommended] = []
    if run.summary.num_failed == run.summary.num_requests:
        return found  # no request fits the context, so the load says nothing about settings

    def recommend(setting: str, value: Any, reason: str) -> None:
        found.append(Recommended(setting=setting, value=value, reason=reason))

    if engine.hardware.is_gpu:
        why = "the fewest devices that hold the model and meet the objectives: replicas carry more than shared models do"
        if (context := engine.args.context_parallel_size) > 1:
            why = "keys shared out by tokens carry more than the same devices otherwise"
            recommend(
                "context_parallel_size", context, "as it was given" if context_is_given else why
            )
        else:
            recommend("tensor_parallel_size", engine.num_gpus, why)
    peak, seqs = peak_sequences(run), scheduling.max_num_seqs
    wanted = min(seqs, max(8, -(-math.ceil(peak * SPARE) // 8) * 8))
    why = f"at the load at most {peak} sequences run at once; a quarter more for bursts"
    recommend("max_num_seqs", wanted, why if wanted < seqs else f"the load fills {peak} of {seqs}")
    why = "prompts alone in a step keep the products busy"
    recommend("max_num_batched_tokens", scheduling.max_num_batched_tokens, why)
    why = "fewer tokens a step did not carry more requests within the objectives"
    if limits is None:
        why = "the engine's own choice; fewer were not tried"
    elif limits:
        why = (
            "shorter steps keep the time between tokens within the objectives, and so more requests"
        )
    recommend("max_num_mixed_tokens", scheduling.max_num_mixed_tokens, why)
    if engine.hardware.is_gpu:
        longest = 2 * ledger.blocks_per_sequence * ledger.block_bytes
        cache = min(ledger.kv_bytes, max(longest, ledger.kv_bytes * run.peak_cache_usage * SPARE))
        used = ledger.used_bytes - ledger.kv_bytes + cache
        share = min(0.95, max(0.1, math.ceil(used / ledger.total_bytes * 20) / 20))
        why = f"the KV cache is filled to {run.peak_cache_usage:.0%} at most; the rest may serve other programs, or prefixes"
        recommend("gpu_memory_utilization", max(share, 0.9) if bound == "memory" else share, why)
    if replicas is not None:
        recommend("replicas", replicas, why_replicas(replicas, capacity.rate, rate))
    return found


def why_replicas(replicas: int, of_one: float | None, rate: float | None) -> str:
    """Reason for this number of replicas: the capacity of one, and whether the load exceeds that of all."""
    if not of_one:
        return ""
    why = f"one carries {of_one:.3g} requests/s within the objectives"
    if rate is None or replicas * of_one >= rate:
        return why
    return (
        f"simulated together they carry the {rate:g} requests/s; alone {why}, "
        f"less than a share of {rate / replicas:.3g}: several spread a burst that holds one up"
    )


def peak_sequences(run: Simulation) -> int:
    """Maximum number of concurrent sequences per replica, each counted from its first token to its
    last, both included: a sequence of one token counts, too."""
    events = sorted(
        [(r.first_token, -1) for r in run.records if r.first_token is not None]
        + [(r.last_token, 1) for r in run.records if r.last_token is not None]
    )
    most = now = 0
    for _, change in events:
        now -= change
        most = max(most, now)
    return -(-most // run.num_replicas)


def balancer_weights(plans: Sequence[DevicePlan]) -> list[float]:
    """Fraction of the traffic for each kind of replica in a mixed fleet, in proportion to its capacity."""
    rates = [p.capacity.rate or 0.0 for p in plans]
    total = sum(rates)
    return [rate / total if total else 0.0 for rate in rates]


def more_memory(plan: DevicePlan, load: OfferedLoad) -> float | None:
    """Additional requests per second per additional GiB of KV cache; None if the objectives are not
    met at all."""
    if plan.capacity.rate is None:
        return None
    if plan.binds != "memory" or not plan.engine.ledger.block_bytes:
        return 0.0
    more = plan.engine.with_blocks(
        plan.engine.ledger.num_blocks + 2**30 // plan.engine.ledger.block_bytes
    )
    if plan.load.agents is not None and isinstance(load.workload, SessionWorkload):
        users = max(1, round(plan.load.agents.num_sessions / plan.load.num_replicas))
        traffic = load.workload.of_sessions(ClosedLoop(concurrency=users), users, seed=load.seed)
        rates = [simulate(e.simulated, traffic).summary.requests_per_s for e in (plan.engine, more)]
        return max(0.0, rates[1] - rates[0])
    found = find_capacity(more.simulated, load.workload, load.objectives, seed=load.seed)
    return max(0.0, (found.rate or 0.0) - plan.capacity.rate)


def check_load(load: OfferedLoad) -> None:
    if load.rate is not None and not 0 < load.rate < math.inf:
        raise ConfigError(f"rate={load.rate} must be above 0", field="rate")
    if load.users is not None and load.users < 1:
        raise ConfigError(f"concurrency={load.users} must be above 0", field="concurrency")
    if not 0 < load.objectives.attainment <= 1:
        raise ConfigError("attainment must be above 0 and at most 1", field="attainment")


def label_of(plan: DevicePlan) -> str:
    host = plan.engine.simulated.cost.host.label
    return worst(plan.load.label, host)


def as_data(plan: DevicePlan, load: OfferedLoad, price: float | None) -> dict[str, Any]:
    """One device's plan as data for JSON and the page."""
    engine, s, ledger = plan.engine, plan.load.summary, plan.engine.ledger
    shape = mean_shape(plan.load)
    table = engine.table
    one_gib = more_memory(plan, load)
    _, n_out = load.workload.mean_lengths
    return {
        "device": engine.hardware.name,
        "title": engine.hardware.title,
        "num_gpus": engine.num_gpus,
        "replicas": plan.replicas,
        "label": label_of(plan),
        "steps": "from the analytic model"
        if table is None
        else ("from a shipped table" if table.shipped else "measured here"),
        "fit_error": None if table is None else table.error,
        "ledger": {
            **{
                f.name: getattr(ledger, f.name)
                for f in dataclasses.fields(ledger)
                if f.name not in ("forms", "groups")
            },
            "num_kv_tokens": ledger.num_kv_tokens,
            "num_full_sequences": ledger.num_full_sequences,
        },
        "max_context": engine.config.model.max_model_len,
        "max_concurrency": min(
            engine.config.scheduling.max_num_seqs, concurrency_of(engine, load.workload)
        ),
        "alone": plan.capacity.alone.summary.as_dict(),
        "capacity": {
            "requests_per_s": plan.capacity.rate,
            "output_tokens_per_s": None
            if plan.capacity.rate is None
            else plan.capacity.rate * n_out,
        },
        "saturated_output_tokens_per_s": plan.full.summary.steady_throughput
        or plan.full.summary.output_throughput,
        "throughput": plan.throughput,
        "at_load": s.as_dict(),
        "objectives_met": plan.capacity.rate is not None
        and not (plan.replicas is None and plan.run is not None),
        "nearest": plan.nearest,
        "binds": plan.binds,
        "step": {
            "decodes": plan.load.mean_decodes,
            "prompt_tokens": plan.load.mean_prompt_tokens,
            "seconds": engine.simulated.cost.seconds(shape),
            "parts_s": engine.analytic.parts(shape),
        },
        "busy": plan.load.busy,
        "peak_cache_usage": plan.load.peak_cache_usage,
        "prefix_hit_rate": plan.load.prefix_hit_rate,
        "agents": None if plan.load.agents is None else agents_of(plan, plan.load.agents),
        "tokens_per_verification": plan.load.tokens_per_verification,
        "num_preemptions": plan.load.num_preemptions,
        "one_more_gib": {
            # without attention, blocks are empty and memory is for recurrent states
            "kv_tokens": 2**30 // ledger.block_bytes * ledger.block_size
            if ledger.block_bytes
            else 0,
            "states": 2**30 * ledger.num_states // ledger.state_bytes if ledger.state_bytes else 0,
            "requests_per_s": one_gib,
        },
        "one_more_device": {
            "requests_per_s": None
            if plan.capacity.rate is None
            else plan.capacity.rate / engine.num_gpus
        },
        "cost_per_million_output_tokens": None if price is None else plan.cost_per_million(price),
        "joules_per_output_token": plan.joules_per_token,
        "recommended": [dataclasses.asdict(r) for r in plan.settings],
        "notes": list(plan.notes),
        "simulation_seconds": plan.load.seconds,
    }


def agents_of(plan: DevicePlan, agents: AgentSummary) -> dict[str, Any]:
    """Figures of sessions per GPU, and the number of concurrent sessions of one replica."""
    count, best = plan.num_gpus, plan.capacity.run
    each = dataclasses.replace(
        agents,
        num_gpus=count,
        output_throughput_per_gpu=agents.turns.output_throughput / count,
        total_throughput_per_gpu=agents.turns.total_throughput / count,
    )
    carried_at_once = None if best is None or best.agents is None else best.agents.num_sessions
    return {**each.as_dict(), "sessions_of_a_replica": carried_at_once}


def concurrency_of(engine: PlannedEngine, workload: Workload) -> int:
    """Number of requests of the workload's mean length that fit in the KV cache at once."""
    blocks = math.ceil(sum(workload.mean_lengths) / engine.config.cache.block_size) * len(
        engine.config.cache.groups
    )
    return (engine.ledger.num_blocks - 1) // blocks
