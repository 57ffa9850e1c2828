"""torch's ops as `CpuOps` uses them, at SmolLM2-135M's sizes, beside the alternatives they were chosen over. Microseconds.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/kernels.py --device cpu --op torch [--threads 2] [--batch-sizes 1 16 32]

The lowest and the median of many runs are kept. The lowest is what the op costs; the distance between them shows how busy
the machine was. Threads that wait passively add some 50 µs to each op that uses both of them. Threads that spin give times
of whole scheduler ticks as soon as anything else runs. Weights rotate among enough copies to come from memory. `used` is
what CpuOps does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from slipstream.kernels.cpu import torch_ops as cpu
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors
from slipstream.kernels.ops import AttentionParams, NormParams, QKVLayout
from slipstream.kernels.reference import ReferenceOps

E, H, K, D, FF, V, CONTEXT, BLOCK = 576, 9, 3, 64, 1536, 49152, 512, 16
Run = Callable[[], Any]
reference = ReferenceOps()


def measure(run: Run, seconds: float) -> dict[str, float]:
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return {"min_us": round(min(times), 1), "median_us": round(sorted(times)[len(times) // 2], 1)}


def rotating(items: list[Any], use: Callable[[Any], Any]) -> Run:
    state = iter(range(10**9))
    return lambda: use(items[next(state) % len(items)])


def decode_step(batch: int, dtype: torch.dtype) -> tuple[AttentionMetadata, LayerKV]:
    blocks = CONTEXT // BLOCK
    table = (torch.randperm(batch * blocks) + 1).int().view(batch, blocks)
    lens = torch.full((batch,), CONTEXT - 3, dtype=torch.int32)
    at = lens.long() - 1
    meta = AttentionMetadata(
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
        seq_lens=lens,
        block_table=table,
        positions=at,
        slot_mapping=table.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK,
        num_decodes=batch,
        max_query_len=1,
        max_seq_len=CONTEXT,
    )
    kv = LayerKV(*(torch.randn(batch * blocks + 1, K, BLOCK, D).to(dtype) for _ in range(2)))
    return meta, kv


def products_decode(
    q: torch.Tensor, kv: LayerKV, group: cpu.DecodeGroup, scores: torch.dtype
) -> torch.Tensor:
    """Decode attention by matrix products, scores in the type given: what SDPA was chosen over."""
    q = q if group.rows is None else q[group.rows]
    n, length = len(q) * K, group.num_blocks * BLOCK
    keys, values = (
        t.view(-1, BLOCK * D).index_select(0, group.blocks).view(n, length, D) for t in (kv.k, kv.v)
    )
    s = torch.bmm(q.view(n, H // K, D).to(scores), keys.to(scores).transpose(1, 2)).float() * 0.125
    s = s.view(len(q), K, H // K, length) + group.mask
    return torch.bmm(s.softmax(-1).view(n, H // K, length).to(q.dtype), values)


def cases(batch: int, dtype: torch.dtype) -> dict[str, dict[str, Run]]:
    ops = CpuOps()
    found: dict[str, dict[str, Run]] = {}
    for name, (out, inner) in {
        "qkv": (960, E),
        "out": (E, E),
        "up": (2 * FF, E),
        "down": (E, FF),
        "head": (V, E),
    }.items():
        x = torch.randn(batch, inner).to(dtype)
        weights = [
            torch.randn(out, inner).to(dtype)
            for _ in range(max(2, min(24, int(1e8 / (out * inner * 2)))))
        ]
        packed = [ops.quantize_weight(w, None) for w in weights]
        found[f"linear {name}"] = {
            "used": rotating(packed, lambda w, x=x: ops.linear(x, w)),
            "F.linear": rotating(weights, lambda w, x=x: F.linear(x, w)),
        }
    x, residual = torch.randn(batch, E).to(dtype), torch.randn(batch, E).to(dtype)
    norm = NormParams(kind="rms", weight=torch.randn(E).to(dtype), eps=1e-5)
    found["rms_norm + residual"] = {
        "used": lambda: ops.norm(x, norm, residual=residual),
        "reference": lambda: reference.norm(x, norm, residual=residual),
    }
    up = torch.randn(batch, 2 * FF).to(dtype)
    found["gated silu"] = {
        "used": lambda: ops.activation(up, "silu", gated=True),
        "reference": lambda: reference.activation(up, "silu", gated=True),
        "two roundings": lambda: F.silu(up[:, :FF]) * up[:, FF:],
    }
    meta, kv = decode_step(batch, dtype)
    qkv, table = torch.randn(batch, (H + 2 * K) * D).to(dtype), torch.randn(CONTEXT, D)
    heads = QKVLayout(num_heads=H, num_kv_heads=K, head_dim=D, cos_sin=table)
    found["rope_and_cache"] = {
        "used": lambda: ops.rope_and_cache(qkv, kv, meta, heads),
        "first layer": lambda: CpuOps().rope_and_cache(qkv, kv, meta, heads),
        "reference": lambda: reference.rope_and_cache(qkv, kv, meta, heads),
    }
    q = torch.randn(batch, H, D).to(dtype)
    groups = cpu.decode_groups(meta, meta.seq_lens.tolist(), kv, None, dtype)
    found["attention, decode"] = {
        "used": lambda: ops.attention(q, kv, meta, AttentionParams(scale=0.125)),
        "first layer": lambda: CpuOps().attention(q, kv, meta, AttentionParams(scale=0.125)),
        "products, float32 scores": lambda: [
            products_decode(q, kv, g, torch.float32) for g in groups
        ],
        "products, scores as the cache": lambda: [products_decode(q, kv, g, dtype) for g in groups],
        "reference": lambda: reference.attention(q, kv, meta, AttentionParams(scale=0.125)),
    }
    logits = torch.randn(batch, V).to(dtype) * 4
    one = torch.ones(batch)
    for name, (temperature, top_k, top_p) in {
        "greedy": (0.0, 0, 1.0),
        "plain": (1.0, 0, 1.0),
        "top_k 50": (1.0, 50, 1.0),
        "top_p 0.95": (0.7, 0, 0.95),
        "both": (0.7, 50, 0.95),
    }.items():
        params = SamplingTensors(
            temperature=one * temperature,
            top_k=one.int() * top_k,
            top_p=one * top_p,
            min_p=one * 0,
            seeds=torch.arange(batch),
            history_lens=one.int(),
            all_greedy=temperature == 0,
            any_top_k=top_k > 0,
            any_top_p=top_p < 1,
        )
        found[f"sample, {name}"] = {
            "used": lambda p=params: ops.sample(logits.clone(), p),
            "reference": lambda p=params: reference.sample(logits.clone(), p),
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.25, help="for each op (default: 0.25)")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for dtype in args.dtypes:
            for batch in args.batch_sizes:
                for op, variants in cases(batch, getattr(torch, dtype)).items():
                    times = {name: measure(call, args.seconds) for name, call in variants.items()}
                    rows.append({"dtype": dtype, "batch": batch, "op": op, "times": times})
                    shown = " · ".join(
                        f"{name} {t['min_us']:.0f} ({t['median_us']:.0f})"
                        for name, t in times.items()
                    )
                    print(f"{dtype:9}{batch:4}  {op:20} {shown}", flush=True)
    openmp = {
        name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))
    }
    sizes = {
        "E": E,
        "H": H,
        "K": K,
        "D": D,
        "F": FF,
        "V": V,
        "context": CONTEXT,
        "block_size": BLOCK,
    }
    save(threads=args.threads, openmp=openmp, sizes=sizes, unit="microseconds", rows=rows)
