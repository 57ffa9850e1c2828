"""BitNet's ternary weights: −1, 0 or 1, times one scale for the whole weight. No torch.

They are converted to int8 codes and a scale (`WeightFormat`) when they are read. A checkpoint has

1. `weight` uint8 [out / 4, in] and `weight_scale`: bits 2 i and 2 i + 1 of row r are the code of row
   r + i · out / 4, plus one ("packed"; by transformers' `bitlinear` the scale divides, "packed-inverse");
2. or `weight` in 16 or 32 bits ("masters"). Their mean magnitude is the scale.

Values are NumPy arrays, even with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.model.stored.parts import Array, Stored
from slipstream.spec.stored.quantization_config import StoredQuantization

LEAST = 1e-5
"""Minimum scale of a weight that is computed from unquantized (master) weights."""


def with_codes(
    stored: Iterable[Stored], by: StoredQuantization, is_wanted: Callable[[str], bool]
) -> Iterator[Stored]:
    """Yields `stored` with int8 codes instead of the weights whose modules `is_wanted` accepts.
    CheckpointError names a tensor with other values."""
    assert by.formats is not None
    for name, shape, read in stored:
        module, _, part = name.rpartition(".")
        if by.formats.of(module) is None or not is_wanted(module):
            yield name, shape, read
        elif part == "weight" and by.ternary == "masters":
            yield name, shape, partial(_rounded, read)
            yield f"{module}.weight_scale", (1,), partial(_scale, read)
        elif part == "weight":
            yield name, (4 * shape[0], *shape[1:]), partial(_unpacked, name, read)
        elif part == "weight_scale" and by.ternary == "packed-inverse":
            yield name, shape, partial(_inverse, read)
        else:
            yield name, shape, read


def _scale(read: Callable[[], Any]) -> Array:
    mean = np.abs(read().astype(np.float32)).mean(dtype=np.float32)
    return np.array([max(mean, LEAST)], np.float32)


def _rounded(read: Callable[[], Any]) -> Array:
    factor = np.float32(1) / _scale(read)
    numbers: Array = read().astype(np.float32)
    return np.rint(numbers * factor).clip(-1, 1).astype(np.int8)


def _unpacked(name: str, read: Callable[[], Any]) -> Array:
    octets = read()
    if octets.dtype != np.uint8:
        raise CheckpointError(
            f"{name} is of {octets.dtype}; four codes in a byte (uint8) were expected", field=name
        )
    codes = np.concatenate([octets >> 2 * i & 3 for i in range(4)])
    if codes.size and codes.max() > 2:
        raise CheckpointError(f"{name} has a code that stands for no number", field=name)
    return codes.astype(np.int8) - np.int8(1)


def _inverse(read: Callable[[], Any]) -> Array:
    scale: Array = read().astype(np.float32)
    return 1 / scale
