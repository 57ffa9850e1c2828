"""2:4 sparse weights through cuSPARSELt: if two of every four neighbours in a row are zeros, tensor
cores skip them.

The compressed copy (9/16 of the bytes in 16 bits, 10/16 in 8) is kept next to the dense weight and
used from a certain number of tokens on; below it the dense kernels are faster. The number comes
from the tile table (op "sparse24", measured by `slipstream tune`) or from `FROM_TOKENS`, never from
a measurement at load, so that a configuration gives the same sums in every run. Other weights,
shapes that the library lacks, and machines without it use the dense weight alone.

An 8-bit product is rounded to the model's type before the tokens' scales are applied."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.triton.pointwise import quantize
from slipstream.kernels.weights.forms import (
    Activations,
    Linear,
    Quantized,
    ScaledLinear,
    SparseCopy,
)
from slipstream.platform import platform_of
from slipstream.platform.cuda import CudaPlatform
from slipstream.spec.devices.autotune_table import NEVER, TileTable

FROM_TOKENS = {torch.int8: 256}
"""Default number of tokens, measured on an H200 with cuSPARSELt 0.8
(benchmarks/COMPRESSION_NOTES.md). There the dense product is always faster in bfloat16, and in FP8
from 65 tokens on."""

MULTIPLE = 64
"""Multiple that the library requires of rows and columns, for every dtype."""


def is_sparse24(weight: Tensor) -> bool:
    """Whether every four neighbours in a row of [out, in] contain two zeros or more. Most weights
    fail in the first rows."""
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return False
    parts = (weight[:MULTIPLE], weight[MULTIPLE:])
    return all(
        bool((_zeros(rows).unflatten(1, (-1, 4)).sum(-1) >= 2).all()) for rows in parts if len(rows)
    )


def _zeros(rows: Tensor) -> Tensor:
    if rows.dtype != torch.float8_e4m3fn:
        return rows == 0
    bits = rows.view(torch.uint8)
    return (bits == 0) | (bits == 0x80)


def with_sparse_copy(w: Linear, tiles: TileTable) -> Linear:
    """`w` (dense or 8-bit) with a sparse copy, if it is 2:4 and the copy is faster for some step
    size."""
    dtype = w.weight.dtype
    found = tiles.find("sparse24", w.inputs or str(dtype).removeprefix("torch."), *w.weight.shape)
    from_tokens = FROM_TOKENS.get(dtype, NEVER) if found is None else found[0]
    if from_tokens == NEVER or not available(w.weight) or not is_sparse24(w.weight):
        return w
    return dataclasses.replace(w, sparse=SparseCopy(torch._cslt_compress(w.weight), from_tokens))


def available(weight: Tensor) -> bool:
    """Whether the library is installed and supports the weight's dtype."""
    platform = platform_of(weight.device)
    return (
        isinstance(platform, CudaPlatform)
        and platform.has_sparse_products
        and weight.dtype.itemsize <= 2
    )


def sparse24_linear(x: Activations, w: Linear) -> Tensor:
    """`OpSet.linear` with the sparse copy."""
    assert w.sparse is not None
    if isinstance(w, ScaledLinear):
        q = x if isinstance(x, Quantized) else quantize(x, w.inputs)
        if q.values.dtype == torch.int8:
            y = _multiply(q.values, w.sparse.packed, w.out_dtype, w.scales).mul_(q.scales)
        else:  # the library scales rows of integers only; float16 can't hold a sum of codes
            kept = torch.float32 if w.out_dtype == torch.float16 else w.out_dtype
            y = (_multiply(q.values, w.sparse.packed, kept, None) * q.scales * w.scales).to(
                w.out_dtype
            )
    else:
        assert isinstance(x, Tensor)
        y = _multiply(x, w.sparse.packed, None, None)
    return y if w.bias is None else y + w.bias


def _multiply(
    x: Tensor, packed: Tensor, out_dtype: torch.dtype | None, scales: Tensor | None
) -> Tensor:
    num_tokens = len(x)
    if num_tokens % 16:
        x = F.pad(x.view(torch.int8), (0, 0, 0, -num_tokens % 16)).view(x.dtype)
    y: Tensor = torch._cslt_sparse_mm(
        packed, x.contiguous().t(), alpha=scales, out_dtype=out_dtype, transpose_result=True
    )
    return y[:num_tokens]
