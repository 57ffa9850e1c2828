"""Tiles of the experts' products: microseconds and TFLOP/s of each, beside what is taken.

    python benchmarks/gpu_experts.py OUT.json [--once] [--after FILE]

Both products of one layer (up with the gather, down with the scatter), a prefill step of 16,384 tokens and a decode step of
1,024, even random routing. `--once` runs each tile once, which compiles it; with `--after` the measurement waits for a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import triton

from slipstream.kernels.triton import TritonOps, moe
from slipstream.kernels.triton.pointwise import quantize
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.weights import Linear
from slipstream.model.description import read_spec
from slipstream.model.scheme import SCHEMES
from slipstream.model.spec import MoESpec

CONFIGS = Path(__file__).parent / "configs"
MODELS = (("qwen3-30b-a3b", None), ("mixtral-8x7b", "fp8"), ("deepseek-v2-lite", None))
TOKENS = (16384, 1024)
TILES = {  # entries of a tile: (BLOCK_N, bytes of BLOCK_K, warps, stages)
    128: ((128, 128, 8, 3), (256, 128, 8, 3), (256, 128, 8, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4)),
    64: ((128, 256, 8, 3), (128, 128, 4, 4), (64, 256, 4, 3), (64, 128, 4, 4), (256, 128, 8, 4)),
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--after", type=Path)
    args = parser.parse_args()
    while args.after is not None and not args.after.exists():
        time.sleep(0.1)
    ops, rows = TritonOps(), []
    for name, scheme in MODELS:
        whole = read_spec(CONFIGS / name).spec
        spec = next(layer.mlp for layer in whole.layers if isinstance(layer.mlp, MoESpec))
        weights: list[Linear] = [
            ops.prepare_experts(
                torch.randn(p.copies * p.rows, p.inner, device="cuda", dtype=torch.bfloat16) * 0.02,
                SCHEMES[scheme] if scheme else None,
                num_experts=p.copies,
            )
            for p in spec.products(whole.hidden_size)
            if p.copies > 1
        ]
        for num_tokens in TOKENS:
            logits = torch.randn(num_tokens, spec.num_experts, device="cuda")
            _, chosen = moe.route(logits, spec)
            usual = moe.entries_of_a_tile(chosen.numel(), spec.num_experts)
            for block in (usual,) if num_tokens > 4096 else (64, 128):
                groups = moe.group(chosen, spec.num_experts, block=block)
                for block_n, num_bytes, warps, stages in TILES[block]:
                    times = []
                    for w, gather in zip(weights, (True, False), strict=True):
                        inner = w.weight.shape[1]
                        x = torch.randn(num_tokens if gather else chosen.numel(), inner, device="cuda", dtype=torch.bfloat16)
                        given = x if w.inputs is None else quantize(x, w.inputs)
                        tile = block_n, num_bytes // w.weight.element_size(), warps, stages
                        outer = w.out_features // spec.num_experts
                        call = partial(moe.experts, given, w, groups, spec, outer, torch.bfloat16, gather=gather, tile=tile)
                        if args.once:
                            try:
                                call()
                            except triton.runtime.errors.OutOfResources:
                                continue
                        times.append(0.0 if args.once else microseconds([call] * 4))
                    flops = 2 * chosen.numel() * sum(w.weight.numel() for w in weights) / spec.num_experts
                    us = sum(times)
                    rows.append(
                        {
                            "model": name,
                            "tokens": num_tokens,
                            "entries": block,
                            "tile": [block_n, num_bytes, warps, stages],
                            "usual": block == usual and (block_n, num_bytes, warps, stages) == TILES[block][0],
                            "us": times,
                            "tflops": flops / max(us, 1e-9) / 1e6,
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
        del weights
    record = {"command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
