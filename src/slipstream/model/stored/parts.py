"""Tensors and values of quantized weights as a checkpoint stores them, by
`spec.scheme.WeightFormat`. No torch.

A weight that the op set can't compute with (on a CPU fp8, or more than 4 bits with unquantized
inputs) is expanded to the model's dtype when it is read (`expanded`). `stored/packing.py` packs
codes of 2 to 8 bits into 32-bit words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.spec.parameters import Shape
from slipstream.spec.scheme import E2M1, WeightFormat
from slipstream.spec.stored.quantization_config import StoredFormats

Array: TypeAlias = npt.NDArray[Any]
Stored: TypeAlias = tuple[str, Shape, Callable[[], Any]]
"""A checkpoint tensor: its name, its shape, and a function that reads it."""

SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "input_global_scale")

ROWS_AT_ONCE = 1024
"""Number of rows of codes unpacked at once. Their bits temporarily take a byte each."""


def stored_parts(fmt: WeightFormat) -> tuple[str, ...]:
    """Names of the tensors that a checkpoint has instead of a module's `weight`. The first is the
    codes."""
    packed = fmt.packed or (fmt.in_pairs and not fmt.by_modelopt)
    more = (fmt.factor,) if fmt.factor else () if fmt.symmetric else ("weight_zero_point",)
    return "weight_packed" if packed else "weight", fmt.scale, *more


def stored_shape(fmt: WeightFormat, part: str, rows: int, inner: int) -> tuple[int, int]:
    match part:
        case "weight_packed" | "weight" if fmt.in_pairs:
            return rows, inner // 2
        case "weight_packed":
            return rows, -(-inner * fmt.bits // 32)
        case "weight":
            return rows, inner
        case "weight_scale" | "weight_scale_inv":
            return -(-rows // fmt.block_rows), fmt.groups(inner)
        case _:
            # zero points are packed along the rows
            return -(-rows * fmt.bits // 32), fmt.groups(inner)


def array_numbers(fmt: WeightFormat, parts: Mapping[str, Array], rows: int, inner: int) -> Array:
    """Values float32 [rows, inner] of a weight, from its `stored_parts`."""
    codes, scales = parts[stored_parts(fmt)[0]], scale_values(fmt, parts)
    if fmt.in_pairs:
        codes = np.array((*E2M1, *(-x for x in E2M1)), np.float32)[code_pairs(codes)]
    found: Array = (unpack_words(codes, fmt.bits, inner) if fmt.packed else codes).astype(
        np.float32
    )
    if fmt.block_rows > 1:
        for i, at in enumerate(range(0, rows, fmt.block_rows)):
            found[at : at + fmt.block_rows] *= np.repeat(scales[i], fmt.group_size or inner)[:inner]
        return found
    groups = found.reshape(rows, 1 if scales.size == 1 else scales.shape[1], -1)
    if not fmt.symmetric:
        words = np.ascontiguousarray(parts["weight_zero_point"].T)
        groups -= unpack_words(words, fmt.bits, rows).T.astype(np.float32)[..., None]
    groups *= scales.reshape(1 if scales.size == 1 else rows, groups.shape[1], 1)
    return found


def group_scales(fmt: WeightFormat, value: Array) -> npt.NDArray[np.float32]:
    """Stored scales of any dtype as float32."""
    if fmt.scale_type == "e8m0":
        return np.ldexp(np.float32(1), value.astype(np.int32) - 127)
    return value.astype(np.float32)


def scale_values(fmt: WeightFormat, parts: Mapping[str, Array]) -> npt.NDArray[np.float32]:
    """Scales of a weight's `stored_parts` as float32, multiplied by its global factor."""
    scales = group_scales(fmt, parts[fmt.scale])
    if fmt.factor is None:
        return scales
    whole = parts[fmt.factor].astype(np.float32).reshape(-1)
    return scales * whole if fmt.by_modelopt else scales / whole


def code_pairs(octets: Array) -> Array:
    """Unpacks bytes [rows, n] to codes [rows, 2 n], low halves first."""
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(octets), -1)


def unpack_words(words: Array, bits: int, num_codes: int) -> npt.NDArray[np.int8]:
    """Inverse of `packing.pack_words`: int32 [rows, words] → int8 [rows, num_codes]."""
    if len(words) > ROWS_AT_ONCE:
        parts = (words[at : at + ROWS_AT_ONCE] for at in range(0, len(words), ROWS_AT_ONCE))
        return np.concatenate([unpack_words(part, bits, num_codes) for part in parts])
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        codes = octets[:, :num_codes]
    elif bits == 4:
        codes = np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(words), -1)[:, :num_codes]
    else:
        places = np.unpackbits(octets, axis=-1, count=num_codes * bits, bitorder="little")
        codes = np.packbits(
            places.reshape(len(words), num_codes, bits), axis=-1, bitorder="little"
        )[..., 0]
    # wraps around below 0, as two's complement does
    return (codes - np.uint8(1 << bits - 1)).view(np.int8)


def expanded(
    stored: Iterable[Stored],
    formats: StoredFormats,
    is_wanted: Callable[[str], bool],
    numbers: Callable[[WeightFormat, Mapping[str, Any], int, int], Any] = array_numbers,
) -> Iterator[Stored]:
    """Yields a checkpoint's tensors; a quantized weight for which `is_wanted` (given its module's
    name) is true is expanded by `numbers`.

    The expanded weight replaces its parts. CheckpointError if a part is missing.
    """
    waiting: dict[str, dict[str, tuple[Shape, Callable[[], Any]]]] = {}
    for name, shape, read in stored:
        module, _, part = name.rpartition(".")
        fmt = formats.of(module)
        if fmt is not None and part in INPUT_SCALES and is_wanted(module):
            continue  # inputs are not quantized
        if fmt is None or part not in (*stored_parts(fmt), "weight_shape") or not is_wanted(module):
            yield name, shape, read
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tuple(shape), read
        if len(parts) == len(stored_parts(fmt)) + fmt.packed:
            yield _expanded(module, fmt, waiting.pop(module), numbers)
    for module, parts in waiting.items():
        raise CheckpointError(
            f"{module} has {', '.join(parts)}, but lacks the other parts of its weight",
            field=module,
        )


def _expanded(
    module: str,
    fmt: WeightFormat,
    parts: Mapping[str, tuple[Shape, Callable[[], Any]]],
    numbers: Callable[[WeightFormat, Mapping[str, Any], int, int], Any],
) -> Stored:
    shape = parts["weight_shape"][1]() if fmt.packed else parts[stored_parts(fmt)[0]][0]
    rows, inner = (int(n) for n in shape)
    inner *= 2 if fmt.in_pairs else 1
    for part in stored_parts(fmt):
        own = parts[part][0]
        one_scale = part in SCALES and fmt.groups(inner) == 1 and math.prod(own) == 1
        one_scale |= part == fmt.factor and math.prod(own) == 1
        if own != stored_shape(fmt, part, rows, inner) and not one_scale:
            raise CheckpointError(
                f"{module}.{part} has the shape {list(own)}", field=f"{module}.{part}"
            )

    def read() -> Any:
        return numbers(fmt, {part: parts[part][1]() for part in stored_parts(fmt)}, rows, inner)

    return f"{module}.weight", (rows, inner), read
