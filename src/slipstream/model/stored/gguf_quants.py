"""Decoders of GGUF's block formats. Each `_q…` converts whole blocks, uint8 [N, block_bytes], to
float32 [N, block_size]. Types that are read seldom are taken apart by `kernels.weights.gguf_codes`.

The formats are ggml's. A block begins (Q6_K: ends) with float16 scales, and holds small integers in
nibbles and loose bits. The order of operations is ggml's too, so that float32 results agree bit for
bit with its reference. NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slipstream.kernels.weights.gguf_codes import FORMS, split
from slipstream.spec.stored.gguf import TYPES, GGUFFile

Blocks = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 20
"""Number of values dequantized at a time. It bounds the float32 temporaries to a few MB, whatever
the tensor's size."""


def dequantize(blocks: Blocks, kind: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns the values of `blocks` [N, block_bytes] of the type `kind`, flat, in a new array of
    `dtype`."""
    decode, block_size = _DECODERS[kind]
    result = np.empty((len(blocks), block_size), dtype)
    step = _CHUNK_VALUES // block_size
    with np.errstate(over="ignore", invalid="ignore"):  # too large for float16: infinite
        for begin in range(0, len(blocks), step):
            result[begin : begin + step] = decode(
                np.ascontiguousarray(blocks[begin : begin + step])
            )
    return result.reshape(-1)


def dequantize_tensor(file: GGUFFile, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns a tensor of the file in a new array of `dtype` with its shape. Temporaries stay
    within a few MB."""
    blocks = file.raw(name)
    tensor = file.tensors[name]
    return dequantize(blocks, tensor.type, dtype).reshape(tensor.shape)


def _half(blocks: Blocks, at: int) -> Floats:
    """Returns the float16 at byte `at` of each block as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _signed(blocks: Blocks) -> Floats:
    return blocks.view(np.int8).astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Unpacks bytes […, B] to values […, 2·B]: all low halves, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _bits(packed: Blocks, width: int) -> Blocks:
    """Unpacks bytes [N, B] to [N, 8/width, B]: field j of every byte, lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (packed[:, None, :] >> shifts[:, None]) & np.uint8((1 << width) - 1)


def _fifth_bits(packed: Blocks) -> Blocks:
    """Unpacks bytes [N, 4] to [N, 32]: bit i of the little-endian 32-bit word, moved to bit 4."""
    return (_bits(packed, 1).transpose(0, 2, 1).reshape(len(packed), -1) << 4).astype(np.uint8)


def _floats(codes: npt.NDArray[Any], less: float = 0.0) -> Floats:
    return codes.astype(np.float32) - np.float32(less)


def _q8_0(b: Blocks) -> Floats:
    return _signed(b[:, 2:]) * _half(b, 0)


def _q4_0(b: Blocks) -> Floats:
    return _floats(_nibbles(b[:, 2:]), 8.0) * _half(b, 0)


def _q4_1(b: Blocks) -> Floats:
    return _floats(_nibbles(b[:, 4:])) * _half(b, 0) + _half(b, 2)


def _q5_0(b: Blocks) -> Floats:
    return _floats(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), 16.0) * _half(b, 0)


def _q5_1(b: Blocks) -> Floats:
    return _floats(_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])) * _half(b, 0) + _half(b, 2)


def _k_scales(b: Blocks) -> tuple[Floats, Floats]:
    """Returns the scale and minimum of the 8 groups of a Q4_K or Q5_K block, float32 [N, 8, 1]
    each.

    Twelve bytes hold 16 six-bit numbers. Groups 0–3 are in the low six bits of bytes 0–3 (scales)
    and 4–7 (minima). Groups 4–7 are in the nibbles of bytes 8–11, with their upper two bits on top
    of bytes 0–3 and 4–7.
    """
    low_scale, low_min, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate((low_scale & 63, (high & 15) | (low_scale >> 6 << 4)), axis=1)
    minimum = np.concatenate((low_min & 63, (high >> 4) | (low_min >> 6 << 4)), axis=1)
    return (_floats(scale) * _half(b, 0))[:, :, None], (_floats(minimum) * _half(b, 2))[:, :, None]


def _q2_k(b: Blocks) -> Floats:
    # Groups of 16 have a byte with the scale (low half) and the minimum. Codes are laid out as the
    # upper bits of Q6_K.
    scale, minimum = _floats(b[:, :16] & 15) * _half(b, 80), _floats(b[:, :16] >> 4) * _half(b, 82)
    codes = _bits(b[:, 16:80].reshape(-1, 32), 2).reshape(-1, 16, 16)
    values: Floats = _floats(codes) * scale[:, :, None] - minimum[:, :, None]
    return values.reshape(len(b), -1)


def _q3_k(b: Blocks) -> Floats:
    # The third bits of all groups of 32 are in 32 bytes. The 16 six-bit scales are nibbles of eight
    # bytes and pairs of bits of four bytes.
    codes = _bits(b[:, 32:96].reshape(-1, 32), 2).reshape(-1, 8, 32) | (_bits(b[:, :32], 1) << 2)
    six = _nibbles(b[:, 96:104]) | (_bits(b[:, 104:108], 2).reshape(len(b), -1) << 4)
    scale = _floats(six, 32.0) * _half(b, 108)
    return (_floats(codes, 4.0).reshape(-1, 16, 16) * scale[:, :, None]).reshape(len(b), -1)


def _q4_k(b: Blocks) -> Floats:
    scale, minimum = _k_scales(b)
    values = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (_floats(values) * scale - minimum).reshape(len(b), -1)


def _q5_k(b: Blocks) -> Floats:
    scale, minimum = _k_scales(b)
    values = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (
        _bits(b[:, 16:48], 1) << 4
    )
    return (_floats(values) * scale - minimum).reshape(len(b), -1)


def _q6_k(b: Blocks) -> Floats:
    # Two halves of 128 values: nibbles of 64 bytes, upper two bits in 32 more. Each group of 16 has
    # a signed scale.
    low = _nibbles(b[:, :128].reshape(-1, 2, 64))
    high = _bits(b[:, 128:192].reshape(-1, 32), 2).reshape(-1, 2, 128) << 4
    scale = _signed(np.ascontiguousarray(b[:, 192:208])) * _half(b, 208)
    return (_floats(low | high, 32.0).reshape(-1, 16, 16) * scale[:, :, None]).reshape(len(b), -1)


def _by_codes(b: Blocks, kind: str) -> Floats:
    return split(b.astype(np.int32), kind).values(FORMS[kind])


_DECODERS: dict[str, tuple[Callable[[Blocks], Any], int]] = {
    "F32": (lambda b: b.view(np.float32), 1),
    "F16": (lambda b: b.view(np.float16), 1),
    "BF16": (lambda b: b.view(ml_dtypes.bfloat16), 1),
    "Q8_0": (_q8_0, 32),
    "Q4_0": (_q4_0, 32),
    "Q4_1": (_q4_1, 32),
    "Q5_0": (_q5_0, 32),
    "Q5_1": (_q5_1, 32),
    "Q2_K": (_q2_k, 256),
    "Q3_K": (_q3_k, 256),
    "Q4_K": (_q4_k, 256),
    "Q5_K": (_q5_k, 256),
    "Q6_K": (_q6_k, 256),
}
_DECODERS |= {
    t.name: (partial(_by_codes, kind=t.name), t.block_size)
    for t in TYPES.values()
    if t.name not in _DECODERS
}
