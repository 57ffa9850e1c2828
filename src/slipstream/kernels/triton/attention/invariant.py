"""Attention over the paged cache in which a token's sums depend on its position alone
(`deterministic`).

Keys are taken in *parts* of PART from key 0 on, whatever a step holds. A part has an online softmax
of its own, in tiles of BLOCK_N keys, and parts are folded in their order:

    m' = max(m, mₚ);  l' = l · 2^(m − m') + lₚ · 2^(mₚ − m');  o' = o · 2^(m − m') + oₚ · 2^(mₚ − m')

1. With many queries a thread block walks along all parts of a tile of queries and folds as it goes.
2. With few, parts go to thread blocks of their own, and the last of a tile to end folds them. So a
   lone sequence fills the chip, and who computes a part changes no bit.
3. Over latents (`LayerKV.latent`) a key is R rotary numbers and the latent, which is its value, too.

What is masked adds 0 and multiplies by 1, so a row's sums do not depend on the other rows of its
tile either. Multiplications with an addition after them are written as `fma`, so that no variant of
a kernel rounds between them where another does not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention.paged import (
    LOG2E,
    _load_keys_and_values,
    _load_tile,
    _locate_keys,
    _scores,
    _to_dtype,
)
from slipstream.kernels.triton.gluon_support import runs_on_hopper
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.platform import platform_of

PART, BLOCK_N = 256, 32
"""Keys of a part and of a tile. Both are in the sums: other numbers give other bits."""
ROWS = 16
"""Query rows (tokens × G) of one warp's tile."""
PROMPT_ROWS = 64
"""Rows of a tile of prompts on Hopper, whose four warps have 16 each. With 16-bit numbers both kinds
of tensor-core instruction (HMMA, HGMMA) give the same bits."""
ROWS_OF_8_BITS = 16
"""Rows of every tile over an 8-bit cache. Its codes are widened in registers, where HMMA is given the
inputs of a row in another order than HGMMA is."""
SUMMED = 128
"""Largest head dimension over 16-bit caches for which the sum of a tile's weights is a tensor core's.
Then it does not follow the number of warps, and decodes in parts have four a tile."""
STAGES = 6
"""Tiles of keys on their way to a decode's thread block."""
FEW_PROGRAMS = 8
"""Thread blocks a multiprocessor below which parts go to thread blocks of their own."""
MAX_SCRATCH = 2**24
"""Maximum number of elements of parts written to memory, 64 MB."""
AT_ONCE = tl.constexpr(8)
"""Parts that a thread block loads at once when it folds those of others."""
FOLDED = 512
"""Number of outputs that each warp folds at once, in whole rows."""


@triton.jit
def _fold(acc, m, l, part_acc, part_m, part_l):
    """Fold a part into the sums before it. Where `l` is a sink's 1, `fma(l, before, x · y)` would
    become `before + x · y` and be rounded once: products are `fma`, too."""
    new = tl.maximum(m, part_m)
    safe = tl.where(new == float("-inf"), 0.0, new)
    before, here = tl.exp2(m - safe), tl.exp2(part_m - safe)
    wide = tl.broadcast_to(here[:, None], acc.shape)
    part_acc = tl.fma(part_acc, wide, tl.zeros(acc.shape, tl.float32))
    part_l = tl.fma(part_l, here, tl.zeros(l.shape, tl.float32))
    acc = tl.fma(acc, tl.broadcast_to(before[:, None], acc.shape), part_acc)
    return acc, new, tl.fma(l, before, part_l)


@triton.jit
def _part(
    q, q_rotary, start, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BY_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr, CAUSAL: tl.constexpr, BY_CORE: tl.constexpr,
):  # fmt: skip
    """Computes outputs, maxima and sums over one part of the keys, `start` … `end`."""
    m = tl.full((q.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros((q.shape[0], BLOCK_D), tl.float32)
    for at_tile in range(start, end, BLOCK_N):
        at = at_tile + tl.arange(0, BLOCK_N)
        if R > 0:
            block, slot = _locate_keys(table, at_tile, end, BLOCK_N, BLOCK_SIZE, True)
            row, rs = (block * BLOCK_SIZE + slot) * (R + D), tl.arange(0, q_rotary.shape[1])
            k = _load_tile(k_ptr + row[:, None] + R + ds[None, :], (ds < D)[None, :], BLOCK_D == D)
            turned = _load_tile(
                k_ptr + row[:, None] + rs[None, :], (rs < R)[None, :], q_rotary.shape[1] == R
            )
            v = k
        else:
            k, v = _load_keys_and_values(
                k_ptr, v_ptr, table, at_tile, end, head, ds, K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, True, False
            )  # fmt: skip
        distance = positions[:, None] - at[None, :]
        s = tl.dot(q, tl.trans(_to_dtype(k, q.dtype)), input_precision="ieee")
        if R > 0:
            s = tl.dot(q_rotary, tl.trans(turned), s, input_precision="ieee")
        s, to_log2 = _scores(
            s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS
        )
        s = tl.where(distance >= 0 if CAUSAL else (at < end)[None, :], s, float("-inf"))
        if HAS_WINDOW:
            s = tl.where((distance if CAUSAL else tl.abs(distance)) < window, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1) * to_log2)
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.full(s.shape, 1.0, tl.float32) * to_log2
        p = tl.exp2(tl.fma(s, factor, tl.broadcast_to(-safe[:, None], s.shape)))
        alpha = tl.exp2(m - safe)
        given = p.to(q.dtype)
        if BY_CORE:
            ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
            total = tl.max(tl.dot(given, ones, input_precision="ieee"), 1)
        else:
            total = tl.sum(p, 1)
        l = tl.fma(l, alpha, total)
        acc = tl.dot(given, _to_dtype(v, q.dtype), acc * alpha[:, None], input_precision="ieee")
        m = new
    return acc, m, l


@triton.jit
def _prefetch_blocks(ptr, entry, head, whole, size: tl.constexpr):
    """Prefetch the `size` numbers of a head in each of some blocks to L2."""
    at = ptr + entry.to(tl.int64) * whole + head * size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at, size * (ptr.dtype.element_ty.primitive_bitwidth // 8)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["window", "table_stride", "reach", "first_seq", "num_parts", "lanes"]
)
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, max_ptr, sum_ptr, table_ptr, starts_ptr, lens_ptr, slopes_ptr, bias_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr, arrived_ptr, scale, softcap, window, table_stride, reach, first_seq, num_parts,
    lanes, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALED: tl.constexpr, BY_DIM: tl.constexpr, SPLIT: tl.constexpr, FOLDED: tl.constexpr,
    BLOCK_R: tl.constexpr, BY_CORE: tl.constexpr, PREFETCH: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of a (kv head, sequence), over all parts of their keys or, with SPLIT,
    over each `lanes`-th part. A row is a token and one of the G heads of the kv head."""
    head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    tile = tl.program_id(2)
    lane = tile % lanes
    if PDL:
        if PREFETCH:
            # A hint: of keys that kernels in flight write, the rest of the block comes as well.
            blocks = lane * (PART // BLOCK_SIZE) + tl.arange(0, BLOCKS)
            held = (blocks < (lane + 1) * (PART // BLOCK_SIZE)) & (
                blocks * BLOCK_SIZE < tl.load(lens_ptr + seq)
            )
            entry = tl.load(
                table_ptr + seq.to(tl.int64) * table_stride + blocks, mask=held, other=0
            )
            _prefetch_blocks(k_ptr, entry, head, K * BLOCK_SIZE * D, BLOCK_SIZE * D)
            _prefetch_blocks(v_ptr, entry, head, K * BLOCK_SIZE * D, BLOCK_SIZE * D)
        pdl_wait()
    tile = tl.num_programs(2) // lanes - 1 - tile // lanes  # longest first
    first_token = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - first_token
    if tile * BLOCK_M >= num_queries * G:
        return
    length = tl.load(lens_ptr + seq)
    context = length - num_queries
    rows, ds = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = rows < num_queries * G
    heads = head * G + rows % G
    positions = context + rows // G
    place = (first_token + rows // G).to(tl.int64) * (K * G) + heads
    offset = place[:, None] * D + ds[None, :]
    mask = live[:, None] & (ds < D)[None, :]
    q_at = q_ptr + place[:, None] * (R + D)
    q = tl.load(q_at + R + ds[None, :], mask=mask, other=0.0)
    q_rotary = q
    if R > 0:
        rs = tl.arange(0, BLOCK_R)
        q_rotary = tl.load(q_at + rs[None, :], mask=live[:, None] & (rs < R)[None, :], other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads)[:, None]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[:, None]
    table = table_ptr + seq.to(tl.int64) * table_stride
    low, first = 0, context + tile * BLOCK_M // G
    if HAS_WINDOW:
        low = tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N
    end = length
    if CAUSAL:
        end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
    elif HAS_WINDOW:
        end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + window)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if HAS_SINKS:
        m, l = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E, l + 1.0
    # A sequence of padding has no keys; its first part is empty.
    first_part, last_part = low // PART, tl.cdiv(tl.maximum(end, 1), PART)
    is_one = last_part - first_part == 1
    slots = (place - first_seq * (K * G)) * num_parts
    for part in range(first_part + lane, last_part, lanes):
        part_acc, part_m, part_l = _part(
            q, q_rotary, tl.maximum(part * PART, low), tl.minimum(part * PART + PART, end), positions, table, k_ptr, v_ptr,
            scale, softcap, slope, bias, reach, window, head, ds,
            K, D, R, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, CAUSAL,
            BY_CORE,
        )  # fmt: skip
        if SPLIT:
            if is_one:
                whole, _, total = _fold(acc, m, l, part_acc, part_m, part_l)
                _finish(whole, total, out_ptr, offset, mask, v_scale_ptr, head, SCALED)
            else:
                at = slots + part
                tl.store(max_ptr + at, part_m, mask=live)
                tl.store(sum_ptr + at, part_l, mask=live)
                tl.store(partial_ptr + at[:, None] * D + ds[None, :], part_acc, mask=mask)
        else:
            acc, m, l = _fold(acc, m, l, part_acc, part_m, part_l)
    if SPLIT:
        num = tl.minimum(lanes, last_part - first_part)  # thread blocks that have parts
        if is_one | (lane >= num):
            return
        of = tl.program_id(1) * (tl.num_programs(2) // lanes) + tile
        arrived = arrived_ptr + of * K + head
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") != num - 1:
            return
        tl.store(arrived, 0)
        end_row = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries * G)
        for row in range(tile * BLOCK_M, end_row, FOLDED):
            _fold_parts(
                partial_ptr, max_ptr, sum_ptr, out_ptr, sinks_ptr, v_scale_ptr, row, end_row, head, first_token, first_seq,
                first_part, last_part, num_parts, K, G, D, BLOCK_D, FOLDED, HAS_SINKS, SCALED,
            )  # fmt: skip
    else:
        _finish(acc, l, out_ptr, offset, mask, v_scale_ptr, head, SCALED)


@triton.jit
def _finish(acc, l, out_ptr, offset, mask, v_scale_ptr, head, SCALED: tl.constexpr):
    """Store the outputs of rows whose parts are all folded."""
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fold_parts(
    partial_ptr, max_ptr, sum_ptr, out_ptr, sinks_ptr, v_scale_ptr, row, end_row, head, first_token, first_seq, first, last,
    num_parts, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FOLDED: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Fold the parts `first` … of FOLDED rows from `row` on, which other thread blocks wrote."""
    rows, ds = row + tl.arange(0, FOLDED), tl.arange(0, BLOCK_D)
    live, heads = rows < end_row, head * G + rows % G
    place = (first_token + rows // G).to(tl.int64) * (K * G) + heads
    slots = (place - first_seq * (K * G)) * num_parts
    mask = live[:, None] & (ds < D)[None, :]
    m = tl.full((place.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((place.shape[0],), tl.float32)
    acc = tl.zeros((place.shape[0], BLOCK_D), tl.float32)
    if HAS_SINKS:
        m, l = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2E, l + 1.0
    for begin in range(first, last, AT_ONCE):
        accs, ms, ls = (), (), ()
        for i in tl.static_range(AT_ONCE):
            at, exists = slots + begin + i, live & (begin + i < last)
            ms = ms + (  # type: ignore[assignment]  # noqa: RUF005
                tl.load(max_ptr + at, mask=exists, other=float("-inf"), cache_modifier=".cg"),
            )
            ls = ls + (  # type: ignore[assignment]  # noqa: RUF005
                tl.load(sum_ptr + at, mask=exists, other=0.0, cache_modifier=".cg"),
            )
            accs = accs + (  # type: ignore[assignment]  # noqa: RUF005
                tl.load(
                    partial_ptr + at[:, None] * D + ds[None, :],
                    mask=mask & (begin + i < last),
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        for i in tl.static_range(AT_ONCE):
            acc, m, l = _fold(acc, m, l, accs[i], ms[i], ls[i])
    _finish(acc, l, out_ptr, place[:, None] * D + ds[None, :], mask, v_scale_ptr, head, SCALED)


def attention(q: Tensor, kv: LayerKV, meta: AttentionMetadata, s: AttentionParams) -> Tensor:
    """`OpSet.attention` for `deterministic`."""
    out = q.new_empty(*q.shape[:2], kv.v.shape[3])
    num_decodes, num_seqs = meta.num_decodes, len(meta.seq_lens)
    if num_decodes:
        _attend(q, kv, meta, s, out, 0, num_decodes, 1)
    if num_seqs > num_decodes:
        _attend(q, kv, meta, s, out, num_decodes, num_seqs - num_decodes, meta.max_query_len)
    return out


def _attend(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    out: Tensor,
    first_seq: int,
    num_seqs: int,
    most_queries: int,
) -> None:
    """Attend for sequences `first_seq` …, of at most `most_queries` tokens each. The tokens before
    them are one a sequence."""
    num_tokens, num_heads, dim = *q.shape[:2], out.shape[2]
    num_kv_heads, block_size = kv.k.shape[1:3]
    group, block_d = num_heads // num_kv_heads, max(16, triton.next_power_of_2(dim))
    num_rows, rotary = most_queries * group, q.shape[2] - dim
    by_core = not rotary and dim <= SUMMED and kv.k_scale is None and q.dtype.itemsize == 2
    block_m, warps, stages = ROWS, 1, STAGES
    if rotary:
        warps, stages = 4, 2
    elif q.dtype.itemsize == 2 and runs_on_hopper(q.device):
        if kv.k_scale is not None:
            block_m = ROWS_OF_8_BITS
        elif num_rows > 2 * ROWS:
            block_m, stages = PROMPT_ROWS, 3
        warps = block_m // ROWS
    tiles = triton.cdiv(num_rows, block_m)
    programs, parts = num_kv_heads * num_seqs * tiles, triton.cdiv(meta.max_seq_len, PART)
    chosen = num_seqs if most_queries == 1 else num_tokens - first_seq  # tokens of this launch
    room = FEW_PROGRAMS * platform_of(q.device).multiprocessors
    scratch = chosen * num_heads * parts * dim <= MAX_SCRATCH
    splits = s.causal and programs < room and parts > 1 and scratch
    lanes = min(parts, max(1, 4 * room // programs)) if splits else 1
    if splits and by_core and runs_on_hopper(q.device):
        warps = 4
    prefetches = splits and not rotary and s.window is None and PART % block_size == 0
    prefetches = prefetches and block_size * dim * kv.k.element_size() % 16 == 0
    given = s.alibi_slopes, s.distance_bias, s.sinks, kv.k_scale, kv.v_scale
    slopes, bias, sinks, k_scale, v_scale = (q if t is None else t for t in given)
    partial, maxima, sums, arrived = out, out, out, out
    if splits:  # the scratch begins at the launch's first token
        size = (chosen, num_heads, parts)
        partial = q.new_empty(*size, dim, dtype=torch.float32)
        maxima, sums = q.new_empty(2, *size, dtype=torch.float32)
        # 0 between kernels
        arrived = meta.once(("arrived", programs), lambda: q.new_zeros(programs, dtype=torch.int32))
    _attention_kernel[(num_kv_heads, num_seqs, tiles * lanes)](
        q, kv.k, kv.v, out, partial, maxima, sums, meta.block_table, meta.query_start_loc, meta.seq_lens,
        slopes, bias, sinks, k_scale, v_scale, arrived, s.scale, s.softcap or 1.0, s.window or 0,
        meta.block_table.stride(0), s.reach, first_seq, parts, lanes,
        K=num_kv_heads, G=group, D=dim, R=rotary, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=block_d,
        PART=PART, HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None, HAS_ALIBI=s.alibi_slopes is not None,
        HAS_BIAS=s.distance_bias is not None, CAUSAL=s.causal, HAS_SINKS=s.sinks is not None,
        SCALED=kv.k_scale is not None, BY_DIM=kv.v.stride(2) == 1, SPLIT=splits,
        FOLDED=min(block_m, max(1, FOLDED * warps // block_d)), BLOCK_R=max(16, triton.next_power_of_2(rotary)),
        BY_CORE=by_core, PREFETCH=prefetches, BLOCKS=triton.next_power_of_2(max(1, PART // block_size)),
        num_warps=warps, num_stages=stages, **pdl_options(q),
    )  # fmt: skip
