"""Products around latent attention, for `deterministic`: queries into the latents' space, and sums
of latents to values. `attention/invariant.py` attends.

Both products are one for each head. An output is one sum along the inputs in the tensor core's
steps, in one tile for all numbers of tokens. Prompts, too, attend over latents: `mla_prefill.py`
would expand keys, and so sum otherwise than a later token does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.layouts import MLAParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.triton.attention.mla import reject_8bit_cache, rotate_and_cache
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

BLOCK_T, BLOCK_N = 16, 64


@triton.jit(do_not_specialize=["T"])
def _head_product_kernel(
    x_ptr, w_ptr, y_ptr, T, x_token, x_head, y_token, y_head,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of a head for BLOCK_T tokens."""
    head = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t, ks = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    row = t.to(tl.int64)[:, None]
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + ks < K
        x = tl.load(
            x_ptr + row * x_token + head * x_head + (k + ks)[None, :],
            mask=(t < T)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + (head * K + k + ks)[:, None] * N + n[None, :],
            mask=inside[:, None] & (n < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    at = y_ptr + row * y_token + head * y_head + n[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None] & (n < N)[None, :])


def head_product(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """x [T, H, K] · w [H, K, N] → out [T, H, N], whose last dimensions are contiguous."""
    num_heads, inner, outer = w.shape
    block_k = 64 if x.dtype.itemsize == 2 else 32
    grid = (triton.cdiv(outer, BLOCK_N), triton.cdiv(len(x), BLOCK_T), num_heads)
    _head_product_kernel[grid](
        x, w, out, len(x), *x.stride()[:2], *out.stride()[:2], K=inner, N=outer, BLOCK_T=BLOCK_T, BLOCK_K=block_k,
        BLOCK_N=BLOCK_N, num_warps=4, num_stages=3, **pdl_options(x),
    )  # fmt: skip
    return out


def mla_queries(
    q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
) -> Tensor:
    """`OpSet.mla_queries`."""
    reject_8bit_cache(kv)
    num_heads, nope_dim, rank = params.keys.shape
    out = torch.empty(len(q), num_heads, params.rotary_dim + rank, dtype=q.dtype, device=q.device)
    if len(q):
        rotate_and_cache(q.contiguous(), row.contiguous(), out, kv, meta, params)
        head_product(q[:, :, :nope_dim], params.keys, out[:, :, params.rotary_dim :])
    return out


def mla_values(seen: Tensor, params: MLAParams) -> Tensor:
    """`OpSet.mla_values`."""
    out = seen.new_empty(*seen.shape[:2], params.values.shape[2])
    return head_product(seen, params.values, out).flatten(1) if len(seen) else out.flatten(1)
