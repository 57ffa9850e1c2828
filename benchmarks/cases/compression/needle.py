"""Needles in long texts: how many numbers a model still finds with a KV cache of fewer bits.

    python benchmarks/compression.py --study needle --lengths 2048,4096,8000 --caches auto,fp8,int4

A prompt is held-out conversations with one sentence at a depth from 5 to 95 %, "The secret number of CITY is NUMBER.", and the
begin of that sentence again at its end. The number counts if the greedy continuation begins with its five digits. All caches
get the same prompts. A CPU needs `--kernels reference` for fp8 and int4 caches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.bench.report import print_table
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.text import TextSettings, read_windows
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Quebec", "Nairobi", "Prague")
ROOM = 64
"""Tokens of the sentence, the question and the answer."""


def prompts(tokenizer: Tokenizer, length: int, count: int) -> list[tuple[list[int], str]]:
    """`count` prompts of about `length` tokens, and their numbers."""
    size = length - ROOM
    text = TextSettings(context=512, stride=512, num_windows=2 * size * count // 512 + 1)
    stream = [token for window in read_windows(text, tokenizer) for token in window.token_ids]
    rng, found = random.Random(length), []
    for i in range(count):
        hay, number = stream[i * size : (i + 1) * size], str(rng.randint(10**4, 10**5 - 1))
        begin = f"\nThe secret number of {CITIES[i % len(CITIES)]} is"
        at = int(len(hay) * (0.05 + 0.9 * i / max(1, count - 1)))
        sentence, question = tokenizer.encode(f"{begin} {number}.\n"), tokenizer.encode(begin)
        found.append(([*hay[:at], *sentence, *hay[at:], *question], number))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="2048,4096,8000")
    parser.add_argument("--caches", default="auto,fp8,int4")
    parser.add_argument("--count", type=int, default=40, help="prompts of each length")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto")


def run(args: argparse.Namespace, write: Callable[..., None]) -> None:
    tokenizer = Tokenizer.for_model(read_spec(resolve_model(args.model)))
    lengths = [int(length) for length in args.lengths.split(",")]
    texts = {length: prompts(tokenizer, length, args.count) for length in lengths}
    results: dict[str, dict[str, Any]] = {}
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    for cache in args.caches.split(","):
        with LLM(
            args.model, device=args.device, kernels=args.kernels, kv_cache_dtype=cache,
            max_model_len=max(lengths) + ROOM, enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            results[cache] = {}
            for length, own in texts.items():
                given = [{"prompt_token_ids": tokens} for tokens, _ in own]
                answers = [made.outputs[0].text for made in llm.generate(given, greedy)]
                hits = [a.strip().startswith(n) for a, (_, n) in zip(answers, own, strict=True)]
                results[cache][str(length)] = sum(hits) / len(hits)
        write(settings={k: v for k, v in vars(args).items() if k != "output"}, results=results)
    print_table(
        f"{args.model}, numbers found of {args.count}",
        ("cache", *map(str, lengths)),
        [(cache, *(f"{own[str(n)]:.0%}" for n in lengths)) for cache, own in results.items()],
    )
