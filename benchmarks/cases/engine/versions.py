"""Two versions of Slipstream in turns: on a CPU start, one stream, 16 requests, a prompt, memory; on a GPU throughput.

    python benchmarks/engine.py --study versions --before OTHER/.venv/bin/python [--model smollm2] [--rounds 5]
    python benchmarks/engine.py --study versions --before … --config llama-3-8b [--quantization fp8 --kv-cache-dtype fp8]

With `--config` random weights of that shape run on a GPU.
`--before` is the interpreter of an environment with the other version. Each turn is a process of its own, and both run the same
lines over public names alone. Greedy, no prefix cache; of a process the best of several runs counts, of the rounds the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import common

RECORD = "versions_cpu"

FIGURES = """
import json, resource, sys, time
begin = time.perf_counter()
from slipstream import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", enable_prefix_caching=False, max_model_len=1024)

def seconds(num_seqs, num_tokens, answer):
    prompts = [{"prompt_token_ids": [(7 * i + 13 * s) % 4000 + 50 for i in range(num_tokens)]} for s in range(num_seqs)]
    sampling, at = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), time.perf_counter()
    llm.generate(prompts, sampling, progress=False)
    return time.perf_counter() - at

seconds(1, 16, 1)
found = {"start_to_first_token_s": time.perf_counter() - begin}
seconds(1, 16, 16)
found["one_stream_tokens_per_s"] = max(127 / (seconds(1, 32, 128) - seconds(1, 32, 1)) for _ in range(5))
found["16_requests_tokens_per_s"] = max(16 * 64 / seconds(16, 32, 64) for _ in range(4))
found["prompt_of_512_tokens_per_s"] = max(512 / seconds(1, 512, 1) for _ in range(4))
found["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(found))
"""

GPU_FIGURES = """
import json, statistics, sys, time
from slipstream import LLM, SamplingParams

begin = time.perf_counter()
settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, "max_num_seqs": 256}
llm = LLM(sys.argv[1], **settings, **json.loads(sys.argv[2]))
found = {"start_s": time.perf_counter() - begin}

def rate(num_seqs, num_tokens, answer, run):
    ids = [[(131 * s + 7 * i + 17 * run) % 30000 + 10 for i in range(num_tokens)] for s in range(num_seqs)]
    prompts = [{"prompt_token_ids": x} for x in ids]
    at = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), progress=False)
    return num_seqs * answer / (time.perf_counter() - at)

loads = {"one": (1, 128, 256), "64_of_128_128": (64, 128, 128)}
loads |= {"256_of_512_128": (256, 512, 128), "256_of_16_128": (256, 16, 128)}
for name, load in loads.items():
    first, *others = [rate(*load, run) for run in range(5)]
    found[f"{name}_first_tokens_per_s"] = first
    found[f"{name}_tokens_per_s"] = statistics.median(others)
print(json.dumps(found))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--config", help="a folder of benchmarks/configs: on a GPU, with random weights"
    )
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    words = [FIGURES, args.model]
    if args.config:
        settings = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
        words = [GPU_FIGURES, str(common.CONFIGS / args.config), json.dumps(settings)]
    for _ in range(args.rounds):
        for version, python in (("before", args.before), ("after", sys.executable)):
            done = subprocess.run(
                [python, "-c", *words], check=True, capture_output=True, text=True
            )
            runs[version].append(
                json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
            )
            print(
                version,
                {name: round(value, 2) for name, value in runs[version][-1].items()},
                flush=True,
            )
    medians: dict[str, Any] = {
        version: {name: statistics.median(x[name] for x in of) for name in of[0]}
        for version, of in runs.items()
    }
    print(json.dumps(medians, indent=1))
    save(medians=medians, runs=runs)
