"""Gaps between the tokens of streams, beside the first and the second use of each feature after a start.

    python benchmarks/engine.py --study first-uses --quantization fp8 --kv-cache-dtype fp8
    python benchmarks/engine.py --study first-uses --config smollm2 --device cpu --streams 2 --shrink 8

Random weights of the true shape and a made vocabulary of its size. `--streams` answers run while four requests of one
load arrive. Then the next load's turn comes; all loads come twice. What the first pass has more than the second is the
price of a first use. Python's collector is off in this process, as it is in a server between requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from cases.engine.long import lengthened
from cases.features.grammar import made_tokenizer

from slipstream import AsyncLLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.params.answer_forms import StructuredOutputsParams

CONTEXT, COUNT = 200, 4
"""Tokens of a stream's prompt and of a load's, and requests of a load."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (CONTEXT, {"temperature": 0}),
    "drawn": (CONTEXT, {"temperature": 0.8, "top_p": 0.95, "top_k": 50}),
    "penalties": (CONTEXT, {"presence_penalty": 0.5, "frequency_penalty": 0.5}),
    "log-probabilities": (CONTEXT, {"logprobs": 5}),
    "schema": (CONTEXT, {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}),
    "expression": (CONTEXT, {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{40,}")}),
    "another": (CONTEXT, {"structured_outputs": StructuredOutputsParams(regex=r"(\d{3}-)+")}),
    "choice": (CONTEXT, {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}),
    "long": (8000, {"temperature": 0}),
}
"""Mapping from a load to (tokens of a prompt, sampling parameters)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, for a trial")


async def passes(args: argparse.Namespace, how: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    begun = time.perf_counter()
    engine = await AsyncLLM.start(EngineArgs(**how))
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - begun, 1)}
    arrivals: list[list[float]] = []
    seeds = iter(range(10**6))

    async def ask(length: int, sampling: SamplingParams, times: list[float]) -> None:
        (prompt,) = common.prompts([length // args.shrink], vocab_size, next(seeds))
        async for _ in engine.generate(prompt, sampling):
            times.append(time.perf_counter())

    async def stream() -> None:
        most = how["max_model_len"] // 2
        endless = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        while True:
            arrivals.append([])
            await ask(CONTEXT, endless, arrivals[-1])

    gc.collect()
    gc.freeze()
    gc.disable()
    tasks = [asyncio.create_task(stream()) for _ in range(args.streams)]
    await asyncio.sleep(2)
    for name in ("first_pass", "second_pass"):
        found[name] = {}
        for load in args.loads:
            length, given = LOADS[load]
            sampling = SamplingParams(max_tokens=40, **given)
            begun, times = time.perf_counter(), [list[float]() for _ in range(COUNT)]
            await asyncio.gather(*(ask(length, sampling, own) for own in times))
            pairs = [pair for own in arrivals for pair in pairwise(own) if pair[0] >= begun]
            gaps = sorted(1e3 * (b - a) for a, b in pairs)
            row = (gaps[len(gaps) // 2], gaps[-1], 1e3 * (max(own[0] for own in times) - begun))
            found[name][load] = [round(value, 1) for value in row]
            print(f"{name:12} {load:18} {found[name][load]}", flush=True)
            await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.shutdown()
    gc.enable()
    return found


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    longest = 2 * 8000 // args.shrink
    with tempfile.TemporaryDirectory() as folder:
        config = lengthened(common.CONFIGS / args.config, longest)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made_tokenizer(Path(folder), config["vocab_size"])
        how: dict[str, Any] = dict(
            model=folder,
            load_format="dummy",
            max_model_len=longest,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            device=args.device,
        )
        found = asyncio.run(passes(args, how, config["vocab_size"]))
    save(columns_ms=["median gap", "largest gap", "largest time to a first token"], **found)
