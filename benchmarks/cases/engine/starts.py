"""Starts of versions of Slipstream, in turns: seconds from a process's start to the first token of a prompt of 128, by phase.

    python benchmarks/engine.py --study starts --tree before=OTHER/src now=src --quantization fp8 --kv-cache-dtype fp8

A tree is a folder with the package `slipstream`. Random weights of the true shape. Each start is a process of its own. The
first of each tree, which compiles modules (as pip leaves them) and kernels, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

RECORD = "gpu_start"

START = """
import json, os, sys, time
from slipstream import LLM, SamplingParams

llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **json.loads(sys.argv[2]))
sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([{"prompt_token_ids": list(range(1, 129))}], [sampling], progress=False)
ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
print(json.dumps({"start_to_first_token_s": age, "phases_s": llm.phases}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)


def started(tree: Path, config: Path, settings: dict[str, Any]) -> dict[str, Any]:
    others = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(tree.resolve()), *([others] if others else [])])
    env = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", START, str(config), json.dumps(settings)],
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    trees = {name: Path(folder) for name, _, folder in (one.partition("=") for one in args.tree)}
    settings = {
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "device": args.device,
    }
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for i in range(args.rounds + 1):
        for name, tree in trees.items():
            found = started(tree, common.CONFIGS / args.config, settings)
            print(name, json.dumps(found), flush=True)
            if i:
                starts[name].append(found)
        if i:  # written after each round: a lent machine may go first
            medians = {
                name: statistics.median(s["start_to_first_token_s"] for s in own)
                for name, own in starts.items()
            }
            print(medians, flush=True)
            save(settings=settings | {"config": args.config}, medians=medians, starts=starts)
