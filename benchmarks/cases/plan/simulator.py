"""How fast `slipstream plan` simulates: seconds of one core's time for so many requests, and how much faster than served.

    python benchmarks/plan.py --study simulator [--num-requests 1000000] [--rate 90]

Llama-3-8B in FP8 on an H200, ShareGPT's lengths, by the estimated steps. A shorter load is simulated twice, with decodes asleep
and with the Scheduler planning every step; both must tell the same.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable

import common

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import parse_workload
from slipstream.spec.description import read_spec

COMPARED = 4000


RECORD = "simulator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=90.0)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    folder = common.CONFIGS / "llama-3-8b"
    settings = EngineArgs(model=str(folder), quantization="fp8", kv_cache_dtype="fp8")
    engine = plan_engine(settings, read_spec(folder), find_device("h200")).simulated
    workload = parse_workload("sharegpt")
    short = workload.at_rate(args.rate, COMPARED)
    fast, exact = simulate(engine, short), simulate(engine, short, exact=True)
    assert fast.records == exact.records
    compared = {
        "requests": COMPARED,
        "asleep_s": fast.seconds,
        "every_step_s": exact.seconds,
        "same": True,
    }
    print(compared, flush=True)
    found = simulate(engine, workload.at_rate(args.rate, args.num_requests))
    result = {
        "requests": args.num_requests,
        "rate": args.rate,
        "core_s": found.seconds,
        "simulated_s": found.summary.wall_s,
        "times_real_time": found.speed,
        "steps": found.num_steps,
        "mean_decodes": found.mean_decodes,
        "output_tokens": found.summary.output_tokens,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(result)
    save(compared=compared, result=result)
