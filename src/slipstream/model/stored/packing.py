"""Packs codes of 2 to 8 bits into 32-bit words, as compressed-tensors' "pack-quantized" does.

The codes of a row are contiguous from the low bits of its first word up: 32 codes take `bits`
words, and a code of 3, 5, 6 or 7 bits may span two words. A code is stored with 2^(bits − 1) added,
so that it is never negative. `stored/parts.py` unpacks them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.kernels.arrays import to_array, to_tensor
from slipstream.model.stored.parts import array_numbers
from slipstream.spec.scheme import WeightFormat

ROWS_AT_ONCE = 1024
"""Number of rows packed at once. Their int64 temporaries take 8 bytes per code."""


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes −2^(bits − 1) … 2^(bits − 1) − 1 of any integer type [rows, n] → int32
    [rows, ceil(n · bits / 32)]."""
    if len(codes) > ROWS_AT_ONCE:
        return torch.cat([pack_words(rows, bits) for rows in codes.split(ROWS_AT_ONCE)])
    num_words = -(-codes.shape[1] * bits // 32)
    padded = torch.nn.functional.pad(codes.long() + (1 << bits - 1), (0, -codes.shape[1] % 32))
    groups = padded.unflatten(1, (-1, 32))
    words = torch.zeros(*groups.shape[:2], bits + 1, dtype=torch.int64, device=codes.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        value = groups[..., i] << shift
        words[..., word] |= value & 0xFFFFFFFF
        words[..., word + 1] |= value >> 32
    flat: Tensor = words[..., :bits].flatten(1)[:, :num_words]
    return torch.where(flat >= 2**31, flat - 2**32, flat).to(torch.int32).contiguous()


def numbers(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Dequantizes codes [rows, inner] with scales and zeros [rows, groups] (or a single scale) →
    float32 [rows, inner]."""
    if zeros is None and scales.numel() == 1:
        return codes.float() * scales.float()
    groups: Tensor = codes.float().unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        groups = groups - zeros.float()[..., None]
    products: Tensor = groups * scales.float()[..., None]
    return products.flatten(1)


def tensor_numbers(fmt: WeightFormat, parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    """`parts.array_numbers` for tensors in host memory."""
    arrays = {name: to_array(value) for name, value in parts.items()}
    return to_tensor(array_numbers(fmt, arrays, rows, inner))
