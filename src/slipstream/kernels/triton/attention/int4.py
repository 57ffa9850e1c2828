"""Attention over an int4 cache, whose format is `kernels.cache.int4`'s, and writing to it.

1. `rope_and_cache` rotates heads as for any cache, with keys and values side by side in buffers. A
   second kernel folds and multiplies them by the Hadamard matrix, rounds them, and writes the cache.
2. `attention` reads codes. Halves of the dimensions are products of their own, because a byte holds
   a number of each: so no register is moved to another place. Codes are whole numbers and a half,
   exact in float16. Scales of keys multiply scores, scales of values the weights.
3. The results are multiplied by the Hadamard matrix once more.

Decodes and prompts are split and walked as in `paged.py`. Members of a shared prefix read its blocks
one by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention.int4_writing import (
    hadamard,
    load_halves,
    scale_of,
    store_halves,
)
from slipstream.kernels.triton.attention.paged import (
    DECODE_ACC_SIZE,
    LOG2E,
    _locate_keys,
    _online_softmax,
    _scores,
)
from slipstream.kernels.triton.attention.split_keys import (
    MAX_PARTS,
    DecodeParts,
    combine,
    merge_parts,
    scratch,
)
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.platform import platform_of


def _key_instructions(dim: int) -> tuple[str, str]:
    """Returns the PTX of `_halves_of_keys`, for four bytes at a time, and its registers."""
    chunk = max(16, dim // 8)
    chunks, each = dim // 2 // chunk, chunk * 8 // dim
    fifth = f"${5 * chunks}"
    lines = [f"mov.b32 b, {fifth};"]
    if each > 1:  # four bytes have one shift
        lines = [f"and.b32 c, ${5 * chunks + 1}, 3; shr.b32 b, {fifth}, c;"]
    for i in range(chunks):
        bit, codes = i * each, f"${4 * chunks + i}"
        for half in range(2):
            to = half * 2 * chunks + 2 * i
            shift = f"shr.b32 f, b, {bit};" if half else f"shl.b32 f, b, {4 - bit};"
            lines.append(
                f"{f'shr.b32 c, {codes}, 4;' if half else f'mov.b32 c, {codes};'} and.b32 c, c, 0x0F0F0F0F; {shift} "
                f"lop3.b32 c, f, 0x10101010, c, 0xEA; prmt.b32 ${to}, c, 0x54, 0x4140; prmt.b32 ${to + 1}, c, 0x54, 0x4342;"
            )
    text = "{ .reg .b32 b, c, f; " + " ".join(lines) + " }"
    return text, ",".join(["=&r"] * (4 * chunks) + ["r"] * (chunks + 1 + (each > 1)))


VALUE_INSTRUCTIONS = (
    "{ .reg .b32 c, m; mov.b32 m, 0x54785478; shl.b32 c, $4, 4; and.b32 c, c, 0xF0F0F0F0; prmt.b32 $0, c, 0x54, 0x4140; "
    "prmt.b32 $1, c, 0x54, 0x4342; and.b32 c, $4, 0xF0F0F0F0; prmt.b32 $2, c, 0x54, 0x4140; prmt.b32 $3, c, 0x54, 0x4342; "
    "sub.f16x2 $0, $0, m; sub.f16x2 $1, $1, m; sub.f16x2 $2, $2, m; sub.f16x2 $3, $3, m; }"
)
"""PTX of `_halves_of_values`: codes as bits of a float16 of 64, from which 71.5 is subtracted."""
CTAS_PER_SM = 16
"""Thread blocks of one warp that a multiprocessor has registers for."""
TWO, FOUR, EIGHT = (tl.constexpr((tl.float16,) * n) for n in (2, 4, 8))

VALUE_SCALE = tl.constexpr(16.0)
"""Factor of the products of weights and values' scales, so that float16 represents them. The scale of 16 quantization
steps is twice the largest value."""


@triton.jit
def _rotate_kernel(x_ptr, num_rows, D: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Multiply rows of D numbers by the Hadamard matrix, in place."""
    if PDL:
        pdl_wait()
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None]
    at = x_ptr + rows[:, None] * D + tl.arange(0, HALF)[None, :]
    x, y = load_halves(at, mask, HALF)
    x, y = hadamard(x, y, HALF)
    store_halves(at, x, y, mask, HALF)


@triton.jit
def _halves_of_keys(
    k_ptr, base, slot,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, ASM: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Loads keys' codes in chunks of CHUNK bytes: HALF / CHUNK tensors float16 [N, CHUNK] of the
    lower half of the dimensions, then as many of the upper half. A code c is represented by 64 + c
    / 16."""
    FIFTH: tl.constexpr = HALF // 4
    CHUNKS: tl.constexpr = HALF // CHUNK
    EACH: tl.constexpr = CHUNK // FIFTH  # fifth bits of a byte that a chunk has
    base *= BLOCK_SIZE * (HALF + FIFTH + 2)
    ds = tl.arange(0, CHUNK)
    bits = k_ptr + (base + BLOCK_SIZE * HALF + slot * FIFTH)[:, None] + (ds % FIFTH)[None, :]
    fifth = tl.load(bits)
    inputs = (fifth,)
    if EACH > 1:
        shifts = (ds // FIFTH).to(tl.uint8)[None, :]
        inputs += (tl.broadcast_to(shifts, fifth.shape),)  # type: ignore[assignment]
    at = k_ptr + (base + slot * HALF)[:, None] + ds[None, :]
    codes = ()
    for i in tl.static_range(CHUNKS):
        codes += (tl.load(at + i * CHUNK),)  # type: ignore[assignment]
    if ASM != "":
        given = codes + inputs
        if CHUNKS == 4:
            made = tl.inline_asm_elementwise(ASM, REGISTERS, given, EIGHT, True, 4)
        elif CHUNKS == 2:
            made = tl.inline_asm_elementwise(ASM, REGISTERS, given, FOUR, True, 4)
        else:
            made = tl.inline_asm_elementwise(ASM, REGISTERS, given, TWO, True, 4)
    else:
        if EACH > 1:
            fifth >>= shifts
        made = ()
        for i in tl.static_range(CHUNKS):
            more = fifth >> (i * EACH)
            made += (_sixteenths(codes[i] & 15 | (more & 1) << 4),)
        for i in tl.static_range(CHUNKS):
            more = fifth >> (i * EACH)
            made += (_sixteenths(codes[i] >> 4 | more & 16),)
    return made


@triton.jit
def _sixteenths(codes):
    return (codes.to(tl.uint16) | 0x5400).to(tl.float16, bitcast=True)


@triton.jit
def _steps(k_ptr, v_ptr, base, slot, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Loads scales as bytes [N]: (those of a key's two halves in one integer, that of the
    value)."""
    KEY: tl.constexpr = HALF + HALF // 4
    at = k_ptr + base * (BLOCK_SIZE * (KEY + 2)) + (BLOCK_SIZE * KEY + slot * 2)
    values = v_ptr + base * (BLOCK_SIZE * (HALF + 1)) + (BLOCK_SIZE * HALF + slot)
    return tl.load(at.to(tl.pointer_type(tl.uint16))), tl.load(values)


@triton.jit
def _halves_of_values(
    v_ptr, base, slot, ds, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ASM: tl.constexpr
):
    """Loads values without their scales: the lower and the upper half of the dimensions, float16
    [HALF, N] each."""
    base *= BLOCK_SIZE * (HALF + 1)
    codes = tl.load(v_ptr + (base + slot)[None, :] + (ds * BLOCK_SIZE)[:, None])
    if ASM != "":
        low, high = tl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r", [codes], TWO, True, 4)
    else:
        low, high = _sixteenths(codes << 4) - 71.5, _sixteenths(codes & 0xF0) - 71.5
    return low, high


@triton.jit
def _queries(at, live, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Queries [CHUNK, G] in the layout of `_halves_of_keys`; and for both halves the excess of
    their products, from the 64 and the middle of 32 codes, to be subtracted."""
    found = ()
    low, high = 0.0, 0.0
    for i in tl.static_range(2 * HALF // CHUNK):
        ds = i * CHUNK + tl.arange(0, CHUNK)
        q = tl.load(at + ds[:, None], mask=live, other=0.0).to(tl.float16)
        found += (q,)  # type: ignore[assignment]
        total = tl.sum(q.to(tl.float32), 0)[None, :] * 64.96875
        if i * CHUNK < HALF:
            low += total
        else:
            high += total
    return found, (low, high)


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "num_seqs", "splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, lens_ptr, parts_ptr, arrived_ptr, slopes_ptr,
    bias_ptr, sinks_ptr, scale, softcap, window, table_stride, reach, num_seqs, splits,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_TILES: tl.constexpr,
    BLOCK_G: tl.constexpr, MERGED_G: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr,
    MAX_PARTS: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr, KEY_ASM: tl.constexpr, REGISTERS: tl.constexpr,
    VALUE_ASM: tl.constexpr,
):  # fmt: skip
    """Runs `paged._decode_kernel` over a cache of 4-bit codes."""
    if PDL:
        pdl_wait()
    HALF: tl.constexpr = D // 2
    CHUNK: tl.constexpr = max(16, D // 8)
    CHUNKS: tl.constexpr = HALF // CHUNK
    tile, seq = tl.program_id(0), tl.program_id(1)
    part, begin = parts_ptr + seq * 8, 0 * seq
    end, slot = tl.load(part + 2), tl.load(part + 3)
    is_first = seq < num_seqs
    if seq >= num_seqs:
        seq, begin = tl.load(part), tl.load(part + 1)
    if seq < 0:
        return
    head = tile // HEAD_TILES
    length = tl.load(lens_ptr + seq)
    if HAS_WINDOW:
        begin = tl.where(is_first, tl.maximum(0, length - window) // BLOCK_N * BLOCK_N, begin)
    gs, ds = tile % HEAD_TILES * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, HALF)
    heads = head * G + gs
    offset = (seq * (K * G) + heads)[None, :] * D + ds[:, None]
    live = (gs < G)[None, :]
    queries, sums = _queries(q_ptr + (seq * (K * G) + heads)[None, :] * D, live, HALF, CHUNK)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads, mask=gs < G, other=0.0)[None, :]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[None, :]
    m_i = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_G,), tl.float32)
    if HAS_SINKS:  # counted once, in the first part
        is_first = is_first & (begin < end)
        sinks = tl.load(sinks_ptr + heads, mask=gs < G, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(is_first, sinks, m_i)
        l_i = tl.where(is_first, 1.0, l_i)
    low, high = tl.zeros((HALF, BLOCK_G), tl.float32), tl.zeros((HALF, BLOCK_G), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    # Scales are too small for asynchronous copies: they are loaded a tile ahead, and their blocks' numbers two.
    last = tl.maximum(end - 1, 0) // BLOCK_N * BLOCK_N
    block, at_slot = _locate_keys(table, begin, end, BLOCK_N, BLOCK_SIZE, True)
    key_ahead, value_ahead = _steps(k_ptr, v_ptr, block * K + head, at_slot, HALF, BLOCK_SIZE)
    ahead, slot_ahead = _locate_keys(
        table, tl.minimum(begin + BLOCK_N, last), end, BLOCK_N, BLOCK_SIZE, True
    )
    for start in range(begin, end, BLOCK_N):
        key_steps, value_steps = key_ahead, value_ahead
        key_ahead, value_ahead = _steps(
            k_ptr, v_ptr, ahead * K + head, slot_ahead, HALF, BLOCK_SIZE
        )
        ahead, slot_ahead = _locate_keys(
            table, tl.minimum(start + 2 * BLOCK_N, last), end, BLOCK_N, BLOCK_SIZE, True
        )
        at = start + tl.arange(0, BLOCK_N)
        block, at_slot = _locate_keys(table, start, end, BLOCK_N, BLOCK_SIZE, True)
        base = block * K + head
        # Loads are not masked: all bytes of the cache stand for finite numbers.
        keys = _halves_of_keys(k_ptr, base, at_slot, HALF, BLOCK_SIZE, CHUNK, KEY_ASM, REGISTERS)
        v_low, v_high = _halves_of_values(v_ptr, base, at_slot, ds, HALF, BLOCK_SIZE, VALUE_ASM)
        s = tl.zeros((BLOCK_N, BLOCK_G), tl.float32) - sums[0]
        more = tl.zeros((BLOCK_N, BLOCK_G), tl.float32) - sums[1]
        for i in tl.static_range(CHUNKS):
            s = tl.dot(keys[i], queries[i], s, input_precision="ieee")
            more = tl.dot(keys[CHUNKS + i], queries[CHUNKS + i], more, input_precision="ieee")
        s = s * scale_of(key_steps & 0xFF)[:, None] + more * scale_of(key_steps >> 8)[:, None]
        away = (length - 1 - at)[:, None]
        s, to_log2 = _scores(
            s,
            scale * 16.0,
            softcap,
            slope,
            bias,
            reach,
            away,
            live,
            HAS_SOFTCAP,
            HAS_ALIBI,
            HAS_BIAS,
        )
        seen = at < end
        if HAS_WINDOW:
            seen = seen & (at >= length - window)
        s = tl.where(seen[:, None], s, float("-inf"))
        new = tl.maximum(m_i, tl.max(s, 0) * to_log2)  # finite: each tile has an unmasked key
        p = tl.exp2(s * to_log2 - new[None, :])
        alpha = tl.exp2(m_i - new)
        l_i = l_i * alpha + tl.sum(p, 0)
        weights = (p * (scale_of(value_steps) * VALUE_SCALE)[:, None]).to(tl.float16)
        low = low * alpha[None, :] + tl.dot(v_low, weights, input_precision="ieee")
        high = high * alpha[None, :] + tl.dot(v_high, weights, input_precision="ieee")
        m_i = new
    empty = l_i == 0.0
    total = (tl.where(empty, 1.0, l_i) * VALUE_SCALE)[None, :]
    low, high = low / total, high / total
    if slot < 0:
        store_halves(out_ptr + offset, low, high, live, HALF)
    else:
        place = slot * (K * G) + heads
        if not FUSED:
            place = (seq * (K * G) + heads) * splits + slot
        lse = tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))
        tl.store(lse_ptr + place, lse, mask=gs < G)
        to = partial_ptr + place[None, :] * D + ds[:, None]
        store_halves(to, low, high, live, HALF)
        if FUSED:
            first_slot, num = tl.load(part + 4), tl.load(part + 5)
            arrived = arrived_ptr + first_slot * (K * HEAD_TILES) + tile
            tl.debug_barrier()
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num - 1:
                tl.store(arrived, 0)
                ms = tile % HEAD_TILES * BLOCK_G + tl.arange(0, MERGED_G)
                merge_parts(
                    partial_ptr, lse_ptr, out_ptr, first_slot, num, seq, head * G + ms, ms < G, K * G, D, D, MAX_PARTS,
                )  # fmt: skip


@triton.jit
def _whole_keys(
    k_ptr, base, slot, ds,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Loads keys without their scales, and the scales: for the lower and the upper half of the
    dimensions float16 [N, HALF] and [N] each."""
    FIFTH: tl.constexpr = HALF // 4
    base *= BLOCK_SIZE * (HALF + FIFTH + 2)
    codes = tl.load(k_ptr + (base + slot * HALF)[:, None] + ds[None, :]).to(tl.uint16)
    bits = k_ptr + (base + BLOCK_SIZE * HALF + slot * FIFTH)[:, None] + (ds % FIFTH)[None, :]
    fifth = tl.load(bits).to(tl.uint16) >> (ds // FIFTH).to(tl.uint16)[None, :]
    # 0x5400 is the float16 64, whose fourth bit from the right is 1
    low = (codes << 4) & 0xF0 | (fifth << 8) & 0x100 | 0x5400
    high = codes & 0xF0 | (fifth << 4) & 0x100 | 0x5400
    steps = k_ptr + base + BLOCK_SIZE * (HALF + FIFTH) + slot * 2
    low = low.to(tl.float16, bitcast=True) - 79.5
    high = high.to(tl.float16, bitcast=True) - 79.5
    return low, high, scale_of(tl.load(steps)), scale_of(tl.load(steps + 1))


@triton.jit(do_not_specialize=["window", "table_stride", "reach", "first_seq"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, slopes_ptr, bias_ptr, sinks_ptr, scale, softcap, window,
    table_stride, reach, first_seq,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, VALUE_ASM: tl.constexpr,
):  # fmt: skip
    """Runs `paged._prefill_kernel` over a cache of 4-bit codes, with a causal mask."""
    HALF: tl.constexpr = D // 2
    head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # longest first
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    if tile * BLOCK_M >= num_queries * G:
        return
    length = tl.load(lens_ptr + seq)
    context = length - num_queries
    rows, ds = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HALF)
    live = (rows < num_queries * G)[:, None]
    heads = head * G + rows % G
    positions = context + rows // G
    offset = ((start + rows // G).to(tl.int64) * (K * G) + heads)[:, None] * D + ds[None, :]
    q_low = tl.load(q_ptr + offset, mask=live, other=0.0).to(tl.float16)
    q_high = tl.load(q_ptr + offset + HALF, mask=live, other=0.0).to(tl.float16)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + heads)[:, None]
    bias = (bias_ptr + heads * (2 * reach + 1) + reach)[:, None]
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        m_i, l_i = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E, l_i + 1.0
    low, high = tl.zeros((BLOCK_M, HALF), tl.float32), tl.zeros((BLOCK_M, HALF), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context + tile * BLOCK_M // G - window + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length, context + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
    for key in range(begin, end, BLOCK_N):
        at = key + tl.arange(0, BLOCK_N)
        block, slot = _locate_keys(table, key, end, BLOCK_N, BLOCK_SIZE, True)
        base = block * K + head
        k_low, k_high, first, second = _whole_keys(k_ptr, base, slot, ds, HALF, BLOCK_SIZE)
        v_low, v_high = _halves_of_values(v_ptr, base, slot, ds, HALF, BLOCK_SIZE, VALUE_ASM)
        _, steps = _steps(k_ptr, v_ptr, base, slot, HALF, BLOCK_SIZE)
        distance = positions[:, None] - at[None, :]
        s = tl.dot(q_low, tl.trans(k_low), input_precision="ieee") * first[None, :]
        s += tl.dot(q_high, tl.trans(k_high), input_precision="ieee") * second[None, :]
        s, to_log2 = _scores(
            s, scale, softcap, slope, bias, reach, distance, True, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS
        )
        s = tl.where(distance >= 0, s, float("-inf"))
        if HAS_WINDOW:
            s = tl.where(distance < window, s, float("-inf"))
        p, alpha, m_i, l_i = _online_softmax(s, to_log2, m_i, l_i)
        weights = (p * (scale_of(steps) * VALUE_SCALE)[None, :]).to(tl.float16)
        low = tl.dot(weights, tl.trans(v_low), low * alpha[:, None], input_precision="ieee")
        high = tl.dot(weights, tl.trans(v_high), high * alpha[:, None], input_precision="ieee")
    total = (tl.where(l_i == 0.0, 1.0, l_i) * VALUE_SCALE)[:, None]
    store_halves(out_ptr + offset, low / total, high / total, live, HALF)


def attention(
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    s: AttentionParams,
    *,
    decode_tile: tuple[int, int, int] = (16, 1, 6),
    deterministic: bool = False,
) -> Tensor:
    """`OpSet.attention` over an int4 cache. `decode_tile` and `deterministic`: see `paged_attention`."""
    assert s.causal
    out = torch.empty_like(q)
    num_heads, dim = q.shape[1:]
    num_kv_heads, num_seqs = kv.k.shape[1], meta.seq_lens.shape[0]
    group = num_heads // num_kv_heads
    shape = dict(K=num_kv_heads, G=group, D=dim, BLOCK_SIZE=kv.block_size)
    flags = dict(
        HAS_WINDOW=s.window is not None,
        HAS_SOFTCAP=s.softcap is not None,
        HAS_ALIBI=s.alibi_slopes is not None,
        HAS_BIAS=s.distance_bias is not None,
        HAS_SINKS=s.sinks is not None,
    )
    tensors = [q if t is None else t for t in (s.alibi_slopes, s.distance_bias, s.sinks)]
    scalars = (s.scale, s.softcap or 1.0, s.window or 0, meta.block_table.stride(0), s.reach)
    num_decodes = 0 if deterministic else meta.num_decodes
    if num_decodes:
        block_g = min(max(8, triton.next_power_of_2(group)), max(8, DECODE_ACC_SIZE // dim))
        head_tiles, (block_n, warps, stages) = triton.cdiv(group, block_g), decode_tile
        programs_each = num_kv_heads * head_tiles
        text, registers = ("", "") if knobs.runtime.interpret else _key_instructions(dim)
        processors = platform_of(q.device).multiprocessors
        parts = DecodeParts.of(meta, s.window, programs_each, block_n, processors, CTAS_PER_SM)
        partial, lse = scratch(
            num_decodes if parts.splits else len(parts.arrived), q, dim, max(1, parts.splits)
        )
        _decode_kernel[(programs_each, len(parts.parts))](
            q, kv.k, kv.v, out, partial, lse, meta.block_table, meta.seq_lens, parts.parts, parts.arrived, *tensors, *scalars,
            num_decodes, parts.splits, HEAD_TILES=head_tiles, BLOCK_G=block_g, BLOCK_N=block_n,
            MERGED_G=min(block_g, triton.next_power_of_2(group)), MAX_PARTS=MAX_PARTS, FUSED=not parts.splits,
            KEY_ASM=text, REGISTERS=registers, VALUE_ASM=text and VALUE_INSTRUCTIONS, num_warps=warps, num_stages=stages,
            **shape, **flags, **pdl_options(q),
        )  # fmt: skip
        if parts.splits > 1:
            combine(partial, lse, out[:num_decodes], parts.splits)
    if num_seqs > num_decodes:
        num_rows = meta.max_query_len * group
        block_m = 32 if num_rows <= 32 and not deterministic else 64 if dim > 128 else 128
        _prefill_kernel[(num_kv_heads, num_seqs - num_decodes, triton.cdiv(num_rows, block_m))](
            q, kv.k, kv.v, out, meta.block_table, meta.query_start_loc, meta.seq_lens, *tensors, *scalars, num_decodes,
            VALUE_ASM="" if knobs.runtime.interpret else VALUE_INSTRUCTIONS, BLOCK_M=block_m,
            BLOCK_N=32 if dim > 128 else 64, num_warps=4 if block_m == 32 else 8, num_stages=2, **shape, **flags,
        )  # fmt: skip
    rows, per_program = out.shape[0] * num_heads, 16 if out.shape[0] <= 128 else 64
    if rows:
        _rotate_kernel[(triton.cdiv(rows, per_program),)](
            out, rows, D=dim, ROWS=per_program, num_warps=4, **pdl_options(q)
        )
    return out
