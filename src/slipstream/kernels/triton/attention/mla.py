"""Multi-head latent attention (DeepSeek) over the paged cache of latents, and the small kernels
around it.

A cached row is [rotated key R, latent C], one per token for all heads. The latent is also the
value, so a tile of rows is read once for both. out [T, H, C] = softmax(scale · q rowᵀ) latent, with
q [T, H, R + C].

1. One kernel serves decodes and prefill chunks. A token's heads are rows of one tile, so 16 to 128
   heads fill a tensor core with a single token. With few sequences the keys are split
   (`split_keys.py`).
2. Up to SMALL_BATCH tokens, the work before it (norm, rotary, cache write, queries times `keys`) is
   one kernel, and so is the work after it (merging splits, times `values`). For more tokens cuBLAS
   computes the two products.
3. Whole prompts of many tokens go to `mla_prefill.py`.

Limits: no 8-bit cache, window, soft cap or ALiBi; no such model has them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.layouts import MLAParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.attention.paged import (
    LOG2E,
    _load_tile,
    _locate_keys,
    _online_softmax,
)
from slipstream.kernels.triton.attention.split_keys import (
    MAX_SPLITS,
    combine,
    num_splits,
    scratch,
    store_sums,
)
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import _to_cache
from slipstream.platform import platform_of

SPLIT_KEYS = 32
"""Half of the minimum number of keys in a split."""
SMALL_BATCH = 8
"""Maximum number of tokens that are multiplied one by one, without tensor cores."""
TOKENS_PER_PROGRAM = 4
"""Tokens per thread block of `_rows_kernel` that writes the cache: a latent of 512 numbers for each
of its four warps."""
THRESHOLDS = Thresholds(tokens=(SMALL_BATCH,), decodes=(SMALL_BATCH,))


@triton.jit
def _load_cos_sin(table_ptr, positions, live, R: tl.constexpr, HALF: tl.constexpr):
    """Loads cosines and sines [N, HALF] of `positions` [N]; only the first R // 2 columns exist."""
    i = tl.arange(0, HALF)
    at, mask = (
        table_ptr + (positions * R)[:, None] + i[None, :],
        live[:, None] & (i < R // 2)[None, :],
    )
    return tl.load(at, mask=mask, other=0.0), tl.load(at + R // 2, mask=mask, other=0.0)


@triton.jit
def _rotate(at, live, cos, sin, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads R elements at `at` [N] and rotates them: the first of each pair and the second, float32
    [N, HALF] each."""
    if INTERLEAVED:
        r = tl.arange(0, 2 * HALF)
        x = tl.load(at[:, None] + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    else:
        i = tl.arange(0, HALF)
        mask = live[:, None] & (i < R // 2)[None, :]
        a = tl.load(at[:, None] + i[None, :], mask=mask, other=0.0)
        b = tl.load(at[:, None] + R // 2 + i[None, :], mask=mask, other=0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _interleave(a, b):
    """Interleaves the columns of two tensors [N, HALF] → [N, 2 · HALF]."""
    return tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _store_pairs(at, live, a, b, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store pairs in the order in which `_rotate` read them."""
    if INTERLEAVED:
        r = tl.arange(0, 2 * HALF)
        tl.store(at[:, None] + r[None, :], _interleave(a, b), mask=live[:, None] & (r < R)[None, :])
    else:
        i = tl.arange(0, HALF)
        mask = live[:, None] & (i < R // 2)[None, :]
        tl.store(at[:, None] + i[None, :], a, mask=mask)
        tl.store(at[:, None] + R // 2 + i[None, :], b, mask=mask)


@triton.jit
def _rotate_queries(
    q_ptr, out_ptr, positions_ptr, table_ptr, rows, live,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the rotary numbers of `rows` [N] (a token and head each) and store them before the
    latent part."""
    cos, sin = _load_cos_sin(
        table_ptr, tl.load(positions_ptr + rows // H, mask=live, other=0), live, R, HALF
    )
    offsets = rows.to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _rotate(q_ptr + offsets * (NOPE + R) + NOPE, live, cos, sin, R, HALF, INTERLEAVED)
    _store_pairs(out_ptr + offsets * (R + C), live, a.to(kind), b.to(kind), R, HALF, INTERLEAVED)


@triton.jit
def _cache_latents(
    row_ptr, k_ptr, latents_ptr, rotary_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, tokens, live, first,
    R: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, BLOCK_C: tl.constexpr, INTERLEAVED: tl.constexpr,
    RETURN_ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the keys and norm the latents of `tokens` [N], and write both to the cache.
    RETURN_ROWS: also write them to separate rows from token `first` on, the key pair by pair."""
    row = row_ptr + tokens * (C + R)
    # there is one kv head, so slots are contiguous through all blocks
    cached = k_ptr + tl.load(slots_ptr + tokens, mask=live, other=0) * (R + C)
    cos, sin = _load_cos_sin(
        table_ptr, tl.load(positions_ptr + tokens, mask=live, other=0), live, R, HALF
    )
    a, b = _rotate(row + C, live, cos, sin, R, HALF, INTERLEAVED)
    a, b = _to_cache(a, 1.0, k_ptr, False), _to_cache(b, 1.0, k_ptr, False)
    _store_pairs(cached, live, a, b, R, HALF, INTERLEAVED)
    cs = tl.arange(0, BLOCK_C)
    mask = live[:, None] & (cs < C)[None, :]
    x = tl.load(row[:, None] + cs[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + cs, mask=cs < C, other=0.0).to(tl.float32)
    x = _to_cache(
        x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None] * weight[None, :], 1.0, k_ptr, False
    )
    tl.store(cached[:, None] + R + cs[None, :], x, mask=mask)
    if RETURN_ROWS:
        _store_pairs(rotary_ptr + (tokens - first) * R, live, a, b, R, HALF, True)
        tl.store(latents_ptr + ((tokens - first) * C)[:, None] + cs[None, :], x, mask=mask)


@triton.jit
def _small_batch_kernel(
    q_ptr, row_ptr, out_ptr, k_ptr, keys_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, HALF: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one token. Thread block 0 rotates all heads' queries and the key, norms the latent
    and writes the cache. The others multiply a head's non-rotary numbers with BLOCK_COLS columns of
    its `keys`."""
    token, pid = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pid > 0:
        slices: tl.constexpr = (C + BLOCK_COLS - 1) // BLOCK_COLS
        head = (pid - 1) // slices
        cs, ps = (
            (pid - 1) % slices * BLOCK_COLS + tl.arange(0, BLOCK_COLS),
            tl.arange(0, BLOCK_NOPE),
        )
        live = (ps < NOPE)[:, None] & (cs < C)[None, :]
        w = tl.load(
            keys_ptr + (head * NOPE + ps)[:, None] * C + cs[None, :], mask=live, other=0.0
        ).to(tl.float32)
        if PDL:
            pdl_wait()
        x = tl.load(q_ptr + (token * H + head) * (NOPE + R) + ps, mask=ps < NOPE, other=0.0).to(
            tl.float32
        )
        y = tl.sum(w * x[:, None], 0)
        tl.store(
            out_ptr + (token * H + head) * (R + C) + R + cs,
            y.to(out_ptr.dtype.element_ty),
            mask=cs < C,
        )
        return
    if PDL:
        pdl_wait()
    for h in range(0, H, BLOCK_H):
        heads = h + tl.arange(0, BLOCK_H)
        _rotate_queries(
            q_ptr, out_ptr, positions_ptr, table_ptr, tl.program_id(0) * H + heads, heads < H, H, NOPE, R, C, HALF, INTERLEAVED
        )  # fmt: skip
    tokens = token + tl.arange(0, 1)
    _cache_latents(
        row_ptr, k_ptr, k_ptr, k_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, tokens, tokens >= 0, 0,
        R, C, HALF, BLOCK_C, INTERLEAVED, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "T", "row_programs"])
def _rows_kernel(
    q_ptr, row_ptr, out_ptr, k_ptr, latents_ptr, rotary_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, first, T,
    row_programs,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr,
    RETURN_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, HALF: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process tokens `first` … T − 1. The first `row_programs` thread blocks cache BLOCK_T tokens
    each. The others, if any, rotate BLOCK_Q queries each, where every head of a token counts as
    one."""
    if PDL:
        pdl_wait()
    pid = tl.program_id(0)
    if pid < row_programs:
        tokens = first + pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        _cache_latents(
            row_ptr, k_ptr, latents_ptr, rotary_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, tokens, tokens < T,
            first, R, C, HALF, BLOCK_C, INTERLEAVED, RETURN_ROWS,
        )  # fmt: skip
    else:
        rows = (pid - row_programs) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        _rotate_queries(
            q_ptr,
            out_ptr,
            positions_ptr,
            table_ptr,
            rows,
            rows < T * H,
            H,
            NOPE,
            R,
            C,
            HALF,
            INTERLEAVED,
        )


def mla_queries(
    q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
) -> Tensor:
    """`OpSet.mla_queries`."""
    keys, cos_sin, norm, eps = params.keys, params.cos_sin, params.norm.weight, params.norm.eps
    (num_tokens, (num_heads, nope_dim, rank)), rope_dim = (len(q), keys.shape), cos_sin.shape[1]
    out = torch.empty(num_tokens, num_heads, rope_dim + rank, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q, row = q.contiguous(), row.contiguous()
    shape = _row_shape(params, rank)
    if num_tokens <= SMALL_BATCH:
        columns = 64
        _small_batch_kernel[(num_tokens, 1 + num_heads * triton.cdiv(rank, columns))](
            q, row, out, kv.k, keys, norm, meta.positions, meta.slot_mapping, cos_sin, eps, H=num_heads, NOPE=nope_dim,
            BLOCK_H=min(64, triton.next_power_of_2(num_heads)), BLOCK_NOPE=triton.next_power_of_2(nope_dim), BLOCK_COLS=columns,
            num_warps=4, **shape, **pdl_options(q),
        )  # fmt: skip
        return out
    rotate_and_cache(q, row, out, kv, meta, params)
    torch.bmm(q[:, :, :nope_dim].transpose(0, 1), keys, out=out[:, :, rope_dim:].transpose(0, 1))
    return out


def rotate_and_cache(
    q: Tensor, row: Tensor, out: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
) -> None:
    """Write `mla_queries`' rotary numbers to `out`, and its rows to the cache."""
    num_tokens, num_heads, width = q.shape
    row_programs, block_q = triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), 64
    _rows_kernel[(row_programs + triton.cdiv(num_tokens * num_heads, block_q),)](
        q, row, out, kv.k, out, out, params.norm.weight, meta.positions, meta.slot_mapping, params.cos_sin,
        params.norm.eps, 0, num_tokens, row_programs, H=num_heads, NOPE=width - params.rotary_dim, RETURN_ROWS=False,
        BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_Q=block_q, num_warps=4, **_row_shape(params, params.keys.shape[2]),
        **pdl_options(q),
    )  # fmt: skip


def cache_latents(
    row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams, *, first: int
) -> tuple[Tensor, Tensor]:
    """Write the tokens from `first` on of `row` [T, C + R] to the cache, as `mla_queries` does.
    Returns their latents [T − first, C] and rotated keys [T − first, R], pair by pair."""
    num_tokens, cos_sin, rope_dim = len(row), params.cos_sin, params.rotary_dim
    rank, count = row.shape[1] - rope_dim, num_tokens - first
    latents, rotary_keys = row.new_empty(count, rank), row.new_empty(count, rope_dim)
    row, programs = row.contiguous(), triton.cdiv(count, TOKENS_PER_PROGRAM)
    _rows_kernel[(programs,)](
        row, row, row, kv.k, latents, rotary_keys, params.norm.weight, meta.positions, meta.slot_mapping, cos_sin,
        params.norm.eps, first, num_tokens, programs, H=1, NOPE=0, RETURN_ROWS=True, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_Q=1,
        num_warps=4, **_row_shape(params, rank), **pdl_options(row),
    )  # fmt: skip
    return latents, rotary_keys


def _row_shape(params: MLAParams, rank: int) -> dict[str, int | bool]:
    rope_dim = params.rotary_dim
    half, block_c = triton.next_power_of_2(rope_dim // 2), triton.next_power_of_2(rank)
    return dict(R=rope_dim, C=rank, INTERLEAVED=params.interleaved, HALF=half, BLOCK_C=block_c)


@triton.jit(do_not_specialize=["splits"])
def _combine_values_kernel(
    partial_ptr, lse_ptr, values_ptr, out_ptr, splits,
    H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_V values of a (sequence, head): its splits merged as in `split_keys`, times
    `values`."""
    row = tl.program_id(0)
    cs, vs, at = (
        tl.arange(0, BLOCK_C),
        tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V),
        tl.arange(0, BLOCK_S),
    )
    live = (cs < C)[:, None] & (vs < V)[None, :]
    w = tl.load(values_ptr + (row % H * C + cs)[:, None] * V + vs[None, :], mask=live, other=0.0)
    if PDL:
        pdl_wait()
    lse = tl.load(lse_ptr + row * splits + at, mask=at < splits, other=float("-inf"))
    m_i = tl.max(lse, 0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = tl.sum(tl.exp2(lse - m_i), 0)
    latent = tl.zeros((BLOCK_C,), tl.float32)
    for split in range(splits):
        size = tl.load(lse_ptr + row * splits + split)
        partial = partial_ptr + (row * splits + split).to(tl.int64) * C + cs
        latent += tl.exp2(size - m_i) * tl.load(
            partial, mask=cs < tl.where(size == float("-inf"), 0, C), other=0.0
        )
    latent = (latent / tl.where(l_i == 0.0, 1.0, l_i)).to(w.dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * latent[:, None], 0)
    tl.store(out_ptr + row * V + vs, y.to(out_ptr.dtype.element_ty), mask=vs < V)


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs", "splits"])
def _mla_kernel(
    q_ptr, k_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, starts_ptr, lens_ptr, limits_ptr, scale, table_stride,
    first_seq, num_seqs, splits,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SPLIT: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M (token, head) rows of a sequence over one split of its keys. Of a row, R
    numbers are rotary and C the latent's. Sequences and tiles share the grid's first dimension: the
    others end at 65,535, and 16,384 tokens of 128 heads are more tiles. SUMS: as in
    `paged._prefill_kernel`."""
    D: tl.constexpr = R + C
    if PDL:
        pdl_wait()
    seq, split = tl.program_id(0) % num_seqs + first_seq, tl.program_id(1)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_seqs  # longest first
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= num_queries * H:
        return
    length = tl.load(lens_ptr + seq)
    context = length - num_queries
    rows, rs, cs = (
        tile * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_R),
        tl.arange(0, BLOCK_C),
    )
    live = rows < num_queries * H
    positions = context + rows // H
    if SUMS:
        positions = tl.load(limits_ptr + start + rows // H, mask=live, other=0) - 1
    offset = start.to(tl.int64) * H + rows
    q_rotary = tl.load(
        q_ptr + offset[:, None] * D + rs[None, :], mask=live[:, None] & (rs < R)[None, :], other=0.0
    )
    q_latent = tl.load(
        q_ptr + offset[:, None] * D + R + cs[None, :],
        mask=live[:, None] & (cs < C)[None, :],
        other=0.0,
    )
    end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // H + 1)
    if SUMS:
        end = tl.max(positions, 0) + 1
    span = tl.cdiv(tl.cdiv(end, BLOCK_N), splits) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, end)

    to_log2 = scale * LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    for first in range(begin, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        block, slot = _locate_keys(table, first, end, BLOCK_N, BLOCK_SIZE, True)
        base = (block * BLOCK_SIZE + slot) * D
        # Not masked by `end`: the cache has finite numbers only, and keys beyond the end get weight
        # 0.
        rotary_keys = _load_tile(
            k_ptr + base[:, None] + rs[None, :], (rs < R)[None, :], BLOCK_R == R
        )
        latent = _load_tile(
            k_ptr + base[:, None] + R + cs[None, :], (cs < C)[None, :], BLOCK_C == C
        )
        s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_rotary, tl.trans(rotary_keys), s, input_precision="ieee")
        s = tl.where((positions[:, None] >= at[None, :]) & (at < end)[None, :], s, float("-inf"))
        p, alpha, m_i, l_i = _online_softmax(s, to_log2, m_i, l_i)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[:, None]
    if SPLIT:
        partial = offset * splits + split
        tl.store(
            lse_ptr + partial,
            tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i))),
            mask=live,
        )
        tl.store(
            partial_ptr + partial[:, None] * C + cs[None, :],
            acc,
            mask=(live & (empty == 0))[:, None] & (cs < C)[None, :],
        )
    else:
        if SUMS:
            store_sums(out_ptr + offset * (C + SUMS) + C, m_i, l_i, live)
        out = out_ptr + offset[:, None] * (C + SUMS) + cs[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cs < C)[None, :])


def reject_8bit_cache(kv: LayerKV) -> None:
    if kv.k_scale is not None:
        raise ConfigError(
            "latent attention has no 8-bit cache; use kv_cache_dtype='auto'", field="kv_cache_dtype"
        )


def mla_paged_attention(
    q: Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, values: Tensor | None = None
) -> Tensor:
    """`OpSet.attention` or `attention_part` with `kv.latent`: q [T, H, R + C] → [T, H, C]. With `values` it is
    `OpSet.mla_paged_attention`."""
    reject_8bit_cache(kv)
    q = q.contiguous()
    (num_tokens, num_heads, head_dim), width = q.shape, kv.v.shape[3]
    sums = 0 if meta.limits is None else 4 // q.element_size()
    out = torch.empty(num_tokens, num_heads, width + sums, dtype=q.dtype, device=q.device)
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

    def default_tile(count: int) -> tuple[int, int, int, int]:
        """Tile measured on an H200 (benchmarks/GPU_NOTES.md)."""
        if wide:
            return 16, 16, 4, 2
        return (16, 16, 2, 3) if count <= 16 else (32, 32, 4, 2)

    def launch(
        first: int, count: int, max_query_len: int, splits: int, partial: Tensor, lse: Tensor
    ) -> None:
        num_rows = max_query_len * num_heads
        block_m, block_n, warps, stages = default_tile(num_rows)
        _mla_kernel[(count * triton.cdiv(num_rows, block_m), splits)](
            q, kv.k, out, partial, lse, meta.block_table, meta.query_start_loc, meta.seq_lens,
            q if meta.limits is None else meta.limits, scale, meta.block_table.stride(0), first, count, splits,
            BLOCK_M=block_m, BLOCK_N=block_n, SPLIT=splits > 1, SUMS=sums, num_warps=warps, num_stages=stages,
            **shape, **pdl_options(q),
        )  # fmt: skip

    if num_decodes:
        programs = num_decodes * triton.cdiv(num_heads, default_tile(num_heads)[0])
        splits = num_splits(
            programs, meta.max_seq_len, SPLIT_KEYS, platform_of(q.device).multiprocessors
        )
        partial = lse = out
        if splits > 1:
            partial, lse = scratch(num_decodes, q, width, splits)
        launch(0, num_decodes, 1, splits, partial, lse)
        if splits > 1 and values is not None and num_decodes == num_tokens <= SMALL_BATCH:
            projected = torch.empty(
                num_tokens, num_heads * values.shape[2], dtype=q.dtype, device=q.device
            )
            _combine_values_kernel[(num_decodes * num_heads, triton.cdiv(values.shape[2], 32))](
                partial, lse, values, projected, splits, H=num_heads, C=width, V=values.shape[2], BLOCK_C=shape["BLOCK_C"],
                BLOCK_V=32, BLOCK_S=MAX_SPLITS, num_warps=4, **pdl_options(q),
            )  # fmt: skip
            return projected
        if splits > 1:
            combine(partial, lse, out[:num_decodes], splits, sums=sums)
    if num_seqs > num_decodes:
        launch(num_decodes, num_seqs - num_decodes, meta.max_query_len, 1, out, out)
    if values is None:
        return out
    projected = torch.empty(num_tokens, num_heads, values.shape[2], dtype=q.dtype, device=q.device)
    torch.bmm(out.transpose(0, 1), values, out=projected.transpose(0, 1))
    return projected.flatten(1)
