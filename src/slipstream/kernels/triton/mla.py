"""Attention over a cache of latents (DeepSeek): all heads read one row a token, [rotated key, latent], and the latent is the
value, too, so that a tile of rows is read once for both. One kernel for decodes and prefill chunks; few sequences are split
over several programs, whose parts `attention.py` combines.

A token's heads stand in one tile, as rows of its products: 16 to 128 heads fill a tensor core also when each sequence has one
token. Without 8-bit caches, windows, caps or ALiBi: no such model has them.

What goes before and behind is done for few tokens (FEW) in one kernel each: norm, rotation, cache and the queries' product with
`keys`; the parts' sum and its product with `values`. For more the two products are the library's. Many tokens of whole prompts
are `latent_prompts`'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.triton.attention import (
    LOG2E,
    MAX_SPLITS,
    _combine_kernel,
    _load,
    _softened,
    _tile_of_keys,
    num_splits,
)
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.pointwise import _cached
from slipstream.platform import platform_of

SPLIT_KEYS = 32
"""A part of a sequence has at least twice as many keys."""
FEW = 8
"""Up to so many tokens each multiplies for itself, without tensor cores."""
ROW_TOKENS = 4
"""Tokens of a program that remembers many: a latent of 512 numbers for each of its four warps."""


@triton.jit
def _angles(table_ptr, positions, live, R: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [N, HALF] of `positions` [N], of which R // 2 are there."""
    i = tl.arange(0, HALF)
    at, there = table_ptr + (positions * R)[:, None] + i[None, :], live[:, None] & (i < R // 2)[None, :]
    return tl.load(at, mask=there, other=0.0), tl.load(at + R // 2, mask=there, other=0.0)


@triton.jit
def _turned(at, live, cos, sin, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The R rotary numbers at `at` [N], turned: the first of each pair and the second, float32 [N, HALF] each."""
    if INTERLEAVED:
        r = tl.arange(0, 2 * HALF)
        x = tl.load(at[:, None] + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    else:
        i = tl.arange(0, HALF)
        there = live[:, None] & (i < R // 2)[None, :]
        a = tl.load(at[:, None] + i[None, :], mask=there, other=0.0)
        b = tl.load(at[:, None] + R // 2 + i[None, :], mask=there, other=0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _joined(a, b):
    """[N, HALF] twice → [N, 2 HALF], pair by pair."""
    return tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _store_pairs(at, live, a, b, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where `_turned` found them."""
    if INTERLEAVED:
        r = tl.arange(0, 2 * HALF)
        tl.store(at[:, None] + r[None, :], _joined(a, b), mask=live[:, None] & (r < R)[None, :])
    else:
        i = tl.arange(0, HALF)
        there = live[:, None] & (i < R // 2)[None, :]
        tl.store(at[:, None] + i[None, :], a, mask=there)
        tl.store(at[:, None] + R // 2 + i[None, :], b, mask=there)


@triton.jit
def _turn_queries(
    q_ptr,
    out_ptr,
    positions_ptr,
    table_ptr,
    rows,
    live,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The rotary numbers of `rows` [N], a token and head each, turned and in front of where their products come."""
    cos, sin = _angles(table_ptr, tl.load(positions_ptr + rows // H, mask=live, other=0), live, R, HALF)
    places = rows.to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _turned(q_ptr + places * (P + R) + P, live, cos, sin, R, HALF, INTERLEAVED)
    _store_pairs(out_ptr + places * (R + C), live, a.to(kind), b.to(kind), R, HALF, INTERLEAVED)


@triton.jit
def _remember(
    row_ptr,
    k_ptr,
    latents_ptr,
    turned_ptr,
    norm_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    tokens,
    live,
    first,
    R: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Of `tokens` [N]: the key turned and the latent normed, into the cache, and with KEEP as they are there into rows of their
    own from token `first` on, the key pair by pair."""
    row = row_ptr + tokens * (C + R)
    # one kv head: slots follow one another through all blocks
    cached = k_ptr + tl.load(slots_ptr + tokens, mask=live, other=0) * (R + C)
    cos, sin = _angles(table_ptr, tl.load(positions_ptr + tokens, mask=live, other=0), live, R, HALF)
    a, b = _turned(row + C, live, cos, sin, R, HALF, INTERLEAVED)
    a, b = _cached(a, 1.0, k_ptr, False), _cached(b, 1.0, k_ptr, False)
    _store_pairs(cached, live, a, b, R, HALF, INTERLEAVED)
    cs = tl.arange(0, BLOCK_C)
    there = live[:, None] & (cs < C)[None, :]
    x = tl.load(row[:, None] + cs[None, :], mask=there, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + cs, mask=cs < C, other=0.0).to(tl.float32)
    x = _cached(x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None] * weight[None, :], 1.0, k_ptr, False)
    tl.store(cached[:, None] + R + cs[None, :], x, mask=there)
    if KEEP:
        _store_pairs(turned_ptr + (tokens - first) * R, live, a, b, R, HALF, True)
        tl.store(latents_ptr + ((tokens - first) * C)[:, None] + cs[None, :], x, mask=there)


@triton.jit
def _few_kernel(
    q_ptr,
    row_ptr,
    out_ptr,
    k_ptr,
    keys_ptr,
    norm_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a token: program 0 turns the rotary numbers of all heads and of the key, norms the latent, and writes both into the
    cache; the others multiply a head's plain numbers with SLICE columns of its `keys`."""
    token, pid = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pid > 0:
        slices: tl.constexpr = (C + SLICE - 1) // SLICE
        head = (pid - 1) // slices
        cs, ps = (pid - 1) % slices * SLICE + tl.arange(0, SLICE), tl.arange(0, BLOCK_P)
        live = (ps < P)[:, None] & (cs < C)[None, :]
        w = tl.load(keys_ptr + (head * P + ps)[:, None] * C + cs[None, :], mask=live, other=0.0).to(tl.float32)
        if PDL:
            pdl_wait()
        x = tl.load(q_ptr + (token * H + head) * (P + R) + ps, mask=ps < P, other=0.0).to(tl.float32)
        y = tl.sum(w * x[:, None], 0)
        tl.store(out_ptr + (token * H + head) * (R + C) + R + cs, y.to(out_ptr.dtype.element_ty), mask=cs < C)
        return
    if PDL:
        pdl_wait()
    for h in range(0, H, BLOCK_H):
        heads = h + tl.arange(0, BLOCK_H)
        _turn_queries(
            q_ptr, out_ptr, positions_ptr, table_ptr, tl.program_id(0) * H + heads, heads < H, H, P, R, C, HALF, INTERLEAVED
        )  # fmt: skip
    tokens = token + tl.arange(0, 1)
    _remember(
        row_ptr, k_ptr, k_ptr, k_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, tokens, tokens >= 0, 0,
        R, C, HALF, BLOCK_C, INTERLEAVED, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "T", "row_programs"])
def _many_kernel(
    q_ptr,
    row_ptr,
    out_ptr,
    k_ptr,
    latents_ptr,
    turned_ptr,
    norm_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    first,
    T,
    row_programs,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of tokens `first` … T − 1: the first `row_programs` programs remember BLOCK_T tokens each, the others, if any, turn the
    rotary numbers of BLOCK_Q queries, a token's heads being one each."""
    if PDL:
        pdl_wait()
    pid = tl.program_id(0)
    if pid < row_programs:
        tokens = first + pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        _remember(
            row_ptr, k_ptr, latents_ptr, turned_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, eps, tokens, tokens < T,
            first, R, C, HALF, BLOCK_C, INTERLEAVED, KEEP,
        )  # fmt: skip
    else:
        rows = (pid - row_programs) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        _turn_queries(q_ptr, out_ptr, positions_ptr, table_ptr, rows, rows < T * H, H, P, R, C, HALF, INTERLEAVED)


def mla_queries(
    q: Tensor,
    row: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    *,
    keys: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """`OpSet.mla_queries`."""
    (num_tokens, (num_heads, plain, rank)), rotary = (len(q), keys.shape), cos_sin.shape[1]
    out = torch.empty(num_tokens, num_heads, rotary + rank, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q, row = q.contiguous(), row.contiguous()
    shape = _row_shape(cos_sin, rank, interleaved)
    if num_tokens <= FEW:
        columns = 64
        _few_kernel[(num_tokens, 1 + num_heads * triton.cdiv(rank, columns))](
            q, row, out, kv.k, keys, norm, meta.positions, meta.slot_mapping, cos_sin, eps, H=num_heads, P=plain,
            BLOCK_H=min(64, triton.next_power_of_2(num_heads)), BLOCK_P=triton.next_power_of_2(plain), SLICE=columns,
            num_warps=4, **shape, **overlapped(q),
        )  # fmt: skip
        return out
    row_programs, block_q = triton.cdiv(num_tokens, ROW_TOKENS), 64
    _many_kernel[(row_programs + triton.cdiv(num_tokens * num_heads, block_q),)](
        q, row, out, kv.k, out, out, norm, meta.positions, meta.slot_mapping, cos_sin, eps, 0, num_tokens, row_programs,
        H=num_heads, P=plain, KEEP=False, BLOCK_T=ROW_TOKENS, BLOCK_Q=block_q, num_warps=4, **shape, **overlapped(q),
    )  # fmt: skip
    torch.bmm(q[:, :, :plain].transpose(0, 1), keys, out=out[:, :, rotary:].transpose(0, 1))
    return out


def latent_rows(
    row: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    *,
    first: int,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Of row [T, C + R], from token `first` on, what `mla_queries` leaves in the cache: there, and as latents [T − first, C]
    and turned keys [T − first, R], pair by pair."""
    num_tokens, rotary = len(row), cos_sin.shape[1]
    rank, count = row.shape[1] - rotary, num_tokens - first
    latents, turned = row.new_empty(count, rank), row.new_empty(count, rotary)
    row, programs = row.contiguous(), triton.cdiv(count, ROW_TOKENS)
    _many_kernel[(programs,)](
        row, row, row, kv.k, latents, turned, norm, meta.positions, meta.slot_mapping, cos_sin, eps, first, num_tokens,
        programs, H=1, P=0, KEEP=True, BLOCK_T=ROW_TOKENS, BLOCK_Q=1, num_warps=4,
        **_row_shape(cos_sin, rank, interleaved), **overlapped(row),
    )  # fmt: skip
    return latents, turned


def _row_shape(cos_sin: Tensor, rank: int, interleaved: bool) -> dict[str, int | bool]:
    rotary = cos_sin.shape[1]
    half, block_c = triton.next_power_of_2(rotary // 2), triton.next_power_of_2(rank)
    return dict(R=rotary, C=rank, INTERLEAVED=interleaved, HALF=half, BLOCK_C=block_c)


@triton.jit(do_not_specialize=["splits"])
def _values_kernel(
    part_ptr,
    lse_ptr,
    values_ptr,
    out_ptr,
    splits,
    H: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_V values of a (sequence, head): its parts' sum, as `_combine_kernel` makes it, times `values`."""
    row = tl.program_id(0)
    cs, vs, at = tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, MOST)
    live = (cs < C)[:, None] & (vs < V)[None, :]
    w = tl.load(values_ptr + (row % H * C + cs)[:, None] * V + vs[None, :], mask=live, other=0.0)
    if PDL:
        pdl_wait()
    lse = tl.load(lse_ptr + row * splits + at, mask=at < splits, other=float("-inf"))
    best = tl.max(lse, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(lse - best), 0)
    seen = tl.zeros((BLOCK_C,), tl.float32)
    for split in range(splits):
        size = tl.load(lse_ptr + row * splits + split)
        part = part_ptr + (row * splits + split).to(tl.int64) * C + cs
        seen += tl.exp2(size - best) * tl.load(part, mask=cs < tl.where(size == float("-inf"), 0, C), other=0.0)
    seen = (seen / tl.where(total == 0.0, 1.0, total)).to(w.dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * seen[:, None], 0)
    tl.store(out_ptr + row * V + vs, y.to(out_ptr.dtype.element_ty), mask=vs < V)


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs", "splits"])
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
    num_seqs,
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
    PDL: tl.constexpr,
):
    """One program a (sequence, BLOCK_M of its tokens' heads; part of its keys). R numbers are rotated, C are the latent's.
    Sequences and tiles are one dimension, since a grid's others end at 65,535: 16,384 tokens of 128 heads are more tiles."""
    D: tl.constexpr = R + C
    if PDL:
        pdl_wait()
    seq, split = tl.program_id(0) % num_seqs + first_seq, tl.program_id(1)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_seqs  # the longest first
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
        p, fade, best, total = _softened(s, unit, best, total)
        acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if SPLIT:
        part = place * splits + split
        tl.store(lse_ptr + part, tl.where(empty, float("-inf"), best + tl.log2(tl.where(empty, 1.0, total))), mask=live)
        tl.store(part_ptr + part[:, None] * C + cs[None, :], acc, mask=(live & (empty == 0))[:, None] & (cs < C)[None, :])
    else:
        out = out_ptr + place[:, None] * C + cs[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cs < C)[None, :])


def refuse_8_bits(kv: LayerKV) -> None:
    if kv.k_scale is not None:
        raise ConfigError("latent attention has no 8-bit cache; use kv_cache_dtype='auto'", field="kv_cache_dtype")


def mla_paged_attention(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    *,
    scale: float,
    values: Tensor | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """`OpSet.attention` with `kv.latent`: q [T, H, R + C] → [T, H, C]; with `values` `OpSet.mla_paged_attention`. `tile`:
    (BLOCK_M, BLOCK_N, warps, stages)."""
    refuse_8_bits(kv)
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

    def of_rows(count: int) -> tuple[int, int, int, int]:
        """Measured on an H200 (`benchmarks/results/gpu_decode_tiles.json`)."""
        if wide:
            return 16, 16, 4, 2
        return (16, 16, 2, 3) if count <= 16 else (32, 32, 4, 2)

    def launch(first: int, count: int, max_query_len: int, splits: int, part: Tensor, lse: Tensor) -> None:
        num_rows = max_query_len * num_heads
        block_m, block_n, warps, stages = tile or of_rows(num_rows)
        _latent_kernel[(count * triton.cdiv(num_rows, block_m), splits)](
            q, kv.k, out, part, lse, meta.block_table, meta.query_start_loc, meta.seq_lens, scale, meta.block_table.stride(0),
            first, count, splits, BLOCK_M=block_m, BLOCK_N=block_n, SPLIT=splits > 1, num_warps=warps,
            num_stages=stages, **shape, **overlapped(q),
        )  # fmt: skip

    if num_decodes:
        programs = num_decodes * triton.cdiv(num_heads, of_rows(num_heads)[0])
        splits = num_splits(programs, meta.max_seq_len, SPLIT_KEYS, platform_of(q.device).multiprocessors)
        part = lse = out
        if splits > 1:
            rows = num_decodes * num_heads * splits
            part = torch.empty(rows, width, dtype=torch.float32, device=q.device)
            lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        launch(0, num_decodes, 1, splits, part, lse)
        if splits > 1 and values is not None and num_decodes == num_tokens <= FEW:
            made = torch.empty(num_tokens, num_heads * values.shape[2], dtype=q.dtype, device=q.device)
            _values_kernel[(num_decodes * num_heads, triton.cdiv(values.shape[2], 32))](
                part, lse, values, made, splits, H=num_heads, C=width, V=values.shape[2], BLOCK_C=shape["BLOCK_C"],
                BLOCK_V=32, MOST=MAX_SPLITS, num_warps=4, **overlapped(q),
            )  # fmt: skip
            return made
        if splits > 1:
            _combine_kernel[(num_decodes * num_heads,)](
                part, lse, out, splits, D=width, BLOCK_D=shape["BLOCK_C"], MOST=MAX_SPLITS, num_warps=4, **overlapped(q)
            )
    if num_seqs > num_decodes:
        launch(num_decodes, num_seqs - num_decodes, meta.max_query_len, 1, out, out)
    if values is None:
        return out
    made = torch.empty(num_tokens, num_heads, values.shape[2], dtype=q.dtype, device=q.device)
    torch.bmm(out.transpose(0, 1), values, out=made.transpose(0, 1))
    return made.flatten(1)
