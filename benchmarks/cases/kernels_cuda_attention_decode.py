"""Decode attention over the paged cache: microseconds, and the share of the memory's rate, with keys split by length and whole.

    python benchmarks/kernels.py --device cuda --op attention-decode

One query a sequence, 32 heads of 128 numbers, 8 kv heads; blocks of 16 tokens lie anywhere. Each is replayed from a graph, so
the host's time is not in it, and finding the parts is not either: that is done once a step (its time is the row "find").
Lengths of chats are log-normal, with a median of 290 and at most 2,000.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from cases.kernels_cuda_attention import step

from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention import split_keys
from slipstream.kernels.triton.attention.paged import paged_attention
from slipstream.kernels.triton.tuning import microseconds

HEADS, KV_HEADS, DIM = 32, 8, 128
_random = random.Random(3)


def _chats(count: int) -> list[int]:
    return [min(2000, int(_random.lognormvariate(5.6, 0.9)) + 20) for _ in range(count)]


CASES = {
    "4 of 2,048": [2048] * 4,
    "16 of 2,048": [2048] * 16,
    "64 of 300": [300] * 64,
    "63 of 300, 8,192": [300] * 63 + [8192],
    "16 chats": _chats(16),
    "64 chats": _chats(64),
    "256 chats": _chats(256),
    "128 of 1,024": [1024] * 128,
    "255 of 1,024, 32,768": [1024] * 255 + [32768],
    "1,000 of 192": [192] * 1000,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME"
    )
    parser.add_argument("--rate", type=float, default=4.45, help="of the memory, TB/s")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows = []
    for case in args.cases:
        lengths = CASES[case]
        q = torch.randn(len(lengths), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        for kind in ("bf16", "fp8"):
            kv, meta = step([1] * len(lengths), [n - 1 for n in lengths], KV_HEADS, DIM, kind)
            call = partial(paged_attention, q, kv, meta, AttentionParams(scale=DIM**-0.5))
            call()
            taken = microseconds([call] * 20)
            with mock.patch.multiple(split_keys, MIN_KEYS=2**30, FEW_SEQUENCES=0):
                meta.derived.clear()
                call()
                whole = microseconds([call] * 20)
            floor = 2 * sum(lengths) * KV_HEADS * DIM * kv.k.element_size() / args.rate / 1e6
            row = {
                "case": case,
                "kind": kind,
                "us": taken,
                "share_of_rate": floor / taken,
                "whole_us": whole,
            }
            rows.append(row)
            print(
                f"{case:22} {kind:5} {taken:8.1f} us ({floor / taken:4.0%} of the rate), whole {whole:8.1f}",
                flush=True,
            )
            save(rows=rows)

    def find() -> None:
        meta.derived.clear()
        split_keys.DecodeParts.of(
            meta, None, KV_HEADS, 16, torch.cuda.get_device_properties(0).multi_processor_count
        )

    rows.append({"case": args.cases[-1], "kind": "find", "us": microseconds([find] * 20)})
    print(rows[-1])
    save(rows=rows)
