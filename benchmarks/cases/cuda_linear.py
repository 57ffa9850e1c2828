"""The products of an 8B Llama by scheme and number of tokens: microseconds, and the share of the floor that is reached.

    python benchmarks/gpu_linear.py OUT.json [--tokens 1,16,64,256,1024,8192]

The floor is the larger of weight bytes / 4.45 TB/s and FLOPs / 780 (dense, int4) or 1,450 TFLOP/s (fp8, int8), as measured
on an H200. Each product is replayed from a graph over enough copies of the weight that none stays in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from slipstream.hub import tiles_folder
from slipstream.kernels.autotune_table import load_tiles
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.tuning import microseconds
from slipstream.spec.scheme import SCHEMES

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
BANDWIDTH, DENSE_RATE, EIGHT_BIT_RATE = 4.45e12, 780e12, 1450e12


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--schemes", default="dense,fp8,int8,int4")
    parser.add_argument("--tile-table", default="auto")
    args = parser.parse_args()
    tiles = load_tiles(args.tile_table, torch.cuda.get_device_name(), tiles_folder())
    ops, rows = TritonOps(tiles), []
    for name, (outer, inner) in SHAPES.items():
        for scheme in args.schemes.split(","):
            kind = SCHEMES.get(scheme)
            weight_bytes = kind.weight_bytes(outer, inner) if kind else outer * inner * 2
            weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02
            copies = [ops.quantize_weight(weight.clone(), None, kind) for _ in range(max(2, int(3e8 / weight_bytes)))]
            rate = EIGHT_BIT_RATE if kind and kind.inputs else DENSE_RATE
            for num_tokens in map(int, args.tokens.split(",")):
                x = torch.randn(num_tokens, inner, device="cuda", dtype=torch.bfloat16)
                given = ops.quantize(x, kind.inputs) if kind and kind.inputs else x
                calls = [partial(ops.linear, given, copies[i % len(copies)]) for i in range(max(16, len(copies)))]
                taken = microseconds(calls)
                floor = max(weight_bytes / BANDWIDTH, 2 * num_tokens * outer * inner / rate) * 1e6
                rows.append(
                    {"product": name, "scheme": scheme, "tokens": num_tokens, "us": taken, "floor_us": floor}
                )
                print(
                    f"{name:5} {scheme:6} {num_tokens:6} {taken:9.1f} us  {floor / taken:6.1%} of the floor",
                    flush=True,
                )
            del copies
    record = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tile_table": tiles.describe(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
