"""The mixture of experts of real models by scheme and number of tokens: microseconds, and the share of the floor.

    python benchmarks/kernels.py --device cuda --op moe [--models mixtral-8x7b,qwen3-30b-a3b] [--tokens 1,4,16,64,256,1024]

The floor is the longer of two times: bytes of the experts that the tokens reach / 4.45 TB/s, and FLOPs / 780 (dense, int4)
or 1,450 TFLOP/s (8-bit inputs), as measured on an H200. Routing is even and random. Each call reads another layer's weights,
so that none stays in the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import common
import torch

from slipstream.kernels.ops import Experts
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.tuning import microseconds
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import SCHEMES

BANDWIDTH, DENSE_RATE, EIGHT_BIT_RATE = 4.45e12, 780e12, 1450e12
LAYERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="mixtral-8x7b,qwen3-30b-a3b,qwen1.5-moe-a2.7b")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,8192")
    parser.add_argument("--schemes", default="dense,fp8,int8,int4")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    ops, rows = TritonOps(), []
    for name in args.models.split(","):
        whole = read_spec(common.CONFIGS / name).spec
        mixture, spec = next(
            (layer, layer.mlp) for layer in whole.layers if isinstance(layer.mlp, MoESpec)
        )
        products = [p for p in mixture.weight_shapes(whole.hidden_size) if p.copies > 1]
        for scheme in args.schemes.split(","):
            kind = SCHEMES.get(scheme)
            if kind is not None and any(p.inner % kind.multiple for p in products):
                print(f"{name:18} {scheme:6} has no such products")
                continue
            sizes = [
                kind.weight_bytes(p.rows, p.inner) if kind else 2 * p.rows * p.inner
                for p in products
            ]
            layers = [
                [
                    ops.quantize_experts(
                        torch.randn(p.copies * p.rows, p.inner, device="cuda", dtype=torch.bfloat16)
                        * 0.02,
                        kind,
                        num_experts=p.copies,
                    )
                    for p in products
                ]
                for _ in range(LAYERS)
            ]
            for num_tokens in map(int, args.tokens.split(",")):
                x = torch.randn(num_tokens, whole.hidden_size, device="cuda", dtype=torch.bfloat16)
                logits = torch.randn(
                    LAYERS, num_tokens, spec.num_experts, device="cuda", dtype=torch.bfloat16
                )
                calls = [
                    partial(ops.moe, x, logits[i % LAYERS], Experts(*layers[i % LAYERS], spec))
                    for i in range(16)
                ]
                taken = microseconds(calls)
                reached = [
                    len(row.float().topk(spec.num_experts_per_token).indices.unique())
                    for row in logits
                ]
                num_bytes = sum(sizes) * sum(reached) / LAYERS
                flops = (
                    2
                    * num_tokens
                    * spec.num_experts_per_token
                    * sum(p.rows * p.inner for p in products)
                )
                rate = EIGHT_BIT_RATE if kind and kind.inputs else DENSE_RATE
                floor = max(num_bytes / BANDWIDTH, flops / rate) * 1e6
                rows.append(
                    {
                        "model": name,
                        "scheme": scheme,
                        "tokens": num_tokens,
                        "us": taken,
                        "floor_us": floor,
                    }
                )
                print(
                    f"{name:18} {scheme:6} {num_tokens:6} {taken:9.1f} us  {floor / taken:6.1%} of the floor",
                    flush=True,
                )
            del layers
    save(rows=rows)
