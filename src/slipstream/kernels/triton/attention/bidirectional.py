"""Attention in which every token sees every other: whole texts (encoders), and a picture's windows.
Also the mean of a text's states.

A step's texts are concatenated. Attention reads q, k and v in the rows of the qkv product; it
writes no cache. A thread block takes BLOCK_M consecutive tokens of a head, of one text or several,
and walks from the start of its first token's text to the end of its last token's. A mask separates
the texts. Short texts thus share a tile, and the grid depends on the number of tokens only, as CUDA
graphs need. The rest is FlashAttention-2 (Dao 2023) with scores in units of log 2.

A text's sums depend on its place in the step, so `deterministic` mode uses the paged kernel, and
torch for windows."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.triton.attention.paged import LOG2E, _online_softmax, _scores
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import rope_and_cache

SHORT_PART = 256
"""Maximum length of a part of an image, in tokens, that `attend` supports."""

LONG_TEXT = 1024
"""Length of a text from which tiles are taller: most keys of a tile then belong to the text of all
its rows."""


def default_tile(dtype: torch.dtype, block_d: int, longest: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages) that need at most 99 KB of shared memory."""
    if dtype == torch.float32:
        return 32, 32, 4, 2
    if block_d > 128:
        return 64, 32, 8, 2
    stages = 3 if block_d <= 64 else 2
    return (64, 64, 4, stages) if longest < LONG_TEXT else (128, 64, 8, stages)


@triton.jit(do_not_specialize=["T", "window", "reach"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, positions_ptr, ends_ptr, slopes_ptr, bias_ptr, sinks_ptr, scale, softcap, window, reach,
    T,
    Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One thread block computes BLOCK_M tokens of a query head. Strides are between tokens."""
    if PDL:
        pdl_wait()
    head, first = tl.program_id(0), tl.program_id(1) * BLOCK_M
    rows, ds = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = rows < T
    begins = rows - tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int32)
    ends = tl.load(ends_ptr + rows, mask=live, other=0)
    low = first - tl.load(positions_ptr + first).to(tl.int32)
    last = tl.minimum(first + BLOCK_M, T) - 1
    high = tl.load(ends_ptr + last)
    if HAS_WINDOW:
        low, high = tl.maximum(low, first - window + 1), tl.minimum(high, last + window)
    row_mask = live[:, None] & (ds < D)[None, :]
    q = tl.load(
        q_ptr + rows.to(tl.int64)[:, None] * Q_STRIDE + head * D + ds[None, :],
        mask=row_mask,
        other=0.0,
    )
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head)
    bias = bias_ptr + head * (2 * reach + 1) + reach
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        m_i, l_i = l_i + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E, l_i + 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    kv = (head // G) * D + ds[None, :]
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        at = keys.to(tl.int64)[:, None] * KV_STRIDE + kv
        mask = (keys < high)[:, None] & (ds < D)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        # NaN or infinity in one text must not harm others: their weight for it is 0, and 0 · inf is
        # NaN.
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
        distance = rows[:, None] - keys[None, :]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s, to_log2 = _scores(
            s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS
        )
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        if HAS_WINDOW:
            seen = seen & (tl.abs(distance) < window)
        s = tl.where(seen, s, float("-inf"))
        p, alpha, m_i, l_i = _online_softmax(s, to_log2, m_i, l_i)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    offset = (rows.to(tl.int64) * tl.num_programs(0) + head)[:, None] * D + ds[None, :]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=row_mask)


def bidirectional_attention(
    qkv: Tensor, meta: AttentionMetadata, heads: QKVLayout, s: AttentionParams
) -> Tensor:
    """`OpSet.bidirectional_attention`. Heads with rotary or norm are first written to separate
    rows."""
    num_tokens, h = len(qkv), heads
    if h.cos_sin is None and h.q_norm is None:
        given = qkv.view(num_tokens, -1, h.head_dim)
        q, k, v = given.split((h.num_heads, h.num_kv_heads, h.num_kv_heads), dim=1)
    else:  # written like a cache with one token per block
        k, v = (qkv.new_empty(num_tokens, h.num_kv_heads, 1, h.head_dim) for _ in range(2))
        slots = torch.arange(num_tokens, device=qkv.device)
        q = rope_and_cache(qkv, LayerKV(k, v), dataclasses.replace(meta, slot_mapping=slots), h)
        k, v = k.squeeze(2), v.squeeze(2)
    ends = text_ends(meta) if meta.text_ends is None else meta.text_ends
    return attend(q, k, v, meta.positions, ends, s, longest=meta.max_query_len)


def covers(parts: PackedParts) -> bool:
    """Whether `attend` is faster than torch for these parts: they have several lengths, each of
    which would be a call of torch, and all are short."""
    return len(parts.by_length) > 1 and max(length for length, _ in parts.by_length) <= SHORT_PART


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    ends: Tensor,
    s: AttentionParams,
    *,
    longest: int = 0,
) -> Tensor:
    """q [T, H, D], k and v [T, K, D] → [T, H, D]. `positions` (int64) and `ends` (int32) [T] are
    each token's place in its text and its text's end. `longest`: tokens of the longest text."""
    num_tokens, num_heads, head_dim = q.shape
    assert all(x.stride(1) == head_dim for x in (q, k, v)), "a token's heads lie side by side"
    assert k.stride(0) == v.stride(0)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    head_tensors = [q if t is None else t for t in (s.alibi_slopes, s.distance_bias, s.sinks)]
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages = default_tile(q.dtype, block_d, longest)
    if num_tokens:
        _attention_kernel[(num_heads, triton.cdiv(num_tokens, block_m))](
            q, k, v, out, positions, ends, *head_tensors, s.scale, s.softcap or 1.0, s.window or 0, s.reach, num_tokens,
            Q_STRIDE=q.stride(0), KV_STRIDE=k.stride(0), G=num_heads // k.shape[1], D=head_dim, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_D=block_d, HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None,
            HAS_ALIBI=s.alibi_slopes is not None, HAS_BIAS=s.distance_bias is not None, HAS_SINKS=s.sinks is not None,
            num_warps=warps, num_stages=stages, **pdl_options(q),
        )  # fmt: skip
    return out


def text_ends(meta: AttentionMetadata) -> Tensor:
    """Returns the end of each token's text, int32 [T], as an index of the step's tokens."""
    ends = meta.query_start_loc[1:]
    tokens = torch.arange(len(meta.positions), dtype=torch.int32, device=ends.device)
    return ends[torch.bucketize(tokens, ends, right=True)]


@triton.jit
def _mean_kernel(
    x_ptr, starts_ptr, out_ptr, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Compute BLOCK_E columns of one text's mean per thread block."""
    if PDL:
        pdl_wait()
    text = tl.program_id(0)
    begin, end = tl.load(starts_ptr + text), tl.load(starts_ptr + text + 1)
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    sums = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(begin, end, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        mask = (tokens < end)[:, None] & (at < E)[None, :]
        sums += tl.load(
            x_ptr + tokens.to(tl.int64)[:, None] * E + at[None, :], mask=mask, other=0.0
        ).to(tl.float32)
    tl.store(out_ptr + text * E + at, tl.sum(sums, 0) / tl.maximum(end - begin, 1), mask=at < E)


def mean_of_texts(hidden: Tensor, starts: Tensor) -> Tensor:
    """`OpSet.mean_of_texts`."""
    num_texts, size = len(starts) - 1, hidden.shape[1]
    out = torch.empty(num_texts, size, dtype=torch.float32, device=hidden.device)
    if num_texts:
        _mean_kernel[(num_texts, triton.cdiv(size, 128))](
            hidden.contiguous(),
            starts,
            out,
            size,
            BLOCK_T=16,
            BLOCK_E=128,
            num_warps=4,
            **pdl_options(hidden),
        )
    return out
