"""Exact attention over the paged KV cache: softmax(scale · q kᵀ) v.

q and out are [T, H, D]; k and v are [blocks, K, block_size, D]. G = H / K query heads share a kv
head.

1. Decode (one query per sequence) is bound by reading the cache. One thread block takes a sequence
   and the G query heads of a kv head, so each KV block is read once. The keys of the longer
   sequences are split over several thread blocks, and those of all sequences if there are too few
   to fill the chip (`split_keys.py`). If sequences begin with the same blocks (`SharedPrefixes`), a
   thread block takes several of them and reads those blocks once.
2. Prefill is FlashAttention-2 (Dao 2023): a tile of queries walks along the keys with a running
   maximum and sum. On Hopper most shapes go to `hopper.py`.

Scores are in units of log 2. An 8-bit cache is widened to float16, which represents its numbers
exactly; the per-head scales are applied to scores and sums. Keys are stored by token, values by
dimension ([D, block_size]), because a tensor core wants the dimension that it sums over to be
contiguous.

The split depends on the lengths of a step's sequences and on the launch, never on timing, so sums
have a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.attention.split_keys import (
    CTAS_PER_SM,
    MAX_PARTS,
    DecodeParts,
    combine,
    merge_parts,
    num_splits,
    scratch,
    store_sums,
)
from slipstream.kernels.triton.gluon_support import runs_on_hopper
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.platform import platform_of

LOG2E = tl.constexpr(1.4426950408889634)
DECODE_ACC_SIZE = 2048
"""Accumulators (heads × D) of a decode thread block: 64 registers for each thread of its one warp."""
SHARED_CTAS_PER_SM = 8
"""Thread blocks per multiprocessor for sequences that share a prefix. A layer of 256 beams took 314
µs on an H200, with two splits 306, with four 312."""
TYPICAL_MEMBERS = 4
"""Size of a group with a shared prefix that the number of splits assumes."""
HOPPER_MIN_ROWS = 64
"""Query rows (tokens × G) of a sequence from which `hopper.py` is faster: its tiles have 128 rows."""
HOPPER_MIN_KEYS = 1024
"""Number of keys from which `hopper.py` is faster with fewer rows, too, where the sequences are so few that keys must be
split to fill the chip: 16 new tokens after 100,000 take 0.13 ms a layer on an H200, not 3.0."""
HOPPER_FP8_KEYS = 8192
"""Keys of the longest sequence of a step from which `hopper.py` multiplies an e4m3 cache in 8 bits."""
THRESHOLDS = Thresholds(queries=(HOPPER_MIN_ROWS,), keys=(HOPPER_MIN_KEYS, HOPPER_FP8_KEYS))


@triton.jit
def _scores(
    s, scale, softcap, slope, bias, reach, distance, live,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Turns query–key products s into (scores, factor that converts them to units of log 2).

    A plain score takes one multiplication, which the subtraction in the exponent absorbs.
    `distance` is query position minus key position. `bias` points at a head's entry for distance 0.
    """
    to_log2 = scale * LOG2E
    if HAS_SOFTCAP or HAS_ALIBI or HAS_BIAS:
        s = s * scale
        to_log2 = LOG2E
    if HAS_SOFTCAP:
        # tanh through exp2: tl has none for every backend
        s = softcap * (1.0 - 2.0 / (tl.exp2((s / softcap) * 2.885390081777927) + 1.0))
    if HAS_ALIBI:
        s = s - slope * distance.to(tl.float32)
    if HAS_BIAS:
        s = s + tl.load(
            bias + tl.minimum(tl.maximum(-distance, -reach), reach), mask=live, other=0.0
        )
    return s, to_log2


@triton.jit
def _online_softmax(s, to_log2, m_i, l_i):
    """One step of the running softmax (Milakov and Gimelshein 2018, algorithm 3).

    s [M, N] are the next scores, −inf where masked; `to_log2` is their factor; m_i, l_i [M] are the running maximum and
    sum. Returns weights p [M, N], the factor alpha for earlier sums, and the new m_i and l_i."""
    new = tl.maximum(m_i, tl.max(s, 1) * to_log2)
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s * to_log2 - safe[:, None])
    alpha = tl.exp2(m_i - safe)
    return p, alpha, new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def _locate_keys(
    table, start, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """Finds keys start … start + BLOCK_N in the cache: (KV block numbers int64, slots within the
    blocks). `start` is a multiple of BLOCK_N. The block number is a scalar if the keys are in one
    block."""
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
def _load_tile(at, live, FULL: tl.constexpr):
    """Load a tile. FULL: no element needs the mask."""
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=live, other=0.0)


@triton.jit
def _load_keys_and_values(
    k_ptr, v_ptr, table, start, end, head, ds, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BY_DIM: tl.constexpr, MASKED: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Loads keys `start` … start + BLOCK_N of a kv head, [BLOCK_N, D], and their values, [BLOCK_N,
    D], or [D, BLOCK_N] with TALL. MASKED: some may be at `end` or beyond.

    The tiles are not masked: the cache has finite numbers only, and keys that a query does not see
    get weight 0."""
    block, slot = _locate_keys(table, start, end, BLOCK_N, BLOCK_SIZE, MASKED)
    base = (block * K + head) * (BLOCK_SIZE * D)
    k = _load_tile(
        k_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D
    )
    if BY_DIM:
        v = _load_tile(
            v_ptr + (base + slot)[None, :] + (ds * BLOCK_SIZE)[:, None],
            (ds < D)[:, None],
            BLOCK_D == D,
        )
    else:
        v = _load_tile(
            v_ptr + (base + slot * D)[:, None] + ds[None, :], (ds < D)[None, :], BLOCK_D == D
        )
    if BY_DIM != TALL:
        v = tl.trans(v)
    return k, v


@triton.jit
def _to_dtype(x, kind: tl.constexpr):
    """Converts x to the type `kind`. int8 is converted by its bits: 0x6400 with a byte in its low
    half is the float16 1024 + byte. That takes two instructions for two numbers."""
    if x.dtype == tl.int8:
        shifted = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return shifted.to(tl.float16, bitcast=True) - 1152.0
    return x.to(kind)


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "num_seqs", "splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, lens_ptr, parts_ptr, arrived_ptr, slopes_ptr,
    bias_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap, window, table_stride, reach, num_seqs, splits,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_TILES: tl.constexpr,
    BLOCK_G: tl.constexpr, MERGED_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALED: tl.constexpr, BY_DIM: tl.constexpr, MAX_PARTS: tl.constexpr,
    FUSED: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_G query heads of one kv head over one part of a sequence's keys (`DecodeParts`)
    per thread block.

    Scores are [BLOCK_N keys, BLOCK_G heads] and sums [D, BLOCK_G]: keys and values are the tall
    operands, so few heads waste little of a tensor core. HEAD_TILES thread blocks share a kv head
    if its sums don't fit one warp's registers."""
    if PDL:
        pdl_wait()
    # Heads vary fastest, so that thread blocks without a part come last: mixed in, they would leave
    # some multiprocessors more work.
    tile, seq = tl.program_id(0), tl.program_id(1)
    part, begin = parts_ptr + seq * 8, 0 * seq
    end, slot = tl.load(part + 2), tl.load(part + 3)
    is_first = seq < num_seqs  # a sequence's first part: its number and start need no load
    if seq >= num_seqs:
        seq, begin = tl.load(part), tl.load(part + 1)
    if seq < 0:
        return
    head = tile // HEAD_TILES
    length = tl.load(lens_ptr + seq)
    if HAS_WINDOW:
        begin = tl.where(is_first, tl.maximum(0, length - window) // BLOCK_N * BLOCK_N, begin)
    gs, ds = tile % HEAD_TILES * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = head * G + gs

    offset = (seq * (K * G) + heads)[None, :] * D + ds[:, None]
    live = (gs < G)[None, :] & (ds < D)[:, None]
    q = tl.load(q_ptr + offset, mask=live, other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads, mask=gs < G, other=0.0)[None, :]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[None, :]
    m_i = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_G,), tl.float32)
    if HAS_SINKS:  # counted once, in the first part
        is_first = is_first & (begin < end)
        m_i = tl.where(
            is_first, tl.load(sinks_ptr + heads, mask=gs < G, other=0.0).to(tl.float32) * LOG2E, m_i
        )
        l_i = tl.where(is_first, 1.0, l_i)
    acc = tl.zeros((BLOCK_D, BLOCK_G), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < end
        k, v = _load_keys_and_values(
            k_ptr, v_ptr, table, start, end, head, ds, K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, True, True
        )  # fmt: skip
        s = tl.dot(_to_dtype(k, q.dtype), q, input_precision="ieee")
        away = (length - 1 - at)[:, None]
        head_mask = (gs < G)[None, :]
        s, to_log2 = _scores(
            s, scale, softcap, slope, bias, reach, away, head_mask, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS
        )
        seen = inside
        if HAS_WINDOW:
            seen = seen & (at >= length - window)
        s = tl.where(seen[:, None], s, float("-inf"))
        new = tl.maximum(m_i, tl.max(s, 0) * to_log2)  # finite: each tile has an unmasked key
        p = tl.exp2(s * to_log2 - new[None, :])
        alpha = tl.exp2(m_i - new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha[None, :] + tl.dot(
            _to_dtype(v, q.dtype), p.to(q.dtype), input_precision="ieee"
        )
        m_i = new
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[None, :]
    if slot < 0:
        if SUMS:
            rows = (seq * (K * G) + heads) * (D + SUMS)
            offset = rows[None, :] + ds[:, None]
            store_sums(out_ptr + rows + D, m_i, l_i, gs < G)
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=live)
    else:
        place = slot * (K * G) + heads
        if not FUSED:
            place = (seq * (K * G) + heads) * splits + slot
        tl.store(
            lse_ptr + place,
            tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i))),
            mask=gs < G,
        )
        tl.store(partial_ptr + place[None, :] * D + ds[:, None], acc, mask=live)
        if FUSED:
            first, num = tl.load(part + 4), tl.load(part + 5)
            arrived = arrived_ptr + first * (K * HEAD_TILES) + tile
            tl.debug_barrier()
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num - 1:
                tl.store(arrived, 0)
                ms = tile % HEAD_TILES * BLOCK_G + tl.arange(0, MERGED_G)
                merge_parts(
                    partial_ptr,
                    lse_ptr,
                    out_ptr,
                    first,
                    num,
                    seq,
                    head * G + ms,
                    ms < G,
                    K * G,
                    D,
                    BLOCK_D,
                    MAX_PARTS,
                    SUMS,
                )


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "splits"])
def _shared_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, lens_ptr, begins_ptr, ends_ptr, shared_ptr, slopes_ptr,
    bias_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap, window, table_stride, reach, splits,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr, BY_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the queries of up to MEMBERS sequences of a group, from `seq` on, for one kv head and
    one split of their keys. Thread blocks whose `seq` is not such a first member end at once. Heads
    vary fastest, so that those that go on are consecutive: if only every fourth did, all would
    start on the same quarter of the chip.

    The queries are the columns of one tile, as in `_decode_kernel`. The keys are first the tiles of
    the shared prefix, which all columns see, then the tiles of each member's own tokens, which only
    its columns see."""
    seq, head, split = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    # the groups were written before the step's first kernel
    if (seq - tl.load(begins_ptr + seq)) % MEMBERS != 0:
        return
    if PDL:
        pdl_wait()  # sequence 0 is a first member, so some thread block waits
    num = tl.minimum(tl.load(ends_ptr + seq) - seq, MEMBERS)
    shared = tl.load(shared_ptr + seq)
    cs, ds = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    member = cs // G
    heads = head * G + cs % G
    live = member < num
    lens = tl.load(lens_ptr + seq + member, mask=live, other=0)
    prefix_tiles = tl.cdiv(shared, BLOCK_N)
    own_tiles = tl.cdiv(tl.max(lens, 0) - shared, BLOCK_N)  # of each member
    num_tiles = prefix_tiles + num * own_tiles
    span = tl.cdiv(num_tiles, splits)

    row = (seq + member) * (K * G) + heads
    offset = row[None, :] * D + ds[:, None]
    mask = live[None, :] & (ds < D)[:, None]
    q = tl.load(q_ptr + offset, mask=mask, other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads, mask=live, other=0.0)[None, :]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[None, :]
    m_i = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_SINKS:  # counted once
        m_i = tl.where(
            split == 0, tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2E, m_i
        )
        l_i = tl.where(split == 0, 1.0, l_i)
    acc = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    for tile in range(split * span, tl.minimum((split + 1) * span, num_tiles)):
        own = tl.maximum(tile - prefix_tiles, 0)
        which = own // tl.maximum(own_tiles, 1)  # the member that owns the tile
        in_prefix = tile < prefix_tiles
        start = tl.where(
            in_prefix, tile * BLOCK_N, shared + own % tl.maximum(own_tiles, 1) * BLOCK_N
        )
        end = tl.where(in_prefix, shared, tl.load(lens_ptr + seq + which))
        at = start + tl.arange(0, BLOCK_N)
        table = table_ptr + (seq + which).to(tl.int64) * table_stride
        k, v = _load_keys_and_values(
            k_ptr, v_ptr, table, start, end, head, ds, K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, True, True
        )  # fmt: skip
        s = tl.dot(_to_dtype(k, q.dtype), q, input_precision="ieee")
        away = lens[None, :] - 1 - at[:, None]
        s, to_log2 = _scores(
            s,
            scale,
            softcap,
            slope,
            bias,
            reach,
            away,
            live[None, :],
            HAS_SOFTCAP,
            HAS_ALIBI,
            HAS_BIAS,
        )
        seen = (at < end)[:, None] & (in_prefix | (member == which))[None, :]
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m_i, tl.max(s, 0) * to_log2)
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * to_log2 - safe[None, :])
        alpha = tl.exp2(m_i - safe)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha[None, :] + tl.dot(
            _to_dtype(v, q.dtype), p.to(q.dtype), input_precision="ieee"
        )
        m_i = new
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[None, :]
    if SPLIT:
        partial = row * splits + split
        tl.store(
            lse_ptr + partial,
            tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i))),
            mask=live,
        )
        tl.store(partial_ptr + partial[None, :].to(tl.int64) * D + ds[:, None], acc, mask=mask)
    else:
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _prefill_step(
    q, acc, m_i, l_i, start, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
    K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BY_DIM: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys. MASKED: some keys are ahead of a query or beyond the end."""
    at = start + tl.arange(0, BLOCK_N)
    k, v = _load_keys_and_values(
        k_ptr, v_ptr, table, start, end, head, ds, K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, MASKED, False
    )  # fmt: skip
    distance = positions[:, None] - at[None, :]
    s = tl.dot(q, tl.trans(_to_dtype(k, q.dtype)), input_precision="ieee")
    s, to_log2 = _scores(
        s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS
    )
    if MASKED:
        s = tl.where(distance >= 0 if CAUSAL else (at < end)[None, :], s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where((distance if CAUSAL else tl.abs(distance)) < window, s, float("-inf"))
    p, alpha, m_i, l_i = _online_softmax(s, to_log2, m_i, l_i)
    acc = tl.dot(p.to(q.dtype), _to_dtype(v, q.dtype), acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "first_seq"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, limits_ptr, slopes_ptr, bias_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, scale, softcap, window, table_stride, reach, first_seq,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, SCALED: tl.constexpr,
    BY_DIM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of a (kv head, sequence) per thread block. A row is a token and one of
    the G heads of the kv head, so that a single query also fills a tile. SUMS: a token sees the first
    `limits` keys, and rows end in SUMS numbers for the logarithm of the sum (`store_sums`)."""
    head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # longest first
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
    if SUMS:
        positions = tl.load(limits_ptr + start + rows // G, mask=live, other=0) - 1
    row = (start + rows // G).to(tl.int64) * (K * G) + heads
    offset = row[:, None] * D + ds[None, :]
    q = tl.load(q_ptr + offset, mask=live[:, None] & (ds < D)[None, :], other=0.0)
    if SCALED:
        q = q.to(tl.float16)
        scale *= tl.load(k_scale_ptr + head)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads)[:, None]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[:, None]
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        m_i, l_i = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E, l_i + 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    low, first = 0, context + tile * BLOCK_M // G
    if SUMS:
        first = tl.load(limits_ptr + start + tile * BLOCK_M // G) - 1
    if HAS_WINDOW:
        low = tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N
    if CAUSAL:
        # before it every query sees every key
        full_end = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, low)
        end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
        if SUMS:
            end = tl.max(positions, 0) + 1
    else:
        end = length
        if HAS_WINDOW:
            end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + window)
        full_end = tl.maximum(end // BLOCK_N * BLOCK_N, low)
    for at in range(low, full_end, BLOCK_N):
        acc, m_i, l_i = _prefill_step(
            q, acc, m_i, l_i, at, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
            K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, CAUSAL,
        )  # fmt: skip
    for at in range(full_end, end, BLOCK_N):
        acc, m_i, l_i = _prefill_step(
            q, acc, m_i, l_i, at, end, positions, table, k_ptr, v_ptr, scale, softcap, slope, bias, reach, window, head, ds,
            K, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, BY_DIM, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, CAUSAL,
        )  # fmt: skip
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head)
    if SUMS:
        offset = row[:, None] * (D + SUMS) + ds[None, :]
        store_sums(out_ptr + row * (D + SUMS) + D, m_i, l_i, live)
    tl.store(
        out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (ds < D)[None, :]
    )


def _wants_hopper(
    num_rows: int, num_seqs: int, num_kv_heads: int, max_seq_len: int, num_processors: int
) -> bool:
    """True if `hopper.py` is faster for sequences with at most `num_rows` query rows each."""
    few = max_seq_len >= HOPPER_MIN_KEYS and 2 * num_seqs * num_kv_heads <= num_processors
    return few or num_rows > HOPPER_MIN_ROWS


def paged_attention(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    *,
    decode_tile: tuple[int, int, int] | None = None,
    prefill_tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """`OpSet.attention`; with `meta.limits` `OpSet.attention_part`. Tiles: decode (BLOCK_N, warps,
    stages), prefill (BLOCK_M, BLOCK_N, warps, stages).

    With a prefill tile this file's kernel runs; without one `hopper.py` does if it can."""
    num_heads, head_dim = q.shape[1:]
    sums = 0 if meta.limits is None else 4 // q.element_size()
    out = q.new_empty(len(q), num_heads, head_dim + sums)
    num_kv_heads, block_size = kv.k.shape[1:3]
    block_d = max(16, triton.next_power_of_2(head_dim))
    num_seqs = meta.seq_lens.shape[0]
    shape = dict(
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
    )
    flags = dict(
        HAS_WINDOW=s.window is not None,
        HAS_SOFTCAP=s.softcap is not None,
        HAS_ALIBI=s.alibi_slopes is not None,
    )
    flags.update(HAS_SINKS=s.sinks is not None, HAS_BIAS=s.distance_bias is not None)
    flags.update(SCALED=kv.k_scale is not None, BY_DIM=kv.v.stride(2) == 1)
    given = s.alibi_slopes, s.distance_bias, s.sinks, kv.k_scale, kv.v_scale
    head_tensors = [q if t is None else t for t in given]
    scalars = (s.scale, s.softcap or 1.0, s.window or 0, meta.block_table.stride(0), s.reach)
    num_decodes = meta.num_decodes
    if num_decodes:
        # columns of a tile, in sequences
        members = max(1, DECODE_ACC_SIZE // block_d // shape["G"])
        shared = meta.shared if s.window is None and members > 1 else None
        block_g = min(
            max(8, triton.next_power_of_2(shape["G"])), max(8, DECODE_ACC_SIZE // block_d)
        )
        head_tiles = triton.cdiv(shape["G"], block_g)
        programs = num_decodes * num_kv_heads * head_tiles
        if shared is not None:
            programs = triton.cdiv(programs, min(members, TYPICAL_MEMBERS))
        # With few thread blocks, prefetch deep. Many share a multiprocessor: at D = 256 the tiles
        # of two would fill its memory.
        processors = platform_of(q.device).multiprocessors
        deep = programs < CTAS_PER_SM * processors or flags["SCALED"]
        wide_key = block_d * kv.k.element_size() > 256
        block_n, warps, stages = decode_tile or (16, 1, 6 if deep and not wide_key else 3)
        options = dict(
            BLOCK_N=block_n, num_warps=warps, num_stages=stages, **shape, **flags, **pdl_options(q)
        )
        if shared is None:
            programs_each = num_kv_heads * head_tiles
            parts = DecodeParts.of(meta, s.window, programs_each, block_n, processors)
            partial, lse = scratch(
                num_decodes if parts.splits else len(parts.arrived),
                q,
                head_dim,
                max(1, parts.splits),
            )
            _decode_kernel[(programs_each, len(parts.parts))](
                q, kv.k, kv.v, out, partial, lse, meta.block_table, meta.seq_lens, parts.parts, parts.arrived,
                *head_tensors, *scalars, num_decodes, parts.splits, HEAD_TILES=head_tiles, BLOCK_G=block_g,
                MERGED_G=min(block_g, triton.next_power_of_2(shape["G"])), MAX_PARTS=MAX_PARTS, FUSED=not parts.splits,
                SUMS=sums, **options,
            )  # fmt: skip
            if parts.splits > 1:
                combine(partial, lse, out[:num_decodes], parts.splits, sums=sums)
        else:
            splits = num_splits(programs, meta.max_seq_len, block_n, processors, SHARED_CTAS_PER_SM)
            partial, lse = scratch(num_decodes, q, head_dim, splits) if splits > 1 else (out, out)
            _shared_decode_kernel[(num_kv_heads, num_decodes, splits)](
                q, kv.k, kv.v, out, partial, lse, meta.block_table, meta.seq_lens, shared.begins, shared.ends,
                shared.num_tokens, *head_tensors, *scalars, splits,
                SPLIT=splits > 1, MEMBERS=members, BLOCK_C=max(8, triton.next_power_of_2(members * shape["G"])), **options,
            )  # fmt: skip
            if splits > 1:
                combine(partial, lse, out[:num_decodes], splits)
    num_rows = meta.max_query_len * shape["G"]
    plain = s.alibi_slopes is None and s.distance_bias is None and s.causal and prefill_tile is None
    if num_seqs == num_decodes:
        return out
    if (
        plain
        and runs_on_hopper(q.device)
        and _wants_hopper(
            num_rows,
            num_seqs - num_decodes,
            num_kv_heads,
            meta.max_seq_len,
            platform_of(q.device).multiprocessors,
        )
    ):
        from slipstream.kernels.triton.attention import hopper

        if hopper.covers(q, kv):
            fp8 = meta.max_seq_len >= HOPPER_FP8_KEYS
            hopper.prefill(q, kv, meta, s, out, first_seq=num_decodes, fp8=fp8)
            return out
    default = (64, 32, 8, 2)
    if block_d <= 128 and num_rows <= 64:
        default = (64, 64, 4, 2)
    elif block_d <= 128:
        default = (128, 64, 4, 2) if flags["SCALED"] else (128, 32, 4, 3)
    if q.dtype == torch.float32:
        default = (32, 32, 4, 2)
    block_m, block_n, warps, stages = prefill_tile or default
    if num_rows <= 32:
        block_m, warps = min(block_m, 32), min(warps, 4)
    tiles = triton.cdiv(num_rows, block_m)
    _prefill_kernel[(num_kv_heads, num_seqs - num_decodes, tiles)](
        q, kv.k, kv.v, out, meta.block_table, meta.query_start_loc, meta.seq_lens,
        q if meta.limits is None else meta.limits, *head_tensors, *scalars, num_decodes,
        CAUSAL=s.causal, SUMS=sums, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **shape, **flags,
    )  # fmt: skip
    return out
