"""How well `fleet/detection` finds and names ten kinds of faults over replayed days.

    python benchmarks/fleet.py --study detection --trace AzureLLMInferenceTrace_conv.csv [--replicas 3] [--days 2] [--seed 0 1]

Each replica is the step-level simulator of `slipstream plan` (the engine's own scheduler, block pool and prefix cache) of
Llama-3-8B in FP8 on an L40S, under the trace's requests, with the hours of a day and shared prefixes. Of each kind of fault
there is one on each replica, for five minutes, at a time that is drawn. Six are in the simulation: slow steps (steady; now and
then), blocks that are taken away, prompts that share nothing any more, requests that never end, a step that takes a minute,
answers that go on. The others are added to what the replica tells: clients that do not read, a canary that drifts, errors.
What the detector gets are counters as `/metrics` has them, every five seconds; what steps should take it learns by itself.
Steps have a noise of 8 %, a wander of 2 %, and hiccups of 50 ms; there are errors, stalls and preemptions without a fault, too.

A finding that begins in a fault on its replica finds it; one that begins while there is none, or up to a minute after it, is a
false alarm or, within that minute, an echo, which counts for neither.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import msgspec

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.fleet.detection.detector import Detector
from slipstream.fleet.detection.observation import INTERVAL_S, Observation
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import SimulatedEngine, SimulatedReplica
from slipstream.simulate.traffic import TrafficRequest, Workload, read_trace
from slipstream.spec.description import read_spec

KINDS = {  # of fault: the cause that is to be found
    "throttled clock": "throttled_clock",
    "noisy neighbour": "noisy_neighbour",
    "cache thrash": "cache_thrash",
    "prompt drift": "prompt_drift",
    "leaking queue": "leaking_queue",
    "stuck engine": "stuck_engine",
    "runaway answers": "runaway_answers",
    "slow client": "slow_client",
    "quality drift": "quality_drift",
    "failing requests": "failing_requests",
}
FAULT_S = 300.0
ECHO_S = 60.0
SETTLED_S = 3600.0
"""The first hour is without faults: an hour is what a baseline remembers."""

PEAK = 4.0
"""Requests a second on a replica at the day's peak; an L40S carries 6.5."""

TEMPLATES = 12
LONGEST_BLOCKS = 260
"""Blocks that the longest request needs. The fault of the cache leaves that, or three fifths of
the used blocks if that is more."""


@dataclass(frozen=True)
class Fault:
    kind: str
    begin: float

    @property
    def end(self) -> float:
        return self.begin + FAULT_S


class FaultyCost:
    """Steps with noise, and with what a fault adds. Counts what an engine's metrics would."""

    def __init__(self, cost: Any, rng: random.Random) -> None:
        self._cost, self._rng = cost, rng
        self.host, self.label = cost.host, cost.label
        self.fault = ""
        self.wander = 0.0
        self.num_steps = self.num_generated = 0
        self.step_s = 0.0
        self._until, self._is_loud = 0.0, False
        self.now = 0.0

    def seconds(self, shape: Any) -> float:
        rng, found = self._rng, self._cost.seconds(shape)
        found *= math.exp(rng.gauss(self.wander, 0.08))
        if rng.random() < 0.001:
            found += 0.05
        if self.fault == "throttled clock":
            found *= 1.4
        elif self.fault == "noisy neighbour":
            if self.now >= self._until:
                self._is_loud = not self._is_loud
                self._until = self.now + rng.uniform(3.0, 12.0)
            found *= 1.8 if self._is_loud else 1.0
        elif self.fault == "stuck engine":
            found = 60.0
        self.num_steps += 1
        self.num_generated += shape.num_sampled
        self.step_s += found
        return found


def day_of(
    workload: Workload, seconds: float, rng: random.Random, faults: list[Fault]
) -> list[TrafficRequest]:
    """The trace's requests, one after another, at the rate of the hour, from a place that is drawn."""
    requests = itertools.islice(
        itertools.cycle(workload.requests), rng.randrange(len(workload.requests)), None
    )
    found, at = [], 0.0
    while True:
        rate = PEAK * (0.3 + 0.7 * math.sin(math.pi * ((at / 3600 + 3) % 24) / 24) ** 2)
        at += rng.expovariate(rate)
        if at >= seconds:
            return found
        kind = next((f.kind for f in faults if f.begin <= at < f.end), "")
        r = next(requests)
        template = min(int(rng.expovariate(0.35)), TEMPLATES - 1)
        tokens = max(600, min(r.input_tokens, 3000))
        prefix = (10**6 + len(found),) if kind == "prompt drift" else (template,)
        answer = (
            min(800, 5 * r.output_tokens + 300) if kind == "runaway answers" else r.output_tokens
        )
        found.append(TrafficRequest(at, tokens, answer, prefix))


def observed_day(
    engine: SimulatedEngine, workload: Workload, number: int, days: float, seed: int
) -> tuple[list, list]:
    """The observations of a replica, and its faults."""
    rng = random.Random(seed * 1000 + number)
    seconds = days * 86400
    kinds = list(KINDS)
    rng.shuffle(kinds)
    slot = (seconds - SETTLED_S) / len(kinds)
    faults = [
        Fault(k, SETTLED_S + i * slot + rng.uniform(0, slot - FAULT_S - 900))
        for i, k in enumerate(kinds)
    ]
    own = day_of(workload, seconds, rng, faults)
    ghosts = [TrafficRequest(0.0, 200, 6000) for _ in range(400)]
    traffic = [*own, *ghosts]
    ended: list[int] = []
    cost = FaultyCost(engine.cost, rng)
    replica = SimulatedReplica(
        replace(engine, cost=cost), traffic, lambda i, at: ended.append(i), exact=False
    )  # type: ignore[arg-type]
    found: list[Observation] = []
    upcoming, ghost = 0, len(own)
    taken: list[int] = []
    before = replica.scheduler.stats()
    counted = (0, 0, 0.0)
    num_ghosts = left = 0
    at = 0.0
    while at < seconds:
        fault = next((f.kind for f in faults if f.begin <= at < f.end), "")
        cost.fault = fault
        cost.wander = 0.95 * cost.wander + rng.gauss(0, 0.006)
        if fault == "leaking queue" and ghost < len(traffic):
            replica.add(ghost, at)
            ghost, num_ghosts = ghost + 1, num_ghosts + 1
        pool = replica.scheduler.pool
        if fault == "cache thrash":
            used = pool.num_usable - pool.num_free - len(taken)
            left = left or max(LONGEST_BLOCKS, int(0.6 * used))
            taken += pool.allocate(min(pool.num_free, max(0, pool.num_free + used - left)))
        elif fault != "cache thrash" and taken:
            pool.release(taken)
            taken, left = [], 0
        end = at + INTERVAL_S
        prompt_tokens = 0
        while True:
            if upcoming < len(own) and own[upcoming].arrival <= min(
                end, replica.now if replica.can_step else end
            ):
                replica.add(upcoming, own[upcoming].arrival)
                prompt_tokens += own[upcoming].input_tokens
                upcoming += 1
            elif replica.can_step and replica.now < end:
                cost.now = replica.now
                replica.step()
            else:
                break
        at = end
        stats = replica.scheduler.stats()
        mine = [i for i in ended if i < len(own)]
        num_ghosts -= len(ended) - len(mine)
        ended.clear()
        errors = sum(rng.random() < (0.25 if fault == "failing requests" else 0.0005) for _ in mine)
        stall = (
            abs(rng.gauss(0, 0.02))
            + (2.0 if rng.random() < 0.0005 else 0.0)
            + (3.0 if fault == "slow client" else 0.0)
        )
        canary = math.exp(rng.gauss(math.log(2e-3), 0.3)) * (
            8.0 if fault == "quality drift" else 1.0
        )
        found.append(
            Observation(
                replica=f"replica-{number}", at=at,
                num_steps=cost.num_steps - counted[0], step_s=cost.step_s - counted[2],
                step_age_s=at - next((e for e in reversed(replica.ends) if e <= at), 0.0),
                num_running=stats.num_running, num_waiting=stats.num_waiting, num_open=replica.num_open - num_ghosts,
                kv_cache_usage=stats.kv_cache_usage,
                prefix_queries=stats.prefix_queries - before.prefix_queries, prefix_hits=stats.prefix_hits - before.prefix_hits,
                num_preemptions=stats.num_preemptions - before.num_preemptions,
                prompt_tokens=prompt_tokens, generated_tokens=cost.num_generated - counted[1],
                num_finished=len(mine), finished_prompt_tokens=sum(own[i].input_tokens for i in mine),
                finished_output_tokens=sum(own[i].output_tokens for i in mine),
                num_responses=len(mine), num_errors=errors, write_stall_s=stall, canary_kl=canary,
            )
        )  # fmt: skip
        counted = (cost.num_steps, cost.num_generated, cost.step_s)
        before = stats
    return found, faults


def judge(observations: list[Observation], faults: list[Fault]) -> dict[str, Any]:
    detector = Detector()
    found: dict[int, Any] = {}
    begin = time.process_time()
    for seen in observations:
        detector.observe(seen)
        for news in detector.drain_findings():
            first = found.setdefault(news.number, news)
            found[news.number] = replace(news, began=first.began)
    seconds = time.process_time() - begin
    rows = []
    hits: dict[str, list[Any]] = {}
    false, echoes = [], []
    for finding in found.values():
        during = next((f for f in faults if f.begin <= finding.began <= f.end + ECHO_S), None)
        if during is None:
            false.append(
                {"cause": finding.cause, "at_h": finding.began / 3600, "evidence": finding.evidence}
            )
        elif finding.began > during.end:
            echoes.append(finding.cause)
        else:
            hits.setdefault(during.kind, []).append(finding)
    for fault in faults:
        own = hits.get(fault.kind, [])
        rows.append(
            {
                "kind": fault.kind,
                "delay_s": own[0].began - fault.begin if own else None,
                "causes": [f.cause for f in own],
                "named": bool(own) and own[0].cause == KINDS[fault.kind],
                "lasted_s": own[0].ended - own[0].began
                if own and own[0].ended is not None
                else None,
            }
        )
    return {
        "faults": rows,
        "false_alarms": false,
        "echoes": echoes,
        "us_an_observation": seconds / len(observations) * 1e6,
    }


def one(task: tuple[int, float, int, Path, Path | None]) -> dict[str, Any]:
    number, days, seed, path, kept = task
    file = None if kept is None else kept / f"seed-{seed}-days-{days:g}-replica-{number}.msgpack"
    if file is not None and file.exists():
        return judge(
            *msgspec.msgpack.decode(file.read_bytes(), type=tuple[list[Observation], list[Fault]])
        )
    folder = common.CONFIGS / "llama-3-8b"
    engine = plan_engine(
        EngineArgs(model=str(folder), quantization="fp8"), read_spec(folder), find_device("l40s")
    ).simulated
    day = observed_day(engine, read_trace(path), number, days, seed)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.msgpack.encode(day))
    return judge(*day)


RECORD = "detection"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--days", type=float, default=2.0)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="each draws that many replicas' days"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the observations here, and use those that are there",
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    tasks = [
        (i, args.days, seed, args.trace, args.keep)
        for seed in args.seed
        for i in range(args.replicas)
    ]
    replica_days = len(tasks) * args.days
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(one, tasks))
    rows = [row for run in runs for row in run["faults"]]
    found = [row for row in rows if row["delay_s"] is not None]
    false = [f for run in runs for f in run["false_alarms"]]
    precision, recall = len(found) / max(1, len(found) + len(false)), len(found) / len(rows)
    delays = sorted(row["delay_s"] for row in found)
    result = {
        "replica_days": replica_days,
        "faults": len(rows),
        "found": len(found),
        "named_rightly": sum(row["named"] for row in rows),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(1e-9, precision + recall),
        "delay_s": {
            "median": statistics.median(delays),
            "most": delays[-1],
            "within_30_s": sum(d <= 30 for d in delays),
        },
        "false_alarms_a_replica_day": len(false) / replica_days,
        "us_an_observation": statistics.mean(run["us_an_observation"] for run in runs),
    }
    by_kind = {
        kind: [
            {k: row[k] for k in ("delay_s", "causes", "lasted_s")}
            for row in rows
            if row["kind"] == kind
        ]
        for kind in KINDS
    }
    for kind, each in by_kind.items():
        print(kind, each)
    print("false alarms", false, "echoes", [run["echoes"] for run in runs])
    print(result)
    save(result=result, by_kind=by_kind, false_alarms=false)
