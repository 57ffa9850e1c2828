"""Weights of which a checkpoint keeps only the numbers that are not zero, as compressed-tensors writes them (`sparse-bitmask`
and `sparse-24-bitmask`): `compressed`, those numbers row after row; `bitmask` uint8 [out, in / 8], a bit for every place, from
the low bits up; `shape`; and, for reading by rows, `row_offsets`, which say nothing new. They stand in place of the module's
`weight` (or, from older tools, below it), in the model's type or rounded.

Such a weight is made dense as it is read, one at a time. Whether its zeros are left out again is for the op set to say.
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
    """`stored` with one `weight` in the place of each weight's parts. CheckpointError names what is missing or doesn't fit."""
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
