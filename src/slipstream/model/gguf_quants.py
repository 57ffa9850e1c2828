"""GGUF's block types and what they stand for. Each function takes blocks as uint8 [n, bytes] and gives float32 [n, elements].

Scales are float16. `Qx_0` is scale · q; `Qx_1` scale · q + minimum; the K types keep scales and minima of 16 or 32 elements
in 6 or 8 bits, themselves scaled by float16. Layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""(elements, bytes) of a block."""


def dequantize_blocks(kind: str, blocks: Bytes) -> Floats:
    return _FUNCTIONS[kind](np.ascontiguousarray(blocks))


def _half(b: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, [n, 1]."""
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(b: Bytes) -> Bytes:
    """All low nibbles, then all high ones: [n, m] → [n, 2m]."""
    return np.concatenate((b & 15, b >> 4), axis=1)


def _fifth_bits(b: Bytes) -> Bytes:
    """32 bits of each block as 0 or 16: [n, 4] → [n, 32]."""
    return np.unpackbits(b, axis=1, bitorder="little") << 4


def _f32(b: Bytes) -> Floats:
    return b.view(np.float32).copy()  # the file's own pages are read-only


def _f16(b: Bytes) -> Floats:
    return b.view(np.float16).astype(np.float32)


def _bf16(b: Bytes) -> Floats:
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).astype(np.float32) + _half(b, 2)


def _six_bit_scales(b: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of six bits, packed in 12 bytes: [n, 12] → two of [n, 8, 1]."""
    low, middle, high = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _pairs_of_nibbles(b: Bytes) -> Bytes:
    """128 bytes as eight groups of 32: of each 32 bytes the low nibbles, then the high: [n, 128] → [n, 8, 32]."""
    groups = b.reshape(len(b), 4, 1, 32)
    return np.concatenate((groups & 15, groups >> 4), axis=2).reshape(len(b), 8, 32)


def _k_blocks(b: Bytes, q: npt.NDArray[np.uint8]) -> Floats:
    scales, minima = _six_bit_scales(b[:, 4:16])
    d, minimum = _half(b, 0)[:, :, None], _half(b, 2)[:, :, None]
    return (d * scales * q.astype(np.float32) - minimum * minima).reshape(len(b), 256)


def _q4_k(b: Bytes) -> Floats:
    return _k_blocks(b, _pairs_of_nibbles(b[:, 16:]))


def _q5_k(b: Bytes) -> Floats:
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return _k_blocks(b, _pairs_of_nibbles(b[:, 48:]) | (high << 4))


def _q6_k(b: Bytes) -> Floats:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 128)
    high = b[:, 128:192].reshape(-1, 2, 1, 32)
    high = ((high >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]) & 3).reshape(-1, 2, 128)
    q = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = b[:, 192:208].view(np.int8).astype(np.float32)[:, :, None]
    return (_half(b, 208)[:, :, None] * scales * q).reshape(len(b), 256)


_FUNCTIONS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
