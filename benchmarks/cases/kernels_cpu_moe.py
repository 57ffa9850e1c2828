"""One layer's mixture of experts by form of weights and number of tokens, beside torch's `grouped_mm` in bfloat16.

    python benchmarks/kernels.py --device cpu --op moe [--models qwen3-30b-a3b] [--experts 32] [--tokens 1 16 512]

Sizes are a real model's, with at most `--experts` of its experts. Routing is even and random. The floor is the longer of two
times: reading the experts that the tokens reach, and multiplying, at the rates that this machine shows in the same run. The
forms take turns; the median of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common
import torch

from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.ops import Experts, OpSet
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.start.roofline import measure_ceilings

FORMS = ("torch", "bfloat16", "int8", "int4", "mxfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b", "mixtral-8x7b"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--experts", type=int, default=32, help="at most so many (default: 32)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=5)


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    native = NativeOps(args.threads)
    ceilings, results = measure_ceilings(native.pool), []
    for name in args.models:
        whole = read_spec(common.CONFIGS / name).spec
        mlp = whole.layers[0].mlp
        assert isinstance(mlp, MoESpec)
        spec = replace(mlp, num_experts=min(args.experts, mlp.num_experts), groups=None)
        shapes = replace(whole.layers[0], mlp=spec).weight_shapes(whole.hidden_size)
        products = [p for p in shapes if p.copies > 1]
        held = {
            form: layer(native if form != "torch" else CpuOps(), form, spec, products)
            for form in args.forms
        }
        for num_tokens in args.tokens:
            x = torch.randn(num_tokens, whole.hidden_size, dtype=torch.bfloat16)
            times: dict[str, list[float]] = {form: [] for form in held}
            reached = []
            for i in range(args.rounds + 1):
                logits = torch.randn(num_tokens, spec.num_experts)
                reached.append(len(logits.topk(spec.num_experts_per_token).indices.unique()))
                for form, (ops, weights) in held.items():
                    begin = time.perf_counter()
                    ops.moe(x, logits, Experts(*weights, spec))
                    if i:
                        times[form].append(time.perf_counter() - begin)
            median = {form: common.median(found) for form, found in times.items()}
            multiplied = (
                2
                * num_tokens
                * spec.num_experts_per_token
                * sum(p.rows * p.inner for p in products)
            )
            for form, (ops, weights) in held.items():
                num_bytes = (
                    sum(n for w in weights for _, n in ops.forms_of(w))
                    * common.median(reached)
                    / spec.num_experts
                )
                rate = {"int8": ceilings.int8, "int4": ceilings.int6, "mxfp4": ceilings.int6}.get(
                    form, ceilings.bfloat16
                )
                floor = max(num_bytes / ceilings.read, multiplied / rate)
                row: dict[str, Any] = {
                    "model": name,
                    "experts": spec.num_experts,
                    "tokens": num_tokens,
                    "form": form,
                }
                row |= {
                    "ms": 1e3 * median[form],
                    "share_of_floor": floor / median[form],
                    "mb": num_bytes / 1e6,
                }
                row |= {"times_torch": median["torch"] / median[form]} if "torch" in median else {}
                results.append(row)
                beside = f"{row['times_torch']:6.2f} × torch" if "torch" in median else ""
                share = f"{row['share_of_floor']:5.0%} of the floor"
                print(
                    f"{name:16} {num_tokens:4} tokens  {form:9} {row['ms']:9.2f} ms  {share} {beside}"
                )
    isa = native.pool.isa
    save(threads=args.threads, instruction_set=isa, ceilings=ceilings, results=results)


def layer(ops: OpSet, form: str, spec: MoESpec, products: list[Any]) -> tuple[OpSet, list[Any]]:
    """(ops, up and down), of random weights."""
    made = []
    for p in products:
        weight = torch.empty(spec.num_experts * p.rows, p.inner, dtype=torch.bfloat16).normal_(
            0.0, 0.02
        )
        made.append(ops.quantize_experts(weight, SCHEMES.get(form), num_experts=spec.num_experts))
    return ops, made
