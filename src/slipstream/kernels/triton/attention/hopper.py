"""Prefill attention for Hopper: persistent, warp-specialised thread blocks (FlashAttention-3, Shah et al. 2024).

Computes softmax(scale · q kᵀ) v over the paged cache, causal, for sequences with many queries. Bound by the tensor
cores.

1. One thread block runs on each multiprocessor: a producer and two consumers of four warps each.
2. The producer fills a ring of key and value tiles in shared memory. A 16-bit cache is copied by TMA; an 8-bit one goes
   through registers and becomes float16.
3. Each consumer holds 64 rows (tokens × G query heads of a kv head, G rounded up to a power of two). Both walk along the
   same tiles from last to first. While the tensor cores multiply queries with the next tile and weights with the
   previous one, a consumer takes the exponents of the current tile. Scores are in units of log 2.
4. Work is a query tile (128 rows of one sequence) and a kv head. The producer takes work from a counter and sends it to
   its consumers. In a sequence the tiles with the most keys come first, so thread blocks end together. Which thread
   block computes a tile changes nothing in its result.
5. A short chunk of a long prompt has too few query tiles for the chip, and each takes long. Then the keys of a tile are
   split into parts, which are work of their own (`split_keys.py`). A tile with few keys stays whole.

Limits: compute capability 9.0; bfloat16 or float16; head dims of 64, 128 and 256 (`covers`); causal; no ALiBi, no bias
by distance. Gluon has no interpreter: a test here reads the machine code, and tests/gpu compares the numbers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention.split_keys import combine, scratch
from slipstream.platform import platform_of

LOG2E = gl.constexpr(1.4426950408889634)
CONSUMER_ROWS = gl.constexpr(64)
MAX_PARTS = gl.constexpr(16)
"""Most parts of a tile's keys. With fewer key tiles there are fewer parts, in proportion: merging
parts takes as long as some key tiles (GPU_NOTES.md)."""
# Gluon's names change between Triton's versions (`gluon_support.py`); both known names are tried.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory in another dtype and shape."""
    if HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM barriers, each of which opens after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _num_tiles(starts_ptr, seq, TOKENS: gl.constexpr):
    """Query tiles of a sequence, of TOKENS tokens each."""
    return (gl.load(starts_ptr + seq + 1) - gl.load(starts_ptr + seq) + TOKENS - 1) // TOKENS


@gluon.jit
def _find_sequence(tile, seq, base, last_seq, starts_ptr, TOKENS: gl.constexpr):
    """(sequence, first tile, number of tiles) of query tile `tile`, searched from `seq` on;
    `last_seq` if there is none."""
    tiles = _num_tiles(starts_ptr, seq, TOKENS)
    while (tile >= base + tiles) & (seq < last_seq):
        base += tiles
        seq += 1
        tiles = _num_tiles(starts_ptr, gl.minimum(seq, last_seq - 1), TOKENS)
    return seq, base, tiles


@gluon.jit
def _tile_bounds(
    tile, seq, base, tiles, starts_ptr, lens_ptr, window,
    TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """(first token, tokens left, first position, first key tile, end key tile, end of the keys) of
    a query tile."""
    begin = gl.load(starts_ptr + seq)
    num_queries = gl.load(starts_ptr + seq + 1) - begin
    length = gl.load(lens_ptr + seq)
    first = (base + tiles - 1 - tile) * TOKENS  # longest first
    position = length - num_queries + first
    end = gl.minimum(length, position + TOKENS)
    low = gl.to_tensor(0)
    if HAS_WINDOW:
        low = gl.maximum(0, position - window + 1) // BLOCK_N
    return begin + first, num_queries - first, position, low, (end + BLOCK_N - 1) // BLOCK_N, end


@gluon.jit
def _part_bounds(part, low, high, splits):
    """(number of parts, first key tile, end key tile) of part `part` of a query tile with keys in
    tiles low … high. The tiles are both 0 if there is no such part."""
    num = high - low
    parts = gl.maximum(gl.minimum(splits, num * splits // MAX_PARTS), 1)
    span = (num + parts - 1) // parts
    parts = (num + span - 1) // gl.maximum(span, 1)
    begin = low + part * span
    exists = part < parts
    return parts, gl.where(exists, begin, 0), gl.where(exists, gl.minimum(begin + span, high), 0)


@gluon.jit
def _copy_tile(
    desc, table, start, end, head, full, kv_tile, K: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Copy keys from `start` into `kv_tile` [BLOCK_N, D], a KV block at a time. Barrier `full` opens when all have
    arrived."""
    ROWS_PER_COPY: gl.constexpr = desc.block_type.shape[0]
    mbarrier.expect(full, kv_tile.shape[0] * kv_tile.shape[1] * 2)
    for i in gl.static_range(kv_tile.shape[0] // ROWS_PER_COPY):
        at = start + i * ROWS_PER_COPY
        block = gl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
        row = (block * K + head) * BLOCK_SIZE + at % BLOCK_SIZE
        load_tile(desc, [row, 0], full, kv_tile.slice(i * ROWS_PER_COPY, ROWS_PER_COPY, 0))


@gluon.jit
def _widen(x, IS_FP8: gl.constexpr):
    """Four 8-bit numbers in each int32 [..., N] → float16 pairs in int32 [..., 2 N]. An int8's byte in the low half of
    0x6400 is the float16 1024 + byte."""
    if IS_FP8:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [x], (gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b32 x, k; xor.b32 x, $2, 0x80808080; mov.b32 k, 0x64806480;"
            " prmt.b32 $0, x, 0x64646464, 0x5150; prmt.b32 $1, x, 0x64646464, 0x5352;"
            " sub.f16x2 $0, $0, k; sub.f16x2 $1, $1, k; }",
            "=&r,=&r,r", [x], (gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    pairs = gl.join(low, high)
    return pairs.reshape([x.shape[0], x.shape[1], 2 * x.shape[2]])


@gluon.jit
def _load_8bit(
    ptr, table, start, end, head,
    K: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """KV blocks of an 8-bit cache as stored: int32 [BLOCK_N // BLOCK_SIZE, ROWS, COLUMNS // 4], four numbers in each."""
    ACROSS: gl.constexpr = COLUMNS // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32 // ACROSS, ACROSS], [1, 4, 1], [2, 1, 0]
    )
    BLOCKS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    at = start // BLOCK_SIZE + gl.arange(0, BLOCK_N // BLOCK_SIZE, BLOCKS)
    block = gl.load(table + at, mask=at * BLOCK_SIZE < end, other=0).to(gl.int64)
    base = (block * K + head) * (ROWS * COLUMNS // 4)
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) * (COLUMNS // 4)
    columns = gl.arange(0, COLUMNS // 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    at = (
        ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        + base[:, None, None]
        + (rows[None, :, None] + columns[None, None, :])
    )
    return gl.load(gl.multiple_of(gl.max_contiguous(at, [1, 1, 4]), [1, 1, 16]))


@gluon.jit
def _send(mailbox, AT: gl.constexpr, numbers):
    """Write numbers to the mailbox in shared memory, from place AT."""
    for i in gl.static_range(len(numbers)):
        mailbox.index(AT + i).store(
            gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        )


@gluon.jit
def _receive(mailbox, i: gl.constexpr):
    return gl.max(mailbox.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _producer(
    q_desc, k, v, q_smem, k_smem, v_smem, mailbox, bars, next_ptr, table_ptr, starts_ptr, lens_ptr, window, table_stride,
    first_seq, last_seq, splits,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Fill the rings. A 16-bit cache is read through descriptors of its rows of D numbers, an 8-bit
    one (SCALED) through pointers. Loads that don't depend on the consumers are issued before the
    wait for them."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    n = 0  # tiles so far; gives the slot in the ring and the phase
    round_ = 0
    work = gl.program_id(0)
    each = K  # work items of a query tile
    if SPLIT:
        each = K * splits
    seq, base, tiles = _find_sequence(
        work // each, first_seq, gl.to_tensor(0), last_seq, starts_ptr, TOKENS
    )
    while seq < last_seq:
        head = work % K
        token, left, position, low, high, end = _tile_bounds(
            work // each,
            seq,
            base,
            tiles,
            starts_ptr,
            lens_ptr,
            window,
            TOKENS,
            BLOCK_N,
            HAS_WINDOW,
        )
        part, parts = gl.to_tensor(0), gl.to_tensor(1)
        if SPLIT:
            part = work // K % splits
            parts, low, high = _part_bounds(part, low, high, splits)
        table = table_ptr + seq.to(gl.int64) * table_stride
        if SCALED:
            WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
            FP8: gl.constexpr = k.dtype.element_ty == gl.float8e4nv
            k_words = _reinterpret(k_smem, gl.int32, [STAGES, BLOCK_N, D // 2], WORDS)
            v_words = _reinterpret(v_smem, gl.int32, [STAGES, D, BLOCK_N // 2], WORDS)
            keys = _load_8bit(
                k,
                table,
                gl.maximum(high - 1, 0) * BLOCK_N,
                end,
                head,
                K,
                BLOCK_SIZE,
                D,
                BLOCK_SIZE,
                BLOCK_N,
            )
            for j in range(high - low):
                start = (high - 1 - j) * BLOCK_N
                slot, phase = n % STAGES, ((n // STAGES) & 1) ^ 1
                values = _load_8bit(
                    v, table, start, end, head, K, D, BLOCK_SIZE, BLOCK_SIZE, BLOCK_N
                )
                mbarrier.wait(k_empty.index(slot), phase)
                k_words.index(slot).store(_widen(keys, FP8).reshape([BLOCK_N, D // 2]))
                fence_async_shared()
                mbarrier.arrive(k_full.index(slot), count=1)
                if j == 0:
                    for c in gl.static_range(2):
                        mbarrier.wait(q_empty.index(c), (round_ & 1) ^ 1)
                        _send(mailbox, 8 * c, (token, left, position, low, high, head, part, parts))
                        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                        load_tile(
                            q_desc,
                            [token + c * (TOKENS // 2), head * G, 0],
                            q_full.index(c),
                            q_smem.index(c),
                        )
                ahead = gl.maximum(start - BLOCK_N, 0)
                keys = _load_8bit(k, table, ahead, end, head, K, BLOCK_SIZE, D, BLOCK_SIZE, BLOCK_N)
                mbarrier.wait(v_empty.index(slot), phase)
                v_words.index(slot).store(
                    _widen(values, FP8).permute([1, 0, 2]).reshape([D, BLOCK_N // 2])
                )
                fence_async_shared()
                mbarrier.arrive(v_full.index(slot), count=1)
                n += 1
        else:
            for j in range(high - low):
                start = (high - 1 - j) * BLOCK_N
                slot, phase = n % STAGES, ((n // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(slot), phase)
                _copy_tile(
                    k,
                    table,
                    start,
                    end,
                    head,
                    k_full.index(slot),
                    k_smem.index(slot),
                    K,
                    BLOCK_SIZE,
                )
                if j == 0:
                    for c in gl.static_range(2):
                        mbarrier.wait(q_empty.index(c), (round_ & 1) ^ 1)
                        _send(mailbox, 8 * c, (token, left, position, low, high, head, part, parts))
                        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                        load_tile(
                            q_desc,
                            [token + c * (TOKENS // 2), head * G, 0],
                            q_full.index(c),
                            q_smem.index(c),
                        )
                mbarrier.wait(v_empty.index(slot), phase)
                _copy_tile(
                    v,
                    table,
                    start,
                    end,
                    head,
                    v_full.index(slot),
                    v_smem.index(slot),
                    K,
                    BLOCK_SIZE,
                )
                n += 1
        round_ += (high > low).to(gl.int32)
        work = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
        seq, base, tiles = _find_sequence(work // each, seq, base, last_seq, starts_ptr, TOKENS)
    nothing = gl.to_tensor(0)
    for c in gl.static_range(2):
        mbarrier.wait(q_empty.index(c), (round_ & 1) ^ 1)
        _send(mailbox, 8 * c + 4, (nothing,))  # no key tiles: the end
        mbarrier.arrive(q_full.index(c), count=1)


@gluon.jit
def _mask(s, start, positions, window, HAS_WINDOW: gl.constexpr):
    distance = (
        positions[:, None]
        - (start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]
    )
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softcap(s, factor):
    """tanh of the scores times `factor`, which includes 2 log2 e."""
    return 1.0 - 2.0 / (gl.exp2(s * factor) + 1.0)


@gluon.jit
def _online_softmax(s, m_i, l_i, tile):
    """Step of the running softmax: scores, their factor to units of log 2, and the rows' maximum
    and sum → weights, new maximum and sum, and the factor for earlier sums."""
    new = gl.maximum(m_i, gl.max(s, 1) * tile)
    safe = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * tile - safe[:, None])
    alpha = gl.exp2(m_i - safe)
    return p, new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _consumer(
    out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, softcap, window, first_seq, splits,
    C: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BLOCK_G: gl.constexpr, D: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute rows 64 C … of a query tile. Row r is token r // BLOCK_G and query head r % BLOCK_G,
    of which the first G exist."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    M: gl.constexpr = CONSUMER_ROWS
    TILE: gl.constexpr = k_smem.layout
    dtype: gl.constexpr = k_smem.dtype
    given_dtype: gl.constexpr = q_smem.dtype
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    given = _reinterpret(q_smem.index(C), given_dtype, [M, D], TILE)
    q = _reinterpret(given, dtype, [M, D], TILE)
    n = 0
    round_ = 0
    mbarrier.wait(q_full.index(C), 0)
    high = _receive(mailbox, 8 * C + 4)
    while high > 0:
        token, left, position = (
            _receive(mailbox, 8 * C),
            _receive(mailbox, 8 * C + 1),
            _receive(mailbox, 8 * C + 2),
        )
        low, head = _receive(mailbox, 8 * C + 3), _receive(mailbox, 8 * C + 5)
        part, parts = _receive(mailbox, 8 * C + 6), _receive(mailbox, 8 * C + 7)
        rows = gl.arange(0, M, ROWS)
        positions = position + C * (TOKENS // 2) + rows // BLOCK_G
        to_log2 = scale * LOG2E
        if SCALED:
            to_log2 *= gl.load(k_scale_ptr + head)
        cap_factor = to_log2 * 2.0 / softcap
        if HAS_SOFTCAP:
            to_log2 = softcap * LOG2E
        m_i = gl.full([M], float("-inf"), gl.float32, ROWS)
        l_i = gl.full([M], 0.0, gl.float32, ROWS)
        if HAS_SINKS:
            sinks = gl.load(
                sinks_ptr + head * G + rows % BLOCK_G, mask=rows % BLOCK_G < G, other=0.0
            )
            m_i, l_i = sinks.to(gl.float32) * LOG2E, l_i + 1.0
            if SPLIT:  # counted once, in the first part
                m_i, l_i = gl.where(part == 0, m_i, float("-inf")), gl.where(part == 0, l_i, 0.0)
        acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
        # every row sees all keys from `mask_until` up to `mask_from`
        mask_from = position + C * (TOKENS // 2) + 1
        mask_until = position + TOKENS - window
        if SCALED:
            q.store(given.load(OUT).to(dtype))
            fence_async_shared()

        slot = n % STAGES
        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
        s = gl.zeros([M, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if HAS_SOFTCAP:
            s = _softcap(s, cap_factor)
        s = _mask(s, (high - 1) * BLOCK_N, positions, window, HAS_WINDOW)
        p, m_i, l_i, alpha = _online_softmax(s, m_i, l_i, to_log2)
        weights = gl.convert_layout(p.to(dtype), P_LAYOUT)
        n += 1
        mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1, pred=high - low > 1)
        for j in range(1, high - low):
            slot, previous = n % STAGES, (n - 1) % STAGES
            s = gl.zeros([M, BLOCK_N], gl.float32, S_LAYOUT)
            s = warpgroup_mma(
                q, k_smem.index(slot).permute((1, 0)), s, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(previous), ((n - 1) // STAGES) & 1)
            v = v_smem.index(previous)
            acc = warpgroup_mma(weights, v.permute((1, 0)) if SCALED else v, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            if HAS_SOFTCAP:
                s = _softcap(s, cap_factor)
            start = (high - 1 - j) * BLOCK_N
            masked = start + BLOCK_N > mask_from
            if HAS_WINDOW:
                masked = masked | (start < mask_until)
            if masked:
                s = _mask(s, start, positions, window, HAS_WINDOW)
            p, m_i, l_i, alpha = _online_softmax(s, m_i, l_i, to_log2)
            n += 1
            # This wait keeps the compiler from moving the exponents after the tensor cores' work.
            mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1, pred=j + 1 < high - low)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            weights = gl.convert_layout(p.to(dtype), P_LAYOUT)
            mbarrier.arrive(v_empty.index(previous), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.arrive(q_empty.index(C), count=1)
        slot = (n - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((n - 1) // STAGES) & 1)
        v = v_smem.index(slot)
        acc = warpgroup_mma(weights, v.permute((1, 0)) if SCALED else v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)

        norm = 1.0 / gl.where(l_i == 0.0, 1.0, l_i)
        if SCALED:
            norm *= gl.load(v_scale_ptr + head)
        acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, O_LAYOUT))[:, None]
        is_whole = True
        if SPLIT:
            is_whole = parts == 1
            if parts > 1:
                tokens = C * (TOKENS // 2) + rows // BLOCK_G
                live = (tokens < left) & (rows % BLOCK_G < G)
                # decodes have one token each, so this counts from the first prompt's
                tokens += token - first_seq
                at = (tokens * (K * G) + head * G + rows % BLOCK_G) * splits + part
                lse = gl.where(
                    l_i == 0.0, float("-inf"), m_i + gl.log2(gl.where(l_i == 0.0, 1.0, l_i))
                )
                gl.store(lse_ptr + at, lse, mask=live)
                gl.store(
                    parts_ptr + (tokens * K + head),
                    parts + 0 * tokens,
                    mask=live & (rows % BLOCK_G == 0),
                )
                # `num_parts` keeps it far below 2³¹
                at = gl.convert_layout(at * D, gl.SliceLayout(1, O_LAYOUT))[:, None]
                at += gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))[None, :]
                gl.store(
                    partial_ptr + at,
                    acc,
                    mask=gl.convert_layout(live, gl.SliceLayout(1, O_LAYOUT))[:, None],
                )
        if is_whole:
            out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
            r = gl.arange(0, M, gl.SliceLayout(1, OUT))
            t = C * (TOKENS // 2) + r // BLOCK_G
            offset = ((token + t).to(gl.int64) * (K * G) + head * G + r % BLOCK_G) * D
            live = (t < left) & (r % BLOCK_G < G)
            offset = out_ptr + (offset[:, None] + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :])
            gl.store(
                gl.multiple_of(gl.max_contiguous(offset, [1, 8]), [1, 16]), out, mask=live[:, None]
            )
        round_ += 1
        mbarrier.wait(q_full.index(C), round_ & 1)
        high = _receive(mailbox, 8 * C + 4)


@gluon.jit(do_not_specialize=["window", "table_stride", "first_seq", "last_seq", "splits"])
def _prefill_kernel(
    q_desc, k, v, out_ptr, partial_ptr, lse_ptr, parts_ptr, next_ptr, table_ptr, starts_ptr, lens_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, scale, softcap, window, table_stride, first_seq, last_seq, splits,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    BLOCK_G: gl.constexpr = q_desc.block_type.shape[1]
    TOKENS: gl.constexpr = 2 * q_desc.block_type.shape[0]
    # float16 holds every 8-bit number
    dtype: gl.constexpr = gl.float16 if SCALED else q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, TOKENS // 2, BLOCK_G, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    v_smem = gl.allocate_shared_memory(
        dtype, [STAGES, D, BLOCK_N] if SCALED else [STAGES, BLOCK_N, D], TILE
    )
    q_full, q_empty = _barriers(2, 1), _barriers(2, 1)
    k_full, v_full = _barriers(STAGES, 1), _barriers(STAGES, 1)
    k_empty, v_empty = _barriers(STAGES, 2), _barriers(STAGES, 2)  # both consumers release a tile
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    mailbox = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, sinks_ptr, k_scale_ptr,
                v_scale_ptr, scale, softcap, window, first_seq, splits,
                0, K, G, BLOCK_G, D, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SCALED, SPLIT,
            )),
            (_consumer, (
                out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, sinks_ptr, k_scale_ptr,
                v_scale_ptr, scale, softcap, window, first_seq, splits,
                1, K, G, BLOCK_G, D, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, SCALED, SPLIT,
            )),
            (_producer, (
                q_desc, k, v, q_smem, k_smem, v_smem, mailbox, bars, next_ptr, table_ptr, starts_ptr, lens_ptr, window,
                table_stride, first_seq, last_seq, splits,
                K, G, D, BLOCK_SIZE, TOKENS, BLOCK_N, STAGES, HAS_WINDOW, SCALED, SPLIT,
            )),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


QUERIES, KEYS = gl.NVMMASharedLayout(128, 16, 3), gl.NVMMASharedLayout(128, 16, 2)
TILES = {64: (128, 4, 104), 128: (128, 2, 104), 256: (64, 2, 88)}
"""Head dim → (keys in a tile, tiles in the ring, registers per thread of a converting producer).
The ring and the queries fill 227 KB of shared memory. The consumers' threads get the rest of 504
registers."""


def covers(q: Tensor, kv: LayerKV) -> bool:
    """Whether `prefill` supports these dtypes and shapes."""
    (num_kv_heads, block_size, dim), small = kv.k.shape[1:], kv.k_scale is not None
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and kv.k.dtype in ((torch.float8_e4m3fn, torch.int8) if small else (q.dtype,))
        and kv.v.stride(2 if small else 3) == 1
        and dim in TILES
        and block_size in (16, 32, 64)
        and q.shape[1] // num_kv_heads <= CONSUMER_ROWS.value
    )


def prefill(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    out: Tensor,
    *,
    first_seq: int,
) -> None:
    """Causal attention of sequences `first_seq` … into their rows of `out` [T, H, D]. No ALiBi, no
    bias by distance."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, block_size = kv.k.shape[1:3]
    group = num_heads // num_kv_heads
    block_g = 1 << (group - 1).bit_length()
    rows = CONSUMER_ROWS.value // block_g
    scaled = kv.k_scale is not None
    block_n, stages, converter = TILES[dim]
    regs = converter if scaled else 24
    q_desc = TensorDescriptor(q, list(q.shape), list(q.stride()), [rows, block_g, dim], QUERIES)
    k, v = kv.k, kv.v
    if not scaled:
        shape, copy_shape = [kv.k.numel() // dim, dim], [min(block_size, block_n), dim]
        k, v = (TensorDescriptor(t, shape, [dim, 1], copy_shape, KEYS) for t in (k, v))
    k_scale, v_scale = (
        (q, q) if kv.k_scale is None or kv.v_scale is None else (kv.k_scale, kv.v_scale)
    )
    num_prompt, processors = num_tokens - first_seq, platform_of(q.device).multiprocessors
    max_tiles = num_prompt // (2 * rows) + meta.seq_lens.shape[0] - first_seq  # upper bound
    splits = num_parts(triton.cdiv(num_prompt, 2 * rows) * num_kv_heads, processors)
    partial, lse = scratch(num_prompt, q, dim, splits) if splits > 1 else (out, out)
    # One counter per launch, because launches may overlap; after it the number of parts of each
    # token and kv head.
    counts = torch.zeros(
        1 + (num_prompt * num_kv_heads if splits > 1 else 0), dtype=torch.int32, device=q.device
    )
    parts = counts[1:]
    _prefill_kernel[(min(max_tiles * num_kv_heads * splits, processors),)](
        q_desc, k, v, out, partial, lse, parts if splits > 1 else counts, counts, meta.block_table, meta.query_start_loc,
        meta.seq_lens, q if s.sinks is None else s.sinks, k_scale, v_scale,
        s.scale, s.softcap or 1.0, s.window or 0, meta.block_table.stride(0), first_seq, meta.seq_lens.shape[0], splits,
        K=num_kv_heads, G=group, D=dim, BLOCK_SIZE=block_size, BLOCK_N=block_n, STAGES=stages,
        HAS_WINDOW=s.window is not None, HAS_SOFTCAP=s.softcap is not None, HAS_SINKS=s.sinks is not None, SCALED=scaled,
        SPLIT=splits > 1, PRODUCER_WARPS=4 if scaled else 1, PRODUCER_REGS=regs, CONSUMER_REGS=(504 - regs) // 2, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        combine(partial, lse, out[first_seq:], splits, parts.view(num_prompt, num_kv_heads))


def num_parts(num_programs: int, num_processors: int) -> int:
    """Parts per query tile's keys such that the chip has one work item for each thread block."""
    return max(1, min(int(MAX_PARTS.value), num_processors // num_programs))
