"""Sparse weights stored by compressed-tensors as bit masks and nonzero values (`sparse-bitmask` and
`sparse-24-bitmask`). No torch.

A checkpoint has these tensors instead of a module's `weight` (older tools: below that name):

1. `compressed`: the nonzero elements, row by row, in the model's dtype or quantized.
2. `bitmask` uint8 [out, in / 8]: a bit for every element, from the low bits up.
3. `shape` and `row_offsets`, which can be derived from the mask and are not read.

Each weight is made dense when it is read. The op set decides whether to make it sparse again.
Values are NumPy arrays, even with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.model.stored.parts import Stored

Array: TypeAlias = npt.NDArray[Any]
PARTS = ("shape", "bitmask", "compressed")


def made_dense(stored: Iterable[Stored]) -> Iterator[Stored]:
    """Yields `stored`, with one dense `weight` instead of each sparse weight's parts.

    CheckpointError names a part that is missing or does not fit.
    """
    waiting: dict[str, dict[str, Callable[[], Array]]] = {}
    for name, shape, read in stored:
        stem, _, part = name.rpartition(".")
        stem = stem.removesuffix(".weight")
        if part == "row_offsets":
            continue
        if part not in PARTS:
            yield name, shape, read
            continue
        parts = waiting.setdefault(stem, {})
        parts[part] = read
        if len(parts) == len(PARTS):
            whole = waiting.pop(stem)
            own = whole["shape"]()
            rows, inner = (int(n) for n in own.reshape(-1)) if own.size == 2 else (0, 0)
            dense = partial(_dense, stem, (rows, inner), whole["bitmask"], whole["compressed"])
            yield f"{stem}.weight", (rows, inner), dense
    for stem, parts in waiting.items():
        lacking = ", ".join(f"{stem}.{part}" for part in PARTS if part not in parts)
        raise CheckpointError(f"the checkpoint lacks {lacking}", field=f"{stem}.weight")


def _dense(
    stem: str,
    shape: tuple[int, int],
    read_mask: Callable[[], Array],
    read_numbers: Callable[[], Array],
) -> Array:
    bitmask, compressed, (rows, inner) = read_mask(), read_numbers(), shape
    if bitmask.dtype != np.uint8 or bitmask.shape != (rows, -(-inner // 8)):
        raise CheckpointError(
            f"{stem}.bitmask is {list(bitmask.shape)} of {bitmask.dtype}, which does not fit a shape of {list(shape)}",
            field=f"{stem}.bitmask",
        )
    mask = np.unpackbits(bitmask, axis=-1, count=inner, bitorder="little").view(bool)
    if (count := np.count_nonzero(mask)) != compressed.size:
        raise CheckpointError(
            f"{stem}.compressed holds {compressed.size} numbers, and its bitmask marks {count}",
            field=f"{stem}.compressed",
        )
    dense = np.zeros(mask.shape, f"u{compressed.itemsize}")  # all bits 0 mean zero in every dtype
    dense[mask] = np.ascontiguousarray(compressed).reshape(-1).view(dense.dtype)
    return dense.view(compressed.dtype)
