"""int8 products with and without the weight's zeros: from which share of zeros on the sparse form is faster, and up to how
many tokens.

    python benchmarks/kernels.py --device cpu --op linear [--shapes 576x1536 4096x4096] [--tokens 1 4 64] [--isa avx2]
    python benchmarks/kernels.py --device cpu --op linear --layers 30 --shapes 960x576 576x576 3072x576-gated 576x1536 \\
        --zeros 0.7 --tokens 1 16 64 --prompts 64 512

Each shape (rows x inputs; `-gated`: gate and up with their activation) is measured with each number of decodes (`--tokens`),
each length of a prompt (`--prompts`) and each share of zeros, 2:4 among them. Dense and sparse take turns. Times are medians,
and the ratio is the median of those within a round. A round passes over so many copies of the weight that they do not fit the
processor's caches. With `--layers` it passes over all shapes in turn, as the layers of a model do, and a last row has their
sum. The results must be equal bit by bit. `SPARSE_FROM` of kernels/cpu/host_ops.py follows from this.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch

from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.programs import add_linear
from slipstream.kernels.weights.forms import ScaledLinear

SHAPES = ("576x1536", "3072x576", "4096x4096", "4096x14336")
ZEROS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, "2:4")


def own_cores(count: int) -> list[int]:
    """The first `count` logical CPUs that lie on different cores."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(place.read_text() if place.exists() else str(cpu), cpu)
    return list(found.values())[:count]


def share(text: str) -> float | str:
    return text if text == "2:4" else float(text)


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    inner: int
    gated: bool

    @staticmethod
    def of(name: str) -> Shape:
        rows, inner = name.removesuffix("-gated").split("x")
        return Shape(name, int(rows), int(inner), name.endswith("-gated"))


def weight_of(shape: Shape, zeros: float | str) -> ScaledLinear:
    codes = torch.randint(1, 128, (shape.rows, shape.inner), dtype=torch.int8)
    if zeros == "2:4":
        codes *= (torch.rand(shape.rows, shape.inner // 4, 4).argsort(-1) < 2).flatten(1)
    else:
        codes *= torch.rand(shape.rows, shape.inner) >= zeros
    return ScaledLinear(weight=codes, scales=torch.rand(shape.rows), out_dtype=torch.float32)


@dataclass(frozen=True)
class Step:
    tokens: int
    prompt: bool

    @property
    def name(self) -> str:
        return f"a prompt of {self.tokens}" if self.prompt else f"{self.tokens} tokens"

    @property
    def inputs(self) -> native.StepInputs:
        decodes = 0 if self.prompt else self.tokens
        return native.StepInputs(num_tokens=self.tokens, num_seqs=decodes or 1, num_decodes=decodes)


class Round:
    """Products with all copies of one weight, one after the other, or of several weights in turn."""

    def __init__(
        self, ops: NativeOps, weights: Sequence[tuple[Shape, ScaledLinear]], copies: int
    ) -> None:
        self.copies, self.program = copies, Program(ops.pool)
        self.at: list[list[int]] = [
            [] for _ in weights
        ]  # of each weight: its operators in the program
        self.num_bytes: list[int] = []  # of each, and of all
        self._x: list[int] = []  # unbound buffers
        self._y: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        held, inputs, arena = [], [], Arena()
        for shape, weight in weights:
            packed = ops.pack_weight(weight)
            x, y = self.program.bound(), self.program.bound()
            q = self.program.buffer(native.FORM_Q, shape.inner)
            self.program.add("convert", x, q, native.FORM_Q, shape.inner, 1)
            held.append(packed)
            inputs.append((q, y))
            self.num_bytes.append(packed.parts[0].data.size)
            self._x.append(x)
            self._y.append(y)
            self._sizes.append((shape.inner, shape.rows // (2 if shape.gated else 1)))
        self.num_bytes.append(sum(self.num_bytes))
        for _ in range(copies):
            for (shape, _), packed, (q, y), at in zip(weights, held, inputs, self.at, strict=True):
                (part,) = packed.parts
                copy = part.moved(arena)
                at.append(len(self.program.operators))
                if shape.gated:
                    kind = (native.FORM_F32, *native.activation_of("silu"))
                    self.program.add(
                        "gated_linear",
                        q,
                        y,
                        *kind,
                        part.kind,
                        part.rows,
                        part.inner,
                        copy.data,
                        None,
                        None,
                        0,
                    )
                else:
                    add_linear(
                        self.program, q, y, NativeLinear(weight=packed.weight, parts=(copy,))
                    )

    def bind(self, tokens: int) -> list[torch.Tensor]:
        """Sets the outputs of the next rounds."""
        self._inputs = [
            torch.randn(tokens, n, generator=torch.Generator().manual_seed(0))
            for n, _ in self._sizes
        ]
        self._results = [torch.zeros(tokens, n) for _, n in self._sizes]
        for buffer, given in zip(
            [*self._x, *self._y], [*self._inputs, *self._results], strict=True
        ):
            self.program.bind(buffer, given)
        return self._results

    def us(self, step: Step, clock: str) -> list[float]:
        """Microseconds of one product with each weight."""
        self.program.profile(clock)
        self.program.run(step.inputs)
        ns = self.program.profile(None)
        return [sum(ns[i] for i in at) / self.copies / 1e3 for at in self.at]


def compare(
    args: Any, shapes: Sequence[Shape], steps: Sequence[Step], zeros: float | str
) -> list[dict[str, Any]]:
    weights = [(s, weight_of(s, zeros)) for s in shapes]
    copies = args.layers or max(
        2, -(-args.cache_mb * 2**20 // sum(s.rows * s.inner for s in shapes))
    )
    dense, sparse = (
        Round(NativeOps(args.threads, args.isa, sparse_from=threshold), weights, copies)
        for threshold in (2.0, 0.0)
    )
    names = [*(s.name for s in shapes), *(["a layer"] if args.layers else [])]
    rows = []
    for step in steps:
        ours, theirs = sparse.bind(step.tokens), dense.bind(step.tokens)
        times: dict[Round, list[list[float]]] = {dense: [], sparse: []}
        for i in range(args.rounds + 1):
            for form in (dense, sparse) if i % 2 else (sparse, dense):
                us = form.us(step, args.clock)
                times[form] += [[*us, sum(us)]] if i else []
        if not all(map(torch.equal, ours, theirs)):
            raise SystemExit(
                f"{step.name}, zeros {zeros}: the sparse weights' results are not those of the dense ones"
            )
        for i, name in enumerate(names):
            pairs = [(d[i], s[i]) for d, s in zip(times[dense], times[sparse], strict=True)]
            dense_us, sparse_us = map(common.median, zip(*pairs, strict=True))
            rows.append(
                {
                    "shape": name,
                    "tokens": step.tokens,
                    "prompt": step.prompt,
                    "zeros": zeros,
                    "dense_us": dense_us,
                    "sparse_us": sparse_us,
                    "dense_gb_per_s": dense.num_bytes[i] / dense_us / 1e3,
                    "sparse_gb_per_s": sparse.num_bytes[i] / sparse_us / 1e3,
                    "bytes_ratio": sparse.num_bytes[i] / dense.num_bytes[i],
                    "speed_ratio": common.median([d / s for d, s in pairs]),
                }
            )
    return rows


def dense_from(args: Any, shape: Shape, zeros: float | str) -> str:
    ops = NativeOps(args.threads, args.isa, sparse_from=0.0, dense_copies=True)
    (part,) = ops.pack_weight(weight_of(shape, zeros)).parts
    return "never dense" if part.dense is None else f"dense from {part.dense_from} tokens on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(SHAPES),
        help=f"rows x inputs (default: {' '.join(SHAPES)})",
    )
    parser.add_argument(
        "--tokens", nargs="*", type=int, default=[1, 4, 64], help="decodes (default: 1 4 64)"
    )
    parser.add_argument(
        "--prompts", nargs="*", type=int, default=[], help="lengths of prompts (default: none)"
    )
    parser.add_argument(
        "--zeros", nargs="+", type=share, default=list(ZEROS), help="shares, or 2:4 (default: nine)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="all shapes in turn, so often in a round (default: each alone)",
    )
    parser.add_argument("--isa", choices=native.instruction_sets())
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--clock", choices=["wall", "processor"], default="wall", help="processor: of all threads"
    )
    parser.add_argument(
        "--cache-mb",
        type=int,
        default=192,
        help="copies of a dense weight fill this much (default: 192)",
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    os.sched_setaffinity(0, own_cores(args.threads))
    torch.manual_seed(0)
    shapes = [Shape.of(name) for name in args.shapes]
    steps = [Step(n, False) for n in args.tokens] + [Step(n, True) for n in args.prompts]
    results: list[dict[str, Any]] = []
    for together in [shapes] if args.layers else [[s] for s in shapes]:
        for zeros in args.zeros:
            results += (rows := compare(args, together, steps, zeros))
            for row in rows:
                print(
                    f"{row['shape']:15} {Step(row['tokens'], row['prompt']).name:16} zeros {zeros!s:>4}"
                    f"  dense {row['dense_us']:9.1f} µs {row['dense_gb_per_s']:5.1f} GB/s"
                    f"  sparse {row['sparse_us']:9.1f} µs {row['sparse_gb_per_s']:5.1f} GB/s"
                    f"  {row['bytes_ratio']:4.2f} of the bytes  {row['speed_ratio']:5.2f} x dense",
                    flush=True,
                )
    isa = args.isa or native.instruction_sets()[-1]
    for zeros in args.zeros:
        print(
            f"zeros {zeros}: {dense_from(args, shapes[0], zeros)}, as an engine with dense_copies measures it at its start"
        )
    save(threads=args.threads, instruction_set=isa, clock=args.clock, results=results)
