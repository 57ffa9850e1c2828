"""Kernels of an update of weights that run, each one pass over memory: the sums of a checksum, and
rounding to fp8 by rows.

An 8B's checksum takes 4 ms of an H200's memory. Chunk by chunk in torch it was 34,000 launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.weights.forms import ScaledLinear
from slipstream.kernels.weights.quantize import SMALLEST
from slipstream.kernels.weights.word_sums import words_of
from slipstream.spec.scheme import FORMAT_MAX

BLOCK, STEPS = 2048, 16
"""Number of words that a thread block adds at once, and how many times it does."""


@triton.jit(do_not_specialize=["N"])
def _word_sums_kernel(words_ptr, out_ptr, N, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    plain, weighted = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for step in range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + at, mask=at < N, other=0).to(tl.int64) & 0xFFFFFFFF
        plain += word
        weighted += word * (at + 1)
    tl.atomic_add(out_ptr, tl.sum(plain, 0), sem="relaxed")
    tl.atomic_add(out_ptr + 1, tl.sum(weighted, 0), sem="relaxed")


def word_sums(values: Sequence[Tensor]) -> list[tuple[int, int]]:
    """`OpSet.word_sums`."""
    out = torch.zeros(len(values), 2, dtype=torch.int64, device=values[0].device)
    for value, sums in zip(values, out, strict=True):
        words = words_of(value)
        _word_sums_kernel[(triton.cdiv(words.numel(), BLOCK * STEPS),)](
            words, sums, words.numel(), BLOCK=BLOCK, STEPS=STEPS
        )
    return [(int(plain), int(weighted)) for plain, weighted in out.tolist()]


@triton.jit
def _round_rows_kernel(
    x_ptr, y_ptr, scales_ptr, K, TOP: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Round a row. Divisions are exact, so the codes are those that torch gives on a CPU."""
    row = tl.program_id(0).to(tl.int64)
    at, largest = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + at, mask=k + at < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    top = tl.zeros((1,), tl.float32) + TOP
    scale = tl.div_rn(tl.maximum(tl.max(largest, 0), LEAST) + tl.zeros((1,), tl.float32), top)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + at, mask=k + at < K, other=0.0).to(tl.float32)
        y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        y = tl.minimum(tl.maximum(y, -TOP), TOP)
        tl.store(y_ptr + row * K + k + at, y.to(y_ptr.dtype.element_ty), mask=k + at < K)


def round_rows(weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    """`quantize.round_linear` in fp8."""
    (rows, inner), weight = weight.shape, weight.contiguous()
    codes = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    _round_rows_kernel[(rows,)](
        weight, codes, scales, inner, TOP=FORMAT_MAX["fp8"], LEAST=SMALLEST, BLOCK=2048, num_warps=8
    )
    return ScaledLinear(weight=codes, scales=scales, bias=bias, out_dtype=weight.dtype)
