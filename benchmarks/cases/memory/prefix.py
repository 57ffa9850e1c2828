"""Effect of reusing a shared prefix on the time to first token, on a CPU.

    python benchmarks/memory.py --study prefix

SmolLM2-135M-Instruct, 32 requests that share a 400-token system prompt and have 32 tokens of their own, 32 tokens out:
once all at the same moment, once by 4 users who take turns. Engines with and without prefix caching take turns. Each round
has a system prompt of its own, so that its first request always misses. Medians over the rounds of the mean TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.load import Burst, ClosedLoop, run_load
from slipstream.bench.report import print_table
from slipstream.bench.workload import shared_prefix
from slipstream.config import EngineArgs
from slipstream.costs.metrics import summarize
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec


async def measure(args) -> None:
    vocab = read_spec(resolve_model(args.model)).spec.vocab_size
    loads = {"burst": Burst(), "4 users": ClosedLoop(concurrency=4)}
    engines, runs = {}, {(load, on): [] for load in loads for on in (True, False)}
    for on in (True, False):
        settings = EngineArgs(
            model=args.model,
            device="cpu",
            dtype=args.dtype,
            max_model_len=1024,
            enable_prefix_caching=on,
            skip_tokenizer_init=True,
        )
        engines[on] = await AsyncSlipstream.start(settings)
    try:
        for seed in range(args.rounds + 1):
            for load, arrivals in loads.items():
                for on, engine in engines.items():
                    distinct = seed * len(loads) + list(loads).index(load)
                    workload = shared_prefix(
                        args.num_requests,
                        args.prefix_len,
                        32,
                        32,
                        vocab_size=vocab,
                        seed=1000 + distinct,
                    )
                    summary = summarize(await run_load(engine, workload.requests, arrivals))
                    assert not summary.num_failed, summary.errors
                    if seed:  # the first round warms up
                        runs[load, on].append(summary)
                        print(
                            f"round {seed}, {load}, reuse {on}: mean TTFT {summary.ttft_s.mean * 1e3:.1f} ms",
                            flush=True,
                        )
        described = {f"reuse {on}": await engine.describe() for on, engine in engines.items()}
    finally:
        for engine in engines.values():
            await engine.engine.shutdown()
    ttft = {key: common.median([s.ttft_s.mean for s in each]) for key, each in runs.items()}
    cached = {key: each[-1].cached_tokens for key, each in runs.items()}
    rows = [
        (
            load,
            f"{ttft[load, False] * 1e3:.1f}",
            f"{ttft[load, True] * 1e3:.1f}",
            f"{ttft[load, False] / ttft[load, True]:.2f} ×",
            f"{cached[load, True]:,} of {runs[load, True][-1].input_tokens:,}",
        )
        for load in loads
    ]
    columns = ("mean TTFT, ms", "without reuse", "with reuse", "shorter by", "tokens reused")
    print_table(f"{args.num_requests} requests, {args.prefix_len} tokens in common", columns, rows)
    common.save(
        args.output,
        "prefix",
        workload=workload.describe(),
        engines=described,
        runs={f"{load}, reuse {on}": each for (load, on), each in runs.items()},
        results={
            load: {"without_s": ttft[load, False], "with_s": ttft[load, True]} for load in loads
        },
        ratios={load: ttft[load, False] / ttft[load, True] for load in loads},
    )


RECORD = "prefix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--prefix-len", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    asyncio.run(measure(args))
