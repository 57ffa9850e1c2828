"""The gated delta rule and Mamba-2 for a few tokens of a sequence: one kernel from the convolution to the norm.

A thread block has a head's state in registers. It reads it once, and writes it once for each token after which it is
kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.pdl import pdl_wait
from slipstream.kernels.triton.recurrent.conv import L2_EPS, convolve, find_tokens, keep_all


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with a series where 1 + exp(x) would lose digits."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * 0.33333334))
    return tl.maximum(x, 0.0) + tl.where(e < 0.01, small, tl.log(1.0 + e))


@triton.jit
def time_and_decay(raw, bias, rate, low, high, BOUND: tl.constexpr = 0.0):
    """Returns (dt, log of the factor by which a token decays the state). dt is softplus(raw + bias), clamped. BOUND:
    see `GatedDeltaSpec`."""
    if BOUND < 0.0:
        dt = raw.to(tl.float32) + bias
        return dt, BOUND * tl.sigmoid(tl.exp(rate) * dt)
    dt = tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias), low), high)
    return dt, -tl.exp(rate) * dt


@triton.jit
def tokens_kernel(
    x_ptr, conv_ptr, weight_ptr, bias_ptr, states_ptr, beta_ptr, raw_ptr, z_ptr, decay_ptr, time_ptr, skip_ptr, norm_ptr,
    out_ptr, starts_ptr, read_ptr, write_ptr, arrived_ptr, x_stride, beta_stride, raw_stride, z_stride, low, high, eps, scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, HAS_BIAS: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    TWICE: tl.constexpr, BOUND: tl.constexpr, SIGMOID: tl.constexpr, FINISH: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a head of a short sequence in each thread block. R heads share q and k. DELTA: the gated delta rule;
    else Mamba-2 with C, B, x as q, k, v. FINISH: norm the result (DELTA) and multiply it by the gate."""
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
    begin, end, slot, to = find_tokens(starts_ptr, read_ptr, write_ptr, seq, ONE)
    if (end - begin > SHORT) | (end <= begin):
        return
    cells = is_k[:, None] & is_v[None, :]
    place = head * (K * V) + ks[:, None] * V + vs[None, :]
    now = tl.load(states_ptr + slot * (H * K * V) + place, mask=cells & (slot > 0), other=0.0)
    # The states of q and k are written by the last of their R programs, when all have read them.
    counter, last = arrived_ptr + seq * (H // R) + head // R, True
    # q and k are columns of one tile, with a number for each thread: of fewer numbers Triton gives each thread all.
    pair = tl.arange(0, 2)[None, :]
    qk_at = Q_AT + head // R * K + ks[:, None] + (K_AT - Q_AT) * pair
    is_qk, v_at = is_k[:, None] & (pair >= 0), V_AT + head * V + vs
    for i in range(1 if ONE else end - begin):
        row = begin + i
        qk = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, qk_at, is_qk, x_stride, C, W, False, True, HAS_BIAS, True,
            False,
        )  # fmt: skip
        v = convolve(
            x_ptr, conv_ptr, weight_ptr, bias_ptr, row, begin, slot, v_at, is_v, x_stride, C, W, False, True, HAS_BIAS, True,
            False,
        )  # fmt: skip
        if R > 1 and ONE:  # after the loads of the states, which overlap with what follows
            tl.debug_barrier()
            last = tl.atomic_add(counter, 1, sem="acq_rel") == R - 1
        wide = row.to(tl.int64)
        qk, v = tl.where(is_qk, qk, 0.0), tl.where(is_v, v, 0.0)
        if DELTA:
            qk *= tl.rsqrt(tl.sum(qk * qk, 0) + L2_EPS)[None, :] * tl.where(pair == 0, scale, 1.0)
        q, k = tl.split(qk)
        if CHANNEL:
            raw = tl.load(raw_ptr + wide * raw_stride + head * K + ks, mask=is_k, other=0.0)
        else:
            raw = tl.load(raw_ptr + wide * raw_stride + head)
        dt, kept = time_and_decay(raw, time, rate, low, high, BOUND)
        kept = tl.exp(kept)
        now *= kept[:, None] if CHANNEL else kept
        if DELTA:
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
        if not ONE:
            to = tl.load(write_ptr + row).to(tl.int64)
        tl.store(states_ptr + to * (H * K * V) + place, now, mask=cells & (to > 0))
    tl.debug_barrier()
    if R > 1 and not ONE:
        last = tl.atomic_add(counter, 1, sem="acq_rel") == R - 1
    keep_all(
        x_ptr, conv_ptr, write_ptr, begin, end, slot, to, v_at, is_v, x_stride, C, W, False, ONE
    )
    if last:
        keep_all(
            x_ptr,
            conv_ptr,
            write_ptr,
            begin,
            end,
            slot,
            to,
            qk_at,
            is_qk,
            x_stride,
            C,
            W,
            False,
            ONE,
        )
        if R > 1:
            tl.store(counter, 0)
