"""The consumers of Hopper's attention kernel with 16-bit products."""

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
def write_rows(
    out_ptr, partial_ptr, lse_ptr, parts_ptr, v_scale_ptr, acc, m_i, l_i, rows, token, left, head, part, parts,
    first_seq, splits,
    C: gl.constexpr, K: gl.constexpr, G: gl.constexpr, BLOCK_G: gl.constexpr, D: gl.constexpr, TOKENS: gl.constexpr,
    SCALED: gl.constexpr, SPLIT: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Write a consumer's rows: the output, or of a part of the keys the sums and their logarithm. `l_i` is 2^OFFSET times
    the sum of the weights relative to 2^m_i."""
    M: gl.constexpr = CONSUMER_ROWS
    O_LAYOUT: gl.constexpr = acc.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
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
    given = reinterpret(q_smem.index(C), given_dtype, [M, D], TILE)
    q = reinterpret(given, dtype, [M, D], TILE)
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
            s = softcap_scores(s, cap_factor)
        s = mask_scores(s, (high - 1) * BLOCK_N, positions, window, HAS_WINDOW)
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
                s = softcap_scores(s, cap_factor)
            start = (high - 1 - j) * BLOCK_N
            masked = start + BLOCK_N > mask_from
            if HAS_WINDOW:
                masked = masked | (start < mask_until)
            if masked:
                s = mask_scores(s, start, positions, window, HAS_WINDOW)
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

        write_rows(
            out_ptr, partial_ptr, lse_ptr, parts_ptr, v_scale_ptr, acc, m_i, l_i, rows, token, left, head, part, parts,
            first_seq, splits, C, K, G, BLOCK_G, D, TOKENS, SCALED, SPLIT, 0.0,
        )  # fmt: skip
        round_ += 1
        mbarrier.wait(q_full.index(C), round_ & 1)
        high = receive(mailbox, 8 * C + 4)
