"""The gated delta rule and Mamba-2 for prompts: products inside a chunk on tensor cores, states from chunk to chunk.

G is the log of what remains of the state after a token since the chunk's begin. With P = (q kᵀ) ⊙ exp(Gᵢ − Gⱼ) for i ≥ j:

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
def inverse(lower, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """(I + lower)⁻¹ for a strictly lower triangular matrix, in float32.

    Blocks of 16 on the diagonal are inverted by forward substitution. With these blocks D and the rest B of `lower` the inverse
    is (I + D B)⁻¹ D, and D B has no fourth power if SIZE is 64. A series over single rows would lose all digits.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    rows = tl.arange(0, SIZE)
    same = rows[:, None] // 16 == rows[None, :] // 16
    # [block, row, block, column] → the blocks on the diagonal, [block, row, column]
    diagonal = tl.reshape(tl.where(same, lower, 0.0), (BLOCKS, 16, BLOCKS, 16))
    diagonal = tl.sum(diagonal, 2)
    i = tl.arange(0, 16)
    done = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(diagonal)
    for n in range(1, 16):
        row = tl.sum(tl.where((i == n)[None, :, None], diagonal, 0.0), 1)
        found = tl.sum(row[:, :, None] * tl.where((i < n)[None, :, None], done, 0.0), 1)
        done = tl.where((i == n)[None, :, None], done - found[:, None, :], done)
    done = tl.broadcast_to(done[:, :, None, :], (BLOCKS, 16, BLOCKS, 16))
    done = tl.where(same, tl.reshape(done, (SIZE, SIZE)), 0.0)
    step = tl.dot(done, tl.where(same, 0.0, lower), input_precision=precision)
    square = tl.dot(step, step, input_precision=precision)
    done += tl.dot(square, done, input_precision=precision)
    return done - tl.dot(step, done, input_precision=precision)


@triton.jit
def prepare_kernel(
    mixed_ptr, beta_ptr, raw_ptr, decay_ptr, time_ptr, logs_ptr, p_ptr, u_ptr, w_ptr, starts_ptr, chunks_ptr, beta_stride,
    raw_stride, low, high,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, DELTA: tl.constexpr, TWICE: tl.constexpr, SHORT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head of a chunk. Writes G [T, H] and P [T, H, CHUNK], and with DELTA U [T, H, V] and W [T, H, K]."""
    head = tl.program_id(0)
    rate, bias = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    if PDL:
        pdl_wait()
    _, first, end, _ = find_chunk(chunks_ptr, starts_ptr, tl.program_id(1), SHORT)
    if end <= first:
        return
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    i, ks = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, live = (first + i).to(tl.int64), first + i < end
    keys = live[:, None] & (ks < K)[None, :]
    at = mixed_ptr + row[:, None] * C + head // R * K + ks[None, :]
    q, k = tl.load(at + Q_AT, mask=keys, other=0.0), tl.load(at + K_AT, mask=keys, other=0.0)
    raw = tl.load(raw_ptr + row * raw_stride + head, mask=live, other=0.0)
    _, log = time_and_decay(raw, bias, rate, low, high)
    logs = tl.cumsum(tl.where(live, log, 0.0), 0)
    tl.store(logs_ptr + row * H + head, logs, mask=live)
    apart = logs[:, None] - logs[None, :]
    p = tl.dot(q, tl.trans(k), input_precision=precision)
    p *= tl.exp(tl.where(i[:, None] >= i[None, :], apart, float("-inf")))
    wide = row[:, None] * H + head
    tl.store(p_ptr + wide * CHUNK + i[None, :], p, mask=live[:, None])
    if DELTA:
        vs = tl.arange(0, BLOCK_V)
        beta = tl.load(beta_ptr + row * beta_stride + head, mask=live, other=0.0).to(tl.float32)
        beta = tl.where(live, tl.sigmoid(beta), 0.0) * (2.0 if TWICE else 1.0)
        lower = tl.dot(k, tl.trans(k), input_precision=precision) * beta[:, None]
        lower *= tl.exp(tl.where(i[:, None] > i[None, :], apart, float("-inf")))
        solved = inverse(lower, CHUNK, EXACT).to(k.dtype)
        w = (k.to(tl.float32) * (beta * tl.exp(logs))[:, None]).to(k.dtype)
        w = tl.dot(solved, w, input_precision=precision)
        tl.store(w_ptr + wide * K + ks[None, :], w, mask=keys)
        values = live[:, None] & (vs < V)[None, :]
        v = mixed_ptr + row[:, None] * C + V_AT + head * V + vs[None, :]
        v = tl.load(v, mask=values, other=0.0).to(tl.float32) * beta[:, None]
        u = tl.dot(solved, v.to(k.dtype), input_precision=precision)
        tl.store(u_ptr + wide * V + vs[None, :], u, mask=values)


@triton.jit
def _chunks_of(chunks_ptr, num_chunks, seq):
    """(first chunk of a sequence, one past its last)."""
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


@triton.jit(do_not_specialize=["num_chunks"])
def pass_kernel(
    mixed_ptr, raw_ptr, decay_ptr, time_ptr, skip_ptr, logs_ptr, p_ptr, u_ptr, w_ptr, states_ptr, out_ptr, starts_ptr,
    read_ptr, write_ptr, chunks_ptr, num_chunks, raw_stride, low, high,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, DELTA: tl.constexpr, SHORT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of a head's state, through all chunks of a sequence. Writes results before norm and gate."""
    head, seq = tl.program_id(1), tl.program_id(2)
    rate, bias = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    if PDL:
        pdl_wait()
    if tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq) <= SHORT:
        return
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    i, ks, vs = (
        tl.arange(0, CHUNK),
        tl.arange(0, BLOCK_K),
        tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V),
    )
    is_k, is_v = (ks < K), (vs < V)
    slot = tl.load(read_ptr + seq).to(tl.int64)
    cells = is_k[:, None] & is_v[None, :]
    place = head * (K * V) + ks[:, None] * V + vs[None, :]
    now = tl.load(states_ptr + slot * (H * K * V) + place, mask=cells & (slot > 0), other=0.0)
    skip = 0.0 if DELTA else tl.load(skip_ptr + head)
    begin_chunk, end_chunk = _chunks_of(chunks_ptr, num_chunks, seq)
    for chunk in tl.range(begin_chunk, end_chunk, num_stages=STAGES):
        first, end = tl.load(chunks_ptr + 3 * chunk + 1), tl.load(chunks_ptr + 3 * chunk + 2)
        row, live = (first + i).to(tl.int64), first + i < end
        keys, values = live[:, None] & is_k[None, :], live[:, None] & is_v[None, :]
        at = mixed_ptr + row[:, None] * C + head // R * K + ks[None, :]
        q, k = tl.load(at + Q_AT, mask=keys, other=0.0), tl.load(at + K_AT, mask=keys, other=0.0)
        wide = row[:, None] * H + head
        p = tl.load(p_ptr + wide * CHUNK + i[None, :], mask=live[:, None], other=0.0)
        logs = tl.load(logs_ptr + row * H + head, mask=live, other=0.0)
        last = tl.load(logs_ptr + tl.cast(end - 1, tl.int64) * H + head)
        state = now.to(k.dtype)
        y = tl.dot(q, state, input_precision=precision) * tl.exp(logs)[:, None]
        if DELTA:
            u = tl.load(u_ptr + wide * V + vs[None, :], mask=values, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + wide * K + ks[None, :], mask=keys, other=0.0)
            u -= tl.dot(w, state, input_precision=precision)
        else:
            v = mixed_ptr + row[:, None] * C + V_AT + head * V + vs[None, :]
            v = tl.load(v, mask=values, other=0.0).to(tl.float32)
            raw = tl.load(raw_ptr + row * raw_stride + head, mask=live, other=0.0)
            dt, _ = time_and_decay(raw, bias, rate, low, high)
            u = v * dt[:, None]
            y += skip * v
        y += tl.dot(p, u.to(k.dtype), input_precision=precision)
        tl.store(out_ptr + wide * V + vs[None, :], y, mask=values)
        u = (u * tl.exp(last - logs)[:, None]).to(k.dtype)
        now = now * tl.exp(last) + tl.dot(tl.trans(k), u, input_precision=precision)
        to = tl.load(write_ptr + end - 1).to(tl.int64)
        if to > 0:
            tl.store(states_ptr + to * (H * K * V) + place, now, mask=cells)


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
