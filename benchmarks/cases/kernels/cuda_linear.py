"""The products of an 8B Llama by scheme and number of tokens: microseconds, and the share of the floor.

    python benchmarks/kernels.py --device cuda --op linear [--tokens 1,16,64,256,1024,8192] [--shapes 24576x1536,…]

The floor is the longer of two times: weight bytes / 4.45 TB/s, and FLOPs / 780 (dense, int4) or 1,450 TFLOP/s (8-bit
inputs). These rates were measured on an H200. Each product is replayed from a graph over so many copies of the weight that
none stays in the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from slipstream.hub import tiles_folder
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.tuning import microseconds
from slipstream.spec.devices.autotune_table import load_tiles
from slipstream.spec.scheme import SCHEMES

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
BANDWIDTH, DENSE_RATE, EIGHT_BIT_RATE = 4.45e12, 780e12, 1450e12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--schemes", default="dense,fp8,int8,int4")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="of those of an 8B Llama, or outputs x inputs"
    )
    parser.add_argument("--tile-table", default="auto")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    tiles = load_tiles(args.tile_table, torch.cuda.get_device_name(), tiles_folder())
    ops, rows = TritonOps(tiles), []
    for name in args.shapes.split(","):
        outer, inner = SHAPES[name] if name in SHAPES else map(int, name.split("x"))
        for scheme in args.schemes.split(","):
            kind = SCHEMES.get(scheme)
            weight_bytes = kind.weight_bytes(outer, inner) if kind else outer * inner * 2
            weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02
            copies = [
                ops.quantize_weight(weight.clone(), None, kind)
                for _ in range(max(2, int(3e8 / weight_bytes)))
            ]
            rate = EIGHT_BIT_RATE if kind and kind.inputs else DENSE_RATE
            for num_tokens in map(int, args.tokens.split(",")):
                x = torch.randn(num_tokens, inner, device="cuda", dtype=torch.bfloat16)
                given = ops.quantize(x, kind.inputs) if kind and kind.inputs else x
                calls = [
                    partial(ops.linear, given, copies[i % len(copies)])
                    for i in range(max(16, len(copies)))
                ]
                taken = microseconds(calls)
                floor = max(weight_bytes / BANDWIDTH, 2 * num_tokens * outer * inner / rate) * 1e6
                rows.append(
                    {
                        "product": name,
                        "scheme": scheme,
                        "tokens": num_tokens,
                        "us": taken,
                        "floor_us": floor,
                    }
                )
                print(
                    f"{name:5} {scheme:6} {num_tokens:6} {taken:9.1f} us  {floor / taken:6.1%} of the floor",
                    flush=True,
                )
            del copies
    save(tile_table=tiles.describe(), rows=rows)
