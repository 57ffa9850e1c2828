"""Products with 4-bit weights (`GroupedLinear`): for one token, for a few, and the dense weight for many.

`linear.py` chooses among them. Reading the codes is what they are judged by; turning codes into numbers is what binds them, so
both kernels make numbers by setting bits instead of converting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.split_k import Scratch, sum_parts
from slipstream.kernels.weights import GroupedLinear


@triton.jit(do_not_specialize=["M"])
def _grouped_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    part_ptr,
    counter_ptr,
    M,
    N,
    K,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_skinny_kernel`, a chunk of inputs at a time. A code c in the low bits of 0x4300 is the bfloat16 number 128 + c (of
    0x6400 the float16 number 1024 + c), so no conversion is needed: what the 128 (and the group's zero) add is taken off again
    by the sum of the inputs."""
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
        off = tl.full((BLOCK_N,), excess + 8.0, tl.float32)
        dot = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(4):
            if i * QUARTER % SIZE == 0:  # a group begins: the chunk's first, and with small groups another
                acc += (dot - off[:, None] * total[None, :]) * scale[:, None]
                group = chunk * (CHUNK // SIZE) + i * QUARTER // SIZE
                scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)
                if HAS_ZEROS:
                    off = excess + tl.load(zero_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)
                dot = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
            x = tl.load(x_at + chunk * CHUNK + i * QUARTER, mask=live_m, other=0.0).to(kind)
            codes = ((words >> (4 * i)) & 0xF | base).to(kind, bitcast=True)
            dot = tl.dot(codes, x, dot)
            total += tl.sum(x.to(tl.float32), 0)
        acc += (dot - off[:, None] * total[None, :]) * scale[:, None]
    mine = True
    if SPLITS > 1:
        at = n[:, None] * BLOCK_M + m[None, :]
        acc, mine = sum_parts(
            acc, part_ptr, counter_ptr, at, pid_n, pid_k, tl.num_programs(0) * BLOCK_N * BLOCK_M, SPLITS, BLOCK_N, BLOCK_M
        )
    if mine:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + m[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=live_m & live_n)


def grouped(x: Tensor, w: GroupedLinear, scratch: Scratch, *, tile: tuple[int, int, int] | None = None) -> Tensor:
    """Up to SKINNY tokens. `tile`: (BLOCK_N, SPLITS, stages)."""
    (num_tokens, inner), outer = x.shape, w.weight.shape[0]
    block_m = max(16, triton.next_power_of_2(num_tokens))
    programs = triton.cdiv(outer, 64)
    wanted = 1 if programs > 150 else 2 if programs > 80 else 4
    block_n, splits, stages = tile or (64, wanted, 3 if block_m == 16 else 2)
    splits = min(splits, inner // w.chunk)
    y = torch.empty(num_tokens, outer, dtype=x.dtype, device=x.device)
    part = x
    if splits > 1:
        rows = triton.cdiv(outer, block_n) * block_n
        part = torch.empty(splits * rows * block_m, dtype=torch.float32, device=x.device)
    _grouped_kernel[(triton.cdiv(outer, block_n), splits)](
        x.contiguous(),
        w.weight,
        w.scales,
        w.scales if w.zeros is None else w.zeros,
        x if w.bias is None else w.bias,
        y,
        part,
        scratch.counters,
        num_tokens,
        outer,
        inner,
        HAS_ZEROS=w.zeros is not None,
        HAS_BIAS=w.bias is not None,
        SIZE=w.group_size,
        CHUNK=w.chunk,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLITS=splits,
        num_warps=4,
        num_stages=stages,
        **overlapped(y),
    )
    return y


@triton.jit
def _four_codes(words, base, x0, x1, x2, x3, off0, off1, off2, off3, scale0, scale1, scale2, scale3):
    """One row's words [R, 8] times the four inputs of each: [R]. A code at bit 16 of `base` is the float32 number 128 + code:
    `off` is what 128 and the zero point add to a run's sum."""
    bits = words.to(tl.uint16, bitcast=True).to(tl.uint32)
    y = (tl.sum(((bits << 16) & 0xF0000 | base).to(tl.float32, bitcast=True) * x0, 1) - off0) * scale0
    y += (tl.sum(((bits << 12) & 0xF0000 | base).to(tl.float32, bitcast=True) * x1, 1) - off1) * scale1
    y += (tl.sum(((bits << 8) & 0xF0000 | base).to(tl.float32, bitcast=True) * x2, 1) - off2) * scale2
    y += (tl.sum(((bits << 4) & 0xF0000 | base).to(tl.float32, bitcast=True) * x3, 1) - off3) * scale3
    return y


@triton.jit(do_not_specialize=["base"])
def _grouped_gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    base,
    N,
    W,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token without tensor cores, whose operands would go through shared memory. A thread reads 8 words at once, which lie
    in one group for each of their four codes: it sums their products, and multiplies by the scale once. `base` is 0x43000000,
    no constant here because an instruction that masks and sets bits takes one constant only."""
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
        x2, x3 = tl.load(x_at + 2 * QUARTER).to(tl.float32), tl.load(x_at + 3 * QUARTER).to(tl.float32)
        sum0, sum1, sum2, sum3 = tl.sum(x0, 1), tl.sum(x1, 1), tl.sum(x2, 1), tl.sum(x3, 1)
        group = chunk * (CHUNK // SIZE)
        g0, g1 = (group + place // SIZE) * N, (group + (QUARTER + place) // SIZE) * N
        g2, g3 = (group + (2 * QUARTER + place) // SIZE) * N, (group + (3 * QUARTER + place) // SIZE) * N
        new = ()
        for r in tl.static_range(ROWS):
            n = row + r
            words = tl.load(w_ptr + n.to(tl.int64) * W + start + at, eviction_policy="evict_first")
            s0, s1 = tl.load(scale_ptr + g0 + n).to(tl.float32), tl.load(scale_ptr + g1 + n).to(tl.float32)
            s2, s3 = tl.load(scale_ptr + g2 + n).to(tl.float32), tl.load(scale_ptr + g3 + n).to(tl.float32)
            if HAS_ZEROS:
                z0, z1 = tl.load(zero_ptr + g0 + n).to(tl.float32), tl.load(zero_ptr + g1 + n).to(tl.float32)
                z2, z3 = tl.load(zero_ptr + g2 + n).to(tl.float32), tl.load(zero_ptr + g3 + n).to(tl.float32)
                y = _four_codes(
                    words, base, x0, x1, x2, x3,
                    sum0 * (128.0 + z0), sum1 * (128.0 + z1), sum2 * (128.0 + z2), sum3 * (128.0 + z3), s0, s1, s2, s3,
                )  # fmt: skip
            else:
                y = _four_codes(
                    words, base, x0, x1, x2, x3, sum0 * 136.0, sum1 * 136.0, sum2 * 136.0, sum3 * 136.0, s0, s1, s2, s3
                )
            new = new + (accs[r] + y,)  # type: ignore[assignment]  # noqa: RUF005  (Triton knows no other)
        accs = new
    for r in tl.static_range(ROWS):
        y = tl.sum(accs[r], 0)
        if HAS_BIAS:
            y += tl.load(bias_ptr + row + r).to(tl.float32)
        tl.store(y_ptr + row + r, y.to(y_ptr.dtype.element_ty))


GEMV_ROWS = 4
"""Rows of a 4-bit weight that a program of one token's product owns."""


def gemv_words(w: GroupedLinear) -> int:
    """Words of a row that `grouped_gemv` takes at once; 0: the shape does not suit it."""
    rows, words = w.weight.shape
    return next((n for n in (1024, 512, 256) if words % n == 0), 0) if rows % GEMV_ROWS == 0 else 0


def grouped_gemv(x: Tensor, w: GroupedLinear, block_w: int, *, rows: int = GEMV_ROWS, num_warps: int = 4) -> Tensor:
    """x [1, K]; `block_w` words at once, a divisor of K / 4; the weight's rows must be a multiple of `rows`."""
    outer = w.weight.shape[0]
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device)
    _grouped_gemv_kernel[(outer // rows,)](
        x.contiguous(),
        w.weight,
        w.scales,
        w.scales if w.zeros is None else w.zeros,
        x if w.bias is None else w.bias,
        y,
        0x43000000,
        outer,
        w.weight.shape[1],
        HAS_ZEROS=w.zeros is not None,
        HAS_BIAS=w.bias is not None,
        SIZE=w.group_size,
        CHUNK=w.chunk,
        ROWS=rows,
        BLOCK_W=block_w,
        num_warps=num_warps,
        **overlapped(y),
    )
    return y


@triton.jit
def _expand_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    HAS_ZEROS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One chunk of BLOCK_N rows: codes to numbers."""
    QUARTER: tl.constexpr = CHUNK // 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    js = tl.arange(0, QUARTER)
    live = (n < N)[:, None]
    words = tl.load(w_ptr + n[:, None].to(tl.int64) * (K // 4) + chunk * QUARTER + js[None, :], mask=live, other=0)
    out = out_ptr + n[:, None].to(tl.int64) * K + chunk * CHUNK + js[None, :]
    for i in tl.static_range(4):
        group = chunk * (CHUNK // SIZE) + i * QUARTER // SIZE
        scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        zero = 8.0
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + group * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        number = (((words >> (4 * i)) & 0xF).to(tl.float32) - zero) * scale
        tl.store(out + i * QUARTER, number.to(out_ptr.dtype.element_ty), mask=live)


def expand(w: GroupedLinear, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, in], for a product of many tokens."""
    outer, inner, chunk = w.weight.shape[0], w.weight.shape[1] * 4, w.chunk
    out = torch.empty(outer, inner, dtype=dtype, device=w.weight.device)
    _expand_kernel[(triton.cdiv(outer, 32), inner // chunk)](
        w.weight,
        w.scales,
        w.scales if w.zeros is None else w.zeros,
        out,
        outer,
        inner,
        HAS_ZEROS=w.zeros is not None,
        SIZE=w.group_size,
        CHUNK=chunk,
        BLOCK_N=32,
        num_warps=4,
    )
    return out
