"""Products for `deterministic`: an output depends on its row of inputs, whatever the number of rows.

An output is one sum along K in the tensor core's own steps (16 inputs of 16 bits, 32 of 8). Neither
the height nor the width of a tile changes a bit of it; only splits of K do, and the order in which
scales are multiplied. So the fastest kernel for each number of rows can run, if it does not split K:

| scheme | to 64 rows | more |
| --- | --- | --- |
| 16 bits | on Hopper `hopper.skinny_gemm` | cuBLASLt without splits; narrow weights `gemm` |
| fp8 | on Hopper `hopper.skinny_gemm` | torch's scaled GEMM; narrow weights `gemm` |
| int8: sums of whole numbers, exact in any order of a product without splits | `skinny_gemm` | `gemm` |
| fp8-block | `fp8_tile_linear` | `fp8_tile_linear` |
| 4 bits, GGUF types | 16 bits: the dense copy, or expanded each time | the same |
| any other | `gemm` | `gemm` |

A library promises no order. So before it is used for a weight's shape it is compared with our
kernel, bit by bit, at numbers of rows of inputs between which its own choice changes (`Libraries`).
A shape at which they differ uses `gemm`. With few outputs there are few numbers to tell it by: narrow
weights never use a library."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.triton.gluon_support import runs_on_hopper
from slipstream.kernels.triton.pointwise import quantize
from slipstream.kernels.triton.products import dispatch, gguf
from slipstream.kernels.triton.products.fp8_block import fp8_tile_linear_invariant
from slipstream.kernels.triton.products.split_k import ArrivalCounters
from slipstream.kernels.weights.forms import (
    Activations,
    CodedLinear,
    Float4Linear,
    GroupedLinear,
    JoinedLinear,
    Linear,
    Quantized,
    ScaledLinear,
    TileScaledLinear,
)
from slipstream.platform import platform_of

_logger = logging.getLogger(__name__)
FEW = 64
"""Largest number of rows of inputs for which our kernels for few rows are used."""
NARROW = 16
"""Outputs of a weight below which no library is used, such as the gate of a shared expert. With one
output cuBLASLt's sums were others at most numbers of rows of inputs; with 8 and more they were ours
at all numbers above `FEW`, below which no library runs (`kernels_deterministic_products`)."""
COMPARED = (65, 96, 128, 200, 256, 384, 512, 1024, 2048)
"""Numbers of rows at which a library is compared."""
COMPARED_NUMBERS = 2**26
"""Largest number of outputs that such a comparison computes: 128 MB."""


ALL_ROWS = sys.maxsize
"""`Libraries.most_rows` without a bound."""


class Libraries:
    """The largest numbers of input rows at which the library's product has the same bits as ours,
    by shape of the weight."""

    def __init__(self) -> None:
        self._most: dict[tuple[object, ...], int] = {}

    def most_rows(self, w: Linear, scratch: ArrivalCounters) -> int:
        """Largest number of input rows for the library's product. It is 0 where the products
        differ, and for a shape that is first met while a graph is captured."""
        if w.weight.is_meta:  # kernels are compiled ahead
            return ALL_ROWS
        if w.out_features < NARROW:
            return 0
        key = (type(w), *w.weight.shape, w.weight.dtype, w.bias is not None)
        if key not in self._most:
            if platform_of(w.weight.device).is_capturing:
                return 0
            self._most[key] = _compare(w, scratch)
            if not self._most[key]:
                _logger.info(
                    "deterministic: the library's sums differ for a weight of %s; our kernel runs instead",
                    key,
                )
        return self._most[key]


def linear(
    x: Activations, w: Linear, scratch: ArrivalCounters | None, libraries: Libraries
) -> Tensor:
    """`OpSet.linear`."""
    if isinstance(w, CodedLinear | JoinedLinear):
        w = gguf.expanded(w)
    if isinstance(x, Tensor) and w.inputs is not None:
        x = quantize(x, w.inputs)
    if isinstance(w, TileScaledLinear):
        assert isinstance(x, Quantized)
        return fp8_tile_linear_invariant(x, w)
    if isinstance(w, GroupedLinear | Float4Linear):
        assert isinstance(x, Tensor)
        w = Linear(weight=dispatch.dense(w, x.dtype), bias=w.bias)
    values = x.values if isinstance(x, Quantized) else x
    if isinstance(w, ScaledLinear) and w.inputs == "int8" and scratch is not None:
        assert isinstance(x, Quantized)
        if len(values) > FEW:
            return dispatch.gemm(x, w)
        return dispatch.skinny_gemm(x, w, scratch, tile=(64, 256, 1, 4))
    if scratch is None or not runs_on_hopper(values.device):
        return _ours(x, w)
    if not FEW < len(values) <= libraries.most_rows(w, scratch):
        return _ours(x, w, scratch)
    return _librarys(x, w)


def _ours(x: Activations, w: Linear, scratch: ArrivalCounters | None = None) -> Tensor:
    values = x.values if isinstance(x, Quantized) else x
    few = len(values) <= FEW
    if scratch is not None and few:
        from slipstream.kernels.triton.products import hopper

        values = values.contiguous()
        x = replace(x, values=values) if isinstance(x, Quantized) else values
        if hopper.supports(values, w):
            return hopper.skinny_gemm(x, w, scratch, invariant=True)
    if isinstance(w, ScaledLinear):
        tile = (64, 64, 256, 4, 3) if few else (128, 128, 128, 8, 3)
        return dispatch.gemm(x, w, tile=tile)
    tile = (64, 64, 128, 4, 3) if few else (128, 128, 64, 8, 3)
    return dispatch.gemm(x, w, tile=tile if values.dtype.itemsize == 2 else (32, 64, 32, 4, 2))


def _librarys(x: Activations, w: Linear) -> Tensor:
    if isinstance(x, Quantized):
        assert isinstance(w, ScaledLinear)
        return dispatch.fp8_scaled_mm(x, w)
    with platform_of(x.device).unsplit_products(x.dtype):
        return F.linear(x, w.weight, w.bias)


def _compare(w: Linear, scratch: ArrivalCounters) -> int:
    """Compares the products. Returns the largest number of rows at which the library may be used, 0
    if any bit differs."""
    outer, inner = w.weight.shape
    most = max(COMPARED_NUMBERS // outer, 2 * FEW)
    sizes = [n for n in COMPARED if n <= most]
    rng = torch.Generator(w.weight.device).manual_seed(0)
    dtype = w.out_dtype if isinstance(w, ScaledLinear) else w.weight.dtype
    x = torch.randn(sizes[-1], inner, dtype=dtype, device=w.weight.device, generator=rng)
    given = quantize(x, w.inputs) if w.inputs is not None else x

    def part(end: int) -> Activations:
        if isinstance(given, Quantized):
            return Quantized(given.values[:end], given.scales[:end])
        return given[:end]

    ours = _ours(part(sizes[-1]), w, scratch)
    if not torch.equal(_ours(part(FEW), w, scratch), ours[:FEW]):
        return 0
    if not all(torch.equal(_librarys(part(num), w), ours[:num]) for num in sizes):
        return 0
    return sizes[-1] if sizes[-1] < COMPARED[-1] else ALL_ROWS
