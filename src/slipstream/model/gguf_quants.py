"""GGUF's block formats as numbers. Each `_q…` takes whole blocks, uint8 [N, block_bytes], to float32 [N, block_size].

The formats are ggml's: a block begins (Q6_K: ends) with float16 scales, and holds small integers in nibbles and loose
bits. The order of operations is ggml's too, so that float32 results agree bit for bit with its reference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.quantize import E2M1
from slipstream.spec.gguf import GGUFFile

_CHUNK_VALUES = 1 << 20
"""Values dequantised at a time: bounds the float32 temporaries to a few MB, whatever the tensor's size."""


def dequantize(blocks: npt.NDArray[np.uint8], kind: str, dtype: torch.dtype) -> Tensor:
    """The values of `blocks` [N, block_bytes] of the type `kind`, flat, in a fresh tensor of `dtype`."""
    decode, block_size = _DECODERS[kind]
    result = torch.empty((len(blocks), block_size), dtype=dtype)
    step = _CHUNK_VALUES // block_size
    for begin in range(0, len(blocks), step):
        chunk = torch.from_numpy(blocks[begin : begin + step].copy())  # torch takes no read-only memory
        result[begin : begin + step].copy_(decode(chunk))
    return result.flatten()


def dequantize_tensor(file: GGUFFile, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of the file in `dtype`: a fresh CPU tensor of its shape. Temporaries stay within a few MB."""
    blocks = file.raw(name)
    tensor = file.tensors[name]
    return dequantize(blocks, tensor.type, dtype).view(tensor.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, B] bytes to […, 2·B] values: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """[N, B] bytes to [N, 8/width, B]: field j of every byte, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed[:, None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, 4] bytes to [N, 32]: bit i of the little-endian 32-bit word, moved to bit 4."""
    return (_bits(packed, 1).transpose(1, 2).flatten(1)) << 4


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float().mul_(_half(b, 0))


def _q4_0(b: Tensor) -> Tensor:
    return _nibbles(b[:, 2:]).float().sub_(8.0).mul_(_half(b, 0))


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[:, 4:]).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float().sub_(16.0).mul_(_half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block, float32 [N, 8, 1] each.

    Twelve bytes hold 16 six-bit numbers: groups 0–3 in the low six bits of bytes 0–3 (scales) and 4–7 (minima); groups
    4–7 in the nibbles of bytes 8–11, with their upper two bits on top of bytes 0–3 and 4–7.
    """
    low_scale, low_min, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low_scale & 63, (high & 15) | (low_scale >> 6 << 4)), dim=1)
    minimum = torch.cat((low_min & 63, (high >> 4) | (low_min >> 6 << 4)), dim=1)
    return (scale.float() * _half(b, 0)).unsqueeze(2), (minimum.float() * _half(b, 2)).unsqueeze(2)


def _q2_k(b: Tensor) -> Tensor:
    # Groups of 16: a byte of scale (low half) and minimum; codes as the upper bits of Q6_K.
    scale, minimum = (b[:, :16] & 15).float() * _half(b, 80), (b[:, :16] >> 4).float() * _half(b, 82)
    codes = _bits(b[:, 16:80].reshape(-1, 32), 2).view(-1, 16, 16)
    return codes.float().mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2)).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    # The third bits of all groups of 32 stand in 32 bytes; 16 scales of six bits are nibbles of eight bytes and pairs of four.
    codes = _bits(b[:, 32:96].reshape(-1, 32), 2).view(-1, 8, 32) | (_bits(b[:, :32], 1) << 2)
    six = _nibbles(b[:, 96:104]) | (_bits(b[:, 104:108], 2).flatten(1) << 4)
    scale = six.float().sub_(32.0) * _half(b, 108)
    return codes.float().sub_(4.0).view(-1, 16, 16).mul_(scale.unsqueeze(2)).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b)
    values = _nibbles(b[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return values.float().mul_(scale).sub_(minimum).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b)
    values = _nibbles(b[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | (_bits(b[:, 16:48], 1) << 4)
    return values.float().mul_(scale).sub_(minimum).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    # Two halves of 128 values: nibbles of 64 bytes, upper two bits in 32 more; each group of 16 has a signed scale.
    low = torch.cat((b[:, :128].view(-1, 2, 64) & 15, b[:, :128].view(-1, 2, 64) >> 4), dim=2)
    high = _bits(b[:, 128:192].reshape(-1, 32), 2).view(-1, 2, 128) << 4
    scale = b[:, 192:208].view(torch.int8).float() * _half(b, 208)
    return (low | high).float().sub_(32.0).view(-1, 16, 16).mul_(scale.unsqueeze(2)).flatten(1)


def _mxfp4(b: Tensor) -> Tensor:
    # A block begins with its exponent plus 127; codes of e2m1 are a sign, two bits of exponent and one of mantissa.
    scale = torch.ldexp(torch.ones(len(b), 1), b[:, :1].int() - 127)
    return torch.tensor((*E2M1, 0.0, *(-x for x in E2M1[1:])))[_nibbles(b[:, 1:]).long()].mul_(scale)


_DECODERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "F32": (lambda b: b.view(torch.float32), 1),
    "F16": (lambda b: b.view(torch.float16), 1),
    "BF16": (lambda b: b.view(torch.bfloat16), 1),
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
    "MXFP4": (_mxfp4, 32),
}
