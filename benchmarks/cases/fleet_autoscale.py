"""Our autoscaler beside others' rules and an oracle, in one replay of a recorded trace.

    python benchmarks/fleet.py --study autoscale --trace AzureLLMInferenceTrace_conv.csv [--gpu l4] [--policies ours,ray]

Every replica is simulated step by step with the engine's own scheduler
(`fleet/scaling/replay.py`); nothing is a calibrated queue. All
begin with the same replicas and have the same cold starts, which are paid for. Objectives: TTFT and TPOT of a request, both.

The oracle knows all requests beforehand. For each minute it takes the fewest replicas with which the requests of that minute
meet the objectives (tried in the same simulator, with what came before and after), and has them ready in time.

`forecast`: mean error of the rate a cold start ahead, and of the naive forecast (as it is now).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.fleet.scaling.autoscaler import Autoscaler, FleetObservation, Policy, ScalingLimits
from slipstream.fleet.scaling.baselines import Enova, Fixed, Planned, RayServe
from slipstream.fleet.scaling.capacity import RecentCapacity
from slipstream.fleet.scaling.forecast import SPEEDS, Forecast
from slipstream.fleet.scaling.replay import ColdStart, FleetReplay, Replayed
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import SimulatedEngine
from slipstream.simulate.traffic import TrafficRequest, parse_workload, read_trace
from slipstream.spec.description import read_spec

LIMITS = {"ttft_s": 2.0, "tpot_s": 0.1}
ATTAINMENT = 0.99
INTERVAL_S = 10.0
BLOCK_S, LEAD_S, TAIL_S = 60.0, 60.0, 45.0
INITIAL = 4
FIXED = (5, 6, 7)
TUNED_TARGET = 12.0
"""Requests at once on a replica: about what one has at its capacity."""

POLICIES = ("ours", "enova", "ray", "ray-tuned", *(f"fixed-{n}" for n in FIXED), "oracle")


class Asked:
    """Our policy with the capacity of the requests that it has seen end."""

    name = "slipstream"

    def __init__(
        self, engine: SimulatedEngine, limits: ScalingLimits, cold_start_s: float, **more: Any
    ) -> None:
        objectives = LatencyObjectives(limits=LIMITS, attainment=ATTAINMENT)
        self.capacity = RecentCapacity(engine, parse_workload("sharegpt"), objectives)
        self.policy = Autoscaler(
            self.capacity.replicas_for,
            limits=limits,
            interval_s=INTERVAL_S,
            cold_start_s=cold_start_s,
            **more,
        )

    def decide(self, seen: FleetObservation) -> int:
        self.capacity.refresh(seen.at)
        return self.policy.decide(seen)

    def learn(self, request: TrafficRequest) -> None:
        self.capacity.learn(request.input_tokens, request.output_tokens)


def oracle(
    engine: SimulatedEngine, requests: tuple[TrafficRequest, ...], cold_start: ColdStart, most: int
) -> Planned:
    numbers: list[int] = []
    last = requests[-1].arrival
    while len(numbers) * BLOCK_S <= last:
        begin = len(numbers) * BLOCK_S
        number = max(1, (numbers[-1] if numbers else INITIAL) - 1)
        while number < most and not holds(engine, requests, numbers, begin, number):
            number += 1
        numbers.append(number)
        print(f"oracle: minute {len(numbers)}: {number}", flush=True)
    return Planned(
        [(i * BLOCK_S, n) for i, n in enumerate(numbers)], ahead_s=cold_start.mean_s + INTERVAL_S
    )


def holds(
    engine: SimulatedEngine,
    requests: tuple[TrafficRequest, ...],
    numbers: list[int],
    begin: float,
    number: int,
) -> bool:
    """The requests of the minute meet the objectives with so many replicas, and more in the next."""
    start = max(0.0, begin - LEAD_S)
    window = [
        r._replace(arrival=r.arrival - start)
        for r in requests
        if start <= r.arrival < begin + BLOCK_S + TAIL_S
    ]
    before = numbers[-1] if numbers else number
    plan = [(0.0, before), (begin - start, number), (begin - start + BLOCK_S, number + 1)]
    fleet = FleetReplay(
        engine, window, Planned(plan, ahead_s=0.0), objectives=LIMITS, cold_start=ColdStart(mean_s=1e-3),
        initial=before, interval_s=5.0,
    )  # fmt: skip
    run = fleet.run()
    own = [
        record.meets(LIMITS)
        for r, record in zip(window, run.records, strict=True)
        if begin - start <= r.arrival < begin - start + BLOCK_S
    ]
    return sum(own) >= ATTAINMENT * len(own)


def forecast_errors(requests: tuple[TrafficRequest, ...], cold_start_s: float) -> dict[str, Any]:
    """Mean absolute errors in requests/s, and how often the bound held."""
    forecast = Forecast(interval_s=INTERVAL_S, horizon_s=cold_start_s + INTERVAL_S)
    count = int(requests[-1].arrival / INTERVAL_S)
    rates = [0.0] * count
    for r in requests:
        if r.arrival < count * INTERVAL_S:
            rates[int(r.arrival / INTERVAL_S)] += 1 / INTERVAL_S
    ours, naive, mean_error, held, share = [], [], [], [], 0.8
    half = max(1, forecast.steps // 2)
    for i, rate in enumerate(rates[: -forecast.steps]):
        forecast.learn(rate)
        came = statistics.fmean(rates[i + forecast.steps - half + 1 : i + forecast.steps + 1])
        if i < 30:
            continue
        ours.append(abs(forecast.mean() - came))
        naive.append(abs(rate - came))
        mean_error.append(abs(statistics.fmean(rates[max(0, i - 5) : i + 1]) - came))
        held.append(came <= forecast.upper(share))
    return {
        "horizon_s": forecast.steps * INTERVAL_S,
        "ours": statistics.fmean(ours),
        "naive": statistics.fmean(naive),
        "mean_of_a_minute": statistics.fmean(mean_error),
        "bound": {"share": share, "held": statistics.fmean(held)},
        "methods": len(SPEEDS),
    }


def missed(run: Replayed) -> list[int]:
    """Requests that missed an objective, by the minute in which they came."""
    found = [0] * (int(max(r.sent for r in run.records) / 60) + 1)
    for r in run.records:
        found[int(r.sent / 60)] += not r.meets(LIMITS)
    return found


def row(run: Replayed) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "goodput": run.goodput,
        "replica_hours": run.replica_hours,
        "started": run.num_started,
        "reversals": run.reversals,
        "most_replicas": run.most_replicas,
        "ttft_p99_s": run.ttft_p99_s,
        "most_at_gateway": run.most_at_gateway,
        "missed_by_minute": missed(run),
        "simulated_in_s": run.seconds,
        "timeline": [list(point) for point in run.timeline[::3]],
    }


RECORD = "autoscale"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gpu", default="l4")
    parser.add_argument("--cold-start", type=float, default=40.0)
    parser.add_argument("--max-replicas", type=int, default=16)
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)} (default: all)"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what the record has of other policies"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    names = args.policies.split(",")
    if set(names) - set(POLICIES):
        raise SystemExit(
            f"--policies: {', '.join(sorted(set(names) - set(POLICIES)))} is not of {', '.join(POLICIES)}"
        )
    folder = common.CONFIGS / "llama-3-8b"
    engine = plan_engine(
        EngineArgs(model=str(folder), quantization="fp8"), read_spec(folder), find_device(args.gpu)
    ).simulated
    requests = read_trace(args.trace).requests
    limits, cold_start = (
        ScalingLimits(max_replicas=args.max_replicas),
        ColdStart(mean_s=args.cold_start),
    )
    makes: dict[str, Callable[[], Policy]] = {
        "ours": lambda: Asked(engine, limits, args.cold_start),
        "enova": lambda: Enova(limits, max_num_seqs=engine.scheduling.max_num_seqs),
        "ray": lambda: RayServe(limits),
        "ray-tuned": lambda: RayServe(limits, target=TUNED_TARGET),
        **{f"fixed-{n}": partial(Fixed, n) for n in FIXED},
        "oracle": lambda: oracle(engine, requests, cold_start, args.max_replicas),
    }
    rows: dict[str, Any] = {}
    if args.add and args.output.exists():
        rows = json.loads(args.output.read_text("utf-8"))["policies"]
    errors = forecast_errors(requests, args.cold_start)
    print(errors, flush=True)
    for name in names:
        policy = makes[name]()
        known = FleetObservation(at=0.0, interval_s=1.0, num_arrivals=0)
        fleet = FleetReplay(
            engine, requests, policy, objectives=LIMITS, interval_s=INTERVAL_S,
            cold_start=replace(cold_start, spread=0.0) if name == "oracle" else cold_start,
            initial=policy.decide(known) if isinstance(policy, Fixed | Planned) else INITIAL,
            on_end=policy.learn if isinstance(policy, Asked) else lambda request: None,
        )  # fmt: skip
        rows[name] = row(fleet.run())
        print(name, rows[name], flush=True)
    best = rows.get("oracle")
    for one in rows.values():
        one["hours_over_the_oracles"] = (
            None if best is None else one["replica_hours"] / best["replica_hours"]
        )
    save(
        objectives={**LIMITS, "attainment": ATTAINMENT},
        engine={
            "model": "llama-3-8b fp8",
            "gpu": args.gpu,
            "cold_start_s": args.cold_start,
            "initial": INITIAL,
        },
        requests=len(requests),
        forecast=errors,
        policies=rows,
    )
