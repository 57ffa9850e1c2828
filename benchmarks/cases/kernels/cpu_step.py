"""Whole steps of the C++ kernels by the weights' form: operators against their floors, tokens a second, perplexity.

    python benchmarks/kernels.py --device cpu --op step [--forms 'as stored' int8] [--threads 2]

A GGUF file as it is, rounded to int8 at load, and with its matrices expanded to 16 and 32 bits. For each form:

1. `slipstream bench roofline`: each operator of decode steps and of a prefill, with its share of the floor;
2. `slipstream bench throughput`: one stream, 16 and 64 requests, greedy, prefill in the time, median of the rounds;
3. perplexity of `--text` in windows of 512 tokens, by `slipstream eval` of the form with itself.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from peers_cpu import rewritten

from slipstream.costs.hardware import available_cores
from slipstream.hub import resolve_model

FORMS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "as stored": (None, ()),
    "int8": (None, ("--quantization", "int8")),
    "bfloat16": ("BF16", ("--dtype", "bfloat16")),
    "float32": ("F32", ("--dtype", "float32")),
}
"""The type that the file is rewritten in, and the engine's options."""
LOADS = {"1 stream": (1, 32, 256), "16 at once": (16, 128, 128), "64 at once": (64, 128, 128)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--batch-sizes", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="a file; without it no perplexity")
    parser.add_argument("--windows", type=int, default=16, help="of the text (default: 16)")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    path, result = resolve_model(args.model), {}
    with tempfile.TemporaryDirectory() as place:
        for form in args.forms:
            kind, options = FORMS[form]
            model = rewritten(path, kind, Path(place)) if kind else path
            result[form] = measure(
                args, model, ("--device", "cpu", "--num-threads", str(args.threads), *options)
            )
            show(form, result[form])
            save(model=args.model, threads=args.threads, results=result)


def measure(args: argparse.Namespace, model: Path, engine: tuple[str, ...]) -> dict[str, Any]:
    shapes = ("--batch-sizes", args.batch_sizes, "--prompt", str(args.prompt))
    found: dict[str, Any] = {
        "roofline": common.slipstream("bench", "roofline", model, *shapes, *engine)["results"]
    }
    rates = {}
    for name in args.loads:
        count, n_in, n_out = LOADS[name]
        lengths = (
            "--num-requests",
            str(count),
            "--input-len",
            str(n_in),
            "--output-len",
            str(n_out),
        )
        ran = common.slipstream(
            "bench", "throughput", model, *lengths, "--repeat", str(args.rounds), *engine
        )
        rates[name] = ran["results"]["output_throughput"]
    found["output_tokens_per_s"] = rates
    if args.text:
        text = (
            "--text",
            args.text,
            "--part",
            "all",
            "--context",
            "512",
            "--stride",
            "512",
            "--windows",
            str(args.windows),
        )
        found["perplexity"] = common.slipstream("eval", model, *text, *engine)["perplexity"]
    return found


def show(form: str, found: dict[str, Any]) -> None:
    perplexity = f", perplexity {found['perplexity']:.2f}" if "perplexity" in found else ""
    print(f"{form}{perplexity}")
    for step in found["roofline"]["steps"]:
        seconds = sum(op["seconds"] for op in step["operators"])
        floor = sum(op["floor_s"] or 0.0 for op in step["operators"])
        print(f"  {step['name']:<12} {1e3 * seconds:8.2f} ms, {floor / seconds:.0%} of it floor")
    for name, rate in found["output_tokens_per_s"].items():
        print(f"  {name:<12} {rate:8.0f} output tokens/s")
