"""In-flight against static batching in Slipstream, and both against transformers.generate, on a CPU.

    python benchmarks/cpu_batching.py

SmolLM2-135M-Instruct, 32 requests with the lengths of ShareGPT conversations (benchmarks/data/sharegpt-lengths.json, its
first 32; random tokens), all there at the start, greedy, end-of-sequence ignored, the same type, the same threads, at most
--batch-size requests in a step for all. Two static baselines: the classical one computes every row of a batch until its
longest has ended, as transformers.generate does (Orca, OSDI 2022, section 3); Slipstream's own `static` policy drops the
rows that have ended, and only lets nobody join. Tokens that nobody asked for are never counted. All take turns, so that a
busy neighbour disturbs all alike; medians over the rounds. Output tokens per second of wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import common

from slipstream.bench.adapters.slipstream import OfflineSlipstream
from slipstream.bench.adapters.transformers import OfflineTransformers
from slipstream.bench.metrics import RequestRecord, summarize
from slipstream.bench.report import print_table
from slipstream.bench.workload import BenchRequest, recorded, warmup
from slipstream.config import EngineArgs
from slipstream.hub import resolve_model
from slipstream.plan.hardware import available_cores
from slipstream.spec.description import read_spec

LENGTHS = Path(__file__).parent / "data" / "sharegpt-lengths.json"


class Padded:
    """Classical static batching on the static policy: every member of a batch runs as long as its longest."""

    def __init__(self, engine: OfflineSlipstream, batch_size: int) -> None:
        self.engine, self.batch_size = engine, batch_size

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestRecord]:
        batches = [requests[i : i + self.batch_size] for i in range(0, len(requests), self.batch_size)]
        padded = [replace(r, output_tokens=max(m.output_tokens for m in batch)) for batch in batches for r in batch]
        records = self.engine.run(padded)
        return [replace(record, output_tokens=r.output_tokens) for record, r in zip(records, requests, strict=True)]

    def describe(self) -> dict[str, object]:
        return self.engine.describe()


def main() -> None:
    parser = common.parser(__doc__, "cpu_batching")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths-file", type=Path, default=LENGTHS)
    args = parser.parse_args()

    path, threads = resolve_model(args.model), available_cores()
    workload = recorded(args.lengths_file, args.num_requests, vocab_size=read_spec(path).spec.vocab_size)

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
            path, batch_size=args.batch_size, dtype=args.dtype, device="cpu", num_threads=threads, dummy=False
        ),
    }
    for engine in engines.values():
        engine.run(warmup(workload, args.batch_size))
    runs = {name: [] for name in engines}
    for number in range(args.rounds):
        for name, engine in engines.items():
            runs[name].append(summarize(engine.run(workload.requests)))
            print(f"round {number + 1}, {name}: {runs[name][-1].output_throughput:.1f} output tok/s", flush=True)

    speed = {name: common.median([s.output_throughput for s in each]) for name, each in runs.items()}
    ttft = {name: common.median([s.ttft_s.mean for s in each]) for name, each in runs.items()}
    first, static, dropping, peer = speed.values()
    print_table(
        f"{workload.name} × {len(workload.requests)}, {workload.input_tokens} tokens in, {workload.output_tokens} out",
        ("", "output tok/s", "mean TTFT, s", "in-flight is"),
        [(name, f"{speed[name]:.1f}", f"{ttft[name]:.2f}", f"{first / speed[name]:.2f} ×") for name in engines],
    )
    common.save(
        args.output,
        "cpu_batching",
        workload=workload.describe(),
        engines={name: engine.describe() for name, engine in engines.items()},
        runs=runs,
        results={
            "output_throughput": speed,
            "mean_ttft_s": ttft,
            "inflight_over_static": first / static,
            "inflight_over_static_dropping": first / dropping,
            "inflight_over_transformers": first / peer,
            "static_over_transformers": static / peer,
        },
    )


if __name__ == "__main__":
    main()
