"""Tiles of decode attention over 16-bit caches: microseconds of each, and how far its answer is from the default tile's.

    python benchmarks/kernels.py --device cuda --op attention-tiles

Heads with a kv head each (GPT-J's 256 numbers, MPT's 128), shared kv heads (Qwen 3's), and latents (DeepSeek-V2-Lite's, its
prompts too). 1,000 sequences of 192 tokens (of latents 1,024), their blocks in random order; prompts are 128 of 128 tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.mla import mla_paged_attention
from slipstream.kernels.triton.tuning import microseconds

CUDA, BLOCK, LENGTH = torch.device("cuda"), 16, 192
HEADS = ((16, 16, 256, torch.float16), (32, 32, 128, torch.bfloat16), (32, 4, 128, torch.bfloat16))
"""(heads, kv heads, size, type)."""
TILES = tuple(
    (n, w, s) for n in (16, 32, 64) for w in (1, 2, 4) for s in (2, 3, 4, 6) if n * w * s <= 256
)
"""(BLOCK_N, warps, stages)."""
ROTATED, LATENT, LATENT_HEADS = 64, 512, 16
LATENT_TILES = {
    "latents, decode": tuple(
        (16, n, w, s) for n in (16, 32, 64) for w in (2, 4) for s in (1, 2, 3)
    ),
    "latents, prompts": tuple(
        (m, n, w, s) for m in (32, 64, 128) for n in (16, 32, 64) for w in (4, 8) for s in (1, 2)
    ),
    "latents, one": tuple((16, n, w, s) for n in (16, 32) for w in (2, 4) for s in (2, 3)),
}
"""(BLOCK_M, BLOCK_N, warps, stages)."""


def scattered(num_seqs: int, num_new: int, length: int) -> AttentionMetadata:
    meta = AttentionMetadata.uniform(num_seqs, num_new, length, block_size=BLOCK, device=CUDA)
    others = torch.randperm(meta.block_table.numel(), device=CUDA).int() + 1
    return replace(meta, block_table=others[meta.block_table.long() - 1])


def sweep(
    case: str,
    run: Callable[..., Tensor],
    tiles: Sequence[tuple[int, ...]],
    rows: list[dict[str, Any]],
) -> None:
    """`run` takes a tile; None is what is taken."""
    expected = run(None).float()
    for tile in (None, *tiles):
        call = partial(run, tile)
        us = microseconds([call] * 4)  # infinite if the GPU has not enough of something
        error = float((call().float() - expected).norm() / expected.norm()) if us < 1e9 else None
        rows.append({"case": case, "tile": tile, "us": us if us < 1e9 else None, "error": error})
        print(json.dumps(rows[-1]), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows: list[dict[str, Any]] = []
    meta = scattered(1000, 1, LENGTH)
    num_blocks = meta.block_table.numel() + 1
    for heads, kv_heads, size, dtype in HEADS:
        k, v = (
            torch.randn(num_blocks, kv_heads, BLOCK, size, device=CUDA, dtype=dtype)
            for _ in range(2)
        )
        q = torch.randn(1000, heads, size, device=CUDA, dtype=dtype)
        attend = partial(paged_attention, q, LayerKV(k, v), meta, AttentionParams(scale=size**-0.5))
        sweep(
            f"{heads} heads, {kv_heads} kv heads of {size}",
            lambda tile, run=attend: run(decode_tile=tile),
            TILES,
            rows,
        )
    for (case, tiles), (num_seqs, num_new, length) in zip(
        LATENT_TILES.items(), ((1024, 1, LENGTH), (128, 128, 128), (1, 1, LENGTH)), strict=True
    ):
        step = scattered(num_seqs, num_new, length)
        k = torch.randn(
            step.block_table.numel() + 1,
            1,
            BLOCK,
            ROTATED + LATENT,
            device=CUDA,
            dtype=torch.bfloat16,
        )
        kv = LayerKV(k, k[..., ROTATED:])
        q = torch.randn(
            num_seqs * num_new, LATENT_HEADS, ROTATED + LATENT, device=CUDA, dtype=torch.bfloat16
        )

        mla_attention = partial(mla_paged_attention, q, kv, step, scale=0.05)
        sweep(case, lambda tile, run=mla_attention: run(tile=tile), tiles, rows)
    save(rows=rows)
