"""Decode attention over an int4 cache next to fp8 and bfloat16: its error, and microseconds of a layer.

    python benchmarks/kernels.py --device cuda --op int4 --tiles 16,1,6 16,1,8 --lengths 64x32768 4x32768

The error is that against the reference in float32 over the same codes, of decodes and of prompts. Each is replayed from a
graph. Blocks of 16 tokens lie anywhere. A tile is keys, warps, stages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from cases.kernels.cuda_attention import BLOCK_SIZE, step

from slipstream.kernels.cache import int4 as int4_cache
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton.attention import int4
from slipstream.kernels.triton.attention.paged import paged_attention
from slipstream.kernels.triton.tuning import microseconds
from slipstream.spec.layers import int4_row_bytes

SHAPES = {"32,8,128": (32, 8, 128), "16,4,64": (16, 4, 64), "64,8,128": (64, 8, 128)}
CHECKED = ((32, 8, 128), (9, 3, 64), (4, 1, 256))
STEPS = ([1] * 36, [1], [300, 7])


def tile(text: str) -> tuple[int, int, int]:
    keys, warps, stages = map(int, text.split(","))
    return keys, warps, stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiles", nargs="+", type=tile, default=[None])
    parser.add_argument("--lengths", nargs="+", default=["64x32768"], metavar="SEQSxKEYS")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))


def in_int4(kv: LayerKV) -> LayerKV:
    """An int4 cache with the keys and values of one in bfloat16."""
    num, heads, size, dim = kv.k.shape
    k, v = (
        torch.zeros(num, heads, size, n, dtype=torch.uint8, device="cuda")
        for n in int4_row_bytes(dim)
    )
    fold = torch.stack((torch.ones(heads, dim), torch.zeros(heads, dim))).cuda()
    made = LayerKV(k, v, fold=fold)
    for blocks in torch.arange(num, device="cuda").split(4096):
        slots = (blocks[:, None] * size + torch.arange(size, device="cuda")).flatten()
        rows = (x[blocks].transpose(1, 2).flatten(0, 1).float() for x in (kv.k, kv.v))
        int4_cache.write(made, *rows, slots // size, slots % size)
    return made


def errors() -> list[dict[str, object]]:
    found = []
    for heads, kv_heads, dim in CHECKED:
        for lengths in STEPS:
            for window in (None, 37):
                contexts = [(i * 577) % 1900 for i in range(len(lengths))]
                kv, meta = step(lengths, contexts, kv_heads, dim, "bf16")
                kv = in_int4(kv)
                q = torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16)
                params = AttentionParams(scale=dim**-0.5, window=window)
                ours = int4.attention(q, kv, meta, params).float()
                theirs = ReferenceOps().attention(q.float(), kv, meta, params)
                error = float((ours - theirs).norm() / theirs.norm())
                found.append({"heads": heads, "dim": dim, "seqs": len(lengths), "new": lengths[0],
                              "window": window, "error": error, "bad": not error < 0.01})  # fmt: skip
    return found


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    check, rows = errors(), list[dict[str, object]]()
    for found in check:
        print(found, flush=True)
    for name in args.shapes:
        heads, kv_heads, dim = SHAPES[name]
        for lengths in args.lengths:
            seqs, length = map(int, lengths.split("x"))
            q = torch.randn(seqs, heads, dim, device="cuda", dtype=torch.bfloat16)
            params = AttentionParams(scale=dim**-0.5)
            for kind in ("bf16", "fp8", "int4"):
                kv, meta = step([1] * seqs, [length - 1] * seqs, kv_heads, dim, "bf16" if kind == "int4" else kind)  # fmt: skip
                kv = in_int4(kv) if kind == "int4" else kv
                for given in args.tiles if kind == "int4" else [None]:
                    call = partial(int4.attention if kind == "int4" else paged_attention, q, kv, meta, params)  # fmt: skip
                    if kind == "int4" and given:
                        call = partial(call, decode_tile=given)
                    us = microseconds([call] * 20)
                    num_bytes = (
                        (kv.k.nbytes + kv.v.nbytes) // len(kv.k) * (seqs * -(-length // BLOCK_SIZE))
                    )
                    row = {"shape": name, "lengths": lengths, "cache": kind, "tile": given, "us": us,
                           "gb_s": num_bytes / us / 1e3}  # fmt: skip
                    rows.append(row)
                    print(row, flush=True)
                    save(check=check, rows=rows)
