"""A simulated fleet of a thousand replicas (docs/fleet.md), the same with caches of 8 bits, and one of 26 faster replicas
under a lighter load.

    python benchmarks/fleet.py --study thousand --trace mooncake_conversation.jsonl

It takes some 600 s of one core and 2.8 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

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
    results = {}
    for name, load in LOADS.items():
        file, *options = load.split()
        results[name] = common.slipstream(
            "fleet", "simulate", common.DATA / file, *options, *workload
        )
    save(loads=LOADS, results=results)
