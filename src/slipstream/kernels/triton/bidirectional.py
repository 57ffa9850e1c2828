"""Whole texts, of which every token sees every other (an encoder's): their attention, and the means of their states.

A step's texts stand one behind another, and so do their keys and values in the rows that the product before made: attention
reads them there, and no cache is written. A program has BLOCK_M tokens of a head, whatever texts they are of, and walks along
the tokens from the beginning of its first one's text to the end of its last one's; a mask parts the texts. So short texts share
a program's rows, and the launch depends on the number of tokens alone, as a CUDA graph wants it. Otherwise this is
FlashAttention-2 (Dao 2023), with scores in units of log 2.

How a text's sums are cut into tiles depends on where it stands in its step: in `deterministic` mode the paged kernel runs.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.triton.attention import LOG2E, _scores, _softened
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.pointwise import rope_and_cache

LONG = 1024
"""Tokens of a text from which tiles are taller: then most of a program's keys are of all its rows' text."""


def tile(dtype: torch.dtype, block_d: int, longest: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages), in 99 KB of shared memory."""
    if dtype == torch.float32:
        return 32, 32, 4, 2
    if block_d > 128:
        return 64, 32, 8, 2
    stages = 3 if block_d <= 64 else 2
    return (64, 64, 4, stages) if longest < LONG else (128, 64, 8, stages)


@triton.jit(do_not_specialize=["T", "window", "reach"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    positions_ptr,
    ends_ptr,
    slopes_ptr,
    bias_ptr,
    sinks_ptr,
    scale,
    softcap,
    window,
    reach,
    T,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (query head, BLOCK_M tokens). The strides are those of tokens."""
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
    inside = live[:, None] & (ds < D)[None, :]
    q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * Q_STRIDE + head * D + ds[None, :], mask=inside, other=0.0)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head)
    bias = bias_ptr + head * (2 * reach + 1) + reach
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        best, total = total + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E, total + 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    kv = (head // G) * D + ds[None, :]
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        at = keys.to(tl.int64)[:, None] * KV_STRIDE + kv
        there = (keys < high)[:, None] & (ds < D)[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        # A text that went wrong is to harm no other: its weight is 0 there.
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
        distance = rows[:, None] - keys[None, :]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s, unit = _scores(s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS)
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        if HAS_WINDOW:
            seen = seen & (tl.abs(distance) < window)
        s = tl.where(seen, s, float("-inf"))
        p, fade, best, total = _softened(s, unit, best, total)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (rows.to(tl.int64) * tl.num_programs(0) + head)[:, None] * D + ds[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def bidirectional_attention(qkv: Tensor, meta: AttentionMetadata, heads: QKVLayout, s: AttentionParams) -> Tensor:
    """`OpSet.bidirectional_attention`. Heads that are turned or normed are so in rows of their own."""
    num_tokens, h = len(qkv), heads
    if h.cos_sin is None and h.q_norm is None:
        given = qkv.view(num_tokens, -1, h.head_dim)
        q, k, v = given.split((h.num_heads, h.num_kv_heads, h.num_kv_heads), dim=1)
    else:  # a cache of blocks of one token
        k, v = (qkv.new_empty(num_tokens, h.num_kv_heads, 1, h.head_dim) for _ in range(2))
        slots = torch.arange(num_tokens, device=qkv.device)
        q = rope_and_cache(qkv, LayerKV(k, v), dataclasses.replace(meta, slot_mapping=slots), h)
        k, v = k.squeeze(2), v.squeeze(2)
    out = torch.empty(num_tokens, h.num_heads, h.head_dim, dtype=qkv.dtype, device=qkv.device)
    ends = text_ends(meta) if meta.text_ends is None else meta.text_ends
    of_heads = [q if t is None else t for t in (s.alibi_slopes, s.distance_bias, s.sinks)]
    block_d = max(16, triton.next_power_of_2(h.head_dim))
    block_m, block_n, warps, stages = tile(qkv.dtype, block_d, meta.max_query_len)
    if num_tokens:
        _attention_kernel[(h.num_heads, triton.cdiv(num_tokens, block_m))](
            q, k, v, out, meta.positions, ends, *of_heads, s.scale, s.softcap or 1.0, s.window or 0, s.reach, num_tokens,
            Q_STRIDE=q.stride(0), KV_STRIDE=k.stride(0), G=h.num_heads // h.num_kv_heads, D=h.head_dim, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_D=block_d, HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None,
            HAS_ALIBI=s.alibi_slopes is not None, HAS_BIAS=s.distance_bias is not None, HAS_SINKS=s.sinks is not None,
            num_warps=warps, num_stages=stages, **overlapped(q),
        )  # fmt: skip
    return out


def text_ends(meta: AttentionMetadata) -> Tensor:
    """int32 [T]: where each token's text ends."""
    ends = meta.query_start_loc[1:]
    tokens = torch.arange(len(meta.positions), dtype=torch.int32, device=ends.device)
    return ends[torch.bucketize(tokens, ends, right=True)]


@triton.jit
def _mean_kernel(
    x_ptr, starts_ptr, out_ptr, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a (text, BLOCK_E numbers of its states)."""
    if PDL:
        pdl_wait()
    text = tl.program_id(0)
    begin, end = tl.load(starts_ptr + text), tl.load(starts_ptr + text + 1)
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    sums = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(begin, end, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        there = (tokens < end)[:, None] & (at < E)[None, :]
        sums += tl.load(x_ptr + tokens.to(tl.int64)[:, None] * E + at[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + text * E + at, tl.sum(sums, 0) / tl.maximum(end - begin, 1), mask=at < E)


def mean_of_texts(x: Tensor, starts: Tensor) -> Tensor:
    """`OpSet.mean_of_texts`."""
    num_texts, size = len(starts) - 1, x.shape[1]
    out = torch.empty(num_texts, size, dtype=torch.float32, device=x.device)
    if num_texts:
        _mean_kernel[(num_texts, triton.cdiv(size, 128))](
            x.contiguous(), starts, out, size, BLOCK_T=16, BLOCK_E=128, num_warps=4, **overlapped(x)
        )
    return out
