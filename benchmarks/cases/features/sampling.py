"""Tokens/s of what requests ask for beyond the likeliest token, as shares of greedy requests'.

    python benchmarks/features.py --study sampling                         Llama-3-8B's shape in FP8 at 1, 64, 768 requests
    python benchmarks/features.py --study sampling --model smollm2 --device cpu --counts 1 16 --tokens 64 --rounds 5

Kinds take turns within a round; a share is the median over the rounds of a kind's rate over greedy's in the same round.
On a CPU the record has processor time a token as well, which other programs change less; with `--threads 1` it is the time
that one core needs. Before the times: no token that its grammar does not allow (a matcher of the answer's own), and equal
answers with and without shared masks. The record is written after each number of requests. About 2 minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from cases.features.grammar import made_tokenizer
from cases.features.masks import GRAMMARS, Runs, check

from slipstream import LLM, SamplingParams
from slipstream.costs.hardware import available_cores

RECORD = "sampling"


def kinds(num_tokens: int) -> dict[str, SamplingParams]:
    base: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 0}
    warm = {**base, "temperature": 0.8}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    return {
        "greedy": SamplingParams(temperature=0.0, **base),
        "temperature": SamplingParams(**warm),
        "top_p": SamplingParams(top_p=0.95, **warm),
        "top_p, top_k, min_p": SamplingParams(top_p=0.95, top_k=50, min_p=0.02, **warm),
        "penalties": SamplingParams(**penalties, **warm),
        "5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5, **base),
        "schema": SamplingParams(structured_outputs=GRAMMARS["open schema"], **warm),
        "regex": SamplingParams(structured_outputs=GRAMMARS["regex"], **warm),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(common.CONFIGS / "llama-3-8b"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None, help="of a CPU")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 64, 768])
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=None, help="(default: all)")
    parser.add_argument(
        "--checked", type=int, default=None, help="requests whose tokens are checked"
    )


def engine(args: argparse.Namespace) -> LLM:
    most = {"max_num_seqs": max(args.counts), "max_model_len": 1024, "enable_prefix_caching": False}
    folder = Path(args.model)
    if not folder.is_dir():
        return LLM(args.model, device=args.device, num_threads=args.threads, **most)
    config = json.loads((folder / "config.json").read_text()) | {
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        made_tokenizer(Path(made), config["vocab_size"])
        types = {"quantization": "fp8", "kv_cache_dtype": "fp8", "load_format": "dummy"}
        return LLM(made, device=args.device, **types, **most)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rng, found = random.Random(1), dict[str, Any](cores=available_cores(), checks={}, counts={})
    with engine(args) as llm:
        vocab = llm.core.description.spec.vocab_size
        prompts = [
            {"prompt_token_ids": [rng.randrange(300, vocab) for _ in range(args.prompt)]}
            for _ in range(max(args.counts))
        ]
        runs = Runs(llm, prompts)
        for name in ("_launch", "_take_results", "_pass_on"):
            runs._measure(llm.core, name)
        checked = (
            sorted(args.counts)[min(1, len(args.counts) - 1)]
            if args.checked is None
            else args.checked
        )
        for grammar in ("open schema", "regex") if checked else ():
            found["checks"][grammar] = check(runs, checked, min(48, args.tokens), grammar, False)
            print(f"{grammar}: {json.dumps(found['checks'][grammar])}", flush=True)
        asked = {
            k: v
            for k, v in kinds(args.tokens).items()
            if not args.kinds or k in (*args.kinds, "greedy")
        }
        for count in args.counts:
            rows: dict[str, Any] = {}
            for params in asked.values():
                runs.run(params, count)  # its kernels, graphs and masks are there then
            for _ in range(args.rounds):
                for name, params in asked.items():
                    begin = time.process_time()
                    part = runs.run(params, count)[0]
                    cpu = (time.process_time() - begin) / (count * args.tokens) * 1e6
                    row = rows.setdefault(name, {"tokens_per_s": [], "cpu_us_a_token": []})
                    row["tokens_per_s"].append(part["tokens_per_s"])
                    row["cpu_us_a_token"].append(round(cpu, 1))
                    row["ms_a_step"], row["parts_ms"] = part["ms_a_step"], part["parts_ms"]
            base = rows["greedy"]
            for name, row in rows.items():
                for key, sign in (("tokens_per_s", 1), ("cpu_us_a_token", -1)):
                    shares = [(a / b) ** sign for a, b in zip(row[key], base[key], strict=True)]
                    row[f"of greedy, {key}"] = round(common.median(shares), 3)
                print(
                    f"{count} {name}: {json.dumps({k: v for k, v in row.items() if k != 'parts_ms'})}",
                    flush=True,
                )
            found["counts"][str(count)] = rows
            save(**found)
