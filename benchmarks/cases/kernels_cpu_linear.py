"""int8 products with and without the weight's zeros: from which share of zeros on the sparse form is faster.

    python benchmarks/kernels.py --device cpu --op linear [--shapes 576x1536 4096x4096] [--tokens 1 4 64] [--isa avx2]

Each shape (rows x inputs) is measured with each number of tokens and each share of zeros, 2:4 among them. Dense and sparse
take turns; the median of each counts. One round passes over so many copies of the weight that they do not fit the
processor's caches. `SPARSE_FROM` of kernels/host_ops.py follows from this.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import common
import torch

from slipstream.kernels import native
from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.native import Arena, NativeLinear, Program
from slipstream.kernels.programs import add_linear
from slipstream.kernels.weights import ScaledLinear
from slipstream.plan.hardware import available_cores

SHAPES = ("576x1536", "3072x576", "4096x4096", "4096x14336")
ZEROS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def codes(rows: int, inner: int, zeros: float | str) -> torch.Tensor:
    found = torch.randint(1, 128, (rows, inner), dtype=torch.int8)
    if zeros == "2:4":
        return found * (torch.rand(rows, inner // 4, 4).argsort(-1) < 2).flatten(1)
    return found * (torch.rand(rows, inner) >= zeros)


class Round:
    """All copies of one weight, one after the other."""

    def __init__(self, ops: NativeOps, weight: ScaledLinear, tokens: int, cache_bytes: int) -> None:
        held, arena = ops.pack_weight(weight), Arena()
        (part,) = held.parts
        self.num_bytes, self.tokens = part.data.size, tokens
        self.copies = max(2, -(-cache_bytes // self.num_bytes))
        self.program = Program(ops.pool)
        rows, inner = weight.weight.shape
        self._x, self._y = torch.randn(tokens, inner), torch.empty(tokens, rows)
        x, y = self.program.buffer(native.FORM_Q, inner), self.program.bound(self._y)
        self.program.add("convert", self.program.bound(self._x), x, native.FORM_Q, inner, 1)
        for _ in range(self.copies):
            copy = NativeLinear(weight=held.weight, parts=(part.moved(arena),))
            add_linear(self.program, x, y, copy)

    def us(self) -> float:
        """Of one product."""
        begin = time.perf_counter()
        self.program.run(native.StepInputs(num_tokens=self.tokens))
        return (time.perf_counter() - begin) / self.copies * 1e6


def compare(args: Any, shape: str, tokens: int, zeros: float | str) -> dict[str, Any]:
    rows, inner = map(int, shape.split("x"))
    weight = ScaledLinear(weight=codes(rows, inner, zeros), scales=torch.rand(rows), out_dtype=torch.float32)
    forms = {
        name: Round(NativeOps(args.threads, args.isa, sparse_from=threshold), weight, tokens, args.cache_mb * 2**20)
        for name, threshold in (("dense", 2.0), ("sparse", 0.0))
    }
    times: dict[str, list[float]] = {name: [] for name in forms}
    for i in range(args.rounds + 2):
        for name in sorted(forms, reverse=i % 2 == 1):
            us = forms[name].us()
            if i >= 2:
                times[name].append(us)
    median = {name: common.median(us) for name, us in times.items()}
    return {
        "shape": shape,
        "tokens": tokens,
        "zeros": zeros,
        **{f"{name}_us": us for name, us in median.items()},
        **{f"{name}_gb_per_s": forms[name].num_bytes / us / 1e3 for name, us in median.items()},
        "bytes_ratio": forms["sparse"].num_bytes / forms["dense"].num_bytes,
        "speed_ratio": median["dense"] / median["sparse"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help=f"rows x inputs (default: {' '.join(SHAPES)})")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 64])
    parser.add_argument("--isa", choices=native.instruction_sets())
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cache-mb", type=int, default=192, help="copies of a weight fill this much (default: 192)")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.manual_seed(0)
    results = []
    for tokens in args.tokens:
        for shape in args.shapes:
            found = [compare(args, shape, tokens, zeros) for zeros in (*ZEROS, "2:4")]
            results += found
            print(f"{shape}, {tokens} tokens: dense {found[0]['dense_us']:.0f} µs at {found[0]['dense_gb_per_s']:.1f} GB/s")
            for row in found:
                print(
                    f"  zeros {row['zeros']!s:>4}  {row['sparse_us']:8.1f} µs {row['sparse_gb_per_s']:6.1f} GB/s "
                    f"{row['bytes_ratio']:5.2f} of the bytes  {row['speed_ratio']:5.2f} × dense"
                )
            faster = [row["zeros"] for row in found[:-1] if row["speed_ratio"] > 1]
            print(f"  sparse is faster from {min(faster):.0%} zeros" if faster else "  sparse is never faster")
    isa = args.isa or native.instruction_sets()[-1]
    save(threads=args.threads, instruction_set=isa, results=results)

