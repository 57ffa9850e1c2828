"""The gated delta rule and Mamba-2 for a few tokens of a sequence: one kernel from the convolution to the norm.

A program has a head's state in registers. It reads it once, and writes it once for each token after which it is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.pdl import pdl_wait
from slipstream.kernels.triton.recurrent.conv import L2_EPS, convolve, keep_all


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with a series where 1 + exp(x) would lose digits."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * 0.33333334))
    return tl.maximum(x, 0.0) + tl.where(e < 0.01, small, tl.log(1.0 + e))


@triton.jit
def time_and_decay(raw, bias, rate, low, high):
    """(dt, the log of what a token keeps of the state): dt = softplus(raw + bias), clamped."""
    dt = tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias), low), high)
    return dt, -tl.exp(rate) * dt


@triton.jit
def tokens_kernel(
    x_ptr, conv_ptr, weight_ptr, bias_ptr, states_ptr, beta_ptr, raw_ptr, z_ptr, decay_ptr, time_ptr, skip_ptr, norm_ptr,
    out_ptr, starts_ptr, read_ptr, write_ptr, arrived_ptr, x_stride, beta_stride, raw_stride, z_stride, low, high, eps, scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, HAS_BIAS: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    TWICE: tl.constexpr, SIGMOID: tl.constexpr, FINISH: tl.constexpr, SHORT: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head of a short sequence. R heads share q and k. DELTA: the gated delta rule; else Mamba-2 with C, B, x
    as q, k, v. FINISH: norm the result (DELTA) and multiply it by the gate."""
    head, seq = tl.program_id(0), tl.program_id(1)
    ks, vs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_k, is_v = ks < K, vs < V
    rate = tl.load(decay_ptr + head)
    time = (
        tl.load(time_ptr + head * K + ks, mask=is_k, other=0.0)
        if CHANNEL
        else tl.load(time_ptr + head)
    )
    if PDL:
        pdl_wait()
    begin, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if (end - begin > SHORT) | (end <= begin):
        return
    slot = tl.load(read_ptr + seq).to(tl.int64)
    cells = is_k[:, None] & is_v[None, :]
    place = head * (K * V) + ks[:, None] * V + vs[None, :]
    now = tl.load(states_ptr + slot * (H * K * V) + place, mask=cells & (slot > 0), other=0.0)
    q_at, k_at, v_at = Q_AT + head // R * K + ks, K_AT + head // R * K + ks, V_AT + head * V + vs
    for i in range(end - begin):
        row = begin + i
        q = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, q_at, is_k, x_stride, C, W, False, True, HAS_BIAS
        )  # fmt: skip
        k = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, k_at, is_k, x_stride, C, W, False, True, HAS_BIAS
        )  # fmt: skip
        v = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, v_at, is_v, x_stride, C, W, False, True, HAS_BIAS
        )  # fmt: skip
        wide = row.to(tl.int64)
        q, k, v = tl.where(is_k, q, 0.0), tl.where(is_k, k, 0.0), tl.where(is_v, v, 0.0)
        if CHANNEL:
            raw = tl.load(raw_ptr + wide * raw_stride + head * K + ks, mask=is_k, other=0.0)
        else:
            raw = tl.load(raw_ptr + wide * raw_stride + head)
        dt, kept = time_and_decay(raw, time, rate, low, high)
        kept = tl.exp(kept)
        now *= kept[:, None] if CHANNEL else kept
        if DELTA:
            q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
            beta = tl.sigmoid(tl.load(beta_ptr + wide * beta_stride + head).to(tl.float32))
            beta = 2.0 * beta if TWICE else beta
            now += k[:, None] * (beta * (v - tl.sum(now * k[:, None], 0)))[None, :]
            y = tl.sum(now * q[:, None], 0)
        else:
            now += k[:, None] * (dt * v)[None, :]
            y = tl.sum(now * q[:, None], 0) + tl.load(skip_ptr + head) * v
        if FINISH:
            if DELTA:
                weight = tl.load(norm_ptr + vs, mask=is_v, other=0.0).to(tl.float32)
                y = y * tl.rsqrt(tl.sum(y * y, 0) / V + eps) * weight
            z = tl.load(z_ptr + wide * z_stride + head * V + vs, mask=is_v, other=0.0).to(
                tl.float32
            )
            y *= tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
        tl.store(out_ptr + wide * (H * V) + head * V + vs, y, mask=is_v)
        to = tl.load(write_ptr + row).to(tl.int64)
        if to > 0:
            tl.store(states_ptr + to * (H * K * V) + place, now, mask=cells)
    # v's convolution is this program's own; those of q and k are written by the last of their R programs.
    tl.debug_barrier()
    keep_all(x_ptr, conv_ptr, write_ptr, begin, end, slot, v_at, is_v, x_stride, C, W, False)
    counter, last = arrived_ptr + seq * (H // R) + head // R, True
    if R > 1:
        last = tl.atomic_add(counter, 1, sem="acq_rel") == R - 1
    if last:
        keep_all(x_ptr, conv_ptr, write_ptr, begin, end, slot, q_at, is_k, x_stride, C, W, False)
        keep_all(x_ptr, conv_ptr, write_ptr, begin, end, slot, k_at, is_k, x_stride, C, W, False)
        if R > 1:
            tl.store(counter, 0)
