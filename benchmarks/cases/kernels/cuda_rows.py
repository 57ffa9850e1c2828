"""Kernels that pass over rows once: microseconds, and the share of the floor (bytes read and written / 4.29 TB/s).

    python benchmarks/kernels.py --device cuda --op rows [--tokens 1,1024,16384]

Norms with a residual, gated activations and roundings to 8 bits, at the widths of an 8B Llama and of Mixtral's experts, with
an output in bfloat16, FP8 or INT8; rotation and cache write of an 8B Llama and of GPT-J. The tokens are those of prompts of 295
in blocks of their own. The rate is that of a device copy on an H200. Replayed from graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import NormParams, QKVLayout
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of

COPY = 4.29e12
HIDDEN, INNER = 4096, 14336
PROMPT, BLOCK = 295, 16
HEADS = {"Llama-3-8B": (32, 8, 128, 128, False), "GPT-J": (16, 16, 256, 64, True)}
"""Heads, kv heads, numbers of a head and those that are rotated, in pairs of neighbours or not."""
OUTPUTS: dict[str, Any] = {"bfloat16": None, "fp8": "fp8", "int8": "int8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="1,1024,16384")


def rotation(
    ops: TritonOps, num_tokens: int, model: str, kind: torch.dtype
) -> tuple[Callable[[], object], int]:
    """A call, and the bytes that it reads and writes."""
    heads, kv_heads, dim, rotary, interleaved = HEADS[model]
    each = -(-PROMPT // BLOCK) * BLOCK
    at = torch.arange(num_tokens, device="cuda")
    meta = dataclasses.replace(
        uniform(
            1, num_tokens, num_tokens, block_size=BLOCK, platform=platform_of(torch.device("cuda"))
        ),
        positions=at % PROMPT,
        slot_mapping=at // PROMPT * each + at % PROMPT + BLOCK,
    )
    shape = -(-num_tokens // PROMPT) * each // BLOCK + 1, kv_heads, BLOCK, dim
    k, v = (torch.zeros(shape, dtype=kind, device="cuda") for _ in range(2))
    scales = [torch.ones(kv_heads, device="cuda")] * 2 if kind.itemsize == 1 else []
    kv = LayerKV(k, by_dim(v), *scales) if scales else LayerKV(k, v)
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    table = torch.rand(PROMPT, rotary, device="cuda")
    layout = QKVLayout(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, interleaved=interleaved, cos_sin=table
    )
    numbers = 2 * qkv[0].numel() + 2 * heads * dim + 2 * kv_heads * dim * kind.itemsize
    return partial(ops.rope_and_cache, qkv, kv, meta, layout), num_tokens * numbers


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    ops, rows = TritonOps(), []
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for num_tokens in map(int, args.tokens.split(",")):
        x, residual = new(num_tokens, HIDDEN), new(num_tokens, HIDDEN)
        norm = NormParams(kind="rms", weight=new(HIDDEN), eps=1e-5)
        both, inner = new(num_tokens, 2 * INNER), new(num_tokens, INNER)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "norm and residual": (partial(ops.norm, x, norm, residual=residual), 8 * x.numel())
        }
        for name, form in OUTPUTS.items():
            written = 2 if form is None else 1
            call = partial(activation, both, "silu", gated=True, inputs=form)
            calls[f"gated activation, {name}"] = call, (4 + written) * inner.numel()
            if form is not None:
                calls[f"rounding, {name}"] = partial(quantize, inner, form), 3 * inner.numel()
        for model in HEADS:
            for kind in (torch.float8_e4m3fn, torch.bfloat16):
                calls[f"rotation, {model}, {str(kind)[6:]}"] = rotation(
                    ops, num_tokens, model, kind
                )
        for what, (call, num_bytes) in calls.items():
            taken, floor = microseconds([call] * 4), 1e6 * num_bytes / COPY
            rows.append({"tokens": num_tokens, "what": what, "us": taken, "floor_us": floor})
            print(
                f"{num_tokens:6} tokens  {what:36} {taken:9.1f} us  {floor / taken:6.1%} of the floor",
                flush=True,
            )
    save(rows=rows)
