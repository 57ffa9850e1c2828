"""Simulates a fleet on a virtual clock: the fleet's own router, guard and autoscaler, over coarse
replicas (`replica.py`).

1. A request arrives at one of the gateways, which chooses a replica (`gateway/placing.py`). If none
   can take it, it waits at the gateway.
2. A replica reports changes of its cache at the end of the step that made them, and its load every
   `REPORT_S`, to every gateway.
3. The autoscaler decides every `interval_s`. A started replica is ready a cold start later; surplus
   replicas, those with the fewest requests first, finish their requests and leave.

Equal settings give equal results, apart from the times of the router's own work, which are
measured on this machine.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from slipstream.fleet.config import PoolSpec, Routing, ScalingObjectives
from slipstream.fleet.gateway.placing import Placing
from slipstream.fleet.gateway.router import Decision, ReplicaState
from slipstream.fleet.scaling.scaler import PoolState, Scaler, Tally
from slipstream.fleet.simulation.replica import CoarseReplica, Prompt
from slipstream.fleet.simulation.report import (
    FleetFigures,
    Marks,
    ScalerTurns,
    Stopwatch,
    TableSize,
    most_reversals,
)
from slipstream.fleet.simulation.traffic import EndlessCache, FleetTraffic
from slipstream.server.http.record import RequestRecord
from slipstream.simulate.simulator import SimulatedEngine
from slipstream.simulate.traffic import PREFIX_TOKENS

REPORT_S = 0.5
"""Seconds between a replica's reports of its load, as in `server.operations.fleet`."""

SAMPLE_S = 1.0
"""Seconds between samples of all queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerRun:
    """The scaler of a simulation, and the seconds from a replica's start until it is ready."""

    scaler: Scaler
    cold_start_s: float


class _Place:
    """A replica, from its start. `sequence` is the number of its last report of changes."""

    __slots__ = ("id", "is_draining", "is_ready", "ready_at", "replica", "sequence", "started_at")

    def __init__(self, name: str, started_at: float, ready_at: float) -> None:
        self.id, self.started_at, self.ready_at = name, started_at, ready_at
        self.is_ready = self.is_draining = False
        self.sequence = 0
        self.replica: CoarseReplica


class _SimulatedRequest:
    __slots__ = ("decision", "first_at", "gateway", "place")

    def __init__(self, gateway: Placing, decision: Decision, place: _Place) -> None:
        self.gateway, self.decision, self.place = gateway, decision, place
        self.first_at = 0.0


class FleetSimulation:
    """One simulation. `run` is called once."""

    def __init__(
        self,
        engine: SimulatedEngine,
        traffic: FleetTraffic,
        spec: PoolSpec,
        routing: Routing,
        *,
        num_replicas: int,
        num_gateways: int = 1,
        objectives: ScalingObjectives | None = None,
        scaling: ScalerRun | None = None,
        seed: int = 0,
    ) -> None:
        self._engine, self._traffic, self._spec = engine, traffic, spec
        self._scaling = scaling
        self._gateways = [Placing(routing, seed=seed + i) for i in range(num_gateways)]
        self._places: dict[str, _Place] = {}
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, _Place]] = []
        self._order = itertools.count()
        self._at_gateway: deque[Prompt] = deque()
        self._under_way: dict[int, _SimulatedRequest] = {}
        self._endless = EndlessCache(traffic)
        count = len(traffic)
        self._ttft = np.full(count, np.nan)
        self._tpot = np.full(count, np.nan)
        self._tally = Tally()
        self._tally.objectives = objectives if scaling is None else scaling.scaler.objectives
        self._front_s = engine.cost.host.request_s
        self.num_taken_out = 0
        self.num_refused = self.num_finished = self.num_met = 0
        self.hit_tokens = self.bound_tokens = self.prompt_tokens = self.output_tokens = 0
        self.predicted_hit_tokens = 0
        self.num_started = self.most_at_gateway = 0
        self.most_replicas = 0
        self.replica_s = 0.0
        self.work: list[int] = []  # tokens computed by each replica
        self.busy: list[float] = []  # seconds
        self.waiting: list[int] = []  # by ready replica and sample
        self.queued: list[int] = []
        self.timeline: list[tuple[float, int, int, int]] = []
        self.watches = {
            name: Stopwatch() for name in ("decision", "changes", "answer", "load", "scaler")
        }
        for _ in range(num_replicas):
            self._ready(self._start(0.0, 0.0))

    # --- Replicas -----------------------------------------------------------------------------------------------------

    def _start(self, at: float, cold_start_s: float) -> _Place:
        place = _Place(f"{self._spec.key}-{next(self._numbers)}", at, at + cold_start_s)
        self._places[place.id] = place
        self.num_started += bool(cold_start_s)
        self.most_replicas = max(self.most_replicas, len(self._places))
        return place

    def _ready(self, place: _Place) -> None:
        spec, engine = self._spec, self._engine
        place.is_ready = True
        place.replica = CoarseReplica(engine, self._first, self._end, at=place.ready_at)
        for gateway in self._gateways:
            gateway.guard.add(place.id)
            gateway.router.add(
                ReplicaState(
                    id=place.id,
                    weight=spec.weight,
                    block_size=PREFIX_TOKENS,
                    max_num_seqs=engine.scheduling.max_num_seqs,
                    prefill_tokens_per_s=spec.prefill_tokens_per_s,
                    step_s=spec.step_s,
                )
            )
            gateway.router.reset(place.id, 0, ())

    def _leave(self, place: _Place, at: float) -> None:
        del self._places[place.id]
        self.replica_s += at - place.started_at
        if place.is_ready:
            self._note_work(place)
            for gateway in self._gateways:
                gateway.router.remove(place.id)
                gateway.guard.remove(place.id)

    def _note_work(self, place: _Place) -> None:
        self.work.append(place.replica.computed_tokens)
        self.busy.append(place.replica.busy_s)

    def _plan(self, place: _Place) -> None:
        if place.replica.next_at != math.inf:
            heapq.heappush(self._events, (place.replica.next_at, next(self._order), place))

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, index: int, at: float) -> None:
        row = int(self._traffic.rows[index])
        prompt = Prompt(
            index,
            self._traffic.input_tokens[row],
            self._traffic.output_tokens[row],
            self._traffic.keys(index),
        )
        self._tally.arrived()
        self.prompt_tokens += prompt.input_tokens
        self.bound_tokens += self._endless.take(index)
        self._send(prompt, at)

    def _send(self, prompt: Prompt, at: float) -> bool:
        gateway = self._gateways[prompt.index % len(self._gateways)]
        began = time.thread_time_ns()
        decision = gateway.choose([prompt.keys], max(2, prompt.input_tokens), now=at)
        self.watches["decision"].add(began)
        if decision is None:
            self._at_gateway.append(prompt)
            self.most_at_gateway = max(self.most_at_gateway, len(self._at_gateway))
            return False
        place = self._places[decision.replica]
        if not place.replica.fits(prompt):
            gateway.ended(decision, at)
            self.num_refused += 1
            return True
        self.predicted_hit_tokens += decision.num_cached_tokens
        self._under_way[prompt.index] = _SimulatedRequest(gateway, decision, place)
        place.replica.add(prompt, at)
        self._plan(place)
        return True

    def _first(self, prompt: Prompt, at: float) -> None:
        call = self._under_way[prompt.index]
        call.first_at = at
        ttft_s = at + self._front_s - self._traffic.times[prompt.index]
        self._ttft[prompt.index] = ttft_s
        self.hit_tokens += prompt.num_cached
        began = time.thread_time_ns()
        call.gateway.began(call.decision, ttft_s, at)
        self.watches["answer"].add(began)
        # No replica is slower than another, so each exclusion is a mistake.
        watched = call.gateway.guard.replicas.get(call.decision.replica)
        self.num_taken_out += watched is not None and watched.was_slow and not watched.seen

    def _end(self, prompt: Prompt, at: float) -> None:
        call = self._under_way.pop(prompt.index)
        began = time.thread_time_ns()
        call.gateway.ended(call.decision, at)
        self.watches["answer"].add(began)
        self.num_finished += 1
        self.output_tokens += prompt.output_tokens
        if prompt.output_tokens > 1:
            self._tpot[prompt.index] = (at - call.first_at) / (prompt.output_tokens - 1)
        arrival = float(self._traffic.times[prompt.index])
        record = RequestRecord(
            id="",
            start=arrival,
            created=0,
            num_prompt_tokens=prompt.input_tokens,
            num_output_tokens=prompt.output_tokens,
            ttft_s=float(self._ttft[prompt.index]),
        )
        before = self._tally.num_met
        self._tally.ended(record, at + self._front_s - arrival, failed=False)
        self.num_met += self._tally.num_met - before

    # --- Reports ------------------------------------------------------------------------------------------------------

    def _tell_changes(self, place: _Place) -> None:
        stored, removed = place.replica.take_changes()
        if not stored and not removed:
            return
        place.sequence += 1
        for gateway in self._gateways:
            began = time.thread_time_ns()
            told = gateway.router.apply(place.id, place.sequence, stored, removed)
            self.watches["changes"].add(began, len(stored) + len(removed))
            assert told

    def _tell_load(self, part: int, parts: int) -> None:
        for place in itertools.islice(list(self._places.values()), part, None, parts):
            if place.is_ready:
                running, waiting = place.replica.num_running, place.replica.num_waiting
                for gateway in self._gateways:
                    began = time.thread_time_ns()
                    gateway.router.update(place.id, running=running, waiting=waiting)
                    self.watches["load"].add(began)

    def _look_at_queues(self) -> None:
        for place in self._places.values():
            if place.is_ready:
                self.waiting.append(place.replica.num_waiting)
                self.queued.append(place.replica.queued_tokens)

    # --- The autoscaler -----------------------------------------------------------------------------------------------

    def _scale(self, at: float, scaling: ScalerRun) -> None:
        for place in [p for p in self._places.values() if p.is_draining]:
            if not place.replica.num_open:
                self._leave(place, at)
        active = [p for p in self._places.values() if not p.is_draining]
        ready = [p for p in active if p.is_ready]
        now = PoolState(
            num_at_gateway=len(self._at_gateway),
            num_running=sum(p.replica.num_running for p in ready),
            num_waiting=sum(p.replica.num_waiting for p in ready),
            num_ready=len(ready),
            num_starting=len(active) - len(ready),
            kv_cache_usage=sum(p.replica.usage for p in ready) / max(1, len(ready)),
            cold_start_s=scaling.cold_start_s,
        )
        scaler = scaling.scaler
        began = time.thread_time_ns()
        change = scaler.look(at, now, self._tally)
        self.watches["scaler"].add(began)
        if change is not None:
            for _ in range(change.wanted - len(active)):
                place = self._start(at, scaling.cold_start_s)
                heapq.heappush(self._events, (place.ready_at, next(self._order), place))
            active.sort(key=lambda p: (p.is_ready, p.replica.num_open if p.is_ready else 0))
            for place in active[: max(0, len(active) - change.wanted)]:
                if place.is_ready and place.replica.num_open:
                    place.is_draining = True
                    for gateway in self._gateways:
                        gateway.router.update(place.id, draining=True)
                else:
                    self._leave(place, at)
            scaler.made(change)
        if scaler.wanted is not None:
            self.timeline.append((at, now.num_ready, now.num_starting, scaler.wanted))
        if scaler.began is not None and scaler.capacity.is_due(at - scaler.began):
            scaler.capacity.refresh(at - scaler.began)

    # --- The loop -----------------------------------------------------------------------------------------------------

    def run(self) -> FleetFigures:
        """Run to the last answer, and return the figures."""
        began, cpu = time.monotonic(), time.process_time()
        was_on = gc.isenabled()
        gc.disable()  # it would scan all requests again and again, and they form no cycles
        try:
            end = self._run()
        finally:
            if was_on:
                gc.enable()
        for place in list(self._places.values()):
            self.replica_s += end - place.started_at
            if place.is_ready:
                self._note_work(place)
        return self._figures(end, time.monotonic() - began, time.process_time() - cpu)

    def _run(self) -> float:
        times, events, parts = self._traffic.times, self._events, 10
        count, upcoming, now = len(times), 0, 0.0
        at_times = times.tolist()
        report_at, part, look_at = REPORT_S / parts, 0, SAMPLE_S
        scaling = self._scaling
        scale_at = math.inf
        if scaling is not None:
            scaling.scaler.look(0.0, PoolState(num_ready=len(self._places)), self._tally)
            scale_at = scaling.scaler.settings.interval_s
        while self.num_finished + self.num_refused < count:
            arrival = at_times[upcoming] if upcoming < count else math.inf
            event = events[0][0] if events else math.inf
            now = min(arrival, event, report_at, look_at, scale_at)
            if now == event:
                _, _, place = heapq.heappop(events)
                if not place.is_ready:
                    if place.id in self._places:
                        self._ready(place)
                        self._retry(now)
                elif place.replica.next_at == now:
                    place.replica.advance()
                    self._tell_changes(place)
                    self._plan(place)
                    if self._at_gateway:
                        self._retry(now)
            elif now == arrival:
                self._arrive(upcoming, now)
                upcoming += 1
            elif now == report_at:
                self._tell_load(part, parts)
                part, report_at = (part + 1) % parts, report_at + REPORT_S / parts
            elif now == look_at:
                self._look_at_queues()
                look_at += SAMPLE_S
            elif scaling is not None:
                self._scale(now, scaling)
                scale_at += scaling.scaler.settings.interval_s
                if self._at_gateway:
                    self._retry(now)
        return now

    def _retry(self, now: float) -> None:
        while self._at_gateway:
            if not self._send(self._at_gateway.popleft(), now):
                self._at_gateway.rotate(1)  # `_send` has put it at the end
                return

    # --- Figures ------------------------------------------------------------------------------------------------------

    def _figures(self, end: float, wall_s: float, cpu_s: float) -> FleetFigures:
        ttft, tpot = (x[~np.isnan(x)].tolist() for x in (self._ttft, self._tpot))
        mean_work, prompt_tokens = sum(self.work) / len(self.work), max(1, self.prompt_tokens)
        gateway_s = sum(sum(watch.taken) for watch in self.watches.values()) / 1e9
        tables = [gateway.router.store for gateway in self._gateways]
        goodput = self.num_met / max(1, self.num_finished)
        return FleetFigures(
            requests=len(self._traffic),
            finished=self.num_finished,
            refused=self.num_refused,
            gateways=len(self._gateways),
            copies=self._traffic.num_copies,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            simulated_s=end,
            wall_s=wall_s,
            processor_s=cpu_s,
            hit_share=self.hit_tokens / prompt_tokens,
            hit_share_bound=self.bound_tokens / prompt_tokens,
            hit_share_predicted=self.predicted_hit_tokens / prompt_tokens,
            ttft_s=Marks.of(ttft),
            tpot_s=Marks.of(tpot),
            waiting_requests=Marks.of(self.waiting),
            queued_tokens=Marks.of(self.queued),
            most_work_over_mean=max(self.work) / mean_work if mean_work else 1.0,
            busy=sum(self.busy) / self.replica_s if self.replica_s else 0.0,
            replica_hours=self.replica_s / 3600,
            most_replicas=self.most_replicas,
            most_at_gateway=self.most_at_gateway,
            taken_out=self.num_taken_out,
            gateway_busy=gateway_s / len(self._gateways) / max(end, 1e-9),
            gateway={name: watch.times for name, watch in self.watches.items() if watch.taken},
            table=[TableSize(table.num_blocks, table.num_bytes) for table in tables],
            goodput=None if self._tally.objectives is None else goodput,
            scaler=None if self._scaling is None else self._turns(self._scaling.scaler),
        )

    def _turns(self, scaler: Scaler) -> ScalerTurns:
        wanted = [(at, number) for at, _, _, number in self.timeline]
        turns = most_reversals(wanted)
        return ScalerTurns(scaler.num_up, scaler.num_down, self.num_started, self.timeline, turns)
