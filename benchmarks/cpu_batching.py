"""In-flight against static batching in Slipstream, and both against transformers.generate, on a CPU.

    python benchmarks/cpu_batching.py

SmolLM2-135M-Instruct, real ShareGPT prompts, answers as long as ShareGPT's: 32 requests, all there at the start, greedy,
end-of-sequence ignored, the same type, the same threads, at most --batch-size requests in a step for all three. The three
take turns, so that a busy neighbour disturbs all alike; medians over the rounds. Output tokens per second of wall time.
"""

from __future__ import annotations

import common

from slipstream.bench.adapters.slipstream import OfflineSlipstream
from slipstream.bench.adapters.transformers import OfflineTransformers
from slipstream.bench.metrics import summarize
from slipstream.bench.report import print_table
from slipstream.bench.workload import recorded, sharegpt, warmup
from slipstream.config import EngineArgs
from slipstream.engine.tokenizer import Tokenizer
from slipstream.hub import read_sharegpt, resolve_dataset, resolve_model
from slipstream.plan.hardware import available_cores


def main() -> None:
    parser = common.parser(__doc__, "cpu_batching")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-output-len", type=int, default=1024, help="longer answers are left out")
    parser.add_argument("--lengths-file", help="take lengths from here, with random tokens, instead of ShareGPT's texts")
    args = parser.parse_args()

    path, threads = resolve_model(args.model), available_cores()
    tokenizer = Tokenizer.from_pretrained(path)
    if args.lengths_file:
        workload = recorded(common.Path(args.lengths_file), args.num_requests, vocab_size=tokenizer.vocab_size)
    else:
        turns = read_sharegpt(resolve_dataset("sharegpt"))
        fitting = ((p, a) for p, a in turns if len(a) < 3 * args.max_output_len)
        workload = sharegpt(fitting, tokenizer.encode, args.num_requests)

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
        "slipstream, static": slipstream("static"),
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
    first, static, peer = speed.values()
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
            "inflight_over_transformers": first / peer,
            "static_over_transformers": static / peer,
        },
    )


if __name__ == "__main__":
    main()
