"""Dense products for one to four tokens: bandwidth is all that counts, every weight is read once.

At M = 1 the library's GEMM leaves a fifth of the bandwidth unused at the shapes of an 8B model. Here a program owns BLOCK_N
rows of the weight and walks along K with all its threads, keeping a partial sum per thread, and adds the threads up once
at the end, always in the same order: the result does not depend on timing or on what else runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 4
"""More tokens than this are the tensor cores' business."""


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    N,
    K,
    M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    live = rows < N
    w_rows = w_ptr + rows[:, None].to(tl.int64) * K + ks[None, :]
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_rows + k, mask=live[:, None], other=0.0, eviction_policy="evict_first").to(tl.float32)
            x0 = tl.load(x_ptr + k + ks).to(tl.float32)
        else:
            inside = k + ks < K
            w = tl.load(w_rows + k, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            x0 = tl.load(x_ptr + k + ks, mask=inside, other=0.0).to(tl.float32)
        acc0 += w * x0[None, :]
        if M > 1:
            x1 = tl.load(x_ptr + K + k + ks, mask=k + ks < K, other=0.0).to(tl.float32)
            acc1 += w * x1[None, :]
        if M > 2:
            x2 = tl.load(x_ptr + 2 * K + k + ks, mask=k + ks < K, other=0.0).to(tl.float32)
            acc2 += w * x2[None, :]
        if M > 3:
            x3 = tl.load(x_ptr + 3 * K + k + ks, mask=k + ks < K, other=0.0).to(tl.float32)
            acc3 += w * x3[None, :]
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)
    out = y_ptr + rows
    tl.store(out, (tl.sum(acc0, 1) + bias).to(y_ptr.dtype.element_ty), mask=live)
    if M > 1:
        tl.store(out + N, (tl.sum(acc1, 1) + bias).to(y_ptr.dtype.element_ty), mask=live)
    if M > 2:
        tl.store(out + 2 * N, (tl.sum(acc2, 1) + bias).to(y_ptr.dtype.element_ty), mask=live)
    if M > 3:
        tl.store(out + 3 * N, (tl.sum(acc3, 1) + bias).to(y_ptr.dtype.element_ty), mask=live)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, *, block_n: int = 4, block_k: int = 1024, num_warps: int = 4) -> Tensor:
    """x [M, K] · weight [N, K]ᵀ + bias → [M, N] for M ≤ MAX_TOKENS; contiguous, accumulated in float32."""
    tokens, inner = x.shape
    outer = weight.shape[0]
    y = torch.empty(tokens, outer, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outer, block_n),)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        y,
        outer,
        inner,
        M=tokens,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=inner % block_k == 0,
        num_warps=num_warps,
    )
    return y
