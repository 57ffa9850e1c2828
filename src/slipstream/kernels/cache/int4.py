"""The format of an int4 KV cache, by torch: keys of 5 bits, values of 4 bits, scales of 8 bits.

1. A key's mean over tokens is subtracted, which changes all scores of a query alike. Its numbers are
   multiplied by factors, and the queries' divided by them, so that both lose little (`fold_of`).
2. Queries, keys and values are multiplied by a Hadamard matrix, which spreads outliers over the
   head. Scores stay as they are. Attention's result is multiplied by it once more.
3. A key has two scales, one for each half of its numbers; a value has one. A scale has the bits of a
   positive float16 without the last seven. Of the smallest that cuts no number off and the two
   below it, it is the one with the least squared error.
4. Code c of n bits stands for (c + 1/2 − 2ⁿ⁻¹) · scale.

A block of a head is planes of bytes, one after another. Byte j of a token's codes holds the numbers
j and j + D/2, the first in the low bits:

    keys     4 bits [block_size, D/2]; the fifth bits [block_size, D/8]; scales [block_size, 2]
    values   codes [D/2, block_size]; scales [block_size]

Bit a of byte j of the fifth bits is number j + a · D/8's, and bit a + 4 that of the number D/2
later. The sizes are `spec.layers.int4_row_bytes`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slipstream.kernels.metadata import LayerKV

SHIFT = 7
"""Bits of a float16 that a scale lacks."""
LARGEST = 0xF7
"""The largest scale. Bytes above stand for no finite number."""
CANDIDATES = 3
"""Number of scales that are tried: the smallest that represents the maximum without clipping, and
the next lower ones."""


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthogonal Hadamard matrix, float32 [size, size]; size is a power of two."""
    made = torch.ones(1, 1, device=device)
    while len(made) < size:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    made /= size**0.5
    return made


def rotated(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix, in float32. Its own inverse."""
    return x.float() @ hadamard(x.shape[-1], x.device)


def fold_of(queries: Tensor, keys: Tensor, *, shifts: bool) -> Tensor:
    """Returns `LayerKV.fold` for a layer, float32 [2, K, D]: the factors that keys are multiplied
    by, and the values that are subtracted from keys before that. `queries` float32 [K, D] are mean
    squares, keys [N, K, D].

    The error of a score is smallest if keys are multiplied by √(|q| / |k|), dimension by dimension
    (by Cauchy and Schwarz). `shifts` is False if the scores are changed later, for example by a
    soft cap: then nothing may be subtracted from the keys."""
    keys = keys.float()
    mean = keys.mean(0) if shifts else torch.zeros_like(keys[0])
    k, q = (x.sqrt() for x in ((keys - mean).square().mean(0), queries))
    k, q = (x + 1e-3 * x.mean(1, keepdim=True) + 1e-6 for x in (k, q))
    return torch.stack(((q / k).sqrt(), mean))


def folded_queries(q: Tensor, fold: Tensor) -> Tensor:
    """Transforms queries [T, H, D] to match the stored keys: float32, divided by the keys' factors
    and rotated."""
    return rotated(q.float() / fold[0].repeat_interleave(q.shape[1] // fold.shape[1], 0))


def write(kv: LayerKV, k: Tensor, v: Tensor, block: Tensor, offset: Tensor) -> None:
    """Put keys and values [T, K, D] into their slots."""
    assert kv.fold is not None
    codes, scales = _rounded(rotated((k.float() - kv.fold[1]) * kv.fold[0]), 5, 2)
    fifth = (codes >> 4).unflatten(-1, (2, 4, -1))  # [T, K, half, a, D/8]
    bits = torch.arange(8, device=k.device).view(2, 4, 1)
    nibbles, more, steps = _planes(kv.k, k.shape[-1], 5)
    nibbles[block, :, offset] = _halves_in_bytes(codes & 15)
    more[block, :, offset] = (fifth << bits).sum((2, 3)).to(torch.uint8)
    steps[block, :, offset] = scales
    codes, scales = _rounded(rotated(v), 4, 1)
    nibbles, steps = _planes(kv.v, k.shape[-1], 4)
    nibbles[block, :, :, offset] = _halves_in_bytes(codes)
    steps[block, :, offset] = scales


def read(kv: LayerKV, blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Reads keys and values of n blocks from the cache, float32 [K, n · block_size, D]."""
    nibbles, more, steps = (x[blocks] for x in _planes(kv.k, head_dim, 5))
    bits = torch.arange(8, device=more.device).view(2, 4, 1)
    fifth = (more[..., None, None, :] >> bits & 1).flatten(-3)
    keys = _numbers(torch.cat((nibbles & 15, nibbles >> 4), -1) | fifth << 4, steps, 5)
    nibbles, steps = (x[blocks] for x in _planes(kv.v, head_dim, 4))
    nibbles = nibbles.transpose(-1, -2)
    values = _numbers(torch.cat((nibbles & 15, nibbles >> 4), -1), steps, 4)
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _planes(cache: Tensor, head_dim: int, bits: int) -> tuple[Tensor, ...]:
    """Views of the parts of an int4 cache [B, K, block_size, bytes]: codes, the fifth bits of keys,
    and scales."""
    size, flat = cache.shape[2], cache.flatten(2)
    if bits == 4:
        codes, scales = flat.split((size * head_dim // 2, size), -1)
        return codes.unflatten(-1, (-1, size)), scales[..., None]
    parts = flat.split([size * n for n in (head_dim // 2, head_dim // 8, 2)], -1)
    return tuple(x.unflatten(-1, (size, -1)) for x in parts)


def _halves_in_bytes(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, -1)
    return (low | high << 4).to(torch.uint8)


def _rounded(x: Tensor, bits: int, num_scales: int) -> tuple[Tensor, Tensor]:
    """Quantizes to (codes [..., D] int32, scales [..., num_scales] as bytes)."""
    most, parts = 1 << (bits - 1), x.unflatten(-1, (num_scales, -1))
    half = (parts.abs().amax(-1) / most).clamp(max=60000).half()
    scales = ((half.view(torch.int16).int() + (1 << SHIFT) - 1) >> SHIFT).clamp(max=LARGEST)
    found = []
    for less in range(CANDIDATES):
        tried = (scales - less).clamp(min=0).to(torch.uint8)
        step = _scale(tried)[..., None]
        codes = (parts / step.where(step > 0, 1)).floor().clamp(-most, most - 1)
        error = ((codes + 0.5) * step - parts).square().sum(-1)
        found.append((error, codes + most, tried))
    errors, codes, tried = (torch.stack(x) for x in zip(*found, strict=True))
    best = errors.argmin(0, keepdim=True)
    codes = codes.take_along_dim(best[..., None], 0)[0]
    return codes.flatten(-2).int(), tried.take_along_dim(best, 0)[0]


def _scale(scales: Tensor) -> Tensor:
    return (scales.to(torch.int16) << SHIFT).view(torch.float16).float()


def _numbers(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    centred = codes.float() + (0.5 - (1 << (bits - 1)))
    numbers: Tensor = (
        centred.unflatten(-1, (scales.shape[-1], -1)) * _scale(scales)[..., None]
    ).flatten(-2)
    return numbers
