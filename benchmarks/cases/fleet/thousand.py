"""A simulated fleet of a thousand replicas (docs/fleet.md), the same with caches of 8 bits, and one of 26 faster replicas
under a lighter load.

    python benchmarks/fleet.py --study thousand --trace mooncake_conversation.jsonl

The loads run side by side, a process each: some 300 s of two cores and 6 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

THOUSAND = "--gpu h200 --rate 10000 --requests 1000000"
LOADS = {
    "thousand": f"fleet-1000.yaml {THOUSAND}",
    "thousand_fp8_cache": f"fleet-1000-fp8.yaml {THOUSAND}",
    "lighter": "fleet-1000.yaml --replicas 26 --gpu b200 --rate 200 --requests 20000",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    workload = ("--workload", f"trace:{args.trace}")

    def simulate(load: str) -> Any:
        file, *options = load.split()
        return common.slipstream("fleet", "simulate", common.DATA / file, *options, *workload)

    with ThreadPoolExecutor() as pool:
        results = dict(zip(LOADS, pool.map(simulate, LOADS.values()), strict=True))
    save(loads=LOADS, results=results)
