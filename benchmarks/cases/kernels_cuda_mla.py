"""Prompts of latent attention (DeepSeek-V2-Lite's layer), over latents and with keys and values of their own.

    python benchmarks/kernels.py --device cuda --op mla        # under a minute

Printed: microseconds of both ways and of their parts, of the attention's tiles, and how far the two results are apart. All
are replayed from graphs, so the host's time is not in it. They take turns; each time is the median of ROUNDS. FLOPs are those
of the keys that a query sees.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import MLAParams, NormParams
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention.mla import cache_latents, mla_paged_attention, mla_queries
from slipstream.kernels.triton.attention.mla_prefill import prefill_attention
from slipstream.kernels.triton.tuning import microseconds

PLAIN, ROTATED, LATENT, VALUE, BLOCK, SCALE = 128, 64, 512, 128, 16, 192**-0.5
CASES = {
    "128 of 128": [128] * 128,
    "8 of 2,048": [2048] * 8,
    "1 of 16,384": [16384],
    "22 of 20 to 1,500": random.Random(1).choices(range(20, 1501), k=22),
}
TILES = (
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 64, 4, 2),
)
"""(BLOCK_M, BLOCK_N, warps, stages); None is what is taken."""
MANY_HEADS = {"8 of 2,048": TILES[:2] + TILES[3:5], "1 of 16,384": TILES[:2]}
"""DeepSeek V3's 128, attention alone."""
ROUNDS = 3
NEAR = 2e-2
"""How far results over bfloat16's latents and with its keys may be apart, of their norm."""


@dataclass(frozen=True)
class Layer:
    """A layer's weights, and a step's numbers."""

    meta: AttentionMetadata
    kv: LayerKV
    q: Tensor  # [T, H, P + R]
    row: Tensor  # [T, C + R]
    params: MLAParams


def step(lengths: list[int], device: torch.device) -> AttentionMetadata:
    """Whole prompts, whose blocks lie anywhere."""
    per = [-(-n // BLOCK) for n in lengths]
    table = torch.nn.utils.rnn.pad_sequence(
        list((torch.randperm(sum(per)).int() + 1).split(per)), batch_first=True
    )
    at = torch.cat([torch.arange(n) for n in lengths])
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        positions=at.to(device),
        slot_mapping=(table[of, at // BLOCK].long() * BLOCK + at % BLOCK).to(device),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        from_start=True,
    )


def layer(lengths: list[int], num_heads: int, device: torch.device) -> Layer:
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    meta, num_tokens = step(lengths, device), sum(lengths)
    k = new(meta.block_table.amax().item() + 1, 1, BLOCK, ROTATED + LATENT)
    angles = torch.outer(
        torch.arange(max(lengths)).float(), 1e4 ** -torch.arange(0, 1, 2 / ROTATED)
    )
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    return Layer(
        meta,
        LayerKV(k, k[..., ROTATED:]),
        new(num_tokens, num_heads, PLAIN + ROTATED),
        new(num_tokens, LATENT + ROTATED),
        MLAParams(
            keys=new(num_heads, PLAIN, LATENT) / 16,
            values=new(num_heads, LATENT, VALUE) / 16,
            norm=NormParams(kind="rms", weight=new(LATENT), eps=1e-6),
            cos_sin=cos_sin,
            interleaved=True,
            scale=SCALE,
        ),
    )


def calls(x: Layer) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    ops, (num_tokens, num_heads) = TritonOps(), x.q.shape[:2]
    whole = partial(ops.mla_attention, x.q, x.row, x.kv, params=x.params)
    latents, turned = cache_latents(x.row, x.kv, x.meta, x.params, first=0)
    weight, values = x.params.keys.view(-1, LATENT), x.params.values
    k = F.linear(latents, weight).view(num_tokens, num_heads, PLAIN)
    v = torch.bmm(latents.expand(num_heads, -1, -1), values)
    out = torch.empty(num_tokens, num_heads * VALUE, dtype=x.q.dtype, device=x.q.device)
    queries = mla_queries(x.q, x.row, x.kv, x.meta, x.params)
    return {
        "over latents": partial(whole, replace(x.meta, from_start=False)),
        "  queries": partial(mla_queries, x.q, x.row, x.kv, x.meta, x.params),
        "  attention": partial(mla_paged_attention, queries, x.kv, x.meta, scale=SCALE),
        "with keys and values": partial(whole, x.meta),
        "  rows": partial(cache_latents, x.row, x.kv, x.meta, x.params, first=0),
        "  keys": partial(F.linear, latents, weight),
        "  values": partial(torch.bmm, latents.expand(num_heads, -1, -1), values),
        "  prompts' attention": partial(of_prompts(x, k, turned, v, out), None),
    }


def of_prompts(x: Layer, k: Tensor, turned: Tensor, v: Tensor, out: Tensor) -> Callable[..., None]:
    return lambda tile: prefill_attention(x.q, k, turned, v, x.meta, x.params, out, tile=tile)


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def flops(lengths: list[int], num_heads: int) -> int:
    return sum(2 * (PLAIN + ROTATED + VALUE) * num_heads * (n * (n + 1) // 2) for n in lengths)


def in_turn(timed: Mapping[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Microseconds of each; infinite if the GPU has not enough of something."""
    found: dict[Any, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, call in timed.items():
            found[name].append(microseconds([call] * 4))
    return {name: statistics.median(us) for name, us in found.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []

    def tell(case: str, what: str, us: float, count: int | None = None, **more: Any) -> None:
        """`count`: of FLOPs."""
        tflops = None if count is None else count / us / 1e6
        rows.append(
            {"case": case, "what": what, "us": us if us < 1e9 else None, "tflops": tflops, **more}
        )
        shown = "" if tflops is None else f"{tflops:7.1f} TFLOP/s"
        print(f"{case:20} {what:34} {us:9.1f} us {shown}", flush=True)
        save(rows=rows)

    for case, lengths in CASES.items():
        x = layer(lengths, 16, device)
        timed, count = calls(x), flops(lengths, 16)
        expected, cache = timed["over latents"](), x.kv.k.clone()
        error = apart(timed["with keys and values"](), expected)
        assert error < NEAR, f"{case}: {error}"
        assert apart(x.kv.k, cache) < 1e-4, case
        for what, us in in_turn(timed).items():
            tell(case, what, us, count if what == "  prompts' attention" else None, apart=error)
        del timed, expected, cache

    for num_heads, swept in ((16, dict.fromkeys(CASES, TILES)), (128, MANY_HEADS)):
        for case, tiles in swept.items():
            x = layer(CASES[case], num_heads, device)
            num_tokens, new = len(x.q), partial(torch.randn, device=device, dtype=torch.bfloat16)
            k, v = new(num_tokens, num_heads, PLAIN), new(num_heads, num_tokens, VALUE)
            out = new(num_tokens, num_heads * VALUE)
            call = of_prompts(x, k, new(num_tokens, ROTATED), v, out)
            call(None)
            expected = out.clone()
            for tile, us in in_turn({tile: partial(call, tile) for tile in (None, *tiles)}).items():
                error = None
                if us < 1e9:
                    call(tile)
                    error = apart(out, expected)
                    assert error < NEAR, f"{case}, {tile}: {error}"
                count = flops(CASES[case], num_heads)
                tell(
                    case,
                    f"{num_heads} heads, {tile}",
                    us,
                    count,
                    tile=tile,
                    heads=num_heads,
                    apart=error,
                )
            del x, k, v, out, expected
