"""The consumers of Hopper's attention kernel, with products of 16 or 8 bits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton.attention.hopper_memory import (
    CONSUMER_ROWS,
    LOG2E,
    receive,
    reinterpret,
)


@gluon.jit
def mask_scores(s, start, positions, window, HAS_WINDOW: gl.constexpr):
    distance = (
        positions[:, None]
        - (start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]
    )
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def softcap_scores(s, factor):
    """Computes the tanh of a soft cap for scores. `factor` includes 2 · log2 e, since exponentials
    of 2 are used."""
    return 1.0 - 2.0 / (gl.exp2(s * factor) + 1.0)


@gluon.jit
def _online_softmax(s, m_i, l_i, tile):
    """Computes a step of the running softmax. Takes scores, their factor to units of log 2, and the
    rows' maximum and sum so far. Returns weights, the new maximum and sum, and the factor for
    earlier sums."""
    new = gl.maximum(m_i, gl.max(s, 1) * tile)
    safe = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * tile - safe[:, None])
    alpha = gl.exp2(m_i - safe)
    return p, new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _online_softmax_8bit(s, m_i, l_i, tile):
    """`_online_softmax` with a factor for each row, and weights times 256: below 2⁻¹⁷ of the largest they round to 0."""
    new = gl.maximum(m_i, gl.max(s, 1) * tile)
    safe = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * tile[:, None] - (safe - 8.0)[:, None])
    alpha = gl.exp2(m_i - safe)
    return p, new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _pack(p):
    """Converts weights to e4m3 and packs four into each int32 [M, N / 16, 4]. Columns change places
    within 16 as `_in_order_of_weights` says, so no thread needs another's."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    parts = p.reshape([M, N // 16, 2, 4, 2]).permute([0, 1, 3, 4, 2])
    low, high = gl.split(parts)
    a, b = gl.split(low)
    c, d = gl.split(high)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }",
        "=r,r,r,r,r", [a, b, c, d], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _unpack(words, layout: gl.constexpr):
    """Unpacks the e4m3 weights in `words` into an operand of a tensor core."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] * 16
    first, third = words.to(gl.int8), (words >> 16).to(gl.int8)
    second, fourth = (words >> 8).to(gl.int8), (words >> 24).to(gl.int8)
    both = gl.join(gl.join(first, third), gl.join(second, fourth))
    return gl.convert_layout(both.reshape([M, N]).to(gl.float8e4nv, bitcast=True), layout)


@gluon.jit
def _scores(
    s, start, positions, to_log2, cap_factor, m_i, l_i, window, masked,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Computes a tile's weights from its products, as `_online_softmax` returns them."""
    if HAS_SOFTCAP:
        if FP8:
            cap_factor = cap_factor[:, None]
        s = softcap_scores(s, cap_factor)
    if masked:
        s = mask_scores(s, start, positions, window, HAS_WINDOW)
    if FP8:
        p, m_i, l_i, alpha = _online_softmax_8bit(s, m_i, l_i, to_log2)
    else:
        p, m_i, l_i, alpha = _online_softmax(s, m_i, l_i, to_log2)
    return p, m_i, l_i, alpha


@gluon.jit
def write_rows(
    out_ptr, partial_ptr, lse_ptr, parts_ptr, v_scale_ptr, acc, m_i, l_i, rows, token, left, head, part, parts,
    first_seq, splits,
    C: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BLOCK_G: gl.constexpr, D: gl.constexpr, TOKENS: gl.constexpr,
    SCALED: gl.constexpr, SPLIT: gl.constexpr, LIMITS: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Write a consumer's rows: the output, or of a part of the keys the sums and their logarithm. `l_i` is 2^OFFSET times
    the sum of the weights relative to 2^m_i. LIMITS: all rows are written as parts."""
    M: gl.constexpr = CONSUMER_ROWS
    O_LAYOUT: gl.constexpr = acc.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    norm = 1.0 / gl.where(l_i == 0.0, 1.0, l_i)
    if SCALED:
        norm *= gl.load(v_scale_ptr + head)
    acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, O_LAYOUT))[:, None]
    is_whole = True
    if SPLIT:
        is_part = parts > 1
        if LIMITS:
            is_part = parts > 0
        is_whole = not is_part
        if is_part:
            tokens = C * (TOKENS // 2) + rows // BLOCK_G
            live = (tokens < left) & (rows % BLOCK_G < G)
            # decodes have one token each, so this counts from the first prompt's
            tokens += token - first_seq
            at = (tokens * (K * G) + head * G + rows % BLOCK_G) * splits + part
            lse = gl.where(
                l_i == 0.0, float("-inf"), m_i - OFFSET + gl.log2(gl.where(l_i == 0.0, 1.0, l_i))
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


@gluon.jit
def consumer(
    out_ptr, partial_ptr, lse_ptr, parts_ptr, q_smem, k_smem, v_smem, mailbox, bars, limits_ptr, sinks_ptr, k_scale_ptr,
    v_scale_ptr, scale, softcap, window, first_seq, splits,
    C: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BLOCK_G: gl.constexpr, D: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr, LIMITS: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Compute rows 64 C … of a query tile. Row r is token r // BLOCK_G and query head r % BLOCK_G,
    of which the first G exist. LIMITS: a token sees the first `limits` keys.

    With FP8, products are of 8 bits: e4m3 keys and values as the cache has them, queries and weights
    rounded to e4m3. A row of queries has a factor of its own, so that its largest number is 448.
    Weights are multiplied by 256, so that only those below 2⁻¹⁷ of the largest become 0. The tensor
    cores add 8-bit products with 14 bits, so each tile has sums of its own, which are added in
    float32.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 32 if FP8 else 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 if FP8 else 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4 if FP8 else 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    M: gl.constexpr = CONSUMER_ROWS
    GIVEN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if FP8 else k_smem.layout
    TILE: gl.constexpr = gl.NVMMASharedLayout(min(D, 128), 8, 2) if FP8 else k_smem.layout
    dtype: gl.constexpr = gl.float8e4nv if FP8 else k_smem.dtype
    # values of a cache in 8 bits are stored by dimension
    TURNED: gl.constexpr = SCALED or FP8
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    given = reinterpret(q_smem.index(C), q_smem.dtype, [M, D], GIVEN)
    q = reinterpret(q_smem.index(C), dtype, [M, D], TILE)
    n = 0
    round_ = 0
    mbarrier.wait(q_full.index(C), 0)
    high = receive(mailbox, 8 * C + 4)
    while high > 0:
        token, left, position = (
            receive(mailbox, 8 * C),
            receive(mailbox, 8 * C + 1),
            receive(mailbox, 8 * C + 2),
        )
        low, head = receive(mailbox, 8 * C + 3), receive(mailbox, 8 * C + 5)
        part, parts = receive(mailbox, 8 * C + 6), receive(mailbox, 8 * C + 7)
        rows = gl.arange(0, M, ROWS)
        positions = position + C * (TOKENS // 2) + rows // BLOCK_G
        if LIMITS:
            tokens = C * (TOKENS // 2) + rows // BLOCK_G
            positions = gl.load(limits_ptr + token + tokens, mask=tokens < left, other=0) - 1
        if FP8:
            numbers = given.load(OUT).to(gl.float32)
            largest = gl.maximum(gl.max(gl.abs(numbers), 1), 1e-30)
            numbers = numbers * (448.0 / largest)[:, None]
            q.store(numbers.to(gl.float8e4nv))
            fence_async_shared()
            to_log2 = gl.convert_layout(largest * (1.0 / 448.0), ROWS) * (
                scale * LOG2E * gl.load(k_scale_ptr + head)
            )
        else:
            to_log2 = scale * LOG2E
            if SCALED:
                to_log2 *= gl.load(k_scale_ptr + head)
        cap_factor = to_log2 * 2.0 / softcap
        if HAS_SOFTCAP:
            to_log2 = softcap * LOG2E
            if FP8:
                to_log2 = gl.full([M], 1.0, gl.float32, ROWS) * to_log2
        m_i = gl.full([M], float("-inf"), gl.float32, ROWS)
        l_i = gl.full([M], 0.0, gl.float32, ROWS)
        if HAS_SINKS:
            sinks = gl.load(
                sinks_ptr + head * G + rows % BLOCK_G, mask=rows % BLOCK_G < G, other=0.0
            )
            m_i, l_i = sinks.to(gl.float32) * LOG2E, l_i + (256.0 if FP8 else 1.0)
            if SPLIT:  # counted once, in the first part
                m_i, l_i = gl.where(part == 0, m_i, float("-inf")), gl.where(part == 0, l_i, 0.0)
        acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
        # every row sees all keys from `mask_until` up to `mask_from`
        mask_from = position + C * (TOKENS // 2) + 1
        mask_until = position + TOKENS - window
        if LIMITS:
            at = C * (TOKENS // 2)
            mask_from = gl.load(limits_ptr + token + at, mask=at < left, other=0)
        if SCALED and not FP8:
            q.store(given.load(OUT).to(dtype))
            fence_async_shared()

        slot = n % STAGES
        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
        s = gl.zeros([M, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, m_i, l_i, alpha = _scores(
            s, (high - 1) * BLOCK_N, positions, to_log2, cap_factor, m_i, l_i, window, True, HAS_WINDOW, HAS_SOFTCAP, FP8,
        )  # fmt: skip
        if FP8:
            weights = _pack(p)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))
        else:
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
            if TURNED:
                v = v.permute((1, 0))
            if FP8:
                tile = gl.zeros([M, D], gl.float32, O_LAYOUT)
                tile = warpgroup_mma(
                    _unpack(weights, P_LAYOUT), v, tile, use_acc=False, is_async=True
                )
            else:
                acc = warpgroup_mma(weights, v, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            start = (high - 1 - j) * BLOCK_N
            masked = start + BLOCK_N > mask_from
            if HAS_WINDOW:
                masked = masked | (start < mask_until)
            p, m_i, l_i, beta = _scores(
                s, start, positions, to_log2, cap_factor, m_i, l_i, window, masked, HAS_WINDOW, HAS_SOFTCAP, FP8,
            )  # fmt: skip
            n += 1
            # This wait keeps the compiler from moving the exponents after the tensor cores' work.
            mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1, pred=j + 1 < high - low)
            if FP8:
                tile = warpgroup_mma_wait(0, deps=(tile,))
                acc = acc * alpha[:, None] + tile
                weights = _pack(p)
                alpha = gl.convert_layout(beta, gl.SliceLayout(1, O_LAYOUT))
                mbarrier.arrive(v_empty.index(previous), count=1)
            else:
                acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
                weights = gl.convert_layout(p.to(dtype), P_LAYOUT)
                mbarrier.arrive(v_empty.index(previous), count=1)
                acc = acc * gl.convert_layout(beta, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.arrive(q_empty.index(C), count=1)
        slot = (n - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((n - 1) // STAGES) & 1)
        v = v_smem.index(slot)
        if TURNED:
            v = v.permute((1, 0))
        if FP8:
            tile = gl.zeros([M, D], gl.float32, O_LAYOUT)
            tile = warpgroup_mma(_unpack(weights, P_LAYOUT), v, tile, use_acc=False, is_async=True)
            tile = warpgroup_mma_wait(0, deps=(tile,))
            acc = acc * alpha[:, None] + tile
        else:
            acc = warpgroup_mma(weights, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)

        write_rows(
            out_ptr, partial_ptr, lse_ptr, parts_ptr, v_scale_ptr, acc, m_i, l_i, rows, token, left, head, part, parts,
            first_seq, splits, C, K, G, BLOCK_G, D, TOKENS, TURNED, SPLIT, LIMITS, 8.0 if FP8 else 0.0,
        )  # fmt: skip
        round_ += 1
        mbarrier.wait(q_full.index(C), round_ & 1)
        high = receive(mailbox, 8 * C + 4)
