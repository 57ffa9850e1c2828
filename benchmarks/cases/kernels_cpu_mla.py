"""The attention of DeepSeek's layers: the C++ program beside torch's operators, and each operator's share of its floor.

    python benchmarks/kernels.py --device cpu --op mla [--model deepseek-v2-lite] [--layers 4] [--context 1024] [--threads 1]

The layers are a real model's with an MLP of 32 and a vocabulary of 256; there are several, so that no cache holds their
weights. Two things are measured:

1. operators, shares and floors, by `slipstream bench roofline`: decodes of `--batch-sizes` sequences, and a prompt;
2. processor time a layer of whole steps with either kernels, through `LLM`: calls that write 1 + `--tokens` tokens, less
   calls that write one. The two take turns; the median of each counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream import LLM, SamplingParams


def write_config(model: str, num_layers: int, folder: Path) -> None:
    config = json.loads((common.CONFIGS / model / "config.json").read_text())
    config |= {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_layers,
        "intermediate_size": 32,
        "vocab_size": 256,
    }
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--tokens", type=int, default=16, help="decode steps that are timed (default: 16)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="(default: 1) of more, waiting counts as well"
    )
    parser.add_argument("--rounds", type=int, default=5)


def processor_ms(llm: LLM, num_seqs: int, prompt: int, num_tokens: int) -> float:
    given = common.prompts([prompt] * num_seqs, 256)
    begin = time.process_time()
    llm.generate(
        given, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), progress=False
    )
    return 1e3 * (time.process_time() - begin)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_threads": args.threads,
        "load_format": "dummy",
        "device": "cpu",
    }
    settings["max_model_len"] = max(args.context, args.prompt) + args.tokens + 1
    with tempfile.TemporaryDirectory() as place:
        write_config(args.model, args.layers, Path(place))
        words = [
            word
            for name, value in settings.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        sizes = ",".join(map(str, args.batch_sizes))
        shapes = (
            "--batch-sizes",
            sizes,
            "--context",
            str(args.context),
            "--prompt",
            str(args.prompt),
        )
        roofline = common.slipstream("bench", "roofline", place, *shapes, *words)["results"]
        engines = {
            name: LLM(
                place,
                kernels=name,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                **settings,
            )
            for name in ("cpu", "torch")
        }
        results = []
        for num_seqs, prompt, count in [
            (n, args.context, args.tokens) for n in args.batch_sizes
        ] + [(1, args.prompt, 0)]:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for i in range(args.rounds + 1):
                for name, llm in engines.items():
                    spent = processor_ms(llm, num_seqs, prompt, 1 + count)
                    if count:
                        spent = (spent - processor_ms(llm, num_seqs, prompt, 1)) / count
                    if i:
                        times[name].append(spent / args.layers)
            median = {name: common.median(found) for name, found in times.items()}
            what = f"decode of {num_seqs} at {prompt:,}" if count else f"prompt of {prompt:,}"
            results.append(
                {"what": what, "ms_a_layer": median, "times_torch": median["torch"] / median["cpu"]}
            )
            print(
                f"{what:24} {median['cpu']:8.3f} ms a layer, torch's {median['torch']:8.3f}",
                flush=True,
            )
        for llm in engines.values():
            llm.shutdown()
    for step in roofline["steps"]:
        print(step["name"])
        for op in sorted(step["operators"], key=lambda op: -op["seconds"])[:8]:
            share = "" if op["share"] is None else f"{op['share']:5.0%} of its floor"
            print(
                f"    {op['operator']:44} {1e3 * op['seconds'] / args.layers:8.3f} ms a layer {share}"
            )
    save(
        model=args.model,
        threads=args.threads,
        layers=args.layers,
        results=results,
        roofline=roofline,
    )
