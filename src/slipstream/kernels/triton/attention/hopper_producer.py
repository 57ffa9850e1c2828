"""The producer of Hopper's attention kernel: takes work and fills the rings of key and value tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from slipstream.kernels.triton.attention.hopper_memory import (
    MAX_PARTS,
    load_tile,
    reinterpret,
    send,
)


@gluon.jit
def _num_tiles(starts_ptr, seq, TOKENS: gl.constexpr):
    """Number of query tiles of a sequence, of TOKENS tokens each."""
    return (gl.load(starts_ptr + seq + 1) - gl.load(starts_ptr + seq) + TOKENS - 1) // TOKENS


@gluon.jit
def _find_sequence(tile, seq, base, last_seq, starts_ptr, TOKENS: gl.constexpr):
    """Finds the sequence of query tile `tile`: (sequence, its first tile, its number of tiles). The
    search begins at `seq`; `last_seq` if there is none."""
    tiles = _num_tiles(starts_ptr, seq, TOKENS)
    while (tile >= base + tiles) & (seq < last_seq):
        base += tiles
        seq += 1
        tiles = _num_tiles(starts_ptr, gl.minimum(seq, last_seq - 1), TOKENS)
    return seq, base, tiles


@gluon.jit
def _tile_bounds(
    tile, seq, base, tiles, starts_ptr, lens_ptr, limits_ptr, window,
    TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr, LIMITS: gl.constexpr,
):  # fmt: skip
    """Bounds of a query tile: (first token, tokens left, first position, first key tile, end of its
    key tiles, end of its keys)."""
    begin = gl.load(starts_ptr + seq)
    num_queries = gl.load(starts_ptr + seq + 1) - begin
    length = gl.load(lens_ptr + seq)
    first = (base + tiles - 1 - tile) * TOKENS  # longest first
    position = length - num_queries + first
    end = gl.minimum(length, position + TOKENS)
    if LIMITS:
        end = gl.load(limits_ptr + begin + gl.minimum(first + TOKENS, num_queries) - 1)
    low = gl.to_tensor(0)
    if HAS_WINDOW:
        low = gl.maximum(0, position - window + 1) // BLOCK_N
    return begin + first, num_queries - first, position, low, (end + BLOCK_N - 1) // BLOCK_N, end


@gluon.jit
def _part_bounds(part, low, high, splits):
    """Bounds of part `part` of a query tile whose keys are in tiles low … high: (number of parts,
    first key tile, end of its key tiles). The tiles are both 0 if there is no such part."""
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
    mbarrier.expect(
        full, kv_tile.shape[0] * kv_tile.shape[1] * (kv_tile.dtype.primitive_bitwidth // 8)
    )
    for i in gl.static_range(kv_tile.shape[0] // ROWS_PER_COPY):
        at = start + i * ROWS_PER_COPY
        block = gl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
        row = (block * K + head) * BLOCK_SIZE + at % BLOCK_SIZE
        load_tile(desc, [row, 0], full, kv_tile.slice(i * ROWS_PER_COPY, ROWS_PER_COPY, 0))


@gluon.jit
def _widen(x, IS_FP8: gl.constexpr):
    """Converts 8-bit numbers, four in each int32 [..., N], to float16, two in each int32 [..., 2 N]. An int8's byte in
    the low half of 0x6400 is the float16 1024 + byte."""
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
    """Loads KV blocks of an 8-bit cache unconverted: int32 [BLOCK_N // BLOCK_SIZE, ROWS, COLUMNS // 4], four numbers
    in each."""
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
def _prefetch_8bit(
    ptr, table, start, end, head, K: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Bring an 8-bit tile of KV blocks from `start` on into the L2 cache, 128 bytes a thread. A tile's loads wait for
    memory, and there are no registers for two tiles."""
    LINES: gl.constexpr = BLOCK_SIZE * D // 128  # of a KV block
    line = gl.arange(0, BLOCK_N // BLOCK_SIZE * LINES, gl.BlockedLayout([1], [32], [4], [0]))
    at = gl.maximum(start, 0) // BLOCK_SIZE + line // LINES
    block = gl.load(table + at, mask=at * BLOCK_SIZE < end, other=0).to(gl.int64)
    at = ptr + ((block * K + head) * (BLOCK_SIZE * D) + line % LINES * 128)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _in_order_of_weights(words):
    """Reorders values [blocks, D, words], four keys in a word, to match the weights. A consumer's thread t holds
    columns 2t, 2t + 1, 8 + 2t and 9 + 2t of an accumulator, but an 8-bit operand wants columns 4t … 4t + 3 from it."""
    shape: gl.constexpr = words.shape
    pairs = words.reshape([shape[0], shape[1] * shape[2] // 4, 2, 2]).permute([0, 1, 3, 2])
    low, high = gl.split(pairs)
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=&r,=r,r,r", [low, high], (gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(even, odd).reshape([shape[0], shape[1], shape[2]])


@gluon.jit
def _send_queries(
    q_desc, q_smem, q_full, q_empty, mailbox, item, round_, G: gl.constexpr, TOKENS: gl.constexpr
):
    """Send a query tile to both consumers: its queries, and numbers that describe it. The first number is the tile's
    first token, number 5 its kv head."""
    for c in gl.static_range(2):
        mbarrier.wait(q_empty.index(c), (round_ & 1) ^ 1)
        send(mailbox, 8 * c, item)
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        first = [item[0] + c * (TOKENS // 2), item[5] * G, 0]
        load_tile(q_desc, first, q_full.index(c), q_smem.index(c))


@gluon.jit
def producer(
    q_desc, k, v, q_smem, k_smem, v_smem, mailbox, bars, next_ptr, table_ptr, starts_ptr, lens_ptr, limits_ptr, window,
    table_stride, first_seq, last_seq, splits,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr, LIMITS: gl.constexpr,
    FP8: gl.constexpr,
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
            limits_ptr,
            window,
            TOKENS,
            BLOCK_N,
            HAS_WINDOW,
            LIMITS,
        )
        part, parts = gl.to_tensor(0), gl.to_tensor(1)
        if SPLIT:
            part = work // K % splits
            parts, low, high = _part_bounds(part, low, high, splits)
        table = table_ptr + seq.to(gl.int64) * table_stride
        if SCALED and not FP8:
            WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
            E4M3: gl.constexpr = k.dtype.element_ty == gl.float8e4nv
            k_words = reinterpret(k_smem, gl.int32, [STAGES, BLOCK_N, D // 2], WORDS)
            v_words = reinterpret(v_smem, gl.int32, [STAGES, D, BLOCK_N // 2], WORDS)
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
                k_words.index(slot).store(_widen(keys, E4M3).reshape([BLOCK_N, D // 2]))
                fence_async_shared()
                mbarrier.arrive(k_full.index(slot), count=1)
                if j == 0:
                    item = (token, left, position, low, high, head, part, parts)
                    _send_queries(q_desc, q_smem, q_full, q_empty, mailbox, item, round_, G, TOKENS)
                ahead = gl.maximum(start - BLOCK_N, 0)
                keys = _load_8bit(k, table, ahead, end, head, K, BLOCK_SIZE, D, BLOCK_SIZE, BLOCK_N)
                mbarrier.wait(v_empty.index(slot), phase)
                v_words.index(slot).store(
                    _widen(values, E4M3).permute([1, 0, 2]).reshape([D, BLOCK_N // 2])
                )
                fence_async_shared()
                mbarrier.arrive(v_full.index(slot), count=1)
                n += 1
        else:
            if FP8:
                v_bytes = reinterpret(
                    v_smem, gl.int32, [STAGES, D, BLOCK_N // 4], gl.NVMMASharedLayout(128, 32, 2)
                )
            for j in range(high - low):
                start = (high - 1 - j) * BLOCK_N
                slot, phase = n % STAGES, ((n // STAGES) & 1) ^ 1
                if FP8:
                    values = _load_8bit(
                        v, table, start, end, head, K, D, BLOCK_SIZE, BLOCK_SIZE, BLOCK_N
                    )
                    ahead = start - 2 * BLOCK_N
                    _prefetch_8bit(v, table, ahead, end, head, K, D, BLOCK_SIZE, BLOCK_N)
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
                    item = (token, left, position, low, high, head, part, parts)
                    _send_queries(q_desc, q_smem, q_full, q_empty, mailbox, item, round_, G, TOKENS)
                mbarrier.wait(v_empty.index(slot), phase)
                if FP8:
                    words = _in_order_of_weights(
                        values.reshape([BLOCK_N // BLOCK_SIZE, D, BLOCK_SIZE // 4])
                    )
                    v_bytes.index(slot).store(words.permute([1, 0, 2]).reshape([D, BLOCK_N // 4]))
                    fence_async_shared()
                    mbarrier.arrive(v_full.index(slot), count=1)
                else:
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
        send(mailbox, 8 * c + 4, (nothing,))  # no key tiles: the end
        mbarrier.arrive(q_full.index(c), count=1)
