"""Where a CPU's step spends its time, by operator, with one instruction set after the other.

    python benchmarks/kernels.py --device cpu --op shares [--isas avx512-bf16 amx] [--threads 2] [--forms int8 Q4_1 bfloat16]

`slipstream bench roofline` of the same model with random weights in each form, for each of the instruction sets: a prompt of
512 and steps of 64 decodes. Times are medians of seven steps, in microseconds of wall time, of all the operators of one kind
together.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import torch
from cases.kernels_cpu_isas import FORMS, own_cores

from slipstream.config import EngineArgs
from slipstream.kernels.cpu import native
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.start.cpu_choice import CpuChoice
from slipstream.worker.start.roofline import Roofline, measure_roofline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isas", nargs="+", default=native.instruction_sets()[-2:], metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--caches", nargs="+", default=["auto"], help="kv_cache_dtype")
    parser.add_argument("--model", type=Path, default=common.HERE / "configs" / "smollm2")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[64])
    parser.add_argument("--context", type=int, default=192, help="tokens of each decoding sequence")


def measured(args: argparse.Namespace, isa: str, form: str, cache: str) -> Roofline:
    choice = CpuChoice(isa=isa, dtype="bfloat16", num_threads=args.threads, timings=())
    settings = EngineArgs(
        model=str(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="bfloat16",
        seed=0,
        quantization=FORMS[form],
        kv_cache_dtype=cache,
        num_threads=args.threads,
        max_model_len=1024,
        max_num_seqs=64,
    )
    with (
        patch("slipstream.worker.device.choose_cpu", lambda *_, **__: choice),
        patch.object(CpuChoice, "reason", "given"),
    ):
        executor = LocalExecutor.build(settings, by_torch=True)
    try:
        assert isinstance(executor.runner, ModelRunner)
        assert executor.runner.ops.pool.isa == isa
        return measure_roofline(
            executor.runner, batch_sizes=args.batch_sizes, prompt=args.prompt, context=args.context
        )
    finally:
        executor.shutdown()


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    os.sched_setaffinity(0, own_cores(args.threads))
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for form in args.forms:
        for cache in args.caches:
            for isa in args.isas:
                roofline = measured(args, isa, form, cache)
                for step in roofline.steps:
                    print(
                        f"\n{form}, cache {cache}, {isa}: {step.name}: {step.seconds * 1e6:,.0f} µs",
                        flush=True,
                    )
                    for o in sorted(step.operators, key=lambda o: -o.seconds):
                        rate = (
                            f"{o.operations / o.seconds / 1e9:8,.0f} GOP/s" if o.operations else ""
                        )
                        each = f"{o.count:4} × {o.seconds / o.count * 1e6:9,.1f} = {o.seconds * 1e6:9,.0f} µs"
                        print(f"  {o.operator:40} {each} {rate}", flush=True)
                found.append(
                    {"form": form, "cache": cache, "isa": isa} | dataclasses.asdict(roofline)
                )
                save(threads=args.threads, shares=found)
