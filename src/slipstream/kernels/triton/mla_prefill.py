"""Latent attention of whole prompts (DeepSeek), of which nothing is in the cache yet: with keys and values of their own.

Over latents (`latent`) a key takes R + C multiplications a head and a value C, which is right for decodes: they read one
row a token for all heads. A prompt's tokens share what they read: with keys and values made of its latents, by a product each,
these take P + R and V, 3.4 times fewer at DeepSeek's sizes. What goes into the cache is the same.

Attention is FlashAttention-2 (Dao 2023) with scores in units of log 2. A key is two tiles: plain numbers of each head's
own, and rotary ones that all heads share; queries are turned where they are read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.triton.attention import LOG2E, _load, _softened
from slipstream.kernels.triton.mla import (
    _angles,
    _joined,
    _turned,
    latent_rows,
    mla_paged_attention,
    mla_queries,
    refuse_8_bits,
)
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.platform import platform_of

WHOLE_TOKENS = 256
"""Tokens of whole prompts in a step from which they have keys and values of their own: beside decodes, four launches more."""
HEADS_AT_ONCE = 16
"""Heads that run side by side. All 128 of DeepSeek V3 would leave no two tiles of a head to share what they read."""
SHORT = 256
"""Tokens of the longest prompt up to which tiles are lower: less of what they multiply lies ahead of the queries."""
THREE_STAGES_BYTES = 168 * 1024
"""What a high tile of three stages takes on Hopper, 128 KiB elsewhere; of two 88 KiB, which fit in the 99 of small chips."""


@triton.jit
def _find(unit, starts_ptr, first_seq, last_seq, tiles, BLOCK_M: tl.constexpr):
    """The sequence of `unit` (`last_seq`: there is none) and its tile of BLOCK_M tokens, the longest first. Each sequence has
    `tiles` units, of which some may be empty, or with `tiles` 0 as many as it needs."""
    num_seqs = last_seq - first_seq
    seq, tile = first_seq + unit % num_seqs, tiles - 1 - unit // num_seqs
    if tiles == 0:
        seq, before, so_far = first_seq, 0, 0
        for begin in range(first_seq, last_seq, 256):
            i = begin + tl.arange(0, 256)
            there = i < last_seq
            tokens = tl.load(starts_ptr + i + 1, mask=there, other=0) - tl.load(starts_ptr + i, mask=there, other=0)
            units = (tokens + BLOCK_M - 1) // BLOCK_M
            passed = there & (so_far + tl.cumsum(units, 0) <= unit)
            seq += tl.sum(passed.to(tl.int32), 0)
            before += tl.sum(tl.where(passed, units, 0), 0)
            so_far += tl.sum(units, 0)
        at = tl.minimum(seq, last_seq - 1)
        tokens = tl.load(starts_ptr + at + 1) - tl.load(starts_ptr + at)
        tile = (tokens + BLOCK_M - 1) // BLOCK_M - 1 - (unit - before)
    return seq, tile


@triton.jit
def _rows(ptr, keys, n, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """The D numbers of each of `keys`; MASKED: zeros from key n on, which are another prompt's."""
    ds = tl.arange(0, BLOCK_D)
    at = ptr + keys.to(tl.int64)[:, None] * STRIDE + ds[None, :]
    if MASKED:
        return tl.load(at, mask=(keys < n)[:, None] & (ds < D)[None, :], other=0.0)
    return _load(at, (ds < D)[None, :], BLOCK_D == D)


@triton.jit
def _step(
    q,
    q_turned,
    acc,
    best,
    total,
    first,
    n,
    rows,
    k,
    turned,
    v,
    unit,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys first … first + BLOCK_N. MASKED: some of them lie ahead of a query, or beyond the prompt's end."""
    keys = first + tl.arange(0, BLOCK_N)
    plain = _rows(k, keys, n, H * P, P, BLOCK_P, MASKED)
    rotary = _rows(turned, keys, n, R, R, 2 * HALF, MASKED)
    values = _rows(v, keys, n, V, V, BLOCK_V, MASKED)
    s = tl.dot(q, tl.trans(plain), input_precision="ieee")
    s = tl.dot(q_turned, tl.trans(rotary), s, input_precision="ieee")
    if MASKED:
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    p, fade, best, total = _softened(s, unit, best, total)
    acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return acc, best, total


@triton.jit(do_not_specialize=["first_seq", "last_seq", "first_token", "num_keys", "tiles"])
def _prompts_kernel(
    q_ptr,
    k_ptr,
    turned_ptr,
    v_ptr,
    out_ptr,
    starts_ptr,
    table_ptr,
    scale,
    first_seq,
    last_seq,
    first_token,
    num_keys,
    tiles,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (head, BLOCK_M tokens of a prompt). Keys and values begin with token `first_token`."""
    if PDL:
        pdl_wait()
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    seq, tile = _find(tl.program_id(1), starts_ptr, first_seq, last_seq, tiles, BLOCK_M)
    if seq >= last_seq:
        return
    start = tl.load(starts_ptr + seq)
    n = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= n:
        return
    rows, ps, vs = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    live = rows < n
    place = (start + rows).to(tl.int64) * H + head
    at = q_ptr + place * (P + R)
    q = tl.load(at[:, None] + ps[None, :], mask=live[:, None] & (ps < P)[None, :], other=0.0)
    cos, sin = _angles(table_ptr, rows, live, R, HALF)  # a token's position is its place in the prompt
    a, b = _turned(at + P, live, cos, sin, R, HALF, INTERLEAVED)
    q_turned = _joined(a, b).to(q.dtype)
    row = (start - first_token).to(tl.int64)
    k, turned = k_ptr + (row * H + head) * P, turned_ptr + row * R
    v = v_ptr + (head.to(tl.int64) * num_keys + row) * V

    unit = scale * LOG2E
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    whole = (tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N  # keys that every query of the tile may see
    end = tl.minimum(n, tile * BLOCK_M + BLOCK_M)
    for first in range(0, whole, BLOCK_N):
        acc, best, total = _step(
            q, q_turned, acc, best, total, first, n, rows, k, turned, v, unit, H, P, R, V, BLOCK_N, BLOCK_P, HALF, BLOCK_V,
            False,
        )  # fmt: skip
    for first in range(whole, end, BLOCK_N):
        acc, best, total = _step(
            q, q_turned, acc, best, total, first, n, rows, k, turned, v, unit, H, P, R, V, BLOCK_N, BLOCK_P, HALF, BLOCK_V,
            True,
        )  # fmt: skip
    acc = acc / total[:, None]
    out = out_ptr + (place * V)[:, None] + vs[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (vs < V)[None, :])


def prompt_tile(dtype: torch.dtype, width: int, longest: int, shared: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages), measured on an H200 (`benchmarks/gpu_latent_prompts.py`). `width`: numbers of a key
    and a value together; `shared`: bytes of memory that a program may take."""
    if dtype == torch.float32:
        return 32, 16, 4, 2
    if width > 320:
        return 64, 32, 4, 2
    return (64, 64, 4, 2) if longest <= SHORT else (128, 64, 8, 3 if shared >= THREE_STAGES_BYTES else 2)


def prompt_attention(
    q: Tensor,
    k: Tensor,
    turned: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    *,
    cos_sin: Tensor,
    interleaved: bool,
    scale: float,
    out: Tensor,
    tile: tuple[int, int, int, int] | None = None,
) -> None:
    """Causal attention of the sequences behind the decodes, with nothing in the cache before the step, into their rows of `out`
    [T, H · V].

    q [T, H, P + R] as the product made it; of those sequences' N tokens k [N, H, P], the turned keys [N, R], pair by pair, and
    v [H, N, V]. `tile`: (BLOCK_M, BLOCK_N, warps, stages)."""
    (num_keys, num_heads, plain), rotary, width = k.shape, turned.shape[1], v.shape[2]
    first_seq, last_seq = meta.num_decodes, len(meta.seq_lens)
    block_p, block_v = (max(16, triton.next_power_of_2(n)) for n in (plain, width))
    half = max(8, triton.next_power_of_2(rotary // 2))
    block_m, block_n, warps, stages = tile or prompt_tile(
        q.dtype, block_p + 2 * half + block_v, meta.max_query_len, platform_of(q.device).shared_bytes
    )
    # Units of a sequence: as many as the longest needs, or, if that leaves more of them empty, as it needs itself.
    tiles, num_seqs = triton.cdiv(meta.max_query_len, block_m), last_seq - first_seq
    most = num_keys // block_m + num_seqs
    if tiles * num_seqs <= most:
        most = tiles * num_seqs
    else:
        tiles = 0
    heads = math.gcd(num_heads, HEADS_AT_ONCE)
    _prompts_kernel[(heads, most, num_heads // heads)](
        q, k, turned, v, out, meta.query_start_loc, cos_sin, scale, first_seq, last_seq, len(q) - num_keys, num_keys, tiles,
        H=num_heads, P=plain, R=rotary, V=width, INTERLEAVED=interleaved, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_P=block_p,
        HALF=half, BLOCK_V=block_v, num_warps=warps, num_stages=stages, **overlapped(q),
    )  # fmt: skip


def takes(meta: AttentionMetadata) -> bool:
    """Whether `mla_attention` is for this step."""
    return meta.from_start and len(meta.positions) - meta.num_decodes >= WHOLE_TOKENS


def mla_attention(
    q: Tensor,
    row: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    *,
    keys: Tensor,
    values: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    scale: float,
) -> Tensor:
    """`OpSet.mla_attention` of a step with `meta.from_start`: decodes over latents, the others with keys and values. All rows
    are in the cache before anything attends: a sequence of one token may share blocks that a prompt of this step fills."""
    refuse_8_bits(kv)
    num_heads, plain, rank = keys.shape
    num_decodes, num_keys, width = meta.num_decodes, len(q) - meta.num_decodes, values.shape[2]
    options: dict[str, Any] = dict(norm=norm, eps=eps, cos_sin=cos_sin, interleaved=interleaved)
    q = q.contiguous()
    out = torch.empty(len(q), num_heads * width, dtype=q.dtype, device=q.device)
    latents, turned = latent_rows(row, kv, meta, first=num_decodes, **options)
    if num_decodes:
        alone = _decodes_of(meta)
        queries = mla_queries(q[:num_decodes], row[:num_decodes], kv, alone, keys=keys, **options)
        out[:num_decodes] = mla_paged_attention(queries, kv, alone, scale=scale, values=values)
    k = F.linear(latents, keys.view(-1, rank)).view(num_keys, num_heads, plain)
    v = torch.bmm(latents.expand(num_heads, -1, -1), values)
    prompt_attention(q, k, turned, v, meta, cos_sin=cos_sin, interleaved=interleaved, scale=scale, out=out)
    return out


def _decodes_of(meta: AttentionMetadata) -> AttentionMetadata:
    """A step's decodes alone."""
    n = meta.num_decodes
    return dataclasses.replace(
        meta,
        query_start_loc=meta.query_start_loc[: n + 1],
        seq_lens=meta.seq_lens[:n],
        block_table=meta.block_table[:n],
        positions=meta.positions[:n],
        slot_mapping=meta.slot_mapping[:n],
        max_query_len=1,
        from_start=False,
    )
