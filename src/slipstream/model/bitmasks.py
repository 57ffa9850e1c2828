"""Weights that a checkpoint stores without their zeros, as compressed-tensors writes them (`sparse-bitmask` and
`sparse-24-bitmask`). In place of a module's `weight` (or below it, from older tools) stand:

1. `compressed`: the other numbers, row after row, in the model's type or rounded.
2. `bitmask` uint8 [out, in / 8]: a bit for every place, from the low bits up.
3. `shape`; and `row_offsets`, which follow from the mask and are not read.

Each weight is made dense as it is read, one at a time. The op set decides whether to leave the zeros out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.spec.parameters import Shape

Stored = tuple[str, Shape, Callable[[], Tensor]]
"""A tensor of a checkpoint: its name, its shape, and how to read it."""

PARTS = ("shape", "bitmask", "compressed")


def made_dense(stored: Iterable[Stored]) -> Iterator[Stored]:
    """`stored`, with one `weight` in place of each weight's parts. CheckpointError names a part that is missing or does not
    fit."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, shape, read in stored:
        stem, _, part = name.rpartition(".")
        stem = stem.removesuffix(".weight")
        if part == "row_offsets":
            continue
        if part not in PARTS:
            yield name, shape, read
            continue
        parts = waiting.setdefault(stem, {})
        parts[part] = read()  # its file may be closed before the others come
        if len(parts) == len(PARTS):
            weight = _dense(stem, **waiting.pop(stem))
            yield f"{stem}.weight", tuple(weight.shape), lambda w=weight: w  # type: ignore[misc]
    for stem, parts in waiting.items():
        lacking = ", ".join(f"{stem}.{part}" for part in PARTS if part not in parts)
        raise CheckpointError(f"the checkpoint lacks {lacking}", field=f"{stem}.weight")


def _dense(stem: str, shape: Tensor, bitmask: Tensor, compressed: Tensor) -> Tensor:
    rows, inner = (int(n) for n in shape.flatten()) if shape.numel() == 2 else (0, 0)
    if bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (rows, -(-inner // 8)):
        raise CheckpointError(
            f"{stem}.bitmask is {list(bitmask.shape)} of {bitmask.dtype}, which does not fit a shape of {shape.tolist()}",
            field=f"{stem}.bitmask",
        )
    bits = np.unpackbits(bitmask.numpy(), axis=-1, count=inner, bitorder="little")
    mask = torch.from_numpy(bits.view(bool))
    if (count := int(mask.sum())) != compressed.numel():
        raise CheckpointError(
            f"{stem}.compressed holds {compressed.numel()} numbers, and its bitmask marks {count}", field=f"{stem}.compressed"
        )
    if compressed.element_size() == 1:  # float8 can't be indexed
        plain = torch.zeros(rows, inner, dtype=torch.uint8)
        return plain.masked_scatter_(mask, compressed.view(torch.uint8)).view(compressed.dtype)
    return torch.zeros(rows, inner, dtype=compressed.dtype).masked_scatter_(mask, compressed)
