"""Two instruction sets of one CPU in turns: single products, then prompts and batches of a whole engine.

    python benchmarks/kernels.py --device cpu --op isas [--isas avx512-bf16 amx] [--threads 2] [--model FOLDER]

1. Products of the model's shapes in each form of weights, and each number of tokens: the median of the rounds, whether the
   results are equal bit by bit, and how far they are apart at most, as a share of the largest.
2. `slipstream bench throughput`'s loads in one process with an engine for each instruction set, random weights, greedy.
3. Each instruction set's ceilings, as `slipstream bench roofline` measures them.

The process holds itself to as many cores as it has threads, of different cores where the system tells hyper-threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import Arena, NativeLinear, Program
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.programs import add_linear
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.start.cpu_choice import CpuChoice
from slipstream.worker.start.roofline import measure_ceilings

SHAPES = ("960x576", "576x576", "3072x576", "576x1536")
FORMS = {"int8": "int8", "Q4_1": "int4-g32", "bfloat16": None}
LOADS = {
    "prompt of 512": (1, 512, 1),
    "1 stream": (1, 32, 64),
    "16 requests": (16, 128, 0),
    "64 requests": (64, 128, 0),
}
"""Requests, tokens of a prompt, tokens of an answer (0: `--answers`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isas", nargs=2, default=native.instruction_sets()[-2:], metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="rows x inputs")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 64, 512])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--model", type=Path, default=common.HERE / "configs" / "smollm2")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument(
        "--answers", type=int, default=128, help="tokens of an answer with 16 and 64 requests"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--product-s", type=float, default=25.0, help="seconds for all products together"
    )


def own_cores(count: int) -> list[int]:
    """The first `count` logical CPUs that lie on different cores."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(place.read_text() if place.exists() else str(cpu), cpu)
    return list(found.values())[:count]


class Products:
    """One weight, several times one after the other, so that it comes from the last cache."""

    def __init__(
        self, ops: NativeOps, weight: torch.Tensor, form: str, tokens: int, copies: int
    ) -> None:
        scheme = FORMS[form]
        held = ops.quantize_weight(
            weight if scheme else weight.bfloat16(), None, SCHEMES[scheme] if scheme else None
        )
        (part,) = held.parts
        arena = Arena()
        self.copies, self.tokens = copies, tokens
        self.program = Program(ops.pool)
        rows, inner = weight.shape
        self.x = torch.randn(tokens, inner, generator=torch.Generator().manual_seed(0))
        self.y = torch.empty(tokens, rows)
        x, y = self.program.buffer(part.form, inner), self.program.bound(self.y)
        self.program.add("convert", self.program.bound(self.x), x, part.form, inner, 1)
        for _ in range(copies):
            add_linear(
                self.program, x, y, NativeLinear(weight=held.weight, parts=(part.moved(arena),))
            )

    def us(self) -> float:
        begin = time.perf_counter()
        self.program.run(native.StepInputs(num_tokens=self.tokens))
        return (time.perf_counter() - begin) / self.copies * 1e6


def products(args: argparse.Namespace) -> list[dict[str, Any]]:
    ops = {isa: NativeOps(args.threads, isa) for isa in args.isas}
    cases = [
        (form, shape, tokens)
        for form in args.forms
        for shape in args.shapes
        for tokens in args.tokens
    ]
    found = []
    for form, shape, tokens in cases:
        rows, inner = map(int, shape.split("x"))
        weight = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1)) / inner**0.5
        runs = {
            isa: Products(o, weight, form, tokens, 30 if tokens <= 64 else 4)
            for isa, o in ops.items()
        }
        times: dict[str, list[float]] = {isa: [] for isa in runs}
        until = time.perf_counter() + args.product_s / len(cases)
        while len(times[args.isas[0]]) < 4 or time.perf_counter() < until:
            for isa, run in runs.items():
                times[isa].append(run.us())
        first, second = (runs[isa].y for isa in args.isas)
        apart = float((first - second).abs().max() / first.abs().max())
        us = {isa: common.median(t[1:]) for isa, t in times.items()}
        ratio = us[args.isas[0]] / us[args.isas[1]]
        gops = {isa: 2e-3 * rows * inner * tokens / t for isa, t in us.items()}
        found.append(
            {
                "form": form,
                "shape": shape,
                "tokens": tokens,
                "us": us,
                "gop_per_s": gops,
                "ratio": ratio,
            }
            | {"equal": bool(torch.equal(first, second)), "apart": apart}
        )
        print(
            f"{form:9} {shape:9} {tokens:4} tokens "
            + " ".join(f"{isa} {us[isa]:9.1f} µs {gops[isa]:7.0f} GOP/s" for isa in us)
            + f"  {ratio:5.2f} x, {'equal' if found[-1]['equal'] else f'apart by {apart:.1e}'}",
            flush=True,
        )
    return found


def engine(args: argparse.Namespace, isa: str, form: str) -> LLM:
    choice = CpuChoice(isa=isa, dtype="bfloat16", num_threads=args.threads, timings=())
    with (
        patch("slipstream.worker.device.choose_cpu", lambda *_, **__: choice),
        patch.object(CpuChoice, "reason", "given"),
    ):
        return LLM(
            str(args.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="bfloat16",
            seed=0,
            quantization=FORMS[form],
            num_threads=args.threads,
            max_model_len=1024,
            max_num_seqs=64,
            enable_prefix_caching=False,
        )


def engines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for form in args.forms if args.loads else ():
        llms = {isa: engine(args, isa, form) for isa in args.isas}
        for isa, llm in llms.items():
            assert (
                isa in str(llm.core.executor.runner.ops.name)
                or llm.core.executor.runner.ops.pool.isa == isa
            )
        for name in args.loads:
            count, num_in, num_out = LOADS[name]
            num_out = num_out or args.answers
            given = torch.randint(
                0, 500, (count, num_in), generator=torch.Generator().manual_seed(0)
            ).tolist()
            prompts = [{"prompt_token_ids": ids} for ids in given]
            params = SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=0.0)
            times: dict[str, list[float]] = {isa: [] for isa in llms}
            texts: dict[str, Any] = {}
            for i in range(args.rounds + 1 if count < 64 else (args.rounds + 1) // 2):
                for isa in sorted(llms, reverse=i % 2 == 1):
                    begin = time.perf_counter()
                    out = llms[isa].generate(prompts, params)
                    if i or count == 64:
                        times[isa].append(time.perf_counter() - begin)
                    texts[isa] = [list(o.outputs[0].token_ids) for o in out]
            tokens = count * (num_in if num_out == 1 else num_out)
            rates = {isa: tokens / common.median(t) for isa, t in times.items()}
            same = sum(a == b for a, b in zip(*texts.values(), strict=True)) / count
            row = {
                "form": form,
                "load": name,
                "tokens_per_s": rates,
                "ratio": rates[args.isas[1]] / rates[args.isas[0]],
            }
            print(
                f"{form:9} {name:14} "
                + " ".join(f"{isa} {r:8.0f} tok/s" for isa, r in rates.items())
                + f"  {row['ratio']:.2f} x, {same:.0%} same",
                flush=True,
            )
            yield row | {"same_answers": same, "seconds": times}
        for llm in llms.values():
            llm.shutdown()


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    os.sched_setaffinity(0, own_cores(args.threads))
    torch.set_num_threads(1)
    ceilings = {
        isa: dataclasses.asdict(measure_ceilings(NativeOps(args.threads, isa).pool))
        for isa in args.isas
    }
    for isa, rates in ceilings.items():
        print(isa, {name: f"{rate / 1e9:.0f} G/s" for name, rate in rates.items()}, flush=True)
    save(threads=args.threads, isas=args.isas, ceilings=ceilings)
    found, loads = products(args), []
    save(threads=args.threads, isas=args.isas, ceilings=ceilings, products=found)
    for load in engines(args):
        loads.append(load)
        save(threads=args.threads, isas=args.isas, ceilings=ceilings, products=found, engines=loads)
