"""Draws from logits: tokens against float64, and microseconds of variants of the kernels, next to an argmax.

    python benchmarks/kernels.py --device cuda --op drawing
    TRITON_INTERPRET=1 python benchmarks/kernels.py --device cuda --op drawing --tiny --output drawing.json    on a CPU

Checked are tokens of random rows with random parameters: those of the kernels as they are against sums in float64, those of
each variant against them. `listed` counts the rows whose list of candidates is full. Times are of graphs, over 128,256 logits
in bfloat16: flat (a standard deviation of 1.28) and peaked (3). About 3 minutes on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.plain.reference import uniform
from slipstream.kernels.triton import drawing, sampling
from slipstream.kernels.triton.tuning import microseconds

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"TILE": drawing.TILE},
    "16, 8": {"LEVELS": (16, 8)},
    "8, 8, 8": {"LEVELS": (8, 8, 8)},
    "8, 8": {"LEVELS": (8, 8)},
    "tiles of 512": {"TILE": 512},
    "16, 8, tiles of 2048": {"LEVELS": (16, 8), "TILE": 2048},
    "16 rows split": {"SPLIT_ROWS": 16},
    "528 programs": {"MAX_PROGRAMS": 528},
    "2112 programs": {"MAX_PROGRAMS": 2112},
}
CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS = {
    "greedy": {"temperature": 0.0, **CUTS},
    "temperature": {"temperature": 0.8, **CUTS},
    "top_p": {"temperature": 0.8, **CUTS, "top_p": 0.95},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}
DRAWN = {  # what parameters are drawn from, and their type
    "temperature": ([0.0, 1e-3, 0.3, 0.8, 1.0, 3.0, 100.0], torch.float32),
    "top_k": ([0, 0, 1, 2, 50, 5000, 10**6], torch.int64),
    "top_p": ([1.0, 1.0, 0.0, 1e-6, 0.3, 0.9, 0.95, 0.9999], torch.float32),
    "min_p": ([0.0, 0.0, 0.02, 0.5, 1.0], torch.float32),
}


def parameters(n: int, rng: np.random.Generator, device: str, **given: float) -> SamplingTensors:
    values = {
        name: torch.tensor(
            np.full(n, given[name]) if given else rng.choice(choices, n), dtype=kind, device=device
        )
        for name, (choices, kind) in DRAWN.items()
    }
    return SamplingTensors(
        **values,
        seeds=torch.tensor(rng.integers(-(2**62), 2**62, n), device=device),
        history_lens=torch.tensor(rng.integers(1, 10**5, n), dtype=torch.int32, device=device),
        rows=torch.arange(n, dtype=torch.int32, device=device),
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )


def part_of(p: SamplingTensors, part: slice) -> SamplingTensors:
    fields = {name: getattr(p, name) for name in (f.name for f in dataclasses.fields(p))}
    return SamplingTensors(
        **{name: v[part] if isinstance(v, Tensor) else v for name, v in fields.items()}
    )


def kept(x: Tensor, p: SamplingTensors, near: float) -> Tensor:
    """Weights of the tokens that may be drawn, in float64. `near` moves the bound of top_p a little."""
    x = x.double()
    heat = torch.where(p.temperature > 0, p.temperature, 1.0).double()[:, None]
    w = ((x - x.amax(1, keepdim=True)) / heat).exp()
    least = (p.min_p.double() * (1 - 1e-6)).clamp(min=2.0**-42)
    w = w.where(w >= least[:, None], 0.0)
    most = x.shape[1]
    k = torch.where((p.top_k > 0) & (p.top_k < most), p.top_k, most).long()
    w = w.where(x >= x.sort(dim=1, descending=True).values.gather(1, k[:, None] - 1), 0.0)
    top_p = torch.where(p.top_p < 1, (p.top_p.double() * near).clamp(max=1.0), 1.0)[:, None]
    ordered = w.sort(dim=1, descending=True).values
    before = ordered.cumsum(1) - ordered
    last = (before < top_p * w.sum(1, keepdim=True)).sum(1, keepdim=True).clamp(min=1) - 1
    return w.where((w >= ordered.gather(1, last)) | (p.top_p >= 1)[:, None], 0.0)


def num_wrong(x: Tensor, p: SamplingTensors, tokens: Tensor) -> int:
    u = uniform(p.seeds, p.history_lens).double()
    good = (p.temperature == 0) & (tokens == x.float().argmax(1))
    for near in (1.0, 1 - 1e-5, 1 + 1e-5):
        w = kept(x, p, near)
        running, own = w.cumsum(1), w.gather(1, tokens[:, None])[:, 0]
        total, at = running[:, -1], running.gather(1, tokens[:, None])[:, 0]
        inside = (at - own - 2e-5 * total <= u * total) & (u * total <= at + 2e-5 * total)
        good |= (p.temperature > 0) & (own > 0) & inside
    return int((~good).sum())


def draw(variant: str, x: Tensor, p: SamplingTensors) -> Tensor:
    with mock.patch.multiple(drawing, **VARIANTS[variant]):
        return drawing.draw(x, p)


def num_listed(x: Tensor, p: SamplingTensors) -> Tensor:
    """Length of each row's list of candidates after a draw, from the kernels' state."""
    states, empty = [], torch.empty

    def spied(*shape: Any, **how: Any) -> Tensor:
        made = empty(*shape, **how)
        if shape[-1:] == (drawing.STATE,) and how.get("dtype") == torch.int64:
            states.append(made)
        return made

    with mock.patch.object(torch, "empty", spied):
        drawing.draw(x, p)
    return states[0][:, getattr(drawing.NUM_LISTED, "value", drawing.NUM_LISTED)]


def check(names: list[str], tiny: bool) -> dict[str, Any]:
    rng, device = np.random.default_rng(0), "cpu" if tiny else "cuda"
    torch.manual_seed(0)
    vocab = 300 if tiny else 128256
    batches = [(3, 2)] if tiny else [(1, 40), (3, 40), (64, 20), (300, 10), (2048, 3)]
    found: dict[str, Any] = {"rows": 0, "wrong": 0, "listed": {"full": 0, "most": 0}}
    found["differ"] = dict.fromkeys(names, 0)
    for rows, times in batches:
        for turn in range(times):
            spread = float(rng.choice([0.0, 0.3, 1.28, 2.0, 8.0]))
            x = torch.randn(rows, vocab, device=device) * spread
            if turn % 5 == 1:
                x = x.round()
            if turn % 5 == 2:
                x[torch.rand(rows, vocab, device=device) < 0.9] = -torch.inf
                x[:, 5] = 0.0
            if turn % 5 == 3:
                x[:, int(rng.integers(vocab))] += 30
            x = x if turn % 2 or tiny else x.bfloat16()
            p = parameters(rows, rng, device)
            tokens = draw("default", x, p)
            for a in range(0, rows, 128):
                part = slice(a, a + 128)
                found["wrong"] += num_wrong(x[part], part_of(p, part), tokens[part])
            for name in names:
                found["differ"][name] += int((draw(name, x, p) != tokens).sum())
            is_cut = (p.temperature > 0) & ((p.top_p < 1) | (p.top_k > 0) & (p.top_k < vocab))
            if len(listed := num_listed(x, p)[is_cut]):
                found["listed"]["full"] += int((listed > drawing.MAX_LISTED).sum())
                found["listed"]["most"] = max(found["listed"]["most"], int(listed.max()))
            found["rows"] += rows
    return found


def timed(call: Callable[[], object], tiny: bool) -> float:
    if not tiny:
        return microseconds([call] * 8)
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="300 logits, interpreted on a CPU")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    checked = check(args.variants, args.tiny)
    print("check:", json.dumps(checked), flush=True)
    rng, device = np.random.default_rng(0), "cpu" if args.tiny else "cuda"
    shape: dict[str, Any] = {"dtype": torch.float32 if args.tiny else torch.bfloat16}
    us: dict[str, Any] = {}
    for rows in (1, 2) if args.tiny else (1, 64, 768, 2048):
        for kind, spread in {"flat": 1.28, "peaked": 3.0}.items():
            x = torch.randn(rows, 300 if args.tiny else 128256, device=device, **shape) * spread
            own = us[f"{rows} rows, {kind}"] = {
                "argmax": timed(partial(sampling.argmax, x), args.tiny)
            }
            given = {what: parameters(rows, rng, device, **how) for what, how in KINDS.items()}
            for name in args.variants:
                own[name] = {
                    what: timed(partial(draw, name, x, p), args.tiny) for what, p in given.items()
                }
                print(f"{rows} rows, {kind}, {name}: {json.dumps(own[name])}", flush=True)
            save(check=checked, us=us)
