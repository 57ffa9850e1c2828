"""Single tensors of a GGUF file: their placement in a layer, and their quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats
from slipstream.compress.gguf.blocks import round_blocks
from slipstream.compress.gguf.mix import PlannedBlocks
from slipstream.spec.parameters import Placement, orders_rows

About = dict[str, dict[str, Any]]
"""Notes on quantized tensors, by name: `rounding`, and `error` if it was measured."""


def inside(at: Placement, index: int) -> Placement:
    """Returns the placement with the parameter's name within its layer."""
    return Placement(
        at.target.removeprefix(f"layers.{index}."), at.start, at.rows, at.transform, at.copies
    )


def outside(at: Placement, index: int) -> Placement:
    return Placement(f"layers.{index}.{at.target}", at.start, at.rows, at.transform, at.copies)


def inputs_of(
    stats: Mapping[str, InputStats], at: Placement, value: Tensor, expert: int
) -> InputStats | None:
    """Statistics of a matrix's inputs; None if there are none, or if the file stores its columns in another order."""
    product = at.target.removesuffix(".weight")
    own = stats.get(product if value.ndim == 2 else f"{product}@{expert}")
    is_ordered = orders_rows(at.transform)
    return own if own is not None and is_ordered and len(own.absmax) == value.shape[-1] else None


def round_tensor(
    tensor: PlannedBlocks,
    at: Placement,
    value: Tensor,
    stats: Mapping[str, InputStats],
    about: About,
    damping: float | None,
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor. Returns its blocks and their dequantized values. Experts are quantized one
    by one; those that received no tokens have no statistics."""
    parts = value.unbind(0) if value.ndim == 3 else (value,)
    blocks, after, lost, whole, with_gptq = list[Tensor](), list[Tensor](), 0.0, 0.0, 0
    for i, part in enumerate(parts):
        own = inputs_of(stats, at, value, i)
        raw, made = round_blocks(part.float(), tensor.type, own, damping=damping)
        blocks.append(torch.from_numpy(raw))
        after.append(made)
        with_gptq += damping is not None and own is not None and own.squares is None
        if own is not None:
            lost, whole = lost + own.energy(made - part), whole + own.energy(part)
    rounding = "gptq" if with_gptq == len(parts) else "nearest"
    if 0 < with_gptq < len(parts):
        rounding = f"gptq of {with_gptq} of {len(parts)} experts, else nearest"
    about[tensor.name] = {"rounding": rounding, **({"error": lost / whole} if whole else {})}
    return torch.stack(blocks), torch.stack(after).view(value.shape)
