"""Ops of recurrent layers: decodes against the bytes of their states, prompts against the rate of multiplications.

    python benchmarks/kernels.py --device cpu --op recurrent [--layers qwen3.5-0.8b lfm2] [--decodes 1 16] [--prompts 512]

A step passes over so many layers that their states don't fit the processor's caches. Times are medians for one layer without
its products. Ceilings are measured in the same run:

1. Decodes: bytes of states read and written per second, beside the bytes that all threads can read.
2. Prompts: multiplications per second, beside those that all threads can do in float32. The delta rule has 4 for each number
   of a state and token, Mamba-2 and Mamba-1 have 3. Convolutions, norms and exponentials take time and are not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.native import CEILINGS, StepInputs
from slipstream.kernels.cpu.native_interface import LayerPointers
from slipstream.kernels.cpu.program import recurrent
from slipstream.kernels.cpu.program.native_program import Program, point_at
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)
from slipstream.spec.recurrent import (
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    state_bytes,
)

DELTA = GatedDeltaSpec(
    num_key_heads=16, num_heads=16, key_dim=128, value_dim=128, conv_width=4, eps=1e-6
)
MAMBA2 = dict(value_dim=64, key_dim=128, conv_width=4, eps=1e-5)
LAYERS: dict[str, RecurrentSpec] = {
    "qwen3.5-0.8b": DELTA,
    "kimi-linear-48b": GatedDeltaSpec(
        num_key_heads=32,
        num_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        eps=1e-5,
        decay="channel",
        gate="sigmoid",
        latent=128,
    ),
    "granite-4-h-tiny": Mamba2Spec(num_heads=48, num_groups=1, **MAMBA2),
    "nemotron-3-nano": Mamba2Spec(num_heads=64, num_groups=8, norm_groups=8, **MAMBA2),
    "jamba-3b": MambaSpec(width=5120, key_dim=16, rank=160, conv_width=4, eps=1e-6),
    "lfm2-350m": ShortConvSpec(width=1024, conv_width=3),
}
CACHE_BYTES = 128 * 2**20
"""Bytes of states that a step passes over at least."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--decodes", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", help="instruction set (default: the best)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: the processor time of all threads, which other programs change little; with one thread",
    )


def op_of(
    spec: RecurrentSpec,
) -> tuple[Sequence[int], Callable[[Program, Sequence[int], int, int], None]]:
    """Returns the widths of an op's inputs, and a function that adds it: (program, inputs, out, layer)."""

    def floats(*shape: int) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    conv = ConvParams(
        weight=floats(spec.conv_channels, spec.conv_width), silu=not isinstance(spec, ShortConvSpec)
    )

    def adding(p: Program) -> Callable[[str, int, int], int]:
        return lambda _, form, size: p.buffer(form, size)

    match spec:
        case GatedDeltaSpec():
            delta = GatedDeltaParams(
                spec=spec,
                conv=conv,
                decay=floats(spec.num_heads),
                time=floats(spec.decay_size),
                norm=floats(spec.value_dim),
            )

            def add_delta(p: Program, x: Sequence[int], out: int, layer: int) -> None:
                decay, z = x[2:] if spec.latent else (None, None)
                own = (0, layer, delta, adding(p))
                recurrent.add_gated_delta(p, x[0], x[1], decay, z, out, *own)

            if spec.latent:
                return (spec.conv_channels, spec.num_heads, spec.decay_size, spec.v_size), add_delta
            return (spec.conv_channels + spec.v_size, 2 * spec.num_heads), add_delta
        case Mamba2Spec():
            heads = spec.num_heads
            params = Mamba2Params(
                spec=spec,
                conv=conv,
                decay=floats(heads),
                time=floats(heads),
                skip=floats(heads),
                norm=floats(spec.v_size),
            )
            width = spec.v_size + spec.conv_channels + heads
            return (width,), lambda p, x, out, layer: recurrent.add_mamba2(
                p, x[0], out, 0, layer, params, adding(p)
            )
        case MambaSpec():
            scan = MambaParams(
                spec=spec,
                decay=floats(spec.width, spec.key_dim),
                time=floats(spec.width),
                skip=floats(spec.width),
            )

            def add_mamba(p: Program, x: Sequence[int], out: int, layer: int) -> None:
                inner = p.buffer(0, spec.width)
                recurrent.add_causal_conv(p, x[0], inner, 0, layer, conv)
                rest = (x[1], x[2], x[3], x[0], out, 0, layer, scan, adding(p))
                recurrent.add_selective_scan(p, inner, *rest)

            return (2 * spec.width, spec.width, spec.key_dim, spec.key_dim), add_mamba
        case ShortConvSpec():
            return (3 * spec.width,), lambda p, x, out, layer: recurrent.add_short_conv(
                p, x[0], out, 0, layer, conv
            )


def multiplications(spec: RecurrentSpec) -> int:
    """Multiplications of a token's recurrence."""
    if spec.state_shape is None:
        return 0
    return (4 if isinstance(spec, GatedDeltaSpec) else 3) * int(np.prod(spec.state_shape))


Timed = tuple[float, list[int]]


def timed(p: Program, step: StepInputs, args: argparse.Namespace) -> Timed:
    """Returns the median of the seconds of a step, and the nanoseconds of its operators then."""
    p.run(step)
    rounds = []
    for _ in range(args.rounds):
        p.profile(args.clock)
        start = time.perf_counter()
        p.run(step)
        wall, ns = time.perf_counter() - start, p.profile(None)
        rounds.append((wall if args.clock == "wall" else sum(ns) / 1e9, ns))
    return sorted(rounds)[len(rounds) // 2]


def ceilings(pool: ThreadPool, args: argparse.Namespace) -> dict[str, float]:
    """Bytes that all threads can read in a second, and multiplications of float32 that they can do."""
    data, found = np.empty(256 * 2**20, np.uint8), {}
    data.fill(0)  # else all of it is one page
    for what, work in (("read", 1), ("float32", 200_000)):
        kind, p = CEILINGS.index(what), Program(pool)
        p.add("ceiling", kind, data, data.size, work)
        macs = native.load().ss_ceiling_macs(pool.pointer, kind, work)
        amount = data.size if what == "read" else macs
        found[what] = amount / timed(p, StepInputs(num_tokens=1), args)[0]
    return found


def measure(
    pool: ThreadPool, spec: RecurrentSpec, num_seqs: int, each: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Times a step of `num_seqs` sequences of `each` tokens, for one layer."""
    num_bytes = state_bytes(spec, 2)
    layers = min(64, -(-CACHE_BYTES // (num_bytes * num_seqs))) if each == 1 else 4
    slots, shape = num_seqs + 1, spec.state_shape
    states = [
        LayerState(
            torch.zeros(slots, spec.conv_width - 1, spec.conv_channels, dtype=torch.bfloat16),
            None if shape is None else torch.zeros(slots, *shape),
        )
        for _ in range(layers)
    ]
    pointers = (LayerPointers * layers)()
    for pointer, state in zip(pointers, states, strict=True):
        point_at(pointer, state)
    widths, add = op_of(spec)
    p, num_tokens = Program(pool), num_seqs * each
    rows = [torch.randn(num_tokens, width) for width in widths]
    inputs = [p.bound(row) for row in rows]
    v_size = spec.width if isinstance(spec, MambaSpec | ShortConvSpec) else spec.v_size
    out = p.bound(torch.zeros(num_tokens, v_size))
    for layer in range(layers):
        add(p, inputs, out, layer)
    own = np.arange(1, slots, dtype=np.int32)
    starts = np.arange(0, num_tokens + 1, each, dtype=np.int32)
    write = np.zeros((num_seqs, each), np.int32)
    write[:, -1] = own
    step = StepInputs(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_decodes=num_seqs if each == 1 else 0,
        query_start_loc=arrays.address(starts),
        layers=pointers,
        state_read=arrays.address(own),
        state_write=arrays.address(write),
    )
    taken, ns = timed(p, step, args)
    taken /= layers
    times: dict[str, float] = {}
    for operator, one in zip(p.operators, ns, strict=True):
        times[operator.name] = times.get(operator.name, 0) + one / 1e3 / layers
    return {
        "us": taken * 1e6,
        "gb_per_s": 2 * num_bytes * num_seqs / taken / 1e9,
        "gmul_per_s": multiplications(spec) * num_tokens / taken / 1e9,
        "operators_us": times,
    }


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    pool = ThreadPool(args.threads, args.isa)
    most = ceilings(pool, args)
    print(
        f"{pool.isa}, {args.threads} threads: {most['read'] / 1e9:.1f} GB/s read, {most['float32'] / 1e9:.1f} G float32/s"
    )
    results = []
    for name in args.layers:
        steps = [(n, 1) for n in args.decodes] + [(1, n) for n in args.prompts]
        for num_seqs, each in steps:
            found = measure(pool, LAYERS[name], num_seqs, each, args)
            results.append({"layer": name, "sequences": num_seqs, "tokens": each, **found})
            of = {k: round(us, 1) for k, us in found["operators_us"].items()}
            print(
                f"{name:18} {num_seqs:3} x {each:4}: {found['us']:9.1f} us, {found['gb_per_s']:6.1f} GB/s"
                f" ({found['gb_per_s'] * 1e9 / most['read']:4.0%}), {found['gmul_per_s']:6.1f} G/s"
                f" ({found['gmul_per_s'] * 1e9 / most['float32']:4.0%})  {of}"
            )
    save(
        clock=args.clock,
        threads=args.threads,
        instruction_set=pool.isa,
        ceilings=most,
        results=results,
    )
