"""Multi-head latent attention (DeepSeek) of whole prompts, which have nothing in the cache yet.

Over latents (`mla.py`) a key costs R + C multiplications per head and a value C. That suits
decodes, which read one row per token for all heads. A prompt's tokens share what they read, so keys
and values are expanded first, by one product each. Then they cost NOPE + R and V, 3.4 times less at
DeepSeek's sizes. The cache gets the same rows either way.

The kernel is FlashAttention-2 (Dao 2023) with scores in units of log 2; it is bound by the tensor
cores. A key is two tiles: a head's own non-rotary part, and the rotary part that all heads share.
Queries are rotated when they are read."""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.layouts import MLAParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.attention.mla import (
    _interleave,
    _load_cos_sin,
    _rotate,
    cache_latents,
    mla_paged_attention,
    mla_queries,
    reject_8bit_cache,
)
from slipstream.kernels.triton.attention.paged import LOG2E, _load_tile, _online_softmax
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.platform import platform_of

MIN_TOKENS = 256
"""Tokens of whole prompts in a step from which this is used. Together with decodes it takes four
more launches."""
HEADS_PER_WAVE = 16
"""Heads that run at the same time. With all 128 of DeepSeek V3, no two tiles of a head would share
reads in L2."""
SHORT_PROMPT = 256
"""Maximum length of a prompt, in tokens, for which tiles have fewer rows, so that less of each is
beyond the queries."""
THRESHOLDS = Thresholds(tokens=(MIN_TOKENS - 1,), queries=(SHORT_PROMPT,))
THREE_STAGES_BYTES = 168 * 1024
"""Shared memory of a high tile with three stages on Hopper (elsewhere 128 KiB). With two stages it takes 88 KiB."""


@triton.jit
def _find_tile(index, starts_ptr, first_seq, last_seq, tiles_per_seq, BLOCK_M: tl.constexpr):
    """Finds tile `index` of a step, in the order of the longest first: (sequence, number of its
    tile of BLOCK_M tokens). The sequence is `last_seq` if there is no such tile. Each sequence has
    `tiles_per_seq` tiles, some of them empty; with 0, as many as it needs.
    """
    num_seqs = last_seq - first_seq
    seq, tile = first_seq + index % num_seqs, tiles_per_seq - 1 - index // num_seqs
    if tiles_per_seq == 0:
        seq, before, so_far = first_seq, 0, 0
        for begin in range(first_seq, last_seq, 256):
            i = begin + tl.arange(0, 256)
            mask = i < last_seq
            tokens = tl.load(starts_ptr + i + 1, mask=mask, other=0) - tl.load(
                starts_ptr + i, mask=mask, other=0
            )
            num_tiles = (tokens + BLOCK_M - 1) // BLOCK_M
            passed = mask & (so_far + tl.cumsum(num_tiles, 0) <= index)
            seq += tl.sum(passed.to(tl.int32), 0)
            before += tl.sum(tl.where(passed, num_tiles, 0), 0)
            so_far += tl.sum(num_tiles, 0)
        at = tl.minimum(seq, last_seq - 1)
        tokens = tl.load(starts_ptr + at + 1) - tl.load(starts_ptr + at)
        tile = (tokens + BLOCK_M - 1) // BLOCK_M - 1 - (index - before)
    return seq, tile


@triton.jit
def _load_rows(
    ptr, keys, n, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Loads D numbers of each of `keys`. MASKED: zeros from key n on, which belong to another
    prompt."""
    ds = tl.arange(0, BLOCK_D)
    at = ptr + keys.to(tl.int64)[:, None] * STRIDE + ds[None, :]
    if MASKED:
        return tl.load(at, mask=(keys < n)[:, None] & (ds < D)[None, :], other=0.0)
    return _load_tile(at, (ds < D)[None, :], BLOCK_D == D)


@triton.jit
def _prefill_step(
    q, q_rotary, acc, m_i, l_i, first, n, rows, k, rotary_keys, v, to_log2,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process keys first … first + BLOCK_N. MASKED: some are ahead of a query or beyond the
    prompt's end."""
    keys = first + tl.arange(0, BLOCK_N)
    nope = _load_rows(k, keys, n, H * NOPE, NOPE, BLOCK_NOPE, MASKED)
    rotary = _load_rows(rotary_keys, keys, n, R, R, 2 * HALF, MASKED)
    values = _load_rows(v, keys, n, V, V, BLOCK_V, MASKED)
    s = tl.dot(q, tl.trans(nope), input_precision="ieee")
    s = tl.dot(q_rotary, tl.trans(rotary), s, input_precision="ieee")
    if MASKED:
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    p, alpha, m_i, l_i = _online_softmax(s, to_log2, m_i, l_i)
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["first_seq", "last_seq", "first_token", "num_keys", "tiles_per_seq"])
def _mla_prefill_kernel(
    q_ptr, k_ptr, rotary_ptr, v_ptr, out_ptr, starts_ptr, table_ptr, scale, first_seq, last_seq, first_token, num_keys,
    tiles_per_seq,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_NOPE: tl.constexpr, HALF: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M tokens of a (prompt, head) per thread block. Keys and values begin with token
    `first_token`."""
    if PDL:
        pdl_wait()
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    seq, tile = _find_tile(
        tl.program_id(1), starts_ptr, first_seq, last_seq, tiles_per_seq, BLOCK_M
    )
    if seq >= last_seq:
        return
    start = tl.load(starts_ptr + seq)
    n = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= n:
        return
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    ps = tl.arange(0, BLOCK_NOPE)
    vs = tl.arange(0, BLOCK_V)
    live = rows < n
    offset = (start + rows).to(tl.int64) * H + head
    at = q_ptr + offset * (NOPE + R)
    q = tl.load(at[:, None] + ps[None, :], mask=live[:, None] & (ps < NOPE)[None, :], other=0.0)
    # a token's position is its place in the prompt
    cos, sin = _load_cos_sin(table_ptr, rows, live, R, HALF)
    a, b = _rotate(at + NOPE, live, cos, sin, R, HALF, INTERLEAVED)
    q_rotary = _interleave(a, b).to(q.dtype)
    row = (start - first_token).to(tl.int64)
    k, rotary_keys = k_ptr + (row * H + head) * NOPE, rotary_ptr + row * R
    v = v_ptr + (head.to(tl.int64) * num_keys + row) * V

    to_log2 = scale * LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    full_end = (tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N  # before it every query sees every key
    end = tl.minimum(n, tile * BLOCK_M + BLOCK_M)
    for first in range(0, full_end, BLOCK_N):
        acc, m_i, l_i = _prefill_step(
            q, q_rotary, acc, m_i, l_i, first, n, rows, k, rotary_keys, v, to_log2,
            H, NOPE, R, V, BLOCK_N, BLOCK_NOPE, HALF, BLOCK_V, False,
        )  # fmt: skip
    for first in range(full_end, end, BLOCK_N):
        acc, m_i, l_i = _prefill_step(
            q, q_rotary, acc, m_i, l_i, first, n, rows, k, rotary_keys, v, to_log2,
            H, NOPE, R, V, BLOCK_N, BLOCK_NOPE, HALF, BLOCK_V, True,
        )  # fmt: skip
    acc = acc / l_i[:, None]
    out = out_ptr + (offset * V)[:, None] + vs[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (vs < V)[None, :])


def default_tile(
    dtype: torch.dtype, width: int, longest: int, shared: int
) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages), measured on an H200 (study `kernels_cuda_mla`). `width`:
    numbers of a key and a value together. `shared`: bytes of shared memory per thread block."""
    if dtype == torch.float32:
        return 32, 16, 4, 2
    if width > 320:
        return 64, 32, 4, 2
    return (
        (64, 64, 4, 2)
        if longest <= SHORT_PROMPT
        else (128, 64, 8, 3 if shared >= THREE_STAGES_BYTES else 2)
    )


def prefill_attention(
    q: Tensor,
    k: Tensor,
    rotary_keys: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    params: MLAParams,
    out: Tensor,
) -> None:
    """Causal attention of the sequences after the decodes, into their rows of `out` [T, H · V].

    q [T, H, NOPE + R] is not yet rotated. For those sequences' N tokens: k [N, H, NOPE],
    rotary_keys [N, R], pair by pair, and v [H, N, V]."""
    (num_keys, num_heads, nope), rotary, width = k.shape, rotary_keys.shape[1], v.shape[2]
    first_seq, last_seq = meta.num_decodes, len(meta.seq_lens)
    block_p, block_v = (max(16, triton.next_power_of_2(n)) for n in (nope, width))
    half = max(8, triton.next_power_of_2(rotary // 2))
    block_m, block_n, warps, stages = default_tile(
        q.dtype,
        block_p + 2 * half + block_v,
        meta.max_query_len,
        platform_of(q.device).shared_bytes,
    )
    # Tiles per sequence: as many as the longest needs. If more of them would be empty, each
    # sequence has as many as it needs.
    tiles_per_seq, num_seqs = triton.cdiv(meta.max_query_len, block_m), last_seq - first_seq
    max_tiles = num_keys // block_m + num_seqs
    if tiles_per_seq * num_seqs <= max_tiles:
        max_tiles = tiles_per_seq * num_seqs
    else:
        tiles_per_seq = 0
    heads = math.gcd(num_heads, HEADS_PER_WAVE)
    _mla_prefill_kernel[(heads, max_tiles, num_heads // heads)](
        q, k, rotary_keys, v, out, meta.query_start_loc, params.cos_sin, params.scale,
        first_seq, last_seq, len(q) - num_keys, num_keys, tiles_per_seq,
        H=num_heads, NOPE=nope, R=rotary, V=width, INTERLEAVED=params.interleaved, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_NOPE=block_p, HALF=half, BLOCK_V=block_v, num_warps=warps, num_stages=stages, **pdl_options(q),
    )  # fmt: skip


def covers(meta: AttentionMetadata) -> bool:
    """Whether `mla_attention` is used for this step."""
    return meta.from_start and len(meta.positions) - meta.num_decodes >= MIN_TOKENS


def mla_attention(
    q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
) -> Tensor:
    """`OpSet.mla_attention` for `meta.from_start`: decodes over latents, prompts with expanded keys
    and values. All rows are cached before any attention, because a one-token sequence may share
    blocks that a prompt of this step fills."""
    reject_8bit_cache(kv)
    keys, values = params.keys, params.values
    num_heads, nope, rank = keys.shape
    num_decodes, num_keys, width = meta.num_decodes, len(q) - meta.num_decodes, values.shape[2]
    q = q.contiguous()
    out = torch.empty(len(q), num_heads * width, dtype=q.dtype, device=q.device)
    latents, rotary_keys = cache_latents(row, kv, meta, params, first=num_decodes)
    if num_decodes:
        decodes = _only_decodes(meta)
        queries = mla_queries(q[:num_decodes], row[:num_decodes], kv, decodes, params)
        out[:num_decodes] = mla_paged_attention(
            queries, kv, decodes, scale=params.scale, values=values
        )
    k = F.linear(latents, keys.view(-1, rank)).view(num_keys, num_heads, nope)
    v = torch.bmm(latents.expand(num_heads, -1, -1), values)
    prefill_attention(q, k, rotary_keys, v, meta, params, out)
    return out


def _only_decodes(meta: AttentionMetadata) -> AttentionMetadata:
    """The metadata of a step's decodes."""
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
