"""Greedy answers with each proposer beside those without: all must be the same tokens.

    python benchmarks/speculation.py --study answers [MODEL] [--num-prompts 300] [--max-tokens 128] [--minutes 15]

Prompts that people wrote (`data/README.md`), some at a time: answered without speculation, then with each proposer, which
always guesses three tokens. The record is written after each group. A run with the same settings goes on where FILE ends. The
draft model is the model itself without two of its layers, so that it errs at times. An answer that differs is listed with
the place of its first other token. Exit code 1 if one does.

Weights and activations are float32 throughout: a GGUF file is unpacked into a folder first, since the C++ kernels would round
activations to 8 bits for its own weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

from slipstream import LLM, SamplingParams
from slipstream.bench.adapters.transformers import load_gguf
from slipstream.hub import resolve_model

METHODS = ("ngram", "suffix", "draft")
FIELDS = {"steps": "num_steps", "drafted": "spec_draft_tokens", "accepted": "spec_accepted_tokens"}
"""Of the engine's counts, by their names in the record."""


def prompts(count: int) -> list[list[dict[str, str]]]:
    lines = (common.DATA / "prompts.jsonl").read_text("utf-8").splitlines()
    return [
        [{"role": "user", "content": json.loads(line)["prompt"]}]
        for line in lines[:: max(1, len(lines) // count)][:count]
    ]


def unpack(model: str, folder: Path) -> tuple[str, str]:
    """A GGUF file's model in float32, and the same without every fifteenth layer, as folders."""
    import torch

    made = load_gguf(resolve_model(model), "float32")
    made.save_pretrained(folder / "whole")
    kept = [layer for i, layer in enumerate(made.model.layers) if i % 15 != 9]
    made.model.layers = torch.nn.ModuleList(kept)
    made.config.num_hidden_layers = len(kept)
    if hasattr(made.config, "layer_types"):
        made.config.layer_types = made.config.layer_types[: len(kept)]
    made.save_pretrained(folder / "draft")
    return str(folder / "whole"), str(folder / "draft")


def earlier(path: Path | None, workload: dict[str, Any]) -> dict[str, Any]:
    """The results of a record of the same workload; none if there is none."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text("utf-8"))
    return record["results"] if record["workload"] == workload else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-seqs", type=int, default=20, help="answered at a time")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no group of prompts after so long"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    begun, chats = time.monotonic(), prompts(args.num_prompts)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "kernels": args.kernels, "max_model_len": 1024}
    settings["max_num_seqs"] = args.num_seqs
    workload = {
        key: getattr(args, key)
        for key in ("model", "num_prompts", "max_tokens", "num_seqs", "methods")
    }
    results = earlier(args.output, workload)
    names = ("plain", *args.methods)
    results = results or {
        n: dict.fromkeys(("answers", "equal", *FIELDS), 0) | {"seconds": 0.0, "different": []}
        for n in names
    }
    with ExitStack() as stack:
        whole, draft = unpack(args.model, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        llms = {}
        for name in names:
            config: dict[str, Any] | None = (
                {"method": name, "num_speculative_tokens": 3} if name != "plain" else None
            )
            if name == "draft":
                config = {**(config or {}), "model": draft}
            made = LLM(
                whole,
                tokenizer=args.model,
                speculative_config=config,
                kv_cache_bytes=2 << 30,
                **settings,
            )
            llms[name] = stack.enter_context(made)
        for first in range(results["plain"]["answers"], len(chats), args.num_seqs):
            if time.monotonic() - begun > 60 * args.minutes:
                break
            expected: list[list[int]] = []
            for name, llm in llms.items():
                before, begin = llm.core.stats(), time.perf_counter()
                answers = [
                    a.outputs[0].token_ids
                    for a in llm.chat(chats[first : first + args.num_seqs], sampling)
                ]
                found, after = results[name], llm.core.stats()
                found["seconds"] += time.perf_counter() - begin
                expected = expected or answers
                for i, (own, other) in enumerate(zip(expected, answers, strict=True), first):
                    if own != other:
                        at = next(
                            k for k, (a, b) in enumerate(zip(own, other, strict=True)) if a != b
                        )
                        found["different"].append({"prompt": i, "token": at})
                found["answers"] += len(answers)
                found["equal"] = found["answers"] - len(found["different"])
                for key, field in FIELDS.items():
                    found[key] += getattr(after, field) - getattr(before, field)
                print(
                    f"{name:7} {found['equal']} of {found['answers']} answers equal, {found['steps']} steps,"
                    f" {found['accepted']} of {found['drafted']} guesses right, {found['seconds']:.0f} s",
                    flush=True,
                )
            save(workload=workload, settings=settings, results=results)
    right = all(not r["different"] for r in results.values())
    sys.exit(0 if right and all(results[m]["accepted"] for m in args.methods) else 1)
