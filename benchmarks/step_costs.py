"""What steps take on this machine, for `slipstream plan`: decodes, prompts and both together, with a model's true shape.

    python benchmarks/step_costs.py --config llama-3-8b --quantization fp8 --kv-cache-dtype fp8 [--rounds 5]

Weights are random. The table it writes is the one that `slipstream plan --measure` keeps for itself. In
`src/slipstream/plan/data/steps-NAME.json` it is shipped, and used for every machine with that device. What host and front end
add is measured by bursts through `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import json

import common

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.host_costs import measure_host
from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.plan.engines import RUN_AHEAD
from slipstream.plan.environment import environment, plain
from slipstream.plan.estimate import bytes_by_part
from slipstream.plan.step_cost import HostCost, StepTable, fit_steps
from slipstream.plan.tables import identity
from slipstream.worker.ceilings import device_ceilings
from slipstream.worker.executor import LocalExecutor
from slipstream.worker.step_costs import grid, measure_steps


def main() -> None:
    parser = common.parser(__doc__, "step_costs")
    parser.add_argument("--config", help="a folder of benchmarks/configs, with random weights")
    parser.add_argument("--model", default="smollm2", help="a model instead")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest context")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-bytes", type=int)
    args = parser.parse_args()
    settings = EngineArgs(
        model=str(common.CONFIGS / args.config) if args.config else args.model,
        load_format="dummy" if args.config else "auto",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=args.max_num_seqs,
        kv_cache_bytes=args.kv_cache_bytes,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    executor = LocalExecutor.build(settings)
    while executor.capture_next():
        pass
    config, scheduling = executor.config, executor.config.scheduling
    limits = scheduling.max_num_seqs, scheduling.max_num_batched_tokens, config.model.max_model_len
    steps = grid(*limits, executor.ledger.num_kv_tokens, args.longest)
    points = measure_steps(executor, steps, rounds=args.rounds)
    info, spec = config.device.info, executor.description.spec
    ceilings = device_ceilings(executor.runner.ops, executor.runner.device)
    of = identity(config, spec, sum(bytes_by_part(config, executor.description).values()))
    made_by = {**environment(), "ceilings": ceilings, "settings": {**vars(args), "output": args.output.name}}
    table = fit_steps(points, identity=of, made_by=common.without_folders(json.loads(json.dumps(made_by, default=plain))))
    del executor

    async def host(table: StepTable) -> HostCost:
        async with await AsyncSlipstream.start(settings) as engine:
            ahead = None if info.is_cuda else RUN_AHEAD
            return await measure_host(engine, table, vocab_size=spec.vocab_size, run_ahead=ahead)

    table = table.with_host(asyncio.run(host(table)))
    args.output.write_text(json.dumps(table.as_data()) + "\n", encoding="utf-8")
    rows = [(*map(str, p.shape), f"{p.seconds * 1e3:.3f}", f"{table.seconds(p.shape) * 1e3:.3f}") for p in points]
    print_table("steps, ms", (*points[0].shape._fields, "measured", "fitted"), rows)
    print(f"fitted to {table.error:.1%}; host {table.host}\nwritten: {args.output}")


if __name__ == "__main__":
    main()
