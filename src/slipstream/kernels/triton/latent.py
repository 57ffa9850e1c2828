"""Attention over a cache of latents (DeepSeek): all heads read one row a token, [rotated key, latent], and the latent is the
value, too, so that a tile of rows is read once for both. One kernel for decodes and prefill chunks; few sequences are split
over several programs, whose parts `attention.py` combines.

A token's heads stand in one tile, as rows of its products: 16 to 128 heads fill a tensor core also when each sequence has one
token. Without 8-bit caches, windows, caps or ALiBi: no such model has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.ops import AttentionMetadata, LayerKV
from slipstream.kernels.triton.attention import (
    LOG2E,
    MAX_SPLITS,
    _combine_kernel,
    _load,
    _tile_of_keys,
    num_splits,
)
from slipstream.kernels.triton.parts import processors


@triton.jit(do_not_specialize=["table_stride", "first_seq", "splits"])
def _latent_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    scale,
    table_stride,
    first_seq,
    splits,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program a (sequence, BLOCK_M of its tokens' heads, part of its keys). R numbers are rotated, C are the latent's."""
    D: tl.constexpr = R + C
    seq, split = tl.program_id(0) + first_seq, tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= num_queries * H:
        return
    length = tl.load(lens_ptr + seq)
    context = length - num_queries
    rows, rs, cs = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    live = rows < num_queries * H
    positions = context + rows // H
    place = start.to(tl.int64) * H + rows
    q_turned = tl.load(q_ptr + place[:, None] * D + rs[None, :], mask=live[:, None] & (rs < R)[None, :], other=0.0)
    q_latent = tl.load(q_ptr + place[:, None] * D + R + cs[None, :], mask=live[:, None] & (cs < C)[None, :], other=0.0)
    end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // H + 1)
    span = tl.cdiv(tl.cdiv(end, BLOCK_N), splits) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, end)

    unit = scale * LOG2E
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    for first in range(begin, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        block, slot = _tile_of_keys(table, first, end, BLOCK_N, BLOCK_SIZE, True)
        base = (block * BLOCK_SIZE + slot) * D
        # Not masked by `end`: the cache holds finite numbers only, and what lies beyond gets weight 0.
        turned = _load(k_ptr + base[:, None] + rs[None, :], (rs < R)[None, :], BLOCK_R == R)
        latent = _load(k_ptr + base[:, None] + R + cs[None, :], (cs < C)[None, :], BLOCK_C == C)
        s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_turned, tl.trans(turned), s, input_precision="ieee")
        s = tl.where((positions[:, None] >= at[None, :]) & (at < end)[None, :], s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 1) * unit)
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * unit - safe[:, None])
        alpha = tl.exp2(best - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
        best = new
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if SPLIT:
        part = place * splits + split
        tl.store(lse_ptr + part, tl.where(empty, float("-inf"), best + tl.log2(tl.where(empty, 1.0, total))), mask=live)
        tl.store(part_ptr + part[:, None] * C + cs[None, :], acc, mask=(live & (empty == 0))[:, None] & (cs < C)[None, :])
    else:
        out = out_ptr + place[:, None] * C + cs[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cs < C)[None, :])


def latent_attention(q: Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float) -> Tensor:
    """`OpSet.attention` with `kv.latent`: q [T, H, R + C] → [T, H, C]. Tiles are guesses that fit an H200's registers and
    shared memory at DeepSeek's 64 + 512; unmeasured so far."""
    if kv.k_scale is not None:
        raise ConfigError("latent attention has no 8-bit cache; use kv_cache_dtype='auto'", field="kv_cache_dtype")
    q = q.contiguous()
    (num_tokens, num_heads, head_dim), width = q.shape, kv.v.shape[3]
    out = torch.empty(num_tokens, num_heads, width, dtype=q.dtype, device=q.device)
    num_seqs, num_decodes = meta.seq_lens.shape[0], meta.num_decodes
    shape = dict(
        H=num_heads,
        R=head_dim - width,
        C=width,
        BLOCK_SIZE=kv.block_size,
        BLOCK_R=max(16, triton.next_power_of_2(head_dim - width)),
        BLOCK_C=max(16, triton.next_power_of_2(width)),
    )
    wide = q.dtype == torch.float32
    block_n = 16 if wide else 32

    def launch(first: int, count: int, max_query_len: int, splits: int, part: Tensor, lse: Tensor) -> None:
        num_rows = max_query_len * num_heads
        block_m = 16 if wide else min(64, max(16, triton.next_power_of_2(num_rows)))
        _latent_kernel[(count, triton.cdiv(num_rows, block_m), splits)](
            q, kv.k, out, part, lse, meta.block_table, meta.query_start_loc, meta.seq_lens, scale, meta.block_table.stride(0),
            first, splits, BLOCK_M=block_m, BLOCK_N=block_n, SPLIT=splits > 1, num_warps=8 if block_m == 64 else 4,
            num_stages=2, **shape,
        )  # fmt: skip

    if num_decodes:
        programs = num_decodes * triton.cdiv(num_heads, 64)
        splits = num_splits(programs, meta.max_seq_len, block_n, processors(q.device))
        part = lse = out
        if splits > 1:
            rows = num_decodes * num_heads * splits
            part = torch.empty(rows, width, dtype=torch.float32, device=q.device)
            lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        launch(0, num_decodes, 1, splits, part, lse)
        if splits > 1:
            _combine_kernel[(num_decodes * num_heads,)](
                part, lse, out, splits, D=width, BLOCK_D=shape["BLOCK_C"], MOST=MAX_SPLITS, PDL=False, num_warps=4
            )
    if num_seqs > num_decodes:
        launch(num_decodes, num_seqs - num_decodes, meta.max_query_len, 1, out, out)
    return out
