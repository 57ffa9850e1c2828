"""The gated delta rule and Mamba-2 for prompts: products inside a chunk on tensor cores, states from chunk to chunk.

G is the sum of the log decays from the chunk's begin to a token. With P = (q kᵀ) ⊙ exp(Gᵢ − Gⱼ) for i ≥ j:

1. Inside a chunk the result is exp(G) q S + P u, and the next state is exp(G_end) S + Σ exp(G_end − Gⱼ) kⱼ uⱼ.
2. Mamba-2: u = dt · v. The gated delta rule (Yang et al. 2024, arXiv:2412.06464): u = U − W S, where (U, W) are
   T (β v, β exp(G) k), and T = (I + L)⁻¹ with L = β (k kᵀ) ⊙ exp(Gᵢ − Gⱼ) for i > j.

Decays stay logs until differences are taken, all of them at most 0: so nothing overflows, however strong they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.pdl import pdl_wait
from slipstream.kernels.triton.recurrent.conv import find_chunk
from slipstream.kernels.triton.recurrent.tokens import time_and_decay


@triton.jit
def inverse(lower, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """(I + lower)⁻¹ for a strictly lower triangular matrix of 2^LEVELS rows, in float32.

    With D the inverses of blocks on the diagonal, and B what `lower` has next to them in blocks of
    twice the size, those have the inverses D − D B D. This is forward substitution by blocks. A
    series of powers of `lower` would lose all digits.
    """
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    rows, columns = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    done = tl.where(rows == columns, 1.0, tl.where(rows // 2 == columns // 2, -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        within = rows // (2 << level) == columns // (2 << level)
        beside = tl.where(within & (rows // (1 << level) != columns // (1 << level)), lower, 0.0)
        beside = tl.dot(done, beside, input_precision=precision)
        done -= tl.dot(beside, done, input_precision=precision)
    return done


@triton.jit
def _solve(
    lower, k, k_decayed, beta, v_ptr, u_ptr, w_ptr, wide, keys, ks, live,
    K: tl.constexpr, V: tl.constexpr, LEVELS: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Writes U = T (β v) and W = T (β exp(G) k), with T = (I + lower)⁻¹."""
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    solved = inverse(lower, LEVELS, EXACT).to(k.dtype)
    w = tl.dot(solved, (k_decayed * beta[:, None]).to(k.dtype), input_precision=precision)
    tl.store(w_ptr + wide * K + ks[None, :], w, mask=keys)
    vs = tl.arange(0, BLOCK_V)
    values = live[:, None] & (vs < V)[None, :]
    v = tl.load(v_ptr + vs[None, :], mask=values, other=0.0).to(tl.float32) * beta[:, None]
    u = tl.dot(solved, v.to(k.dtype), input_precision=precision)
    tl.store(u_ptr + wide * V + vs[None, :], u, mask=values)


@triton.jit
def _beta(beta_ptr, row, live, stride, head, TWICE: tl.constexpr):
    beta = tl.load(beta_ptr + row * stride + head, mask=live, other=0.0).to(tl.float32)
    return tl.where(live, tl.sigmoid(beta), 0.0) * (2.0 if TWICE else 1.0)


@triton.jit
def prepare_kernel(
    mixed_ptr, beta_ptr, raw_ptr, decay_ptr, time_ptr, logs_ptr, p_ptr, u_ptr, w_ptr, starts_ptr, chunks_ptr, beta_stride,
    raw_stride, low, high,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, DELTA: tl.constexpr, TWICE: tl.constexpr, BOUND: tl.constexpr, SHORT: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process a head of a chunk in each thread block. Writes G [T, H] and P [T, H, CHUNK]; with DELTA also U [T, H, V]
    and W [T, H, K]."""
    head = tl.program_id(0)
    rate, bias = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    if PDL:
        pdl_wait()
    _, first, end, _ = find_chunk(chunks_ptr, starts_ptr, tl.program_id(1), SHORT)
    if end <= first:
        return
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    i, ks = tl.arange(0, 1 << LEVELS), tl.arange(0, BLOCK_K)
    row, live = first.to(tl.int64), first + i < end
    mixed_ptr += row * C
    p_ptr, u_ptr, w_ptr = p_ptr + (row * H << LEVELS), u_ptr + row * (H * V), w_ptr + row * (H * K)
    keys = live[:, None] & (ks < K)[None, :]
    at = mixed_ptr + i[:, None] * C + head // R * K + ks[None, :]
    q, k = tl.load(at + Q_AT, mask=keys, other=0.0), tl.load(at + K_AT, mask=keys, other=0.0)
    raw = tl.load(raw_ptr + row * raw_stride + i * raw_stride + head, mask=live, other=0.0)
    _, log = time_and_decay(raw, bias, rate, low, high, BOUND)
    logs = tl.cumsum(tl.where(live, log, 0.0), 0)
    tl.store(logs_ptr + row * H + i * H + head, logs, mask=live)
    apart = logs[:, None] - logs[None, :]
    p = tl.dot(q, tl.trans(k), input_precision=precision)
    p *= tl.exp(tl.where(i[:, None] >= i[None, :], apart, float("-inf")))
    wide = i[:, None] * H + head
    tl.store(p_ptr + (wide << LEVELS) + i[None, :], p, mask=live[:, None])
    if DELTA:
        beta = _beta(beta_ptr + row * beta_stride, i, live, beta_stride, head, TWICE)
        lower = tl.dot(k, tl.trans(k), input_precision=precision) * beta[:, None]
        lower *= tl.exp(tl.where(i[:, None] > i[None, :], apart, float("-inf")))
        decayed = k.to(tl.float32) * tl.exp(logs)[:, None]
        v_ptr = mixed_ptr + i[:, None] * C + V_AT + head * V
        _solve(
            lower, k, decayed, beta, v_ptr, u_ptr, w_ptr, wide, keys, ks, live, K, V, LEVELS, BLOCK_V, EXACT
        )  # fmt: skip


@triton.jit
def prepare_channels_kernel(
    mixed_ptr, beta_ptr, raw_ptr, decay_ptr, time_ptr, logs_ptr, p_ptr, u_ptr, w_ptr, q_ptr, k_ptr, starts_ptr, chunks_ptr,
    beta_stride, raw_stride,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, TWICE: tl.constexpr, BOUND: tl.constexpr, SHORT: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`prepare_kernel` with a decay by channel: G is [T, H, K]. Also writes exp(G) q and exp(G_end − G) k, [T, H, K] each.

    At each level tokens are in blocks of two halves. Pairs of a token of the second half and one of the first are made with
    products of factors relative to the second half's first token: both exponents are at most 0.
    """
    head = tl.program_id(0)
    ks = tl.arange(0, BLOCK_K)
    is_k = ks < K
    rate = tl.load(decay_ptr + head)
    bias = tl.load(time_ptr + head * K + ks, mask=is_k, other=0.0)
    if PDL:
        pdl_wait()
    _, first, end, _ = find_chunk(chunks_ptr, starts_ptr, tl.program_id(1), SHORT)
    if end <= first:
        return
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    i = tl.arange(0, 1 << LEVELS)
    row, live = first.to(tl.int64), first + i < end
    keys, wide = live[:, None] & is_k[None, :], i[:, None] * H + head
    mixed_ptr = mixed_ptr + row * C
    logs_ptr = logs_ptr + row * (H * K)
    raw_ptr = raw_ptr + row * raw_stride
    p_ptr, u_ptr, w_ptr = p_ptr + (row * H << LEVELS), u_ptr + row * (H * V), w_ptr + row * (H * K)
    q_ptr, k_ptr = q_ptr + row * (H * K), k_ptr + row * (H * K)
    at = mixed_ptr + i[:, None] * C + head // R * K + ks[None, :]
    q, k = tl.load(at + Q_AT, mask=keys, other=0.0), tl.load(at + K_AT, mask=keys, other=0.0)
    raw = tl.load(raw_ptr + i[:, None] * raw_stride + head * K + ks[None, :], mask=keys, other=0.0)
    _, log = time_and_decay(raw, bias[None, :], rate, 0.0, float("inf"), BOUND)
    logs = tl.cumsum(tl.where(keys, log, 0.0), 0)
    tl.store(logs_ptr + wide * K + ks[None, :], logs, mask=keys)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    beta = _beta(beta_ptr + row * beta_stride, i, live, beta_stride, head, TWICE)
    last = tl.sum(tl.where((first + i == end - 1)[:, None], logs, 0.0), 0)
    decayed = wide_k * tl.exp(logs)
    tl.store(q_ptr + wide * K + ks[None, :], wide_q * tl.exp(logs), mask=keys)
    tl.store(k_ptr + wide * K + ks[None, :], wide_k * tl.exp(last[None, :] - logs), mask=keys)
    tl.debug_barrier()  # G is read again, by other threads
    p = tl.where(i[:, None] == i[None, :], tl.sum(wide_q * wide_k, 1)[:, None], 0.0)
    lower = tl.zeros((1 << LEVELS, 1 << LEVELS), tl.float32)
    for level in range(LEVELS):
        block, right = i >> (level + 1), (i >> level) & 1 == 1
        middle = (block << (level + 1)) + (1 << level)
        begin = logs_ptr + (middle[:, None] * H + head) * K + ks[None, :]
        apart = logs - tl.load(
            begin, mask=(middle < end - first)[:, None] & is_k[None, :], other=0.0
        )
        factor = tl.exp(tl.minimum(tl.where(right[:, None], apart, -apart), 0.0))
        far_q, far_k = (wide_q * factor).to(k.dtype), (wide_k * factor).to(k.dtype)
        pairs = (block[:, None] == block[None, :]) & right[:, None] & (right[None, :] == 0)
        near = tl.trans(far_k)
        p += tl.where(pairs, tl.dot(far_q, near, input_precision=precision), 0.0)
        lower += tl.where(pairs, tl.dot(far_k, near, input_precision=precision), 0.0)
    tl.store(p_ptr + (wide << LEVELS) + i[None, :], p, mask=live[:, None])
    lower *= beta[:, None]
    v_ptr = mixed_ptr + i[:, None] * C + V_AT + head * V
    _solve(
        lower, k, decayed, beta, v_ptr, u_ptr, w_ptr, wide, keys, ks, live, K, V, LEVELS, BLOCK_V, EXACT
    )  # fmt: skip


@triton.jit
def _chunks_of(chunks_ptr, num_chunks, seq):
    """Finds a sequence's chunks: (number of the first, number after the last)."""
    first, end = 0, 0
    for begin in range(0, num_chunks, 256):
        at = begin + tl.arange(0, 256)
        given = at < num_chunks
        of = tl.load(chunks_ptr + 3 * at, mask=given, other=0)
        start = tl.load(chunks_ptr + 3 * at + 1, mask=given, other=0)
        full = tl.load(chunks_ptr + 3 * at + 2, mask=given, other=0) > start
        first += tl.sum((full & (of < seq)).to(tl.int32), 0)
        end += tl.sum((full & (of <= seq)).to(tl.int32), 0)
    return first, end


@triton.jit
def _chunk_at(chunks_ptr, write_ptr, chunk, end_chunk):
    """Finds a chunk: (first token, end, slot that keeps the state after it)."""
    given = chunk < end_chunk
    first = tl.load(chunks_ptr + 3 * chunk + 1, mask=given, other=0)
    end = tl.load(chunks_ptr + 3 * chunk + 2, mask=given, other=0)
    return first, end, tl.load(write_ptr + end - 1, mask=given, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["num_chunks"])
def pass_kernel(
    q_ptr, k_ptr, v_ptr, raw_ptr, decay_ptr, time_ptr, skip_ptr, logs_ptr, p_ptr, u_ptr, w_ptr, states_ptr, out_ptr, starts_ptr,
    read_ptr, write_ptr, chunks_ptr, num_chunks, qk_stride, v_stride, raw_stride, low, high,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    SHORT: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Carry BLOCK_V columns of a head's state through all chunks of a sequence in each thread block. Writes results
    before norm and gate. CHANNEL: q and k are each head's own, and already have their decays."""
    head, seq = tl.program_id(1), tl.program_id(2)
    rate, bias = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    if PDL:
        pdl_wait()
    if tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq) <= SHORT:
        return
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    i, ks = tl.arange(0, 1 << LEVELS), tl.arange(0, BLOCK_K)
    vs = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = (ks < K), (vs < V)
    slot = tl.load(read_ptr + seq).to(tl.int64)
    cells = is_k[:, None] & is_v[None, :]
    place = head * (K * V) + ks[:, None] * V + vs[None, :]
    now = tl.load(states_ptr + slot * (H * K * V) + place, mask=cells & (slot > 0), other=0.0)
    skip = 0.0 if DELTA else tl.load(skip_ptr + head)
    qk_place, wide = i[:, None] * qk_stride + head // R * K + ks[None, :], i[:, None] * H + head
    p_place = (wide << LEVELS) + i[None, :]
    v_place = wide * V + vs[None, :]
    w_place = wide * K + ks[None, :]
    begin_chunk, end_chunk = _chunks_of(chunks_ptr, num_chunks, seq)
    first, end, to = _chunk_at(chunks_ptr, write_ptr, begin_chunk, end_chunk)
    for chunk in tl.range(begin_chunk, end_chunk, num_stages=STAGES):
        next_first, next_end, next_to = _chunk_at(chunks_ptr, write_ptr, chunk + 1, end_chunk)
        row, live = first.to(tl.int64), first + i < end
        keys, values = live[:, None] & is_k[None, :], live[:, None] & is_v[None, :]
        q = tl.load(q_ptr + row * qk_stride + qk_place, mask=keys, other=0.0)
        k = tl.load(k_ptr + row * qk_stride + qk_place, mask=keys, other=0.0)
        p = tl.load(p_ptr + (row * H << LEVELS) + p_place, mask=live[:, None], other=0.0)
        if CHANNEL:
            at = logs_ptr + (tl.cast(end - 1, tl.int64) * H + head) * K + ks
            last = tl.load(at, mask=is_k, other=0.0)
        else:
            logs = tl.load(logs_ptr + row * H + i * H + head, mask=live, other=0.0)
            last = tl.min(logs, 0)  # logs only fall
        state = now.to(k.dtype)
        y = tl.dot(q, state, input_precision=precision)
        if not CHANNEL:
            y *= tl.exp(logs)[:, None]
        if DELTA:
            u = tl.load(u_ptr + row * (H * V) + v_place, mask=values, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + row * (H * K) + w_place, mask=keys, other=0.0)
            u -= tl.dot(w, state, input_precision=precision)
        else:
            v = v_ptr + row * v_stride + i[:, None] * v_stride + head * V + vs[None, :]
            v = tl.load(v, mask=values, other=0.0).to(tl.float32)
            raw = tl.load(raw_ptr + row * raw_stride + i * raw_stride + head, mask=live, other=0.0)
            dt, _ = time_and_decay(raw, bias, rate, low, high)
            u = v * dt[:, None]
            y += skip * v
        y += tl.dot(p, u.to(k.dtype), input_precision=precision)
        tl.store(out_ptr + row * (H * V) + v_place, y, mask=values)
        if CHANNEL:
            now *= tl.exp(last)[:, None]
        else:
            u *= tl.exp(last - logs)[:, None]
            now *= tl.exp(last)
        now += tl.dot(tl.trans(k), u.to(k.dtype), input_precision=precision)
        if to > 0:
            tl.store(states_ptr + to * (H * K * V) + place, now, mask=cells)
        first, end, to = next_first, next_end, next_to


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    y_ptr, z_ptr, norm_ptr, z_stride, T, eps,
    N: tl.constexpr, SHARED: tl.constexpr, FIRST: tl.constexpr, HAS_NORM: tl.constexpr, SIGMOID: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms groups of N numbers of ROWS tokens and multiplies them by their gate, in place. FIRST: by the gate before the norm.
    SHARED: all groups have the same N weights."""
    group = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    given = at < N
    if HAS_NORM:
        weight = tl.load(norm_ptr + (0 if SHARED else group * N) + at, mask=given, other=0.0)
    if PDL:
        pdl_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = (row < T) & given[None, :]
    place = group * N + at[None, :]
    size = tl.num_programs(1) * N
    y = tl.load(y_ptr + row * size + place, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    if FIRST:
        y *= gate
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(y * y, 1) / N + eps)[:, None] * weight.to(tl.float32)[None, :]
    if not FIRST:
        y *= gate
    tl.store(y_ptr + row * size + place, y, mask=mask)
