"""Products with weights in their stored formats: 4-bit floats and GGUF's types next to FP8, int4 and bfloat16.

    python benchmarks/kernels.py --device cuda --op weights --parts check,products,tiles --formats nvfp4,mxfp4-all,Q4_K,Q6_K
    TRITON_INTERPRET=1 python benchmarks/kernels.py --device cuda --op weights --tiny --output weights.json    on a CPU

check     expanded weights bit for bit; products, rows of a table and mixtures of experts against their values in float64
products  Llama-3-8B's products, weights outside of the L2 cache: microseconds in graphs, and the share of the floor
tiles     the same with other tiles, the best first

The floor is the reading of the weights at the better rate of a copy and a sum, measured first. IQ1 to IQ3 need the gguf
package. Each part takes less than 4 minutes on an H200 for four formats.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.ops import Experts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.products import float4, gguf
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.weights.forms import BlockLinear, BlockRows, GroupedLinear, Linear, chunk_of
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.model.load.random_weights import _random_rows
from slipstream.model.stored import gguf_quants
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.gguf_types import TYPES

FLOAT4 = ("nvfp4", "mxfp4-all")
TYPES_BY_NAME = {quant.name: quant for quant in TYPES.values()}
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
TOLERANCE = {"products": 6e-3, "experts": 2e-2}
"""Relative errors of the norm. bfloat16's own rounding gives 2e-3."""


class Device:
    """Device of the kernels, and its number type."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.where = tiny, torch.device("cpu" if tiny else "cuda")
        self.dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float16]
        self.dtype = self.dtypes[0]

    def us(self, calls: list[Callable[[], object]]) -> float:
        if not self.tiny:
            return microseconds(calls)
        for call in calls:
            call()
        return 1.0

    def bandwidth(self) -> float:
        """Bytes/s: the better of a copy and a sum."""
        if self.tiny:
            return 1e9
        a = torch.empty(2**30, dtype=torch.uint8, device=self.where)
        b, numbers = torch.empty_like(a), a.view(torch.float32)
        copied = 2 * a.numel() / self.us([partial(b.copy_, a)] * 4)
        return 1e6 * max(copied, a.numel() / self.us([numbers.sum] * 4))


def plain(kind: str, rows: int, inner: int, on: Device, *, dtype: torch.dtype, **how: bool) -> Any:
    """(weight as loaded, its values in float32) of random codes and scales."""
    if kind in TYPES_BY_NAME:
        quant = TYPES_BY_NAME[kind]
        size, rng = inner // quant.block_size * quant.block_bytes, np.random.default_rng(0)
        raw = _random_rows(kind, min(rows, 512), size, rng)[np.arange(rows) % min(rows, 512)]
        empty = torch.empty(rows, inner, dtype=dtype, device="meta")
        pieces = (BlockRows(type=kind, blocks=raw, start=0, copies=1),)
        values = gguf_quants.dequantize(raw.reshape(-1, quant.block_bytes), kind, np.float32)
        w = BlockLinear(weight=empty, device=on.where, pieces=pieces)
        return w, torch.from_numpy(values).view(rows, inner).to(on.where)
    if kind in FLOAT4:
        size = SCHEMES[kind].group_size
        if kind == "nvfp4":
            drawn = torch.randint(0, 0x7F, (inner // size, rows), dtype=torch.uint8)
            scales = drawn.view(torch.float8_e4m3fn).float()
        else:
            scales = torch.randint(-12, 4, (inner // size, rows)).float().exp2()
        w = GroupedLinear(
            weight=torch.randint(-(2**15), 2**15, (rows, inner // 4)).to(torch.int16).to(on.where),
            scales=scales.to(dtype).to(on.where),
            bias=torch.randn(rows).to(dtype).to(on.where) if how.get("bias") else None,
            group_size=size,
            chunk=chunk_of(inner, size),
            codes="e2m1",
            divides=how.get("divides", False),
            row_scales=(torch.rand(rows) / 64 + 1e-3).to(on.where) if kind == "nvfp4" else None,
        )
        return w, dequantize(w, torch.float32)
    w = Linear(weight=(torch.randn(rows, inner) / 64).to(dtype).to(on.where))
    if kind != "bf16":
        w = round_linear(w.weight, None, SCHEMES[kind])
        return w, dequantize(w, torch.float32)
    return w, w.weight.float()


def stored(formats: list[str]) -> list[str]:
    """Weights as checkpoints hold them."""
    return [kind for kind in formats if kind in (*FLOAT4, *TYPES_BY_NAME)]


def expanded(w: Linear, dtype: torch.dtype) -> Tensor:
    return gguf.expand(w) if isinstance(w, gguf.CodedLinear) else float4.expanded(w, dtype)


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


def check(on: Device, formats: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    bad: list[str] = []

    def note(name: str, error: float, most: float) -> None:
        worst[name] = max(worst.get(name, 0.0), round(error, 6))
        if not error < most:
            bad.append(f"{name}: {error}")

    sizes = (
        (1, 9) if on.tiny else (1, 2, 5, 16, 17, 33, 64, 100, 200, 256, 300, 512, 513, 700, 2048)
    )
    ops = TritonOps()
    for kind in stored(formats):
        shapes = [(48, 256)] if on.tiny else [(6144, 4096), (4096, 14336), (1040, 2048)]
        if not on.tiny and kind in FLOAT4:
            shapes.append((208, 2880))
        for (rows, inner), dtype in itertools.product(shapes, on.dtypes):
            for divides in (False, True) if kind in FLOAT4 else (False,):
                w, _ = plain(kind, rows, inner, on, dtype=dtype, divides=divides)
                values = plain_values(w, kind, dtype)
                if not torch.equal(expanded(ops.pack_weight(w), dtype), values):
                    bad.append(f"{kind} {rows}x{inner} {dtype}: expanded weights differ")
        for (rows, inner), dtype in itertools.product(shapes, on.dtypes):
            w, values = plain(kind, rows, inner, on, dtype=dtype, bias=True, divides=True)
            packed, exact = ops.pack_weight(w), values.double()
            for n in sizes:
                x = torch.randn(n, inner, device=on.where).to(dtype) / 64
                wanted = x.double() @ exact.T + (0 if w.bias is None else w.bias.double())
                note(kind, relative(ops.linear(x, packed), wanted), TOLERANCE["products"])
            if kind in TYPES_BY_NAME:
                ids = torch.tensor([rows - 1, 0, 7], device=on.where)
                if not torch.equal(ops.embed(ids, packed), values[ids].to(dtype)):
                    bad.append(f"{kind}: rows of a table")
        check_experts(on, kind, note)
        print(f"check {kind}: {json.dumps(worst)}", flush=True)
    return {"worst": worst, "bad": bad}


def plain_values(w: Linear, kind: str, dtype: torch.dtype) -> Tensor:
    """The weight's values as the kernels must round them."""
    if not isinstance(w, BlockLinear):
        return dequantize(w, dtype)
    raw, size = w.pieces[0].blocks, TYPES_BY_NAME[kind].block_bytes
    values = gguf_quants.dequantize(raw.reshape(-1, size), kind, np.float32)
    return torch.from_numpy(values).view(len(raw), -1).to(w.device).to(dtype)


def check_experts(on: Device, kind: str, note: Callable[[str, float, float], None]) -> None:
    num, width, hidden = (8, 256, 256) if on.tiny else (32, 1408, 2816)
    if not on.tiny and kind in TYPES_BY_NAME:
        width, hidden = 1536, 2816 // 256 * 256  # whole blocks
    mlp = DenseSpec(intermediate_size=width, activation="silu", gated=True, bias=kind in FLOAT4)
    spec = MoESpec(num_experts=num, num_experts_per_token=4, normalize=True, expert=mlp)
    ops, made, values = TritonOps(), [], []
    for rows, inner in ((num * 2 * width, hidden), (num * hidden, width)):
        w, dense = plain(kind, rows, inner, on, dtype=on.dtype, bias=True)
        if isinstance(w, BlockLinear):
            w = dataclasses.replace(w, pieces=(dataclasses.replace(w.pieces[0], copies=num),))
        made.append(ops.pack_experts(w, num_experts=num))
        values.append(Linear(weight=dense, bias=None if w.bias is None else w.bias.float()))
    for n in (1, 9) if on.tiny else (1, 4, 16, 24, 64, 256, 300, 1000, 3000):
        x = torch.randn(n, hidden, device=on.where).to(on.dtype) / 256
        logits = torch.randn(n, num, device=on.where).to(on.dtype)
        wanted = ReferenceOps().moe(x.float(), logits.float(), Experts(*values, spec))
        ours = ops.moe(x, logits, Experts(*made, spec))
        note(f"{kind} experts", relative(ours, wanted.double()), TOLERANCE["experts"])


def tensors(w: Linear) -> dict[str, Tensor]:
    fields = {f.name: getattr(w, f.name) for f in dataclasses.fields(w)}
    return {name: v for name, v in fields.items() if isinstance(v, Tensor) and name != "dense"}


def weights(on: Device, formats: list[str]) -> Iterator[tuple[str, str, TritonOps, list[Any], int]]:
    """Each format's product of each shape: its copies, together larger than the L2 cache, and bytes of one."""
    shapes = {"small": (64, 512)} if on.tiny else SHAPES
    for kind, (name, (rows, inner)) in itertools.product(formats, shapes.items()):
        ops = TritonOps()
        w = ops.pack_weight(plain(kind, rows, inner, on, dtype=on.dtype)[0])
        size = sum(v.nbytes for v in tensors(w).values())
        copies = [w]
        for _ in range(0 if on.tiny else max(1, min(24, int(3e8 // size)))):
            copies.append(
                dataclasses.replace(w, **{name: v.clone() for name, v in tensors(w).items()})
            )
        yield kind, name, ops, copies, size


def products(on: Device, formats: list[str]) -> dict[str, Any]:
    rate, table, layers = on.bandwidth(), {}, {}
    for kind, name, ops, every, size in weights(on, formats):
        for n in (1, 9) if on.tiny else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096):
            x = torch.randn(n, 512 if on.tiny else SHAPES[name][1], device=on.where).to(on.dtype)
            us = on.us([partial(ops.linear, x, w) for w in every])
            table[f"{kind} {name} {n}"] = [round(us, 2), round(size / us * 1e6 / rate, 3)]
            layers[f"{kind} {n}"] = round(layers.get(f"{kind} {n}", 0.0) + us, 1)
        print(f"{kind} {name}: {json.dumps(table)[-400:]}", flush=True)
    return {"bandwidth": rate, "us, share": table, "us of a layer": layers}


def tiles_of(kind: str, n: int) -> list[Any]:
    if kind in TYPES_BY_NAME:
        m = 8 if n == 1 else 16
        few = [(m, 32, s, 2, st) for s in (1, 2, 4, 8) for st in (2, 3, 4)]
        return few + [(m, 16, s, 1, 4) for s in (1, 2, 4)] + [(m, 64, s, 4, 4) for s in (2, 4)]
    if n <= 64:
        sizes = itertools.product(((64, 4), (128, 4), (128, 8)), (1, 2, 4, 8), (3, 4, 6))
        return [float4.LinearTile(rows, max(16, n), s, w, st) for (rows, w), s, st in sizes]
    sizes = itertools.product(((64, 4), (128, 4), (128, 8), (256, 8)), (64, 128, 256), (2, 3, 4))
    return [float4.LinearTile(rows, tokens, 1, w, st) for (rows, w), tokens, st in sizes]


def by_expanding(x: Tensor, w: Any) -> Tensor:
    return torch.nn.functional.linear(x, float4.expanded(w, x.dtype))


def tiles(on: Device, formats: list[str]) -> dict[str, Any]:
    rate, table = on.bandwidth(), {}
    for kind, name, ops, every, size in weights(on, stored(formats)):
        inner, scratch = (512 if on.tiny else SHAPES[name][1]), ops._scratch[on.where]
        call, few = (
            (gguf.linear, (1, 16))
            if kind in TYPES_BY_NAME
            else (float4.float4_linear, (16, 64, 256, 512))
        )
        for n in few[:1] if on.tiny else few:
            x = torch.randn(n, inner, device=on.where).to(on.dtype)
            tried = {"default": on.us([partial(call, x, w, scratch) for w in every])}
            if kind in FLOAT4 and not on.tiny:
                tried["expanded"] = on.us([partial(by_expanding, x, w) for w in every])
            for tile in tiles_of(kind, n)[: 2 if on.tiny else None]:
                if kind in TYPES_BY_NAME or tile.splits <= inner // 128:
                    tried[str(tile)] = on.us(
                        [partial(call, x, w, scratch, tile=tile) for w in every]
                    )
            best = sorted(tried.items(), key=lambda item: item[1])[:6]
            kept = dict(best) | {k: tried[k] for k in ("default", "expanded") if k in tried}
            shares = {k: [round(us, 2), round(size / us * 1e6 / rate, 3)] for k, us in kept.items()}
            table[f"{kind} {name} {n}"] = shares
            print(f"{kind} {name} {n}: {json.dumps(shares)}", flush=True)
    return {"bandwidth": rate, "us, share": table}


PARTS = {"check": check, "products": products, "tiles": tiles}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="check,products")
    parser.add_argument(
        "--formats",
        default="nvfp4,mxfp4-all,Q4_K,Q6_K",
        help="schemes of --quantization, bf16, and GGUF's types (default: nvfp4,mxfp4-all,Q4_K,Q6_K)",
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, interpreted on a CPU")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    found: dict[str, Any] = {}
    for part in args.parts.split(","):
        found[part] = PARTS[part](Device(args.tiny), args.formats.split(","))
        save(**found)
    if "check" in found:
        print("check:", found["check"]["bad"] or "all right")
