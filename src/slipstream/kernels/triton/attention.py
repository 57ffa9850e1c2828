"""Exact attention over the paged cache: one launch for decodes (and one that combines their parts), one for prefill chunks
(on Hopper mostly `hopper`'s).

Decode is bound by reading the cache, so the query heads that share a kv head stand in one tile and every block is read
once; a sequence is split over several programs when there are too few sequences to fill the chip (flash-decoding, Dao et
al. 2023). Prefill is FlashAttention-2 (Dao 2023): a tile of queries walks along the keys with a running maximum and sum.
Scores are kept in units of log 2. An 8-bit cache is read as it is and turned into float16, which holds its numbers exactly; the
heads' scales are applied to scores and sums. A tensor core wants what it sums over side by side: keys are kept by token and
values by dimension ([D, block_size] in memory), so neither is shuffled byte by byte on its way.

How a sequence is split depends on its own length and on the launch, never on timing: the sums have a fixed order.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.platform import platform_of

LOG2E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 64
CTAS_PER_SM = 4
"""Decode programs wanted per multiprocessor before sequences are no longer split."""
GROUP_NUMBERS = 2048
"""Sums (heads times their size) of a decode's program: 64 registers of each thread of its one warp."""
HOPPER_TRITON = ((3, 6), (3, 9))
"""Versions of Triton, the first and the last, with which the kernel for Hopper was compiled: Gluon's names change."""
FEW_ROWS = 64
"""Queries times heads of a kv head, up to which Hopper's kernel (128 rows) would multiply mostly nothing."""


@triton.jit
def _scores(
    s,
    scale,
    softcap,
    slope,
    bias,
    reach,
    distance,
    live,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Products of queries and keys as scores, and what they are still to be multiplied with to be in units of log 2: a plain
    score takes one multiplication, which the exponent's subtraction takes in. `distance`: how far a key lies behind. `bias`
    points at a `live` head's at distance 0."""
    unit = scale * LOG2E
    if HAS_SOFTCAP or HAS_ALIBI or HAS_BIAS:
        s = s * scale
        unit = LOG2E
    if HAS_SOFTCAP:
        # tanh by exp: tl has none that runs everywhere
        s = softcap * (1.0 - 2.0 / (tl.exp2((s / softcap) * 2.885390081777927) + 1.0))
    if HAS_ALIBI:
        s = s - slope * distance.to(tl.float32)
    if HAS_BIAS:
        s = s + tl.load(bias + tl.minimum(tl.maximum(-distance, -reach), reach), mask=live, other=0.0)
    return s, unit


@triton.jit
def _softened(s, unit, best, total):
    """Scores s [M, N] of the next keys (−inf: not seen), to be multiplied with `unit`, behind keys whose largest is `best` and
    whose weights' sum is `total` (Milakov and Gimelshein 2018, algorithm 3): their weights, what sums until now are to be
    multiplied with, and the new `best` and `total`."""
    new = tl.maximum(best, tl.max(s, 1) * unit)
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s * unit - safe[:, None])
    fade = tl.exp2(best - safe)
    return p, fade, new, total * fade + tl.sum(p, 1)


@triton.jit
def _tile_of_keys(table, start, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Of keys start … start + BLOCK_N (start a multiple of BLOCK_N): their blocks int64 (one number if it is one block), and
    places in the block."""
    keys = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE)
        slot = tl.multiple_of(start % BLOCK_SIZE, BLOCK_N) + keys
    else:
        entries = table + start // BLOCK_SIZE + keys // BLOCK_SIZE
        block = tl.load(entries, mask=start + keys < end, other=0) if MASKED else tl.load(entries)
        block = tl.max_constancy(block, BLOCK_SIZE)
        slot = keys % BLOCK_SIZE
    return block.to(tl.int64), slot


@triton.jit
def _load(at, live, WHOLE: tl.constexpr):
    """A tile, of which all is there if WHOLE."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=live, other=0.0)


@triton.jit
def _as(x, kind: tl.constexpr):
    """x as `kind`. int8 goes by bits: 0x6400 with a byte in its low half is the float16 number 1024 + byte, which takes two
    instructions for two numbers where the conversion takes several for each."""
    if x.dtype == tl.int8:
        shifted = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return shifted.to(tl.float16, bitcast=True) - 1152.0
    return x.to(kind)


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "splits"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    lens_ptr,
    slopes_ptr,
    bias_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    window,
    table_stride,
    reach,
    splits,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (sequence, BLOCK_G query heads of a kv head, part of the sequence): scores [BLOCK_N keys, BLOCK_G heads],
    sums [D, BLOCK_G]. The keys and values are the tall sides of the products, so that the few heads waste little of a tensor
    core. GROUPS programs read one kv head where its query heads' sums do not fit one warp's registers."""
    if PDL:
        pdl_wait()
    seq, head, split = tl.program_id(0), tl.program_id(1) // GROUPS, tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    gs, ds = tl.program_id(1) % GROUPS * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = head * G + gs
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, length - window) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(length - low, BLOCK_N), splits) * BLOCK_N
    begin = low + split * span
    end = tl.minimum(begin + span, length)

    place = (seq * (K * G) + heads)[None, :] * D + ds[:, None]
    live = (gs < G)[None, :] & (ds < D)[:, None]
    q = tl.load(q_ptr + place, mask=live, other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads, mask=gs < G, other=0.0)[None, :]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[None, :]
    best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    if HAS_SINKS:  # once, in the first part that there is
        once = (split == 0) & (begin < end)
        best = tl.where(once, tl.load(sinks_ptr + heads, mask=gs < G, other=0.0).to(tl.float32) * LOG2E, best)
        total = tl.where(once, 1.0, total)
    acc = tl.zeros((BLOCK_D, BLOCK_G), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < end
        block, slot = _tile_of_keys(table, start, end, BLOCK_N, BLOCK_SIZE, True)
        base = (block * K + head) * (BLOCK_SIZE * D)
        # Loads are not masked by `inside`: the cache holds finite numbers only, and what lies beyond the end gets weight 0.
        k = _load(k_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D)
        if BY_DIM:
            v = _load(v_ptr + (base + slot)[None, :] + (ds * BLOCK_SIZE)[:, None], (ds < D)[:, None], BLOCK_D == D)
        else:
            v = tl.trans(_load(v_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D))
        s = tl.dot(_as(k, q.dtype), q, input_precision="ieee")
        away = (length - 1 - at)[:, None]
        some = (gs < G)[None, :]
        s, unit = _scores(s, scale, softcap, slope, bias, reach, away, some, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS)
        seen = inside
        if HAS_WINDOW:
            seen = seen & (at >= length - window)
        s = tl.where(seen[:, None], s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 0) * unit)  # finite: each tile has a key that is seen
        p = tl.exp2(s * unit - new[None, :])
        alpha = tl.exp2(best - new)
        total = total * alpha + tl.sum(p, 0)
        acc = acc * alpha[None, :] + tl.dot(_as(v, q.dtype), p.to(q.dtype), input_precision="ieee")
        best = new
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[None, :]
    if SPLIT:
        part = (seq * (K * G) + heads) * splits + split
        tl.store(lse_ptr + part, tl.where(empty, float("-inf"), best + tl.log2(tl.where(empty, 1.0, total))), mask=gs < G)
        if begin < end:
            tl.store(part_ptr + part[None, :].to(tl.int64) * D + ds[:, None], acc, mask=live)
    else:
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr
):
    """One program a (sequence, query head): parts weighted by their share of the sum. Parts that hold nothing are skipped."""
    if PDL:
        pdl_wait()
    row = tl.program_id(0)
    ds = tl.arange(0, BLOCK_D)
    at = tl.arange(0, MOST)
    lse = tl.load(lse_ptr + row * splits + at, mask=at < splits, other=float("-inf"))
    best = tl.max(lse, 0)
    weights = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best)))
    total = tl.sum(weights, 0)
    mask = (lse != float("-inf"))[:, None] & (ds < D)[None, :]
    places = part_ptr + (row * splits + at)[:, None].to(tl.int64) * D + ds[None, :]
    parts = tl.load(places, mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + ds, out.to(out_ptr.dtype.element_ty), mask=ds < D)


@triton.jit
def _prefill_step(
    q,
    acc,
    best,
    total,
    start,
    end,
    positions,
    table,
    k_ptr,
    v_ptr,
    scale,
    softcap,
    slope,
    bias,
    reach,
    window,
    head,
    ds,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One tile of keys. MASKED: some of them lie ahead of a query, or beyond the end."""
    at = start + tl.arange(0, BLOCK_N)
    block, slot = _tile_of_keys(table, start, end, BLOCK_N, BLOCK_SIZE, MASKED)
    base = (block * K + head) * (BLOCK_SIZE * D)
    k = _load(k_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D)
    if BY_DIM:
        v = tl.trans(_load(v_ptr + (base + slot)[None, :] + (ds * BLOCK_SIZE)[:, None], (ds < D)[:, None], BLOCK_D == D))
    else:
        v = _load(v_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D)
    distance = positions[:, None] - at[None, :]
    s = tl.dot(q, tl.trans(_as(k, q.dtype)), input_precision="ieee")
    s, unit = _scores(s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS)
    if MASKED:
        s = tl.where(distance >= 0 if CAUSAL else (at < end)[None, :], s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where((distance if CAUSAL else tl.abs(distance)) < window, s, float("-inf"))
    p, fade, best, total = _softened(s, unit, best, total)
    acc = tl.dot(p.to(q.dtype), _as(v, q.dtype), acc * fade[:, None], input_precision="ieee")
    return acc, best, total


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "first_seq"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    slopes_ptr,
    bias_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    window,
    table_stride,
    reach,
    first_seq,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
):
    """One program a (kv head, sequence, BLOCK_M rows): the rows are the queries' tokens times the heads that share the kv head,
    so that a decode, too, has a tile's rows to fill."""
    head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # the longest first
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= num_queries * G:
        return
    length = tl.load(lens_ptr + seq)
    context = length - num_queries
    rows, ds = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = rows < num_queries * G
    heads = head * G + rows % G
    positions = context + rows // G
    place = ((start + rows // G).to(tl.int64) * (K * G) + heads)[:, None] * D + ds[None, :]
    q = tl.load(q_ptr + place, mask=live[:, None] & (ds < D)[None, :], other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads)[:, None]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[:, None]
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        best, total = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E, total + 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    low, first = 0, context + tile * BLOCK_M // G
    if HAS_WINDOW:
        low = tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N
    if CAUSAL:
        whole = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, low)  # keys that every query of the tile may see
        end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
    else:
        end = length
        if HAS_WINDOW:
            end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + window)
        whole = tl.maximum(end // BLOCK_N * BLOCK_N, low)
    for at in range(low, whole, BLOCK_N):
        acc, best, total = _prefill_step(
            q, acc, best, total, at, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
            K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, CAUSAL,
        )  # fmt: skip
    for at in range(whole, end, BLOCK_N):
        acc, best, total = _prefill_step(
            q, acc, best, total, at, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
            K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, CAUSAL,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (ds < D)[None, :])


def paged_attention(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    *,
    decode_tile: tuple[int, int, int] | None = None,
    prefill_tile: tuple[int, int, int, int] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """`OpSet.attention`. Tiles: (BLOCK_N, warps, stages) and (BLOCK_M, BLOCK_N, warps, stages). Prefill with a tile goes
    through this file's kernel, without one through `hopper`'s where that is there. `deterministic`: one kernel and
    one tile for all, so that what a token sees is summed in an order that depends on nothing but its place."""
    out = torch.empty_like(q)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.k.shape[1:3]
    block_d = max(16, triton.next_power_of_2(head_dim))
    num_seqs = meta.seq_lens.shape[0]
    shape = dict(K=num_kv_heads, G=num_heads // num_kv_heads, D=head_dim, BLOCK_SIZE=block_size, BLOCK_D=block_d)
    flags = dict(HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None, HAS_ALIBI=s.alibi_slopes is not None)
    flags.update(HAS_SINKS=s.sinks is not None, HAS_BIAS=s.distance_bias is not None)
    flags.update(SCALED=kv.k_scale is not None, BY_DIM=kv.v.stride(2) == 1)
    given = s.alibi_slopes, s.distance_bias, s.sinks, kv.k_scale, kv.v_scale
    of_heads = [q if t is None else t for t in given]
    numbers = (s.scale, s.softcap or 1.0, s.window or 0, meta.block_table.stride(0), s.reach)
    num_decodes = 0 if deterministic else meta.num_decodes
    if num_decodes:
        block_g = min(max(8, triton.next_power_of_2(shape["G"])), max(8, GROUP_NUMBERS // block_d))
        groups = triton.cdiv(shape["G"], block_g)
        programs = num_decodes * num_kv_heads * groups
        # Few programs ask far ahead. Many share a multiprocessor: with D = 256 the tiles of two would fill its memory.
        ahead = programs < CTAS_PER_SM * platform_of(q.device).multiprocessors or flags["SCALED"]
        wide = block_d * kv.k.element_size() > 256
        block_n, warps, stages = decode_tile or (16, 1, 6 if ahead and not wide else 3)
        splits = num_splits(programs, meta.max_seq_len, block_n, platform_of(q.device).multiprocessors)
        part = lse = out
        if splits > 1:
            rows = num_decodes * num_heads * splits
            part = torch.empty(rows, head_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        _decode_kernel[(num_decodes, num_kv_heads * groups, splits)](
            q, kv.k, kv.v, out, part, lse, meta.block_table, meta.seq_lens, *of_heads, *numbers, splits,
            CAUSAL=True, GROUPS=groups, BLOCK_G=block_g, BLOCK_N=block_n, SPLIT=splits > 1, num_warps=warps,
            num_stages=stages, **shape, **flags, **overlapped(q),
        )  # fmt: skip
        if splits > 1:
            grid = (num_decodes * num_heads,)
            _combine_kernel[grid](
                part, lse, out, splits, D=head_dim, BLOCK_D=block_d, MOST=MAX_SPLITS, num_warps=4, **overlapped(q)
            )
    num_rows = meta.max_query_len * shape["G"]
    plain = s.alibi_slopes is None and s.distance_bias is None and s.causal and prefill_tile is None and not deterministic
    if num_seqs == num_decodes:
        return out
    hopper = _hopper(q.device) if plain and num_rows > FEW_ROWS else None
    if hopper is not None and hopper.covers(q, kv):
        hopper.prefill(q, kv, meta, s, out, first_seq=num_decodes)
    else:
        usual = (64, 32, 8, 2)
        if block_d <= 128:
            usual = (128, 64, 4, 2) if flags["SCALED"] else (128, 32, 4, 3)
        if q.dtype == torch.float32:
            usual = (32, 32, 4, 2)
        block_m, block_n, warps, stages = prefill_tile or usual
        if num_rows <= 32 and not deterministic:
            block_m, warps = min(block_m, 32), min(warps, 4)
        tiles = triton.cdiv(num_rows, block_m)
        _prefill_kernel[(num_kv_heads, num_seqs - num_decodes, tiles)](
            q, kv.k, kv.v, out, meta.block_table, meta.query_start_loc, meta.seq_lens, *of_heads, *numbers,
            num_decodes,
            CAUSAL=s.causal, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **shape, **flags,
        )  # fmt: skip
    return out


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernel for Hopper, on that chip and with the versions of Triton that it was compiled with; None elsewhere."""
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    if not platform_of(device).arch.wgmma:
        return None
    if not HOPPER_TRITON[0] <= version <= HOPPER_TRITON[1]:
        return None
    return importlib.import_module("slipstream.kernels.triton.hopper")


def num_splits(num_programs: int, max_seq_len: int, block_n: int, num_processors: int) -> int:
    """A power of two: enough programs to fill the chip, none with less than two tiles of the longest sequence."""
    wanted = triton.cdiv(CTAS_PER_SM * num_processors, num_programs)
    most = max(1, max_seq_len // (2 * block_n))
    splits = int(min(wanted, most, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)
