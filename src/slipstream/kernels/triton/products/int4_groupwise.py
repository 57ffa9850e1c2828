"""Linear layers with 4-bit weights (`GroupedLinear`): y = x · ((codes − zero) · scale)ᵀ, with scale
and zero per group of K.

There is a kernel for one token, one for a few, and dequantisation for many; `linear.py` chooses.
The kernels are bound by reading the codes and by the instructions that convert them. Codes
therefore become floating-point numbers by setting bits, without conversion instructions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.products.split_k import ArrivalCounters, reduce_splits
from slipstream.kernels.weights.forms import GroupedLinear


@triton.jit(do_not_specialize=["M"])
def _int4_linear_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP_SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`linear._skinny_gemm_kernel` for 4-bit codes, a chunk of K at a time. A code c in the low
    bits of 0x4300 is the bfloat16 128 + c (in 0x6400 the float16 1024 + c). The contribution of the
    128 and the group's zero is subtracted by means of the sum of the inputs."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    kind: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    base: tl.constexpr = 0x6400 if HALF else 0x4300
    excess: tl.constexpr = 1024.0 if HALF else 128.0
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    QUARTER: tl.constexpr = CHUNK // 4
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    js = tl.arange(0, QUARTER)
    chunks = tl.cdiv(K // CHUNK, SPLITS)
    w_at = w_ptr + n[:, None].to(tl.int64) * (K // 4) + js[None, :]
    x_at = x_ptr + m[None, :] * K + js[:, None]
    live_n, live_m = (n < N)[:, None], (m < M)[None, :]
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in range(pid_k * chunks, tl.minimum(pid_k * chunks + chunks, K // CHUNK)):
        words = tl.load(w_at + chunk * QUARTER, mask=live_n, other=0, eviction_policy="evict_first")
        scale = tl.zeros((BLOCK_N,), tl.float32)
        bias_code = tl.full((BLOCK_N,), excess + 8.0, tl.float32)
        dot = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(4):
            # a group begins at the chunk's start, and within it if groups are small
            if i * QUARTER % GROUP_SIZE == 0:
                acc += (dot - bias_code[:, None] * total[None, :]) * scale[:, None]
                group = chunk * (CHUNK // GROUP_SIZE) + i * QUARTER // GROUP_SIZE
                scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)
                if HAS_ZEROS:
                    bias_code = excess + tl.load(
                        zero_ptr + group * N + n, mask=n < N, other=0.0
                    ).to(tl.float32)
                dot = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
            x = tl.load(x_at + chunk * CHUNK + i * QUARTER, mask=live_m, other=0.0).to(kind)
            codes = ((words >> (4 * i)) & 0xF | base).to(kind, bitcast=True)
            dot = tl.dot(codes, x, dot)
            total += tl.sum(x.to(tl.float32), 0)
        acc += (dot - bias_code[:, None] * total[None, :]) * scale[:, None]
    is_last = True
    if SPLITS > 1:
        at = n[:, None] * BLOCK_M + m[None, :]
        acc, is_last = reduce_splits(
            acc,
            partial_ptr,
            counter_ptr,
            at,
            pid_n,
            pid_k,
            tl.num_programs(0) * BLOCK_N * BLOCK_M,
            SPLITS,
            BLOCK_N,
            BLOCK_M,
        )
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            y_ptr + m[None, :] * N + n[:, None],
            acc.to(y_ptr.dtype.element_ty),
            mask=live_m & live_n,
        )


def int4_linear(
    x: Tensor,
    w: GroupedLinear,
    scratch: ArrivalCounters,
    *,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """Product for up to SKINNY_TOKENS tokens. `tile`: (BLOCK_N, SPLITS, stages)."""
    (num_tokens, inner), outer = x.shape, w.weight.shape[0]
    block_m = max(16, triton.next_power_of_2(num_tokens))
    programs = triton.cdiv(outer, 64)
    default_splits = 1 if programs > 150 else 2 if programs > 80 else 4
    block_n, splits, stages = tile or (64, default_splits, 3 if block_m == 16 else 2)
    splits = min(splits, inner // w.chunk)
    y = torch.empty(num_tokens, outer, dtype=x.dtype, device=x.device)
    partial = x
    if splits > 1:
        rows = triton.cdiv(outer, block_n) * block_n
        partial = torch.empty(splits * rows * block_m, dtype=torch.float32, device=x.device)
    _int4_linear_kernel[(triton.cdiv(outer, block_n), splits)](
        x.contiguous(), w.weight, w.scales, w.scales if w.zeros is None else w.zeros, x if w.bias is None else w.bias, y,
        partial, scratch.counters, num_tokens, outer, inner,
        HAS_ZEROS=w.zeros is not None, HAS_BIAS=w.bias is not None, GROUP_SIZE=w.group_size, CHUNK=w.chunk, BLOCK_M=block_m,
        BLOCK_N=block_n, SPLITS=splits, num_warps=4, num_stages=stages, **pdl_options(y),
    )  # fmt: skip
    return y


@triton.jit
def _dot_codes(words, base, x0, x1, x2, x3, off0, off1, off2, off3, scale0, scale1, scale2, scale3):
    """Multiplies words [R, 8] of one weight row, four codes each, with their inputs → partial sums
    [R]. A code at bit 16 of `base` is the float32 128 + code. `off` is the contribution of 128 and
    the zero to the sum."""
    bits = words.to(tl.uint16, bitcast=True).to(tl.uint32)
    y = (
        tl.sum(((bits << 16) & 0xF0000 | base).to(tl.float32, bitcast=True) * x0, 1) - off0
    ) * scale0
    y += (
        tl.sum(((bits << 12) & 0xF0000 | base).to(tl.float32, bitcast=True) * x1, 1) - off1
    ) * scale1
    y += (
        tl.sum(((bits << 8) & 0xF0000 | base).to(tl.float32, bitcast=True) * x2, 1) - off2
    ) * scale2
    y += (
        tl.sum(((bits << 4) & 0xF0000 | base).to(tl.float32, bitcast=True) * x3, 1) - off3
    ) * scale3
    return y


@triton.jit(do_not_specialize=["base"])
def _int4_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, base, N, W,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP_SIZE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Product for one token, without tensor cores, because their operands would pass through shared
    memory. One thread block computes ROWS outputs.

    A thread reads 8 words at once. Each word's four codes are in one group, so the thread sums
    products first and multiplies by the scale once. `base` is 0x43000000, passed at run time
    because an instruction that masks and sets bits takes only one constant."""
    QUARTER: tl.constexpr = CHUNK // 4
    runs, eight = tl.arange(0, BLOCK_W // 8), tl.arange(0, 8)[None, :]
    row = tl.program_id(0) * ROWS
    at = runs[:, None] * 8 + eight
    if PDL:
        pdl_wait()
    accs = (tl.zeros((BLOCK_W // 8,), tl.float32),) * ROWS
    for start in range(0, W, BLOCK_W):
        word = start + runs * 8
        chunk, place = word // QUARTER, word % QUARTER
        x_at = x_ptr + (chunk * CHUNK + place)[:, None] + eight
        x0, x1 = tl.load(x_at).to(tl.float32), tl.load(x_at + QUARTER).to(tl.float32)
        x2, x3 = (
            tl.load(x_at + 2 * QUARTER).to(tl.float32),
            tl.load(x_at + 3 * QUARTER).to(tl.float32),
        )
        sum0, sum1, sum2, sum3 = tl.sum(x0, 1), tl.sum(x1, 1), tl.sum(x2, 1), tl.sum(x3, 1)
        group = chunk * (CHUNK // GROUP_SIZE)
        g0, g1 = (group + place // GROUP_SIZE) * N, (group + (QUARTER + place) // GROUP_SIZE) * N
        g2, g3 = (
            (group + (2 * QUARTER + place) // GROUP_SIZE) * N,
            (group + (3 * QUARTER + place) // GROUP_SIZE) * N,
        )
        new = ()
        for r in tl.static_range(ROWS):
            n = row + r
            words = tl.load(w_ptr + n.to(tl.int64) * W + start + at, eviction_policy="evict_first")
            s0, s1 = (
                tl.load(scale_ptr + g0 + n).to(tl.float32),
                tl.load(scale_ptr + g1 + n).to(tl.float32),
            )
            s2, s3 = (
                tl.load(scale_ptr + g2 + n).to(tl.float32),
                tl.load(scale_ptr + g3 + n).to(tl.float32),
            )
            if HAS_ZEROS:
                z0, z1 = (
                    tl.load(zero_ptr + g0 + n).to(tl.float32),
                    tl.load(zero_ptr + g1 + n).to(tl.float32),
                )
                z2, z3 = (
                    tl.load(zero_ptr + g2 + n).to(tl.float32),
                    tl.load(zero_ptr + g3 + n).to(tl.float32),
                )
                y = _dot_codes(
                    words, base, x0, x1, x2, x3,
                    sum0 * (128.0 + z0), sum1 * (128.0 + z1), sum2 * (128.0 + z2), sum3 * (128.0 + z3), s0, s1, s2, s3,
                )  # fmt: skip
            else:
                y = _dot_codes(
                    words,
                    base,
                    x0,
                    x1,
                    x2,
                    x3,
                    sum0 * 136.0,
                    sum1 * 136.0,
                    sum2 * 136.0,
                    sum3 * 136.0,
                    s0,
                    s1,
                    s2,
                    s3,
                )
            new = new + (accs[r] + y,)  # type: ignore[assignment]  # noqa: RUF005  (Triton knows no other)
        accs = new
    for r in tl.static_range(ROWS):
        y = tl.sum(accs[r], 0)
        if HAS_BIAS:
            y += tl.load(bias_ptr + row + r).to(tl.float32)
        tl.store(y_ptr + row + r, y.to(y_ptr.dtype.element_ty))


GEMV_ROWS = 4
"""Weight rows per thread block of `int4_gemv`."""


def gemv_block(w: GroupedLinear) -> int:
    """Words of a row per step of `int4_gemv`; 0 if it can't run this shape."""
    rows, words = w.weight.shape
    return next((n for n in (1024, 512, 256) if words % n == 0), 0) if rows % GEMV_ROWS == 0 else 0


def int4_gemv(x: Tensor, w: GroupedLinear, block_w: int, *, rows: int = GEMV_ROWS) -> Tensor:
    """x [1, K] → [1, N]. `block_w`: words per step, a divisor of K / 4. The number of weight rows
    must be a multiple of `rows`."""
    outer = w.weight.shape[0]
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device)
    _int4_gemv_kernel[(outer // rows,)](
        x.contiguous(), w.weight, w.scales, w.scales if w.zeros is None else w.zeros, x if w.bias is None else w.bias, y,
        0x43000000, outer, w.weight.shape[1],
        HAS_ZEROS=w.zeros is not None, HAS_BIAS=w.bias is not None, GROUP_SIZE=w.group_size, CHUNK=w.chunk, ROWS=rows,
        BLOCK_W=block_w, num_warps=4, **pdl_options(y),
    )  # fmt: skip
    return y


@triton.jit
def _dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, N, K,
    HAS_ZEROS: tl.constexpr, GROUP_SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Convert one chunk of BLOCK_N rows from codes to numbers."""
    QUARTER: tl.constexpr = CHUNK // 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    js = tl.arange(0, QUARTER)
    live = (n < N)[:, None]
    words = tl.load(
        w_ptr + n[:, None].to(tl.int64) * (K // 4) + chunk * QUARTER + js[None, :],
        mask=live,
        other=0,
    )
    out = out_ptr + n[:, None].to(tl.int64) * K + chunk * CHUNK + js[None, :]
    for i in tl.static_range(4):
        group = chunk * (CHUNK // GROUP_SIZE) + i * QUARTER // GROUP_SIZE
        scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        zero = 8.0
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        number = (((words >> (4 * i)) & 0xF).to(tl.float32) - zero) * scale
        tl.store(out + i * QUARTER, number.to(out_ptr.dtype.element_ty), mask=live)


def dequantize_int4(w: GroupedLinear, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, in], for a product of many tokens."""
    outer, inner, chunk = w.weight.shape[0], w.weight.shape[1] * 4, w.chunk
    out = torch.empty(outer, inner, dtype=dtype, device=w.weight.device)
    _dequantize_kernel[(triton.cdiv(outer, 32), inner // chunk)](
        w.weight, w.scales, w.scales if w.zeros is None else w.zeros, out, outer, inner,
        HAS_ZEROS=w.zeros is not None, GROUP_SIZE=w.group_size, CHUNK=chunk, BLOCK_N=32, num_warps=4,
    )  # fmt: skip
    return out
