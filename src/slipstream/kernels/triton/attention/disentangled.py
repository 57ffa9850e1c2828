"""Disentangled attention of whole texts (DeBERTa) on a GPU.

Dense products make the scores of each query, and of each key, with all buckets of distances. The
kernel of attention adds two of them to each q · k. It is `bidirectional`'s otherwise: its grid
depends on the number of tokens only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.layouts import DisentangledParams
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.triton.attention.bidirectional import default_tile, text_ends
from slipstream.kernels.triton.attention.paged import LOG2E, _online_softmax
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait


@triton.jit(do_not_specialize=["T", "reach"])
def _disentangled_kernel(
    qkv_ptr, of_queries_ptr, of_keys_ptr, buckets_ptr, out_ptr, positions_ptr, ends_ptr, scale, reach, T,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One thread block computes BLOCK_M tokens of a head. Scores with buckets are [H, T, N]."""
    if PDL:
        pdl_wait()
    head, first = tl.program_id(0), tl.program_id(1) * BLOCK_M
    rows, ds = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = rows < T
    begins = rows - tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int32)
    ends = tl.load(ends_ptr + rows, mask=live, other=0)
    low = first - tl.load(positions_ptr + first).to(tl.int32)
    high = tl.load(ends_ptr + tl.minimum(first + BLOCK_M, T) - 1)
    row_mask = live[:, None] & (ds < D)[None, :]
    at = qkv_ptr + rows.to(tl.int64)[:, None] * (3 * H * D) + head * D + ds[None, :]
    q = tl.load(at, mask=row_mask, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    base = head.to(tl.int64) * T
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        of_key = qkv_ptr + keys.to(tl.int64)[:, None] * (3 * H * D) + (H + head) * D + ds[None, :]
        mask = (keys < high)[:, None] & (ds < D)[None, :]
        k = tl.load(of_key, mask=mask, other=0.0)
        v = tl.load(of_key + H * D, mask=mask, other=0.0)
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        distance = rows[:, None] - keys[None, :]
        away = tl.minimum(tl.maximum(distance, -reach), reach) + reach
        bucket = tl.load(buckets_ptr + away)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_KEYS:
            added = of_queries_ptr + (base + rows.to(tl.int64))[:, None] * N + bucket
            s += tl.load(added, mask=seen, other=0.0).to(tl.float32)
        if HAS_QUERIES:
            added = of_keys_ptr + (base + keys.to(tl.int64))[None, :] * N + bucket
            s += tl.load(added, mask=seen, other=0.0).to(tl.float32)
        s = tl.where(seen, s, float("-inf"))
        p, alpha, m_i, l_i = _online_softmax(s, scale * LOG2E, m_i, l_i)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    offset = (rows.to(tl.int64) * H + head)[:, None] * D + ds[None, :]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=row_mask)


def disentangled_attention(
    qkv: Tensor, meta: AttentionMetadata, params: DisentangledParams
) -> Tensor:
    """`OpSet.disentangled_attention`."""
    of_buckets = params.queries if params.keys is None else params.keys
    assert of_buckets is not None
    num_heads, dim, num_buckets = of_buckets.shape
    rows = qkv.contiguous()
    q, k, _ = rows.view(len(qkv), 3, num_heads, dim).permute(1, 2, 0, 3)  # [H, T, D]
    of_queries = None if params.keys is None else torch.bmm(q, params.keys)
    of_keys = None if params.queries is None else torch.bmm(k, params.queries)
    out = qkv.new_empty(len(qkv), num_heads * dim)
    ends = text_ends(meta) if meta.text_ends is None else meta.text_ends
    block_d = max(16, triton.next_power_of_2(dim))
    block_m, block_n, warps, stages = default_tile(qkv.dtype, block_d, 0)
    if len(qkv):
        _disentangled_kernel[(num_heads, triton.cdiv(len(qkv), block_m))](
            rows, rows if of_queries is None else of_queries, rows if of_keys is None else of_keys, params.buckets, out,
            meta.positions, ends, params.scale, len(params.buckets) // 2, len(qkv), H=num_heads, D=dim,
            N=num_buckets, HAS_KEYS=of_queries is not None, HAS_QUERIES=of_keys is not None, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_D=block_d, num_warps=warps, num_stages=stages, **pdl_options(qkv),
        )  # fmt: skip
    return out
