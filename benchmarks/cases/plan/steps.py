"""Times of steps on this machine, for `slipstream plan`: decodes, prompts and both together, with
a model's true shape.

    python benchmarks/plan.py --study steps --config llama-3-8b --quantization fp8 --kv-cache-dtype fp8 [--rounds 5]

Weights are random. The table it writes is the one that `slipstream plan --measure` keeps for itself. In
`src/slipstream/costs/data/steps-NAME.json` it is shipped, and used for every machine with that device. What host and front end
add is measured by bursts through `AsyncLLM`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import common

from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.costs.environment import plain
from slipstream.hub import resolve_model
from slipstream.optimize.step_table import measure_table
from slipstream.spec.description import read_spec

RECORD = "step_costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="a folder of benchmarks/configs, with random weights")
    parser.add_argument("--model", default="smollm2", help="a model instead")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest context")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    settings = EngineArgs(
        model=str(common.CONFIGS / args.config) if args.config else args.model,
        load_format="dummy" if args.config else "auto",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=args.max_num_seqs,
    )
    description = read_spec(resolve_model(settings.model))
    table, ceilings = measure_table(settings, description, longest=args.longest, rounds=args.rounds)
    data = table.as_data()
    data["made_by"] |= {
        "ceilings": ceilings,
        "settings": {**vars(args), "output": args.output.name},
    }
    data = common.without_folders(json.loads(json.dumps(data, default=plain)))
    args.output.write_text(json.dumps(data) + "\n", encoding="utf-8")
    rows = [
        (*map(str, p.shape), f"{p.seconds * 1e3:.3f}", f"{table.seconds(p.shape) * 1e3:.3f}")
        for p in table.points
    ]
    print_table("steps, ms", (*table.points[0].shape._fields, "measured", "fitted"), rows)
    print(f"fitted to {table.error:.1%}; host {table.host}\nwritten: {args.output}")
