"""A simulated fleet of a thousand replicas (docs/fleet.md), and one of 26 faster replicas under a lighter load.

    python benchmarks/fleet.py --study thousand --trace mooncake_conversation.jsonl

It takes some 300 s of one core and 2.8 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import common

LOADS = {
    "thousand": ("--gpu", "h200", "--rate", "10000", "--requests", "1000000"),
    "lighter": ("--replicas", "26", "--gpu", "b200", "--rate", "200", "--requests", "20000"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    given = ("fleet", "simulate", common.DATA / "fleet-1000.yaml")
    workload = ("--workload", f"trace:{args.trace}")
    results = {name: common.slipstream(*given, *load, *workload) for name, load in LOADS.items()}
    save(loads=LOADS, results=results)
