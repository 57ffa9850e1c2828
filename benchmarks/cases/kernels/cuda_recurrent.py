"""Ops of recurrent layers: microseconds, and the share of the floor (bytes read and written / 4.29 TB/s).

    python benchmarks/kernels.py --device cuda --op recurrent [--models Qwen3-Next,LFM2] [--decodes 1,64] [--prompts 8192]

Decodes of N sequences, drafts of 16 sequences of 4 tokens, and prompts of N tokens, in bfloat16. A decode's floor is its state
read and written once, its rows and its result; a prompt's floor is its rows, its result and one state. Replayed from graphs
over states of several layers, so that none stays in L2.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
    StateMetadata,
    chunk_table,
    layer_state,
)
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of
from slipstream.spec.recurrent import (
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    state_bytes,
)

COPY = 4.29e12
L2_BYTES = 3e8
MAX_LAYERS = 32
DELTA = dict(num_key_heads=16, key_dim=128, value_dim=128, conv_width=4, eps=1e-6)
TWO = dict(num_heads=128, value_dim=64, key_dim=128, conv_width=4, eps=1e-5)
MODELS: dict[str, RecurrentSpec] = {
    "Qwen3-Next": GatedDeltaSpec(num_heads=32, **DELTA),
    "Qwen3.6-27B": GatedDeltaSpec(num_heads=48, **DELTA),
    "Kimi-Linear": GatedDeltaSpec(
        num_heads=32,
        **(DELTA | dict(num_key_heads=32)),
        decay="channel",
        gate="sigmoid",
        latent=128,
    ),
    "Nemotron-H": Mamba2Spec(num_groups=8, norm_groups=8, **TWO),
    "Granite-4-H": Mamba2Spec(num_groups=1, **TWO),
    "Jamba": MambaSpec(width=8192, key_dim=16, rank=256, conv_width=4, eps=1e-6),
    "LFM2": ShortConvSpec(width=2048, conv_width=3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--decodes", default="1,16,64,256")
    parser.add_argument("--drafts", default="16")
    parser.add_argument("--prompts", default="512,8192")


def step(num_seqs: int, length: int, every: bool) -> tuple[AttentionMetadata, int]:
    """`num_seqs` sequences of `length` tokens, each in a slot of its own; with `every`, all tokens' states are kept."""
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * length
    read = torch.arange(1, num_seqs + 1, dtype=torch.int32)
    write = torch.zeros(num_seqs * length, dtype=torch.int32)
    write[starts[1:].long() - 1] = read
    if every:
        write = torch.arange(1, num_seqs * length + 1, dtype=torch.int32)
    decodes = num_seqs if length == 1 else 0
    chunks = torch.from_numpy(chunk_table(starts.tolist(), write.numpy(), decodes))
    meta = uniform(
        num_seqs, length, length, block_size=16, platform=platform_of(torch.device("cuda"))
    )
    states = StateMetadata(read.cuda(), write.cuda(), chunks.cuda())
    return dataclasses.replace(meta, states=states), int(write.max()) + 1


def call_of(
    ops: TritonOps, spec: RecurrentSpec, num_tokens: int
) -> tuple[Callable[..., Tensor], int]:
    """(the op with random rows and parameters, without `state` and `meta`; the bytes of its rows and result)."""
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    wide = partial(torch.randn, device="cuda")
    conv = ConvParams(weight=new(spec.conv_channels, spec.conv_width), silu=True)
    op: Callable[..., Tensor]
    rows: tuple[Tensor, ...]
    params: Any
    more: dict[str, Tensor] = {}
    match spec:
        case GatedDeltaSpec():
            op, params = ops.gated_delta, GatedDeltaParams(
                spec=spec, conv=conv, decay=wide(spec.num_heads), time=wide(spec.decay_size), norm=new(spec.value_dim)
            )  # fmt: skip
            rows = (
                new(num_tokens, spec.conv_channels + (0 if spec.latent else spec.v_size)),
                new(num_tokens, spec.num_heads + (0 if spec.latent else spec.decay_size)),
            )
            if spec.latent:
                more = {
                    "decay": new(num_tokens, spec.decay_size),
                    "z": new(num_tokens, spec.v_size),
                }
            size = spec.v_size
        case Mamba2Spec():
            heads, size = spec.num_heads, spec.v_size
            op, params = ops.mamba2, Mamba2Params(
                spec=spec, conv=conv, decay=wide(heads), time=wide(heads), skip=wide(heads), norm=new(size)
            )  # fmt: skip
            rows = (new(num_tokens, size + spec.conv_channels + heads),)
        case MambaSpec():
            size = spec.width
            op, params = ops.selective_scan, MambaParams(
                spec=spec, decay=wide(size, spec.key_dim), time=wide(size), skip=wide(size)
            )  # fmt: skip
            widths = (size, size, spec.key_dim, spec.key_dim, 2 * size)
            rows = tuple(new(num_tokens, n) for n in widths)
        case ShortConvSpec():
            size, op, params = spec.width, ops.short_conv, dataclasses.replace(conv, silu=False)
            rows = (new(num_tokens, 3 * size),)
    moved = sum(x.nbytes for x in (*rows, *more.values())) + 2 * num_tokens * size
    return partial(op, *rows, params=params, **more), moved


def measure(
    ops: TritonOps, spec: RecurrentSpec, num_seqs: int, length: int, every: bool = False
) -> tuple[float, float]:
    """(microseconds, floor)."""
    meta, slots = step(num_seqs, length, every)
    call, moved = call_of(ops, spec, num_seqs * length)
    each = state_bytes(spec, 2)
    layers = max(2, min(MAX_LAYERS, int(L2_BYTES / max(1, each * slots))))
    zeros = partial(torch.zeros, device="cuda")
    states: list[LayerState] = []
    for _ in range(layers):
        made = layer_state(spec, slots, torch.bfloat16, torch.float32, zeros)
        assert made is not None
        states.append(made)
    kept = num_seqs * (1 + (length if every else 1))
    taken = microseconds([partial(call, state=state, meta=meta) for state in states])
    return taken, 1e6 * (moved + kept * each) / COPY


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    ops, rows = TritonOps(), []
    steps = [("decodes", int(n), 1, False) for n in args.decodes.split(",")]
    steps += [("drafts", int(n), 4, True) for n in args.drafts.split(",")]
    steps += [("prompt", 1, int(n), False) for n in args.prompts.split(",")]
    for model in args.models.split(","):
        for what, num_seqs, length, every in steps:
            taken, floor = measure(ops, MODELS[model], num_seqs, length, every)
            row = dict(model=model, what=what, sequences=num_seqs, tokens=length, us=taken)
            rows.append(row | dict(floor_us=floor))
            print(
                f"{model:12} {what:8} {num_seqs:4} x {length:5} {taken:9.1f} us  {floor / taken:6.1%} of the floor",
                flush=True,
            )
    save(rows=rows)
