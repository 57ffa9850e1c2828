"""The dense product for a single token: bandwidth is all that counts, every weight is read once.

At M = 1 the library's GEMM leaves up to a third of the bandwidth unused at the shapes of an 8B model. Here a program owns
BLOCK_N rows of the weight and walks along K with all its threads, keeping a partial sum per thread, and adds the threads
up once at the end, always in the same order. From two tokens on the tensor cores win, and the library is used
(benchmarks/gpu_gemv.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + rows[:, None].to(tl.int64) * K + ks[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            w = tl.load(w_rows + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + ks)
        else:
            inside = k + ks < K
            w = tl.load(w_rows + k, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + k + ks, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=rows < N)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, block_n: int = 4, block_k: int = 2048, num_warps: int = 4
) -> Tensor:
    """x [1, K] · weight [N, K]ᵀ + bias → [1, N]; contiguous, accumulated in float32."""
    outer, inner = weight.shape
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outer, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        outer,
        inner,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=inner % block_k == 0 and outer % block_n == 0,
        num_warps=num_warps,
    )
    return y
