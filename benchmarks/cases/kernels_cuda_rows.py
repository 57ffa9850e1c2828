"""Kernels that pass over rows once: microseconds, and the share of the floor (bytes read and written / 4.29 TB/s).

    python benchmarks/kernels.py --device cuda --op rows [--tokens 1,1024,16384]

Norms with a residual, gated activations and roundings to 8 bits, at the widths of an 8B Llama and of Mixtral's experts, with
an output in bfloat16, FP8 or INT8. The rate is that of a device copy on an H200. Replayed from graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slipstream.kernels.ops import NormParams
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.triton.tuning import microseconds

COPY = 4.29e12
HIDDEN, INNER = 4096, 14336
OUTPUTS: dict[str, Any] = {"bfloat16": None, "fp8": "fp8", "int8": "int8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="1,1024,16384")


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
        for what, (call, num_bytes) in calls.items():
            taken, floor = microseconds([call] * 4), 1e6 * num_bytes / COPY
            rows.append({"tokens": num_tokens, "what": what, "us": taken, "floor_us": floor})
            print(f"{num_tokens:6} tokens  {what:28} {taken:9.1f} us  {floor / taken:6.1%} of the floor", flush=True)
    save(rows=rows)
