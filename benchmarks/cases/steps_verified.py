"""Steps that verify drafts on a GPU: in decode graphs, a row a token, and in mixed graphs, which take the drafts for prompts.

    python benchmarks/steps.py --study verified [--config llama-3-8b] [--quantization fp8] [--kv-cache-dtype fp8]

Random weights of the true shape; the drafts' own cost is not in these times.
`worker/graphs/step_graphs.py` chooses between the two by
MAX_KEYS_AGAIN and MIXED_ROWS, which this study sets so that one of them runs; `chosen` says which one they give.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import common

from slipstream import LLM
from slipstream.worker.graphs import step_graphs as graphs
from slipstream.worker.start.step_costs import Step, measure_steps

CONTEXTS = (256, 1024, 4096)
SIZES = (
    (16, 8),
    (32, 5),
    (64, 1),
    (64, 2),
    (64, 5),
    (128, 1),
    (128, 2),
    (128, 4),
    (256, 1),
    (256, 2),
)
"""(sequences, drafts of each)"""

RECORD = "verified_steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    options = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=8192,
    )
    options |= dict(
        max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_dtype=args.kv_cache_dtype
    )
    speculative = {"method": "ngram", "num_speculative_tokens": 8}
    llm = LLM(
        str(common.CONFIGS / args.config),
        quantization=args.quantization,
        speculative_config=speculative,
        **options,
    )
    executor = llm.core.executor
    room = (llm.core.ledger.num_blocks - 1) * llm.core.config.cache.block_size
    cases = [(n, drafts, c) for c in CONTEXTS for n, drafts in SIZES if n * (c + 32) <= room]
    steps = [Step(verified=((context, 1 + drafts),) * n) for n, drafts, context in cases]
    most, rows, found = graphs.MAX_KEYS_AGAIN, graphs.MIXED_ROWS, {}
    for way, bound in (("rows", 1 << 62), ("mixed", -(1 << 62))):
        graphs.MAX_KEYS_AGAIN = bound
        found[way] = [
            1e3 * step.seconds for step in measure_steps(executor, steps, rounds=args.rounds)
        ]
    table: list[dict[str, Any]] = []
    for (n, drafts, context), by_rows, mixed in zip(
        cases, found["rows"], found["mixed"], strict=True
    ):
        chosen = "rows" if n * (1 + drafts - rows) * context <= most else "mixed"
        row = {
            "sequences": n,
            "drafts": drafts,
            "context": context,
            "rows_ms": by_rows,
            "mixed_ms": mixed,
            "chosen": chosen,
        }
        table.append(row)
        print(json.dumps(row), flush=True)
    settings = {
        "config": args.config,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    save(settings=settings, rows=table)
