"""How much of the KV cache is allocated and never written, while requests wait for memory.

    python benchmarks/kv_waste.py [--lengths-file FILE]

ShareGPT's lengths (from the data set, or from a file), random tokens, a tiny model, and a cache that holds only some of
the requests at once. The engine's own count is read every few milliseconds: wasted is every position of an allocated
block that holds no token. Only readings with requests waiting count: that is saturation.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.load import Burst, run_load
from slipstream.bench.metrics import distribution, summarize
from slipstream.bench.report import print_table
from slipstream.bench.workload import from_lengths, recorded, sharegpt
from slipstream.config import EngineArgs
from slipstream.spec.description import read_spec

MODEL = Path(__file__).parent / "configs" / "tiny"


async def measure(args) -> None:
    spec = read_spec(MODEL).spec
    if args.lengths_file:
        workload = recorded(Path(args.lengths_file), args.num_requests, vocab_size=spec.vocab_size)
    else:
        from slipstream.engine.tokenizer import Tokenizer
        from slipstream.hub import read_sharegpt, resolve_dataset, resolve_model

        tokenizer = Tokenizer.from_pretrained(resolve_model("smollm2"))
        real = sharegpt(read_sharegpt(resolve_dataset("sharegpt")), tokenizer.encode, args.num_requests)
        lengths = [(len(r.prompt_token_ids), r.output_tokens) for r in real.requests]
        workload = from_lengths("sharegpt lengths", lengths, vocab_size=spec.vocab_size, seed=0)
    settings = EngineArgs(
        model=str(MODEL),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=args.num_requests,
        max_num_batched_tokens=max(512, args.num_requests),
        kv_cache_bytes=args.num_tokens * spec.kv_bytes_per_token(4),
    )
    engine = await AsyncSlipstream.start(settings)
    readings = []
    try:
        load = asyncio.create_task(run_load(engine, workload.requests, Burst()))
        while not load.done():
            stats = await engine.engine.stats()
            if stats.num_waiting and stats.num_running > 1:
                readings.append((stats.kv_wasted_tokens / stats.kv_allocated_tokens, stats.num_running, stats.kv_cache_usage))
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
        args.output,
        "kv_waste",
        workload=workload.describe(),
        engine=described,
        results={"wasted": waste, "cache_in_use": usage, "num_running": running, "num_readings": len(readings)},
    )


def main() -> None:
    parser = common.parser(__doc__, "kv_waste")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=16384, help="that the cache holds")
    parser.add_argument("--lengths-file")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
