"""Error of a trellis code beside the formats that `compress` writes, on single layers.

    python benchmarks/compression.py --study trellis [--layers 2,14,27] [--windows 8] [--states 10]

Every row is GPTQ with the same second moments of inputs. The figure is the squared error of a product's output over its square,
summed over the layer's products; bits have scales, and for the trellis a sequence's start, included. The trellis is QTIP's
bit-shift trellis (Tseng et al. 2024) along a column's rows, on inputs that an orthogonal matrix has mixed, with a scale a row;
the values of a state's successors are evenly spread quantiles of a normal distribution. Its C is compiled here.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.bench.report import print_table
from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_layer
from slipstream.compress.gguf.blocks import round_blocks
from slipstream.compress.quantize.rounding import gptq, inverse_factor, round_columns
from slipstream.compress.recipe import Quantize
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.text import calibration_text
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec
from slipstream.spec.stored.gguf_types import BY_NAME

CPU = torch.device("cpu")
LENGTH = 192
"""Numbers of a sequence, whose start is free."""
FLOATS = ctypes.POINTER(ctypes.c_float)
PRODUCTS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def values_of_states(bits: int, state_bits: int, spread: float) -> Tensor:
    count, fan = 1 << state_bits, 1 << bits
    normal = NormalDist(0, spread)
    quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    offsets = np.random.default_rng(0).permutation(count // fan)
    state = np.arange(count)
    found = quantiles[state % fan * (count // fan) + offsets[state // fan]]
    return torch.from_numpy(found.astype(np.float32))


class Trellis:
    def __init__(self, folder: Path, bits: int, state_bits: int) -> None:
        made = folder / "libtrellis.so"
        if not made.is_file():
            source = Path(__file__).with_name("trellis.c")
            flags = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")
            subprocess.run(("cc", *flags, str(source), "-o", str(made)), check=True)
        self.call = ctypes.CDLL(str(made)).trellis
        self.bits, self.state_bits = bits, state_bits
        self.values = values_of_states(bits, state_bits, 1.3 if bits > 3 else 1.15)

    def nearest(self, x: Tensor) -> Tensor:
        """Sequences [n, length] as the trellis has them."""
        x = x.contiguous()
        made = torch.empty_like(x)
        pointers = (ctypes.cast(t.data_ptr(), FLOATS) for t in (x, made))
        last = ctypes.cast(self.values.data_ptr(), FLOATS)
        sizes = (ctypes.c_int64(n) for n in x.shape)
        assert not self.call(*pointers, *sizes, self.bits, self.state_bits, last)
        return made

    def error(self, weight: Tensor, stats: InputStats) -> tuple[float, float]:
        """(bits a weight, squared error of the output)."""
        inner = weight.shape[1]
        generator = torch.Generator().manual_seed(0)
        mixed, _ = torch.linalg.qr(torch.randn(inner, inner, generator=generator))
        hessian = mixed.T @ (stats.hessian / stats.num_rows) @ mixed
        work = weight @ mixed
        scale = work.square().mean(1).sqrt()
        order = hessian.diagonal().argsort(descending=True)
        upper = inverse_factor(hessian[order][:, order], 0.01, torch.zeros(inner).bool())
        work = work[:, order].contiguous()
        found = torch.empty_like(work)

        def on_own(column: Tensor, _: int) -> Tensor:
            return self.nearest((column / scale).view(-1, LENGTH)).view(-1) * scale

        for begin in range(0, inner, 64):
            end = min(begin + 64, inner)
            block = work[:, begin:end].clone()
            errors = round_columns(on_own, block, upper[begin:end, begin:end])
            found[:, begin:end] = block
            work[:, end:] -= errors @ upper[begin:end, end:]
        back = found[:, order.argsort()] @ mixed.T
        bits = self.bits + (self.state_bits - self.bits) / LENGTH + 16 / inner
        return bits, stats.energy(back - weight)


def of_blocks(kind: str) -> Callable[[Tensor, InputStats], tuple[float, float]]:
    def error(weight: Tensor, stats: InputStats) -> tuple[float, float]:
        own = kind if weight.shape[1] % BY_NAME[kind].block_size == 0 else "IQ4_NL"
        quant = BY_NAME[own]
        made = round_blocks(weight, own, stats, damping=0.01)[1]
        return 8 * quant.block_bytes / quant.block_size, stats.energy(made - weight)

    return error


def of_integers(**settings: Any) -> Callable[[Tensor, InputStats], tuple[float, float]]:
    def error(weight: Tensor, stats: InputStats) -> tuple[float, float]:
        fmt = Quantize(group_size=64, rounding="gptq", **settings).format(weight.shape[1])
        made = gptq(weight, fmt, torch.bfloat16, stats).dequantized()
        num_bytes = fmt.num_bytes(*weight.shape, 2)
        return 8 * num_bytes / weight.numel(), stats.energy(made - weight)

    return error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", default="2,14,27")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--states", type=int, default=10, help="bits of a state")


def run(args: argparse.Namespace, write: Callable[..., None]) -> None:
    source = read_spec(resolve_model(args.model))
    windows = calibration_text(
        tokenizer=Tokenizer.for_model(source), num_windows=args.windows, context=512
    )
    stream = Stream(source, windows, device=CPU, dtype=torch.float32)
    layers = [int(i) for i in args.layers.split(",")]
    sums: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        ways = {
            "int4 by 64": of_integers(bits=4),
            "int4 by 64, zero points": of_integers(bits=4, symmetric=False),
            "int3 by 64": of_integers(bits=3),
            **{kind: of_blocks(kind) for kind in ("MXFP4", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0")},
            **{
                f"trellis, {bits} bits": Trellis(Path(temporary), bits, args.states).error
                for bits in (3, 4, 5)
            },
        }
        for index in range(max(layers) + 1):
            values = load_layer(source, index, CPU)
            if index in layers:
                stats = stream.observe(index, values, PRODUCTS, inputs={})
                for name, way in ways.items():
                    for product in PRODUCTS:
                        weight = values[f"{product}.weight"]
                        bits, error = way(weight, stats[product])
                        own = sums.setdefault(name, [0.0, 0.0, 0.0])
                        own[0] += bits * weight.numel()
                        own[1] += weight.numel()
                        own[2] += error / stats[product].energy(weight) / len(layers) / 4
                    print(index, name, own, flush=True)
            stream.states = stream.run(index, values, ObservingOps())
    results = {
        name: {"bits_per_weight": bits / count, "relative_error": error}
        for name, (bits, count, error) in sums.items()
    }
    write(
        settings={
            "model": args.model,
            "layers": layers,
            "windows": args.windows,
            "state_bits": args.states,
        },
        results=results,
    )
    print_table(
        f"{args.model}, layers {args.layers}",
        ("", "bits", "relative error", "dB"),
        [
            (
                name,
                f"{r['bits_per_weight']:.3f}",
                f"{r['relative_error']:.5f}",
                f"{10 * math.log10(max(r['relative_error'], 1e-12)):.2f}",
            )
            for name, r in results.items()
        ],
    )
