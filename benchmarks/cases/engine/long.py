"""Long contexts: steps of some sequences, first tokens of prompts, and of a few new tokens after a cached context.

    python benchmarks/engine.py --study long --quantization fp8 --kv-cache-dtype fp8
    python benchmarks/engine.py --study long --parts beside --target-itl-ms 20      prompts that arrive among 32 streams

Random weights of the true shape, with positions for the longest case. A step's time is the median of five answers' times
from their first to their last token. A hit's time is that from the call of `generate` to the last answer of one token.
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

from slipstream import LLM, AsyncLLM, SamplingParams
from slipstream.config import EngineArgs

STEPS = (
    (1, 200),
    (1, 4000),
    (1, 16000),
    (1, 32000),
    (1, 100000),
    (16, 16000),
    (8, 60000),
    (64, 8000),
)
HITS = ((64, 500), (8, 30000), (64, 8000))
NEW, NUM_STEPS = 16, 48
"""New tokens after a cached context, and steps that are timed."""
STREAMS, CONTEXT = 32, 500
"""Streams that a long prompt arrives among, and the tokens of each one's prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--parts", nargs="+", default=["steps", "hits"], choices=["steps", "hits", "beside"]
    )
    parser.add_argument("--target-itl-ms", type=float, help="objective of the part beside")
    parser.add_argument("--prompts", type=int, nargs="*", default=[8000, 32000, 120000])
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, for a trial")


def lengthened(config: Path, positions: int) -> dict[str, Any]:
    """A model's config with room for `positions`."""
    found: dict[str, Any] = json.loads((config / "config.json").read_text())
    found["max_position_embeddings"] = positions
    found.pop("rope_scaling", None)
    return found


def answers(llm: LLM, given: list[dict[str, list[int]]], count: int) -> Any:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return llm.generate(given, sampling, progress=False)


def seconds(llm: LLM, given: list[dict[str, list[int]]]) -> float:
    begun = time.perf_counter()
    answers(llm, given, 1)
    return time.perf_counter() - begun


def step_ms(llm: LLM, given: list[dict[str, list[int]]]) -> float:
    seconds(llm, given)  # into the cache
    found = []
    for _ in range(5):
        times = [x.times for x in answers(llm, given, 1 + NUM_STEPS)]
        last, first = max(t.last_token for t in times), max(t.first_token for t in times)
        found.append(1e3 * (last - first) / NUM_STEPS)
    return common.median(found)


async def beside(args: argparse.Namespace, how: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Gaps in ms between the tokens of `STREAMS` streams: alone, and while a long prompt and then a short one are computed.

    Prompts are drawn before a measurement. Python's collector is off in this process, as it is in a server between requests.
    """
    engine = await AsyncLLM.start(EngineArgs(**how))
    arrivals: list[list[float]] = []

    async def stream(seed: int) -> None:
        (prompt,) = common.prompts([CONTEXT // args.shrink or 1], vocab_size, seed)
        endless = SamplingParams(
            temperature=0, max_tokens=how["max_model_len"] // 2, ignore_eos=True
        )
        times: list[float] = []
        arrivals.append(times)
        async for _ in engine.generate(prompt, endless):
            times.append(time.perf_counter())

    async def first_token(prompt: Any, wait_s: float) -> float:
        await asyncio.sleep(wait_s)
        begun = time.perf_counter()
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
            pass
        return round(1e3 * (time.perf_counter() - begun), 1)

    def gaps_since(begun: float) -> list[float]:
        pairs = [pair for times in arrivals for pair in pairwise(times)]
        return sorted(1e3 * (b - a) for a, b in pairs if a >= begun)

    def summary(gaps: list[float]) -> dict[str, float]:
        at = {"median": len(gaps) // 2, "p99": 99 * len(gaps) // 100, "max": len(gaps) - 1}
        return {name: round(gaps[index], 2) for name, index in at.items()} | {"gaps": len(gaps)}

    gc.collect()
    gc.freeze()
    gc.disable()
    tasks = [asyncio.create_task(stream(seed)) for seed in range(STREAMS)]
    await asyncio.sleep(2)
    begun = time.perf_counter()
    await asyncio.sleep(2)
    found: dict[str, Any] = {"alone": summary(gaps_since(begun)), "target_ms": args.target_itl_ms}
    print("alone", found["alone"], flush=True)
    for length in args.prompts:
        long, short = common.prompts([length // args.shrink, 100], vocab_size, length)
        await asyncio.sleep(0.3)
        begun = time.perf_counter()
        both = await asyncio.gather(first_token(long, 0), first_token(short, 0.1))
        firsts = dict(zip(("first_token_ms", "short_first_token_ms"), both, strict=True))
        found[str(length)] = summary(gaps_since(begun)) | firsts
        print(length, found[str(length)], flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.shutdown()
    gc.enable()
    return found


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    longest = max([n for _, n in (*STEPS, *HITS)] + args.prompts) // args.shrink + 2 * NUM_STEPS
    found: dict[str, dict[str, Any]] = {"prompt_ms": {}, "step_ms": {}, "hits_ms": {}}
    with tempfile.TemporaryDirectory() as folder:
        config = lengthened(common.CONFIGS / args.config, longest)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        how: dict[str, Any] = dict(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            device=args.device,
        )
        if "beside" in args.parts:
            how["target_itl_ms"] = args.target_itl_ms
            save(streams=asyncio.run(beside(args, how, config["vocab_size"])))
            return
        llm = LLM(**how)

    def texts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        return common.prompts([length // args.shrink] * count, config["vocab_size"], seed)

    def note(kind: str, case: str, value: Any) -> None:
        found[kind][case] = value
        print(f"{kind:10} {case:10} {value}", flush=True)
        save(**found)

    seconds(llm, texts(2, 100 * args.shrink, 0))
    for length in args.prompts:
        times = [seconds(llm, texts(1, length, seed)) for seed in range(3)]
        note("prompt_ms", str(length), round(1e3 * common.median(times), 1))
    for count, length in STEPS if "steps" in args.parts else ():
        note("step_ms", f"{count}x{length}", round(step_ms(llm, texts(count, length, 1)), 3))
    for count, length in HITS if "hits" in args.parts else ():
        contexts = texts(count, length, 2)
        seconds(llm, contexts)
        times = []
        for seed in range(5):
            more = common.prompts([NEW] * count, config["vocab_size"], 3 + seed)
            both = zip(contexts, more, strict=True)
            given = [
                {"prompt_token_ids": a["prompt_token_ids"] + b["prompt_token_ids"]} for a, b in both
            ]
            times.append(round(1e3 * seconds(llm, given), 1))
        note("hits_ms", f"{count}x{length}+{NEW}", times)
    llm.shutdown()
