"""2:4 weights through cuSPARSELt: where two of four neighbours in a row are zeros, tensor cores multiply the other half only.

A copy of the weight without its zeros (9/16 of the bytes in 16 bits, 10/16 in 8) is kept beside the dense one where it is the
faster from some number of tokens on; below it the dense kernels are, which read a weight once for few tokens. The number comes
from the tile table (`spec.autotune_table`, op "halves"; `slipstream tune` measures it) or from `FROM_TOKENS`. Nothing is
measured at load, so that one configuration gives the same sums in every run. Weights with other zeros, shapes that the
library does not take and machines without it are left as they are.

The result of an 8-bit product is rounded to the model's type before the tokens' scales are applied.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.triton.pointwise import quantize
from slipstream.kernels.weights import Activations, Linear, Quantized, ScaledLinear, SparseCopy
from slipstream.spec.autotune_table import NEVER, TileTable

FROM_TOKENS = {torch.int8: 256}
"""Where the table says nothing: measured on an H200, with cuSPARSELt 0.8 (benchmarks/COMPRESSION_NOTES.md). There the dense
product is the faster in bfloat16 at every size, in FP8 from 65 tokens on."""

MULTIPLE = 64
"""Of a weight's rows and columns, as the library wants them for every type."""


def has_halves(weight: Tensor) -> bool:
    """Whether at most two of every four neighbours in a row of [out, in] are no zeros. The first rows mostly say it is not."""
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return False
    parts = (weight[:MULTIPLE], weight[MULTIPLE:])
    return all(bool((_zeros(rows).unflatten(1, (-1, 4)).sum(-1) >= 2).all()) for rows in parts if len(rows))


def _zeros(rows: Tensor) -> Tensor:
    if rows.dtype != torch.float8_e4m3fn:
        return rows == 0
    bits = rows.view(torch.uint8)
    return (bits == 0) | (bits == 0x80)


def with_copy(w: Linear, tiles: TileTable) -> Linear:
    """`w` (dense or of 8 bits) with a sparse copy, if it is 2:4 and there are sizes of a step where the copy is the faster."""
    dtype = w.weight.dtype
    found = tiles.find("halves", w.inputs or str(dtype).removeprefix("torch."), *w.weight.shape)
    from_tokens = FROM_TOKENS.get(dtype, NEVER) if found is None else found[0]
    if from_tokens == NEVER or not available(w.weight) or not has_halves(w.weight):
        return w
    return dataclasses.replace(w, sparse=SparseCopy(torch._cslt_compress(w.weight), from_tokens))


def available(weight: Tensor) -> bool:
    """Whether the library is there, and takes the weight's type."""
    return weight.is_cuda and torch.backends.cusparselt.is_available() and weight.dtype.itemsize <= 2


def product(x: Activations, w: Linear) -> Tensor:
    """`OpSet.linear` of a weight with a sparse copy."""
    assert w.sparse is not None
    if isinstance(w, ScaledLinear):
        q = x if isinstance(x, Quantized) else quantize(x, w.inputs)
        if q.values.dtype == torch.int8:
            y = _multiply(q.values, w.sparse.packed, w.out_dtype, w.scales).mul_(q.scales)
        else:  # the library scales rows of integers alone; float16's range does not hold a sum of codes
            kept = torch.float32 if w.out_dtype == torch.float16 else w.out_dtype
            y = (_multiply(q.values, w.sparse.packed, kept, None) * q.scales * w.scales).to(w.out_dtype)
    else:
        assert isinstance(x, Tensor)
        y = _multiply(x, w.sparse.packed, None, None)
    return y if w.bias is None else y + w.bias


def _multiply(x: Tensor, packed: Tensor, out_dtype: torch.dtype | None, scales: Tensor | None) -> Tensor:
    num_tokens = len(x)
    if num_tokens % 16:
        x = F.pad(x.view(torch.int8), (0, 0, 0, -num_tokens % 16)).view(x.dtype)
    y: Tensor = torch._cslt_sparse_mm(
        packed, x.contiguous().t(), alpha=scales, out_dtype=out_dtype, transpose_result=True
    )
    return y[:num_tokens]
