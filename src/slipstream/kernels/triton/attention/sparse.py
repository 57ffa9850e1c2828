"""Sparse attention over latents (`OpSet.best_keys`, `OpSet.sparse_attention`).

1. A kernel scores all keys that a token sees with the layer's index. PyTorch's top-k chooses among them.
2. A program computes some heads of one token over its chosen keys, which it gathers through the block table.

The scores of a slice of tokens are in memory at once. So a long step needs no more than `MAX_SCORES` of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.triton.attention.mla import reject_8bit_cache
from slipstream.kernels.triton.attention.paged import LOG2E, _online_softmax

MAX_SCORES = 2**26
"""Scores in memory at once: 256 MiB."""


@triton.jit
def _scores_kernel(
    q_ptr, weights_ptr, k_ptr, scores_ptr, seq_ptr, positions_ptr, lens_ptr, table_ptr, table_stride, first, length,
    H: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Score BLOCK_N keys for token first + program: Σ weight · max(0, q · k), −∞ for a key that it doesn't see."""
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    seq = tl.load(seq_ptr + token).to(tl.int64)
    seen = tl.minimum(tl.load(positions_ptr + token) + 1, tl.load(lens_ptr + seq))
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = scores_ptr + row * length + at
    if tl.program_id(1) * BLOCK_N >= seen:
        tl.store(out, float("-inf"), mask=at < length)
    else:
        hs, ds = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        live = at < seen
        block = tl.load(table_ptr + seq * table_stride + at // BLOCK_SIZE, mask=live, other=0)
        base = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * D
        q = tl.load(
            q_ptr + (token * H + hs)[:, None] * D + ds[None, :],
            mask=(hs < H)[:, None] & (ds < D)[None, :],
            other=0.0,
        )
        k = tl.load(
            k_ptr + base[None, :] + ds[:, None], mask=live[None, :] & (ds < D)[:, None], other=0.0
        )
        weights = tl.load(weights_ptr + token * H + hs, mask=hs < H, other=0.0).to(tl.float32)
        s = tl.maximum(tl.dot(q, k, input_precision="ieee"), 0.0)
        scores = tl.sum(s * weights[:, None], 0)
        tl.store(out, tl.where(live, scores, float("-inf")), mask=at < length)


def best_keys(
    q: Tensor, weights: Tensor, kv: LayerKV, meta: AttentionMetadata, top_k: int
) -> Tensor:
    """`OpSet.best_keys`."""
    (num_tokens, num_heads, dim), length = q.shape, meta.max_seq_len
    q, weights, seqs = q.contiguous(), weights.contiguous(), _sequences(num_tokens, meta)
    found = torch.empty(num_tokens, top_k, dtype=torch.int32, device=q.device)
    block_n, rows = 64, max(1, MAX_SCORES // length)
    for first in range(0, num_tokens, rows):
        count = min(rows, num_tokens - first)
        scores = torch.empty(count, length, dtype=torch.float32, device=q.device)
        _scores_kernel[(count, triton.cdiv(length, block_n))](
            q, weights, kv.k, scores, seqs, meta.positions, meta.seq_lens, meta.block_table, meta.block_table.stride(0),
            first, length, H=num_heads, D=dim, BLOCK_SIZE=kv.block_size, BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
        best = scores.topk(min(top_k, length), dim=1, sorted=False)
        none = best.values == float("-inf")
        found[first : first + count] = best.indices.masked_fill_(none, -1)
    return found


@triton.jit
def _sparse_kernel(
    q_ptr, chosen_ptr, k_ptr, out_ptr, seq_ptr, table_ptr, table_stride, scale, top_k,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_H heads of a token over its chosen keys, with a running softmax."""
    D: tl.constexpr = R + C
    token = tl.program_id(0).to(tl.int64)
    hs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rs, cs = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    live, in_r, in_c = hs < H, (rs < R)[None, :], (cs < C)[None, :]
    row = (token * H + hs)[:, None]
    q_rotary = tl.load(q_ptr + row * D + rs[None, :], mask=live[:, None] & in_r, other=0.0)
    q_latent = tl.load(q_ptr + row * D + R + cs[None, :], mask=live[:, None] & in_c, other=0.0)
    table = table_ptr + tl.load(seq_ptr + token).to(tl.int64) * table_stride
    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_C), tl.float32)
    for first in range(0, top_k, BLOCK_N):
        ns = first + tl.arange(0, BLOCK_N)
        at = tl.load(chosen_ptr + token * top_k + ns, mask=ns < top_k, other=-1)
        real = at >= 0
        at = tl.maximum(at, 0)
        block = tl.load(table + at // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        base = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * D)[:, None]
        rotary = tl.load(k_ptr + base + rs[None, :], mask=real[:, None] & in_r, other=0.0)
        latent = tl.load(k_ptr + base + R + cs[None, :], mask=real[:, None] & in_c, other=0.0)
        s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_rotary, tl.trans(rotary), s, input_precision="ieee")
        s = tl.where(real[None, :], s, float("-inf"))
        p, alpha, m_i, l_i = _online_softmax(s, scale * LOG2E, m_i, l_i)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(
        out_ptr + row * C + cs[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & in_c
    )


def sparse_attention(
    q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, scale: float
) -> Tensor:
    """`OpSet.sparse_attention`."""
    reject_8bit_cache(kv)
    (num_tokens, num_heads, head_dim), width = q.shape, kv.v.shape[3]
    out = torch.empty(num_tokens, num_heads, width, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    rotary, block_h, block_n = head_dim - width, 16, 16 if q.dtype == torch.float32 else 32
    _sparse_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        q.contiguous(), chosen.contiguous(), kv.k, out, _sequences(num_tokens, meta), meta.block_table,
        meta.block_table.stride(0), scale, chosen.shape[1], H=num_heads, R=rotary, C=width, BLOCK_SIZE=kv.block_size,
        BLOCK_H=block_h, BLOCK_R=max(16, triton.next_power_of_2(rotary)), BLOCK_C=max(16, triton.next_power_of_2(width)),
        BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out


def _sequences(num_tokens: int, meta: AttentionMetadata) -> Tensor:
    """Returns the number of each token's sequence, int32 [T]. Padding tokens get any number."""

    def made() -> Tensor:
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=meta.positions.device)
        found = torch.bucketize(tokens, meta.query_start_loc[1:], right=True)
        return found.clamp_(max=len(meta.seq_lens) - 1).int()

    return meta.once(("sequences of tokens", num_tokens), made)
