"""One layer's mixture of experts on a CPU, by form of weights and number of tokens: milliseconds, against torch's `grouped_mm`
over bfloat16 weights, and the share of the floor.

    python benchmarks/cpu_moe.py [--models qwen3-30b-a3b] [--experts 32] [--tokens 1 16 512]

Sizes are a real model's, with so many of its experts (routing is even and random). The floor is the longer of reading the
experts that the tokens reach, at the rate that this machine reads, and of multiplying, at its rate in the products' type.
The forms take turns, round after round; the median of each.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch

from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.cpu_torch import CpuOps
from slipstream.kernels.ops import Experts, OpSet
from slipstream.plan.hardware import available_cores
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.roofline import measure_ceilings

CONFIGS = Path(__file__).parent / "configs"
FORMS = ("torch", "bfloat16", "int8", "int4", "mxfp4")


@torch.inference_mode()
def main() -> None:
    parser = common.parser(__doc__, "cpu_moe")
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b", "mixtral-8x7b"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--experts", type=int, default=32, help="at most so many (default: 32)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    native = NativeOps(args.threads)
    ceilings, results = measure_ceilings(native.pool), []
    for name in args.models:
        whole = read_spec(CONFIGS / name).spec
        mlp = whole.layers[0].mlp
        assert isinstance(mlp, MoESpec)
        spec = replace(mlp, num_experts=min(args.experts, mlp.num_experts), groups=None)
        products = [p for p in spec.products(whole.hidden_size) if p.copies > 1]
        held = {form: layer(native if form != "torch" else CpuOps(), form, spec, products) for form in args.forms}
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
            multiplied = 2 * num_tokens * spec.num_experts_per_token * sum(p.rows * p.inner for p in products)
            for form, (ops, weights) in held.items():
                num_bytes = sum(n for w in weights for _, n in ops.forms_of(w)) * common.median(reached) / spec.num_experts
                rate = ceilings.bfloat16 if form in ("torch", "bfloat16") else ceilings.int8
                floor = max(num_bytes / ceilings.read, multiplied / rate)
                row: dict[str, Any] = {"model": name, "experts": spec.num_experts, "tokens": num_tokens, "form": form}
                row |= {"ms": 1e3 * median[form], "share_of_floor": floor / median[form], "mb": num_bytes / 1e6}
                row |= {"times_torch": median["torch"] / median[form]} if "torch" in median else {}
                results.append(row)
                beside = f"{row['times_torch']:6.2f} × torch" if "torch" in median else ""
                share = f"{row['share_of_floor']:5.0%} of the floor"
                print(f"{name:16} {num_tokens:4} tokens  {form:9} {row['ms']:9.2f} ms  {share} {beside}")
    isa = native.pool.isa
    common.save(args.output, "cpu_moe", threads=args.threads, instruction_set=isa, ceilings=ceilings, results=results)


def layer(ops: OpSet, form: str, spec: MoESpec, products: list[Any]) -> tuple[OpSet, list[Any]]:
    """(ops, up and down), of random weights."""
    made = []
    for p in products:
        weight = torch.empty(spec.num_experts * p.rows, p.inner, dtype=torch.bfloat16).normal_(0.0, 0.02)
        made.append(ops.quantize_experts(weight, SCHEMES.get(form), num_experts=spec.num_experts))
    return ops, made


if __name__ == "__main__":
    main()
