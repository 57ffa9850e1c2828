"""Rounding to the schemes of `model.scheme`, and back. Plain torch, on any device: it runs once, at load (and in the
reference)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.ops import GroupedLinear, Linear, Quantized, ScaledLinear
from slipstream.model.scheme import FORMAT_MAX, InputFormat, Scheme

SMALLEST = 1e-12
"""The least magnitude that a row is scaled by, so that a row of zeros has a scale."""

DTYPES: dict[InputFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

ROWS_AT_ONCE = 4096
"""Rows of a weight whose float32 values are held while it is rounded."""


def quantize_rows(x: Tensor, inputs: InputFormat) -> Quantized:
    """[T, E] → values and a scale a row: the largest magnitude falls on 448 (fp8) or 127 (int8)."""
    x, top = x.float(), FORMAT_MAX[inputs]
    scales = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / top
    x = x / scales
    return Quantized((x.round() if inputs == "int8" else x.clamp(-top, top)).to(DTYPES[inputs]), scales)


def round_linear(weight: Tensor, bias: Tensor | None, scheme: Scheme) -> Linear:
    """A dense weight [out, in] by `scheme`, rounded to nearest, some rows at a time."""
    if scheme.inputs is not None:
        parts = [quantize_rows(rows, scheme.inputs) for rows in weight.split(ROWS_AT_ONCE)]
        return ScaledLinear(
            weight=torch.cat([p.values.view(torch.uint8) for p in parts]).view(DTYPES[scheme.inputs]),
            scales=torch.cat([p.scales[:, 0] for p in parts]),
            bias=bias,
            out_dtype=weight.dtype,
        )
    size = scheme.group_size
    assert size is not None
    chunk = chunk_of(weight.shape[1], size)
    words, scales = zip(*(_round_groups(rows, size, chunk) for rows in weight.split(ROWS_AT_ONCE)), strict=True)
    return GroupedLinear(
        weight=torch.cat(words), scales=torch.cat(scales, dim=1), bias=bias, group_size=size, chunk=chunk
    )


def chunk_of(inner: int, size: int) -> int:
    """`GroupedLinear.chunk` of a weight with so many inputs in groups of `size`: the longer, the longer the reads; no quarter
    of a chunk may hold two groups, or fewer than 16 inputs."""
    return next(c for c in (4 * size, 2 * size, size) if inner % c == 0 and c >= 64)


def _round_groups(weight: Tensor, size: int, chunk: int) -> tuple[Tensor, Tensor]:
    """(int16 words [out, in / 4], scales [in / size, out] of the weight's type)."""
    groups = weight.float().unflatten(1, (-1, size))
    scales = (groups.abs().amax(-1).clamp(min=SMALLEST) / 7.5).to(weight.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).int() + 8
    return pack4(codes.flatten(1), chunk), scales.T.contiguous()


def pack4(codes: Tensor, chunk: int) -> Tensor:
    """Codes 0 … 15 int32 [out, in] → `GroupedLinear.weight`."""
    a, b, c, d = codes.unflatten(1, (-1, chunk)).chunk(4, dim=-1)
    words: Tensor = a | b << 4 | c << 8 | d << 12
    return words.to(torch.int16).flatten(1)


def unpack4(words: Tensor, chunk: int) -> Tensor:
    """`GroupedLinear.weight` → codes 0 … 15, int32 [out, in]."""
    chunks: Tensor = words.int().unflatten(1, (-1, chunk // 4))
    return torch.cat([chunks >> shift & 15 for shift in (0, 4, 8, 12)], dim=-1).flatten(1)


def dequantize(w: ScaledLinear | GroupedLinear) -> Tensor:
    """The weight [out, in] in float32."""
    if isinstance(w, ScaledLinear):
        return w.weight.float() * w.scales[:, None]
    codes: Tensor = unpack4(w.weight, w.chunk).unflatten(1, (-1, w.group_size))
    zeros = 8.0 if w.zeros is None else w.zeros.float().T[..., None]
    return ((codes - zeros) * w.scales.float().T[..., None]).flatten(1)
