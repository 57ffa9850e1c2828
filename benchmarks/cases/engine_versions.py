"""Two versions of Slipstream on a CPU, in turns: start, one stream, 16 requests, a prompt, memory.

    python benchmarks/engine.py --study versions --before OTHER/.venv/bin/python [--model smollm2] [--rounds 5]

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(args.rounds):
        for version, python in (("before", args.before), ("after", sys.executable)):
            done = subprocess.run(
                [python, "-c", FIGURES, args.model], check=True, capture_output=True, text=True
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
