"""Batching in flight on a CPU: its speed next to static batching and transformers, and the KV
memory that it wastes.

    python benchmarks/engine.py --study batching                      # speed; record batching.json
    python benchmarks/engine.py --study batching --measure memory     # record batching_memory.json

Speed: SmolLM2-135M-Instruct, 32 requests with ShareGPT's lengths and random tokens, all there at the start, greedy, no
end-of-sequence, the same type and threads and at most `--batch-size` requests in a step for all. There are two static
baselines:

1. the classical one computes every sequence of a batch until the longest has ended, as transformers.generate does (Orca,
   OSDI 2022, section 3);
2. Slipstream's `static` policy drops sequences that have ended, and lets nobody join.

Only tokens that were asked for count. The engines take turns; medians over the rounds. Output tokens per second of wall time.

Memory: a tiny model, requests with ShareGPT's lengths, and a cache of `--num-tokens` that holds only some of them at once.
The engine's own count is read every few milliseconds. Wasted is each position of an allocated block that holds no token.
Only readings with requests waiting count: that is saturation.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream, OfflineSlipstream
from slipstream.bench.adapters.transformers import OfflineTransformers
from slipstream.bench.load import Burst, run_load
from slipstream.bench.report import print_table
from slipstream.bench.workload import BenchRequest, recorded, warmup
from slipstream.config import EngineArgs
from slipstream.costs.hardware import available_cores
from slipstream.costs.metrics import RequestTiming, distribution, summarize
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

TINY = common.CONFIGS / "tiny"


class Padded:
    """Classical static batching on the static policy: every member of a batch runs as long as its longest."""

    def __init__(self, engine: OfflineSlipstream, batch_size: int) -> None:
        self.engine, self.batch_size = engine, batch_size

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        batches = [
            requests[i : i + self.batch_size] for i in range(0, len(requests), self.batch_size)
        ]
        padded = [
            replace(r, output_tokens=max(m.output_tokens for m in batch))
            for batch in batches
            for r in batch
        ]
        records = self.engine.run(padded)
        return [
            replace(record, output_tokens=r.output_tokens)
            for record, r in zip(records, requests, strict=True)
        ]

    def describe(self) -> dict[str, object]:
        return self.engine.describe()


def speed(args: argparse.Namespace) -> None:
    path, threads = resolve_model(args.model), available_cores()
    workload = recorded(
        args.lengths_file, args.num_requests or 32, vocab_size=read_spec(path).spec.vocab_size
    )

    def slipstream(policy: str) -> OfflineSlipstream:
        return OfflineSlipstream(
            EngineArgs(
                model=args.model,
                dtype=args.dtype,
                device="cpu",
                scheduling_policy=policy,
                max_num_seqs=args.batch_size,
                max_model_len=2048,
                enable_prefix_caching=False,
                num_threads=threads,
            )
        )

    engines = {
        "slipstream, in-flight": slipstream("inflight"),
        "slipstream, static": Padded(slipstream("static"), args.batch_size),
        "slipstream, static, ended rows dropped": slipstream("static"),
        "transformers.generate": OfflineTransformers(
            path,
            batch_size=args.batch_size,
            dtype=args.dtype,
            device="cpu",
            num_threads=threads,
            dummy=False,
        ),
    }
    for engine in engines.values():
        engine.run(warmup(workload, args.batch_size))
    runs = {name: [] for name in engines}
    for number in range(args.rounds):
        for name, engine in engines.items():
            runs[name].append(summarize(engine.run(workload.requests)))
            print(
                f"round {number + 1}, {name}: {runs[name][-1].output_throughput:.1f} output tok/s",
                flush=True,
            )

    rate = {name: common.median([s.output_throughput for s in each]) for name, each in runs.items()}
    ttft = {name: common.median([s.ttft_s.mean for s in each]) for name, each in runs.items()}
    first, static, dropping, peer = rate.values()
    print_table(
        f"{workload.name} × {len(workload.requests)}, {workload.input_tokens} tokens in, {workload.output_tokens} out",
        ("", "output tok/s", "mean TTFT, s", "in-flight is"),
        [
            (name, f"{rate[name]:.1f}", f"{ttft[name]:.2f}", f"{first / rate[name]:.2f} ×")
            for name in engines
        ],
    )
    common.save(
        args.output or common.RESULTS / "batching.json",
        "batching",
        workload=workload.describe(),
        engines={name: engine.describe() for name, engine in engines.items()},
        runs=runs,
        results={
            "output_throughput": rate,
            "mean_ttft_s": ttft,
            "inflight_over_static": first / static,
            "inflight_over_static_dropping": first / dropping,
            "inflight_over_transformers": first / peer,
            "static_over_transformers": static / peer,
        },
    )


async def memory(args: argparse.Namespace) -> None:
    spec, count = read_spec(TINY).spec, args.num_requests or 256
    workload = recorded(args.lengths_file, count, vocab_size=spec.vocab_size)
    settings = EngineArgs(
        model=str(TINY),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=count,
        max_num_batched_tokens=max(512, count),
        kv_cache_bytes=args.num_tokens * spec.kv_bytes_per_token(4),
    )
    engine = await AsyncSlipstream.start(settings)
    readings = []
    try:
        load = asyncio.create_task(run_load(engine, workload.requests, Burst()))
        while not load.done():
            stats = await engine.engine.stats()
            if stats.num_waiting and stats.num_running > 1:
                readings.append(
                    (
                        stats.kv_wasted_tokens / stats.kv_allocated_tokens,
                        stats.num_running,
                        stats.kv_cache_usage,
                    )
                )
            await asyncio.sleep(0.005)
        summary = summarize(await load)
        described = await engine.describe()
    finally:
        await engine.engine.shutdown()
    assert not summary.num_failed, summary.errors
    assert readings, "the cache was never saturated; lower --num-tokens"
    waste = distribution(w for w, _, _ in readings)
    running = distribution(float(n) for _, n, _ in readings)
    usage = distribution(u for _, _, u in readings)
    print_table(
        f"{len(readings)} readings at saturation, cache of {args.num_tokens:,} tokens, {summary.num_requests} requests",
        ("", "mean", "p50", "p99"),
        [
            ("wasted", *(f"{v:.2%}" for v in (waste.mean, waste.p50, waste.p99))),
            ("cache in use", *(f"{v:.1%}" for v in (usage.mean, usage.p50, usage.p99))),
            ("sequences running", *(f"{v:.0f}" for v in (running.mean, running.p50, running.p99))),
        ],
    )
    common.save(
        args.output or common.RESULTS / "batching_memory.json",
        "batching_memory",
        workload=workload.describe(),
        engine=described,
        results={
            "wasted": waste,
            "cache_in_use": usage,
            "num_running": running,
            "num_readings": len(readings),
        },
    )


RECORD = "batching"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", choices=("speed", "memory"), default="speed")
    parser.set_defaults(output=None)
    parser.add_argument("--num-requests", type=int, help="(default: 32; of memory 256)")
    parser.add_argument("--lengths-file", type=Path, default=common.SHAREGPT)
    parser.add_argument("--model", default="smollm2", help="speed: (default: smollm2)")
    parser.add_argument("--batch-size", type=int, default=8, help="speed: (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="speed: (default: 3)")
    parser.add_argument("--dtype", default="bfloat16", help="speed: (default: bfloat16)")
    parser.add_argument(
        "--num-tokens",
        type=int,
        default=16384,
        help="memory: that the cache holds (default: 16384)",
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.measure == "speed":
        speed(args)
    else:
        asyncio.run(memory(args))
