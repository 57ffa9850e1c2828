"""`deterministic=True` on one GPU: whether answers keep their bits, and its price in turns with the default.

    python benchmarks/engine.py --study deterministic [--quantization fp8] [--kv-cache-dtype fp8] [--bits-only]

Bits: tokens and log-probabilities of 512 prompts of 3 to 300 tokens, of the shape with 3 layers, together; then from the
prefix cache, 64 of them, 14 of them alone, and all in chunks of 520 tokens with drafts. Each figure is the number of answers
that differ. Times: two engines with random weights in one process, in turns: ms a token of one request of 128/128, and
tokens a second of 512 such requests, three times each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common


def engine(args: argparse.Namespace, model: Path, **settings: Any) -> Any:
    from slipstream import LLM

    given = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=512,
    )
    return LLM(str(model), **{**given, **settings})


def answers(llm: Any, prompts: list[Any], num_tokens: int, **settings: Any) -> list[Any]:
    from slipstream import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **settings)
    made: list[Any] = llm.generate(prompts, sampling, progress=False)
    return made


def bits(args: argparse.Namespace) -> dict[str, int]:
    """Answers that differ from those of one batch, by how they were computed."""
    config = json.loads((common.CONFIGS / args.config / "config.json").read_text())
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    rng, prompts = random.Random(0), []
    for i in range(512):
        ids = [rng.randrange(1000, 30_000) for _ in range(rng.choice((3, 30, 97, 260, 300)))]
        prompts.append({"prompt_token_ids": (ids[:40] * 8)[: len(ids)] if i % 2 else ids})

    def differing(llm: Any, places: range, whole: list[Any], *, alone: bool = False) -> int:
        chosen = [prompts[i] for i in places]
        groups = [[p] for p in chosen] if alone else [chosen]
        made = [a for group in groups for a in found(llm, group)]
        return sum(a != whole[i] for a, i in zip(made, places, strict=True))

    def found(llm: Any, given: list[Any]) -> list[Any]:
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in a.outputs[0].logprobs]
            for a in answers(llm, given, 10, logprobs=2)
        ]

    sizes = dict(deterministic=True, max_model_len=1024, kv_cache_bytes=2**32)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    cold = dict(enable_prefix_caching=False, max_num_batched_tokens=520)
    every, result = range(512), {}
    with engine(args, model, **sizes) as llm:
        whole = found(llm, prompts)
        result["hits"] = differing(llm, every, whole)
        result["64"] = differing(llm, range(64), whole)
    with engine(args, model, **sizes, **cold, speculative_config=drafts) as llm:
        result["chunks_drafts"] = differing(llm, every, whole)
        result["alone"] = differing(llm, range(0, 512, 37), whole, alone=True)
    return result


def times(args: argparse.Namespace) -> dict[str, Any]:
    sizes = dict(
        max_model_len=2048,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        kv_cache_bytes=18 * 2**30,
    )
    model, seed = common.CONFIGS / args.config, 0

    def measured(llm: Any, num: int, num_tokens: int = 128) -> float:
        nonlocal seed
        seed += 1
        given = common.prompts([128] * num, 30_000, seed)
        begin = time.perf_counter()
        first = answers(llm, given, num_tokens)[0].times
        if num > 1:
            return num * num_tokens / (time.perf_counter() - begin)
        return (first.last_token - first.first_token) / (num_tokens - 1) * 1e3

    made: dict[str, Any] = {}
    with (
        engine(args, model, deterministic=True, **sizes) as ours,
        engine(args, model, **sizes) as default,
    ):
        both = {"deterministic": ours, "default": default}
        for llm in both.values():
            measured(llm, 512, 8)
            for _ in range(2):
                measured(llm, 1, 16)
        found: dict[str, dict[str, list[float]]] = {
            what: {name: [] for name in both} for what in ("one_ms", "tok_s")
        }
        for turn in range(3):
            for what, num in (("one_ms", 1), ("one_ms", 1), ("tok_s", 512)):
                for name in list(both)[:: 1 if turn % 2 else -1]:
                    found[what][name].append(measured(both[name], num))
        for what, by_name in found.items():
            made[what] = by_name
            a, b = (statistics.median(by_name[name]) for name in both)
            made[what + "_ratio"] = b / a if what == "one_ms" else a / b
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--bits-only", action="store_true")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    found: dict[str, Any] = {"differing": bits(args)}
    if not args.bits_only:
        found |= times(args)
    print(found)
    save(scheme=args.quantization or "bf16", **found)
