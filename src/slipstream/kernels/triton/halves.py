"""2:4 weights through cuSPARSELt: where two of four neighbours in a row are zeros, tensor cores multiply the other half only.

A copy of the weight without its zeros (9/16 of the bytes in 16 bits, 10/16 in 8) is kept beside the dense one where it is the
faster from some number of tokens on, which is measured once for each shape and type; below it the dense kernels are, which read
a weight once for few tokens. Weights with other zeros, shapes that the library does not take and machines without it are left
as they are. Of 8-bit products the result is rounded to the model's type before the tokens' scales are applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.ops import Activations, Linear, Quantized, ScaledLinear, SparseCopy
from slipstream.kernels.triton.pointwise import quantize

TOKENS = (64, 256, 1024, 4096)
"""Sizes of a step at which both are measured."""

GAIN = 0.95
"""The share of the dense product's time that the sparse one must stay below."""

MULTIPLE = 64
"""Of a weight's rows and columns, as the library wants them for every type."""

Clock = Callable[[Callable[[], object]], float]


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


class Halves:
    """Makes sparse copies, and remembers what was measured. `clock` gives a call's time, in any unit."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or milliseconds
        self._from: dict[tuple[int, int, torch.dtype], int | None] = {}

    def with_copy(self, w: Linear, dense: Callable[[Activations, Linear], Tensor]) -> Linear:
        """`w` (dense or of 8 bits) with a sparse copy, if it is 2:4 and the copy faster than `dense`, the product without."""
        if not (w.weight.is_cuda and torch.backends.cusparselt.is_available() and w.weight.dtype.itemsize <= 2):
            return w
        if not has_halves(w.weight):
            return w
        key = (*w.weight.shape, w.weight.dtype)
        packed = torch._cslt_compress(w.weight)
        if key not in self._from:
            self._from[key] = self._measure(dataclasses.replace(w, sparse=SparseCopy(packed, 0)), dense)
        found = self._from[key]
        return w if found is None else dataclasses.replace(w, sparse=SparseCopy(packed, found))

    def _measure(self, w: Linear, dense: Callable[[Activations, Linear], Tensor]) -> int | None:
        """The fewest tokens from which the sparse product is the faster at every size; None: it is not at the largest."""
        found = None
        kind = w.out_dtype if isinstance(w, ScaledLinear) else w.weight.dtype
        for num_tokens in reversed(TOKENS):
            x = torch.randn(num_tokens, w.weight.shape[1], device=w.weight.device, dtype=kind)
            given: Activations = x if w.inputs is None else quantize(x, w.inputs)
            if not self._clock(partial(product, given, w)) < GAIN * self._clock(partial(dense, given, w)):
                break
            found = num_tokens
        return found


def product(x: Activations, w: Linear) -> Tensor:
    """`OpSet.linear` of a weight with a sparse copy."""
    assert w.sparse is not None
    if isinstance(w, ScaledLinear):
        q = x if isinstance(x, Quantized) else quantize(x, w.inputs)
        y = _multiply(q.values, w.sparse.packed, w.out_dtype, w.scales).mul_(q.scales)
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


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """The mean of some calls on the current device, after a first one."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats
