"""A neighbour that takes a core and gives it back: threads that follow it beside a fixed number.

    python benchmarks/steps.py --study threads [--rounds 6] [--seconds 6] [--neighbours 1]      # record threads.json

One stream of SmolLM2's packaged Q4_1 decodes. Two engines in this process take turns: one whose threads may change
(`thread_governor`), and one with as many by `num_threads`. In each round both run for some seconds alone and for some beside
`--neighbours` processes that do nothing but compute; who is first alternates. Output tokens per second; medians of ratios
within a round. Answers must be the same. On a machine that is busy already the ratios say little.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream import LLM, SamplingParams
from slipstream.costs.hardware import available_cores
from slipstream.hub import resolve_model

TOKENS = 64


def tokens_per_s(llm: Any, seconds: float) -> tuple[float, set[tuple[int, ...]], list[int]]:
    """(speed, the different answers, the threads that worked behind each)"""
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begin, count, found, threads = time.perf_counter(), 0, set(), []
    while time.perf_counter() - begin < seconds:
        (output,) = llm.generate([{"prompt_token_ids": [1] + [300] * 31}], sampling, progress=False)
        found.add(tuple(output.outputs[0].token_ids))
        count += TOKENS
        threads.append(llm.core.executor.runner.ops.pool.num_used)
    return count / (time.perf_counter() - begin), found, threads


RECORD = "threads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--neighbours", type=int, default=1)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    path, cores = str(resolve_model("smollm2")), available_cores()
    common_settings: dict[str, Any] = dict(
        device="cpu", max_model_len=512, max_num_seqs=1, enable_prefix_caching=False
    )
    engines = {
        "follows": LLM(path, **common_settings),
        "fixed": LLM(path, num_threads=cores, **common_settings),
    }
    answers: set[tuple[int, ...]] = set()
    rounds = []
    for i in range(args.rounds):
        found: dict[str, Any] = {}
        for beside in (0, args.neighbours):
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)
            ]
            try:
                for name in sorted(engines, reverse=bool(i % 2)):
                    speed, own, threads = tokens_per_s(engines[name], args.seconds)
                    answers |= own
                    mean = sum(threads) / len(threads)
                    found[f"{name}, {beside} neighbours"] = {
                        "tokens_per_s": speed,
                        "mean_threads": mean,
                    }
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
        for beside in (0, args.neighbours):
            ours, other = (
                found[f"{name}, {beside} neighbours"]["tokens_per_s"]
                for name in ("follows", "fixed")
            )
            found[f"ratio, {beside} neighbours"] = ours / other
        print(found, flush=True)
        rounds.append(found)
    assert len(answers) == 1, "answers differ"
    names = [f"ratio, {n} neighbours" for n in (0, args.neighbours)]
    ratios = {name: common.median([r[name] for r in rounds]) for name in names}
    print(ratios)
    load = Path("/proc/loadavg").read_text().split()[0]
    save(cores=cores, load=load, medians=ratios, rounds=rounds)
