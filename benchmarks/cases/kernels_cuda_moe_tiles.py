"""Tiles of the experts' products: microseconds and TFLOP/s of each, beside what is taken.

    python benchmarks/kernels.py --device cuda --op moe-tiles [--once] [--after FILE]

Both products of one layer with a gated activation between, for a prefill step of 16,384 tokens and a decode step of 1,024.
Routing is even and random. "sorted" products read rows in the experts' order through the copy engine; "gathered" ones gather
their rows; "torch" is torch's grouped product (CUTLASS). What stands around the products is timed too. `--once` runs each
tile once, which compiles it; with `--after` the measurement waits for a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import triton

from slipstream.kernels.ops import Experts
from slipstream.kernels.triton import TritonOps, moe
from slipstream.kernels.triton.experts import expert_gemm
from slipstream.kernels.triton.grouped_gemm import grouped_gemm, permute_rows
from slipstream.kernels.triton.moe_permute import pairs_per_tile, sort_pairs
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.weights import Activations, Linear, Quantized, ScaledLinear
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import SCHEMES

MODELS = (("qwen3-30b-a3b", None), ("mixtral-8x7b", "fp8"), ("deepseek-v2-lite", None))
TOKENS = (16384, 1024)
GATHERED = {64: ((128, 256, 8, 3),), 128: ((128, 128, 8, 3), (256, 128, 8, 3))}
"""Entries of a tile: (BLOCK_N, bytes of BLOCK_K, warps, stages)."""
TILES = {
    "up": {64: ((128, 4, 4), (64, 4, 3)), 128: ((128, 8, 3), (128, 8, 4), (64, 4, 3))},
    "down": {
        64: ((128, 4, 4), (128, 4, 3)),
        128: ((256, 8, 3), (256, 8, 4), (128, 4, 3), (128, 4, 2)),
    },
}
"""Of a product, for the entries of a tile: (BLOCK_N, warps, stages); tiles of 128 also with an empty second half left out."""


def tiles(which: str, block: int) -> list[tuple[int, int, int, bool]]:
    return [
        (*tile, halved) for halved in (False, True)[: block // 64] for tile in TILES[which][block]
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--after", type=Path)


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    while args.after is not None and not args.after.exists():
        time.sleep(0.1)
    ops, rows = TritonOps(), []

    def timed(call: Callable[[], Any]) -> float:
        if not args.once:
            return microseconds([call] * 4)
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            call()
        return 0.0

    for name, scheme in MODELS:
        whole = read_spec(common.CONFIGS / name).spec
        mixture, spec = next(
            (layer, layer.mlp) for layer in whole.layers if isinstance(layer.mlp, MoESpec)
        )
        up, down = (
            ops.quantize_experts(
                torch.randn(p.copies * p.rows, p.inner, device="cuda", dtype=torch.bfloat16) * 0.02,
                SCHEMES[scheme] if scheme else None,
                num_experts=p.copies,
            )
            for p in mixture.weight_shapes(whole.hidden_size)
            if p.copies > 1
        )
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, whole.hidden_size, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(num_tokens, spec.num_experts, device="cuda")
            weights, chosen = moe.route(logits, spec)
            entries, size = chosen.numel(), spec.expert.intermediate_size
            usual = pairs_per_tile(entries, spec.num_experts)

            def note(
                kind: str, us: float, block: int = 0, tile: Sequence[int] = (), share: float = 0.0
            ) -> None:
                """`share` of both products' multiplications."""
                row = {
                    "model": name,
                    "tokens": num_tokens,
                    "kind": kind,
                    "entries": block,
                    "tile": list(tile),
                    "us": us,
                }
                if share:
                    row["tflops"] = (
                        share * 6 * entries * size * whole.hidden_size / max(us, 1e-9) / 1e6
                    )
                rows.append(row)
                print(json.dumps(row), flush=True)

            def rounded(t: torch.Tensor, w: Linear) -> Activations:
                return quantize(t, w.inputs) if w.inputs else t

            given = rounded(x, up)
            for block in sorted({usual, 64, 128}):
                groups = sort_pairs(chosen, spec.num_experts, tile_m=block)
                ordered = permute_rows(given, groups, spec.num_experts_per_token)
                for tile in tiles("up", block):
                    call = partial(
                        grouped_gemm,
                        ordered,
                        up,
                        groups,
                        size,
                        spec.num_experts,
                        x.dtype,
                        spec.expert,
                        tile=tile,
                    )
                    note("sorted up", timed(call), block, tile, 2 / 3)
                inner = grouped_gemm(
                    ordered, up, groups, size, spec.num_experts, x.dtype, spec.expert
                )
                second = rounded(inner, down)
                for tile in tiles("down", block):
                    call = partial(
                        grouped_gemm,
                        second,
                        down,
                        groups,
                        whole.hidden_size,
                        spec.num_experts,
                        x.dtype,
                        tile=tile,
                    )
                    note("sorted down", timed(call), block, tile, 1 / 3)
                for tile in GATHERED[block]:
                    bytes_of = tile[0], tile[1] // up.weight.element_size(), *tile[2:]
                    options = {"gather": True, "tile": bytes_of}
                    call = partial(
                        expert_gemm,
                        given,
                        up,
                        groups,
                        spec,
                        spec.expert.up_rows,
                        x.dtype,
                        **options,
                    )
                    note("gathered up", timed(call), block, tile, 2 / 3)
                    call = partial(
                        expert_gemm,
                        second,
                        down,
                        groups,
                        spec,
                        whole.hidden_size,
                        x.dtype,
                        gather=False,
                        tile=bytes_of,
                    )
                    note("gathered down", timed(call), block, tile, 1 / 3)
            ends = groups.starts[1:].contiguous()
            for which, a, w in (("up", ordered, up), ("down", second, down)):
                stacked = w.weight.view(spec.num_experts, -1, w.weight.shape[1]).transpose(1, 2)
                if isinstance(w, ScaledLinear) and isinstance(a, Quantized):
                    scales = a.scales.flatten(), w.scales.view(spec.num_experts, -1)
                    call = partial(
                        torch._scaled_grouped_mm,
                        a.values,
                        stacked,
                        *scales,
                        offs=ends,
                        out_dtype=x.dtype,
                        use_fast_accum=True,
                    )
                else:
                    call = partial(torch._grouped_mm, a, stacked, offs=ends)
                note(f"torch {which}", timed(call), share=2 / 3 if which == "up" else 1 / 3)
            y = grouped_gemm(second, down, groups, whole.hidden_size, spec.num_experts, x.dtype)
            both = torch.empty(entries, spec.expert.up_rows, device="cuda", dtype=x.dtype)
            for kind, call in {
                "route": partial(moe.route, logits, spec),
                "group": partial(sort_pairs, chosen, spec.num_experts),
                "sort rows": partial(permute_rows, given, groups, spec.num_experts_per_token),
                "activation alone": partial(
                    activation,
                    both,
                    spec.expert.activation,
                    gated=spec.expert.gated,
                    inputs=down.inputs,
                ),
                "quantize between": partial(rounded, inner, down),
                "combine": partial(moe.combine, y, weights, groups.inverse),
                "all": partial(ops.moe, x, logits, Experts(up, down, spec)),
            }.items():
                if kind != "quantize between" or down.inputs:
                    note(kind, timed(call), share=1.0 if kind == "all" else 0.0)
        del up, down, ordered, inner, second, y, both
    save(rows=rows)
