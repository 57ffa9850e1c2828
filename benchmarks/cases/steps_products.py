"""Decode steps on Hopper with its own products of few tokens (`hopper_linear`), and without them (`linear`, cuBLAS).

    python benchmarks/steps.py --study products [--config llama-3-8b] [--quantization fp8] [--tokens 2,6,8,16,24,32,48,64]

Random weights of the true shape, 300 tokens in the cache of each sequence. A step's graph is captured both ways, and both are
replayed in turns: medians of the GPU's time. `difference`: of the hidden states, relative to their length. Where it is 0 both
ways add up in one order. Elsewhere rounding to 8 bits turns the last bit of a sum into another number, layer after layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import common

from slipstream import LLM

ROUNDS, REPLAYS, CONTEXT = 4, 25, 300


RECORD = "step_products"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokens", default="2,6,8,16,24,32,48,64")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    import torch
    from cases.steps_mixed import plans

    from slipstream.kernels.triton import linear
    from slipstream.worker.graphs import StepGraphs

    options = dict(load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=4096)
    llm = LLM(
        str(common.CONFIGS / args.config),
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=64,
        **options,
    )
    runner = llm.core.executor.runner
    others = [path for path in runner.forwards.paths if not isinstance(path, StepGraphs)]
    rows = []
    ways: dict[str, Callable[..., Any]] = {"without": lambda *_: None, "with": linear._on_hopper}
    for num_seqs in map(int, args.tokens.split(",")):
        graphs, hidden, times = {}, {}, {way: list[float]() for way in ways}
        for way, chosen in ways.items():
            with patch.object(linear, "_on_hopper", chosen), torch.inference_mode():
                graphs[way] = StepGraphs(runner.forwards, runner.kv, runner.rows, runner.config)
                captured = graphs[way]._decode_graph(num_seqs)
            runner.forget_rows()
            runner.forwards.paths = [graphs[way], *others]
            first, again = plans(num_seqs, CONTEXT, (), runner.config.cache.block_size)
            for plan in (first, again):  # the graph keeps this step's inputs
                runner.launch(plan).result()
            hidden[way] = captured.output[:num_seqs].float().clone()
        for _ in range(ROUNDS):
            for way, own in graphs.items():
                times[way] += runner.platform.timed_replays(own._captured[num_seqs, 0].graph, REPLAYS)
        found: dict[str, Any] = {way: statistics.median(values) for way, values in times.items()}
        found["ratio"] = found["with"] / found["without"]
        found["difference"] = float((hidden["with"] - hidden["without"]).norm() / hidden["without"].norm())
        rows.append({"tokens": num_seqs, **found})
        print(json.dumps(rows[-1]), flush=True)
    save(settings={name: getattr(args, name) for name in ("config", "quantization", "kv_cache_dtype")}, rows=rows)
