"""Prefill attention over the paged cache: microseconds and TFLOP/s of the kernel for every chip, of Hopper's, and of cuDNN.

    python benchmarks/kernels.py --device cuda --op attention
    python benchmarks/kernels.py --device cuda --op attention --cases "1 of 256 behind 130,816" --errors --peak 6

Where Hopper's splits the keys of few queries, it runs without that as well. An FP8 cache is multiplied in 16 and in 8 bits.
`--errors` adds the relative error against the reference, with queries `--peak` times as large. Each is replayed from a graph,
so the host's time is not in it. FLOPs are those of the keys that a query sees. cuDNN gets contiguous keys and values without a
cache. The cache's blocks of 16 tokens lie anywhere.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton.attention import hopper, paged
from slipstream.kernels.triton.attention.paged import paged_attention
from slipstream.kernels.triton.tuning import microseconds

BLOCK_SIZE = 16
LENGTHS = random.Random(1).choices(range(20, 1501), k=22)
CASES = {  # lengths of the prompts, tokens in the cache before them, (query heads, kv heads, head dim)
    "8 of 2,048": ([2048] * 8, 0, (32, 8, 128)),
    "128 of 128": ([128] * 128, 0, (32, 8, 128)),
    "1 of 2,048": ([2048], 0, (32, 8, 128)),
    "1 of 16,384": ([16384], 0, (32, 8, 128)),
    "4 of 512 behind 8,192": ([512] * 4, 8192, (32, 8, 128)),
    "1 of 32 behind 8,192": ([32], 8192, (32, 8, 128)),
    "1 of 128 behind 8,192": ([128], 8192, (32, 8, 128)),
    "1 of 128 behind 32,768": ([128], 32768, (32, 8, 128)),
    "4 of 64 behind 1,024": ([64] * 4, 1024, (32, 8, 128)),
    "1 of 8,192": ([8192], 0, (32, 8, 128)),
    "1 of 8,192 behind 114,688": ([8192], 114688, (32, 8, 128)),
    "1 of 2,048 behind 30,000": ([2048], 30000, (32, 8, 128)),
    "1 of 256 behind 130,816": ([256], 130816, (8, 2, 128)),
    "22 of 20 to 1,500": (LENGTHS, 0, (32, 8, 128)),
    "8 of 2,048, D = 64": ([2048] * 8, 0, (32, 8, 64)),
    "4 of 2,048, GPT-J": ([2048] * 4, 0, (16, 16, 256)),
}
MAX_SPLIT = 256
"""Tokens of a step whose keys may be split."""
EVERY_CHIP = {
    ("bf16", 64): (128, 32, 4, 3),
    ("fp8", 64): (128, 64, 4, 2),
    ("bf16", 256): (64, 32, 8, 2),
}
EVERY_CHIP |= {
    ("bf16", 128): (128, 32, 4, 3),
    ("fp8", 128): (128, 64, 4, 2),
    ("fp8", 256): (64, 32, 8, 2),
}


def step(
    lengths: list[int], contexts: list[int], kv_heads: int, dim: int, kind: str
) -> tuple[LayerKV, AttentionMetadata]:
    """The cache and the metadata of sequences with `lengths` new tokens behind `contexts`; if each has one they are decodes."""
    ends = [n + context for n, context in zip(lengths, contexts, strict=True)]
    per = [-(-n // BLOCK_SIZE) for n in ends]
    blocks = (torch.randperm(sum(per), device="cuda") + 1).to(torch.int32).split(per)
    table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    k, v = (
        torch.randn(sum(per) + 1, kv_heads, BLOCK_SIZE, dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    kv = LayerKV(k, v)
    if kind == "fp8":
        ones = torch.ones(kv_heads, device="cuda")
        kv = LayerKV(k.to(torch.float8_e4m3fn), by_dim(v.to(torch.float8_e4m3fn)), ones, ones)
    nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    meta = AttentionMetadata(
        query_start_loc=starts, seq_lens=torch.tensor(ends, dtype=torch.int32, device="cuda"), block_table=table,
        positions=nothing, slot_mapping=nothing, num_decodes=len(lengths) if max(lengths) == 1 else 0,
        max_query_len=max(lengths), max_seq_len=max(ends),
    )  # fmt: skip
    return kv, meta


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME"
    )
    parser.add_argument("--errors", action="store_true", help="against the reference; takes memory")
    parser.add_argument("--peak", type=float, default=1.0, help="factor of the queries")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows: list[dict[str, object]] = []
    expected: torch.Tensor | None = None

    def measure(case: str, kernel: str, flops: int, call: partial[torch.Tensor]) -> None:
        call()
        torch.cuda.synchronize()
        taken = microseconds([call] * max(2, min(50, int(2e13 / flops))))
        row = {"case": case, "kernel": kernel, "us": taken, "tflops": flops / taken / 1e6}
        if args.errors and expected is not None:
            row["error"] = float((call().float() - expected).norm() / expected.norm())
        rows.append(row)
        print(
            f"{case:22} {kernel:20} {taken:9.1f} us {flops / taken / 1e6:7.1f} TFLOP/s", flush=True
        )
        save(rows=rows)

    for case in args.cases:
        lengths, context, (heads, kv_heads, dim) = CASES[case]
        flops = sum(4 * dim * heads * (n * context + n * (n + 1) // 2) for n in lengths)
        q = torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16) * args.peak
        for kind in ("bf16", "fp8"):
            kv, meta = step(lengths, [context] * len(lengths), kv_heads, dim, kind)
            params = AttentionParams(scale=dim**-0.5)
            call = partial(paged_attention, q, kv, meta, params)
            expected = (
                ReferenceOps().attention(q, kv, meta, params).float() if args.errors else None
            )
            measure(
                case, f"{kind} every chip", flops, partial(call, prefill_tile=EVERY_CHIP[kind, dim])
            )
            for bits, num_keys in {"16": 2**31, "8": 0}.items() if kind == "fp8" else ():
                with mock.patch.object(paged, "HOPPER_FP8_KEYS", num_keys):
                    measure(case, f"fp8 Hopper, {bits}-bit products", flops, call)
            if kind != "fp8":
                measure(case, f"{kind} Hopper", flops, call)
            if sum(lengths) <= MAX_SPLIT:
                with mock.patch.object(hopper, "num_parts", return_value=1):
                    measure(case, f"{kind} Hopper, unsplit", flops, call)
        if len(set(lengths)) == 1 and not context:
            shape = (len(lengths), lengths[0], -1, dim)
            k, v = (
                torch.randn(len(q), kv_heads, dim, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            )
            q4, k4, v4 = (t.view(shape).transpose(1, 2) for t in (q, k, v))
            cudnn = partial(
                F.scaled_dot_product_attention, q4, k4, v4, is_causal=True, enable_gqa=True
            )
            expected = None
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                measure(case, "bf16 cuDNN", flops, cudnn)
