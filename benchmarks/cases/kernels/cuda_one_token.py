"""A decode step of one sequence: all layers as one kernel, and kernel by kernel.

    python benchmarks/kernels.py --device cuda --op one-token --models llama-3-8b:fp8:fp8 llama-3-8b::auto gpt-j-6b:fp8:fp8

Each model is CONFIG:SCHEME:CACHE, with random weights; the scheme `gguf` is a file in Q4_K_M's types. Measured
through `LLM`: milliseconds a token with so many tokens in the cache, and what the profiler says of one step's kernels
(the layers' kernel, the head's, all else). Kernel by kernel is the same engine with that forward path refused.
tests/gpu compares the results of the two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from cases.engine.table import write_gguf

from slipstream import LLM, SamplingParams
from slipstream.spec.reason import Reason

PATHS = ("one kernel", "kernel by kernel")
LEFT_OUT = Reason("left out to measure without it", notable=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        default=["llama-3-8b:fp8:fp8", "llama-3-8b::auto", "llama-3-8b:int4:fp8"],
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 1900])
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--tokens", type=int, default=64, help="that are timed (default: 64)")


def ms_a_token(llm: LLM, length: int, num_tokens: int) -> float:
    given = common.prompts([length], 500)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens + 1, ignore_eos=True)
    found = []
    for _ in range(5):
        (answer,) = llm.generate(given, sampling, progress=False)
        assert answer.times is not None
        found.append(1e3 * (answer.times.last_token - answer.times.first_token) / num_tokens)
    return common.median(found)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows: list[dict[str, Any]] = []
    for model in args.models:
        config, scheme, cache = model.split(":")
        path_of_model = common.CONFIGS / config
        if scheme == "gguf":
            read, scheme = json.loads((path_of_model / "config.json").read_text()), ""
            path_of_model = write_gguf(Path(tempfile.mkdtemp()) / "llama.gguf", read)
        for path in args.paths:
            never = mock.patch(
                "slipstream.worker.forward.forwards.compile_one_token", return_value=LEFT_OUT
            )
            with never if path == "kernel by kernel" else nullcontext():
                llm = LLM(
                    str(path_of_model),
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    enable_prefix_caching=False,
                    max_num_seqs=1,
                    max_model_len=max(args.lengths) + args.tokens + 1,
                    quantization=scheme or None,
                    kv_cache_dtype=cache,
                )
            times = {length: ms_a_token(llm, length, args.tokens) for length in args.lengths}
            kernels = common.kernels_of(llm, 1, args.lengths[0])["decode step"]
            rows.append({"model": model, "path": path, "ms_a_token": times, "step": kernels})
            print(f"{model:24} {path:18}", {n: round(ms, 3) for n, ms in times.items()}, flush=True)
            llm.shutdown()
            torch.cuda.empty_cache()
            save(rows=rows)
