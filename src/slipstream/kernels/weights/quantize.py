"""Quantization to the schemes of `spec.scheme`, and back. Plain torch, on any device. It runs once,
at load (and in the reference)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.weights.forms import (
    GroupedLinear,
    Linear,
    Quantized,
    ScaledLinear,
    TileScaledLinear,
    chunk_of,
)
from slipstream.spec.scheme import E2M1, FORMAT_MAX, FP8_TILE, InputFormat, Scheme

SMALLEST = 1e-12
"""Minimum magnitude that a row is scaled by, so that a row of zeros has a scale."""

DTYPES: dict[InputFormat, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "fp8-block": torch.float8_e4m3fn,
}

ROWS_AT_ONCE = 4096
"""Rows of a weight whose float32 values are held at once while it is quantized."""


def quantize_rows(x: Tensor, inputs: InputFormat) -> Quantized:
    """[T, E] → values and a scale per row (in `fp8-block` per 128 elements). The largest magnitude
    becomes 448 (fp8) or 127 (int8)."""
    if inputs == "fp8-block":
        groups = quantize_rows(x.reshape(-1, FP8_TILE), "fp8")
        return Quantized(
            groups.values.view(x.shape), groups.scales.view(len(x), x.shape[1] // FP8_TILE)
        )
    x, top = x.float(), FORMAT_MAX[inputs]
    scales = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / top
    x = x / scales
    return Quantized(
        (x.round() if inputs == "int8" else x.clamp(-top, top)).to(DTYPES[inputs]), scales
    )


def numbers(x: Quantized) -> Tensor:
    """Returns the values of quantized rows, float32."""
    groups: Tensor = x.values.float().unflatten(1, (x.scales.shape[1], -1))
    return (groups * x.scales[..., None]).flatten(1)


def round_linear(
    weight: Tensor, bias: Tensor | None, scheme: Scheme, scales_dtype: torch.dtype | None = None
) -> Linear:
    """Quantizes a dense weight [out, in] by `scheme`, to nearest, some rows at a time.

    The scales of groups have the weight's type unless another is given.
    """
    parts = [
        _rounded(rows, scheme, scales_dtype or weight.dtype) for rows in weight.split(ROWS_AT_ONCE)
    ]
    found = dict[str, Any](bias=bias)
    for name, (dim, _) in parts[0].ROWS.items():
        if isinstance(first := getattr(parts[0], name), Tensor):
            kind = torch.uint8 if first.dtype.itemsize == 1 else first.dtype  # float8 has no `cat`
            own = [getattr(part, name).view(kind) for part in parts]
            found[name] = torch.cat(own, dim=dim).view(first.dtype)
    return replace(parts[0], **found)


def _rounded(weight: Tensor, scheme: Scheme, kind: torch.dtype) -> Linear:
    """Quantizes all rows at once; the scales of groups are of the type `kind`."""
    if scheme.name == "fp8-block":
        codes, scales = _round_tiles(weight)
        return TileScaledLinear(weight=codes, scales=scales, out_dtype=weight.dtype)
    if scheme.inputs is not None:
        q = quantize_rows(weight, scheme.inputs)
        return ScaledLinear(weight=q.values, scales=q.scales[:, 0], out_dtype=weight.dtype)
    size, factors = scheme.group_size, None
    assert size is not None
    if scheme.name == "nvfp4":
        codes, e4m3, factors = round_nvfp4(weight)
        scales = e4m3.to(kind).T
    else:
        codes, scales = (_round_floats if scheme.name == "mxfp4" else _round_groups)(
            weight, size, kind
        )
    chunk = chunk_of(weight.shape[1], size)
    return GroupedLinear(
        weight=pack4(codes, chunk),
        scales=scales,
        group_size=size,
        chunk=chunk,
        codes="int4" if scheme.name == "int4" else "e2m1",
        row_scales=factors,
    )


def _round_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes tiles and returns (codes [out, in], scales [⌈out / 128⌉, in / 128])."""
    rows, inner = weight.shape
    n, across = FP8_TILE, inner // FP8_TILE
    tiles = torch.nn.functional.pad(weight.float(), (0, 0, 0, -rows % n)).view(-1, n, across, n)
    flat = quantize_rows(tiles.transpose(1, 2).flatten(2).flatten(0, 1), "fp8")
    codes = (
        flat.values.view(torch.uint8)
        .view(-1, across, n, n)
        .transpose(1, 2)
        .reshape(-1, inner)[:rows]
    )
    return codes.contiguous().view(DTYPES["fp8-block"]), flat.scales.view(-1, across)


def _round_groups(weight: Tensor, size: int, scales_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes groups and returns (codes int32 [out, in], scales [in / size, out]).

    A group's scale is found by search:

    1. The element of the largest magnitude is mapped to several distances from 0, those of
       `_STEPS`, on the side with one code more.
    2. For the resulting codes, the scale with the least squared error is computed.
    3. The best of all is taken.

    For normally distributed values the error is a quarter below that of the largest magnitude over
    7.5.
    """
    groups = weight.float().unflatten(1, (-1, size))
    kind = torch.finfo(scales_dtype)
    # so that a group of zeros has a scale, in float16 too
    least = max(SMALLEST, 7.5 * kind.smallest_normal * kind.eps)
    largest = -groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    largest = torch.where(largest.abs() < least, least, largest)
    gain = torch.full_like(largest, -1.0)
    scales = largest / 7.5
    for step in _STEPS:
        codes = (groups * (step / largest)).round().clamp(-8, 7)
        products, squares = ((codes * x).sum(-1, keepdim=True) for x in (groups, codes))
        # reduction of the squared error, compared with all codes 0
        found = products * products / squares.clamp(min=1.0)
        better = found > gain
        gain = torch.where(better, found, gain)
        scales = torch.where(better, products / squares.clamp(min=1.0), scales)
    scales = torch.where(scales.abs() < least / 7.5, largest / 7.5, scales).to(scales_dtype)
    codes = (groups / scales.float()).round().clamp(-8, 7).int() + 8
    return codes.flatten(1), scales[..., 0].T.contiguous()


_STEPS = (7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 8.75, 9.0)


def _round_floats(weight: Tensor, size: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes groups to e2m1, as `_round_groups` does to int4.

    The scale moves the power of two of the largest magnitude to 4, that of the largest code (OCP
    Microscaling Formats 1.0, section 6.3). Of two equally near codes the larger is taken.
    """
    groups = weight.float().unflatten(1, (-1, size))
    exponents = groups.abs().amax(-1).clamp(min=SMALLEST).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    edges = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    codes = torch.bucketize(
        scaled.abs(), torch.tensor(edges, device=weight.device), right=True
    ).int()
    codes += 8 * (scaled < 0)
    return codes.flatten(1), exponents.exp2().to(kind).T.contiguous()


LARGEST_SCALE = 256.0
"""The e4m3 scale of a row's largest group of `nvfp4` if its largest magnitude becomes 6. It leaves
room for one half more, if that becomes 4."""


def round_nvfp4(weight: Tensor, *, divides: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes a weight [out, in], and returns (codes int32 [out, in], scales float8_e4m3fn
    [out, in / 16], factors float32 [out]).

    1. Each group's largest magnitude becomes 6 or 4, whichever has the smaller squared error ("four
       over six", Cook et al. 2025): the codes are wide apart near 6.
    2. Codes are to nearest, of two equally near the even one.
    3. Each row has a factor, which multiplies its scales, or with `divides` divides them.
    """
    groups = weight.float().unflatten(1, (-1, 16))
    largest = groups.abs().amax(-1)
    top = largest.amax(-1).clamp(min=SMALLEST) / (6 * LARGEST_SCALE)
    factors = top.reciprocal() if divides else top
    whole = factors[:, None]
    error = torch.full_like(largest, torch.inf)
    codes, scales = torch.zeros_like(groups, dtype=torch.int32), torch.zeros_like(largest)
    for top_code in (6.0, 4.0):
        wanted = largest / top_code * whole if divides else largest / top_code / whole
        e4m3 = wanted.clamp(2.0**-9, FORMAT_MAX["fp8"]).to(torch.float8_e4m3fn).float()
        each = (e4m3 / whole if divides else e4m3 * whole)[..., None]
        found = e2m1_codes(groups / each)
        own = (e2m1_values(found) * each - groups).square().sum(-1)
        better = own < error
        error, scales = torch.where(better, own, error), torch.where(better, e4m3, scales)
        codes = torch.where(better[..., None], found, codes)
    return codes.flatten(1), scales.to(torch.float8_e4m3fn), factors


def e2m1_codes(x: Tensor) -> Tensor:
    """Returns the nearest codes int32, of two equally near ones the even."""
    edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], device=x.device)
    edges[::2] = torch.nextafter(edges[::2], edges.new_tensor(torch.inf))  # go to the lower code
    return torch.bucketize(x.abs(), edges, right=True).int() + 8 * (x < 0)


def e2m1_values(codes: Tensor) -> Tensor:
    """Returns the values float32 of codes 0 … 15."""
    return torch.tensor((*E2M1, *(-x for x in E2M1)), device=codes.device)[codes]


def pack4(codes: Tensor, chunk: int) -> Tensor:
    """Codes 0 … 15 int32 [out, in] → `GroupedLinear.weight`."""
    a, b, c, d = codes.unflatten(1, (-1, chunk)).chunk(4, dim=-1)
    words: Tensor = a | b << 4 | c << 8 | d << 12
    return words.to(torch.int16).flatten(1)


def unpack4(words: Tensor, chunk: int) -> Tensor:
    """`GroupedLinear.weight` → codes 0 … 15, int32 [out, in]."""
    chunks: Tensor = words.int().unflatten(1, (-1, chunk // 4))
    return torch.cat([chunks >> shift & 15 for shift in (0, 4, 8, 12)], dim=-1).flatten(1)


def dequantize(
    w: ScaledLinear | TileScaledLinear | GroupedLinear, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the weight [out, in], computed in float32."""
    if isinstance(w, TileScaledLinear):
        scales = w.scales.repeat_interleave(FP8_TILE, dim=0)[: len(w.weight)]
        return numbers(Quantized(w.weight, scales)).to(dtype)
    if isinstance(w, ScaledLinear):
        return (w.weight.float() * w.scales[:, None]).to(dtype)
    if len(w.weight) > ROWS_AT_ONCE:
        out = torch.empty(len(w.weight), w.weight.shape[1] * 4, dtype=dtype, device=w.weight.device)
        for start in range(0, len(out), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            part = w.part(rows)
            assert isinstance(part, GroupedLinear)
            out[rows] = dequantize(part, dtype)
        return out
    codes: Tensor = unpack4(w.weight, w.chunk).unflatten(1, (-1, w.group_size))
    if w.codes == "e2m1":
        values = e2m1_values(codes)
    else:
        values = codes - (8.0 if w.zeros is None else w.zeros.float().T[..., None])
    scales = w.scales.float().T
    if w.row_scales is not None:
        factors = w.row_scales[:, None]
        scales = scales / factors if w.divides else scales * factors
    return (values * scales[..., None]).flatten(1).to(dtype)
