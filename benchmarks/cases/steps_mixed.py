"""Steps of decodes and prompts on a GPU: host and GPU time by graph and op by op, and what a graph costs to capture.

    python benchmarks/steps.py --study mixed [--config llama-3-8b] [--quantization fp8] [--kv-cache-dtype fp8]

Random weights of the true shape. Each case is one step, launched again and again over the same places: the host's time until
`launch` returns, the GPU's time, and the time of a step when steps are launched back to back, as the engine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import common

from slipstream import LLM, SamplingParams
from slipstream.types import NewRequest, ScheduledRequest, StepPlan, TableUpdate

CASES = (
    *((64, 300, ()), (80, 300, (220,)), (80, 300, (432,)), (96, 300, (100, 100, 216))),
    *((250, 400, (260, 240)), (0, 0, (2048,)), (64, 300, (4032,))),
)
"""(decodes, tokens in the cache of each, prompts)"""
REPEATS = 30
GREEDY = SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)


def plans(
    decodes: int, context: int, prompts: tuple[int, ...], block_size: int
) -> tuple[StepPlan, StepPlan]:
    """The step with its new sequences, and the same step once they are known."""
    new, scheduled, next_block = [], [], 1
    shares = [(f"d{i}", context, 1) for i in range(decodes)] + [
        (f"p{i}", 0, n) for i, n in enumerate(prompts)
    ]
    for name, computed, count in shares:
        blocks = -(-(computed + count + 1) // block_size)
        update = TableUpdate(0, 0, tuple(range(next_block, next_block + blocks)))
        next_block += blocks
        tokens = tuple((7 * i + computed + len(new)) % 30_000 for i in range(computed + count))
        new.append(NewRequest(name, tokens, computed + count, GREEDY))
        scheduled.append(ScheduledRequest(name, computed, count, 1, (update,)))
    again = tuple(s._replace(table_updates=()) for s in scheduled)
    return StepPlan(1, tuple(scheduled), tuple(new)), StepPlan(2, again)


def measure(
    runner: Any, case: tuple[int, int, tuple[int, ...]], paths: list[Any]
) -> dict[str, Any]:
    import torch

    runner.forget_rows()
    runner.forwards.paths = paths
    first, again = plans(*case, runner.config.cache.block_size)
    tokens = runner.launch(first).result().token_ids
    for _ in range(5):
        runner.launch(again).result()
    host, gpu = [], []
    for _ in range(REPEATS):
        runner.platform.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        at = time.perf_counter()
        begin.record()
        step = runner.launch(again)
        end.record()
        host.append((time.perf_counter() - at) * 1e3)
        step.result()
        runner.platform.synchronize()
        gpu.append(begin.elapsed_time(end))
    at, steps = time.perf_counter(), []
    for _ in range(REPEATS):
        steps.append(runner.launch(again))
        if len(steps) > 2:
            steps.pop(0).result()
    for step in steps:
        step.result()
    each = (time.perf_counter() - at) / REPEATS * 1e3
    return {
        "host_ms": statistics.median(host),
        "gpu_ms": statistics.median(gpu),
        "step_ms": each,
        "tokens": list(tokens),
    }


RECORD = "mixed_steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    options = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
    )
    options |= dict(max_num_seqs=1024, max_num_batched_tokens=16384)
    llm = LLM(
        str(common.CONFIGS / args.config),
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        **options,
    )
    runner = llm.core.executor.runner
    graphs, rows, captures = runner.graphs, [], []
    for _ in range(20):
        runner.platform.synchronize()
        free, at = runner.platform.memory()[0], time.perf_counter()
        runner.capture_next()
        runner.platform.synchronize()
        captures.append(
            {"ms": (time.perf_counter() - at) * 1e3, "bytes": free - runner.platform.memory()[0]}
        )
    paths = runner.forwards.paths
    for case in CASES:
        ways = {"graph": paths, "eager": [path for path in paths if path is not graphs]}
        found = {name: measure(runner, case, own) for name, own in ways.items()}
        ours, theirs = (found[name].pop("tokens") for name in ("graph", "eager"))
        row = {"decodes": case[0], "context": case[1], "prompts": case[2], **found}
        row["equal_tokens"] = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
        rows.append(row)
        print(json.dumps(row), flush=True)
    settings = {
        "config": args.config,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    save(settings=settings, captures=captures, rows=rows)
