"""Packs codes of 2 to 8 bits into 32-bit words, as compressed-tensors' "pack-quantized" does, and
dequantizes them.

The codes of a row follow each other from the low bits of its first word up, without gaps: 32 codes
are `bits` words, and a code of 3, 5, 6 or 7 bits may lie across two. A code is stored with 2^(bits
− 1) added, so that it is never negative. The parts that need no torch are in `stored/parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.kernels.weights.quantize import e2m1_values
from slipstream.model.stored.parts import stored_parts
from slipstream.spec.scheme import WeightFormat

ROWS_AT_ONCE = 1024
"""Number of rows packed or unpacked together. Their int64 temporaries take 8 bytes per code."""


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


def unpack_words(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """Inverse of `pack_words`: int32 [rows, words] → int8 [rows, num_codes]."""
    if len(words) > ROWS_AT_ONCE:
        return torch.cat(
            [unpack_words(rows, bits, num_codes) for rows in words.split(ROWS_AT_ONCE)]
        )
    wide = torch.nn.functional.pad(
        words.long() & 0xFFFFFFFF, (0, -words.shape[1] % bits)
    ).unflatten(1, (-1, bits))
    wide = torch.nn.functional.pad(wide, (0, 1))
    found = []
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        both = wide[..., word] >> shift
        if shift + bits > 32:
            both |= wide[..., word + 1] << (32 - shift)
        found.append(both & ((1 << bits) - 1))
    codes: Tensor = torch.stack(found, dim=-1).flatten(1)[:, :num_codes]
    return (codes - (1 << bits - 1)).to(torch.int8)


def block_numbers(codes: Tensor, scales: Tensor, rows: int, inner: int) -> Tensor:
    """Codes [R, I], with a scale per block of `rows` by `inner` of them (the last may be cut off) →
    float32 [R, I]."""
    spread = (
        scales.float()
        .repeat_interleave(rows, dim=0)[: codes.shape[0]]
        .repeat_interleave(inner, dim=1)
    )
    return codes.float() * spread[:, : codes.shape[1]]


def numbers(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Codes [rows, inner], scales and zeros [rows, groups] (or a single scale) → float32
    [rows, inner]."""
    if zeros is None and scales.numel() == 1:
        return codes.float() * scales.float()
    groups: Tensor = codes.float().unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        groups = groups - zeros.float()[..., None]
    products: Tensor = groups * scales.float()[..., None]
    return products.flatten(1)


def group_scales(fmt: WeightFormat, value: Tensor) -> Tensor:
    """Returns stored scales of any type in float32."""
    if fmt.scale_type == "e8m0":
        return torch.exp2(value.float() - 127)
    return value.float()


def scale_values(fmt: WeightFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Version of `stored_weights.scale_values` for tensors on any device."""
    scales = group_scales(fmt, parts[fmt.scale])
    if fmt.factor is None:
        return scales
    whole = parts[fmt.factor].float().reshape(-1)
    return scales * whole if fmt.by_modelopt else scales / whole


def code_pairs(octets: Tensor) -> Tensor:
    """Unpacks bytes [rows, n] to codes int32 [rows, 2 n], the low halves first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1).int()


def tensor_numbers(fmt: WeightFormat, parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    """Version of `stored_weights.array_numbers` for tensors on any device."""
    packed, scales = parts[stored_parts(fmt)[0]], scale_values(fmt, parts)
    if fmt.in_pairs:
        return numbers(e2m1_values(code_pairs(packed)), scales, None)
    codes = unpack_words(packed, fmt.bits, inner) if fmt.packed else packed
    if fmt.block_rows > 1:
        return block_numbers(codes, scales, fmt.block_rows, fmt.group_size or inner)
    zeros = (
        None
        if fmt.symmetric
        else unpack_words(parts["weight_zero_point"].T.contiguous(), fmt.bits, rows).T
    )
    return numbers(codes, scales, zeros)
