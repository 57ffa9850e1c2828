"""Experts of few tokens, dense weights: two kernels that walk over the chosen experts' rows, without grouping anything.

With a token or a few, hardly an expert is chosen twice, so each entry (a token's place in one of its experts, as in `moe`)
multiplies for itself, without tensor cores: as `linear`'s product of one token does, each program asks for a piece of its rows
before it multiplies the one at hand. The first kernel applies the activation to what it sums, the second adds a token's experts
up with their weights, so that nothing is left for kernels between and behind them. An expert that all tokens share is done in
the same two. All sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments
from slipstream.kernels.weights import Linear
from slipstream.spec.model import MoESpec

TILE = 2048
"""Numbers of a weight that a program asks for at once, from each of the halves of a gated one."""


@triton.jit
def _piece(at, k, ks, K, live, EVEN: tl.constexpr):
    """[rows, BLOCK_K] of a weight at its columns k + ks."""
    if EVEN:
        return tl.load(at + k, mask=live, other=0.0, eviction_policy="evict_first")
    return tl.load(at + k, mask=live & (k + ks < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    chosen_ptr,
    h_ptr,
    shared_ptr,
    shared_bias_ptr,
    shared_h_ptr,
    S,
    S_SHARED,
    K,
    num_routed,
    alpha,
    limit,
    TOP: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N of the S numbers between an entry's two products: activation(gate · x, up · x). An expert's weight holds the
    gate's S rows, then the up's; without a gate S rows. Programs from `num_routed` on do it for the expert of all tokens, whose
    weight has S_SHARED (twice) rows."""
    pid, token = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BLOCK_K)
    if PDL:
        pdl_wait()
    if pid < num_routed:
        tiles = num_routed // TOP
        entry = token * TOP + pid // tiles
        n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.load(chosen_ptr + entry).to(tl.int64) * S * (2 if GATED else 1) + n
        h_at = h_ptr + entry.to(tl.int64) * S + n
    else:
        w_ptr, bias_ptr, S = shared_ptr, shared_bias_ptr, S_SHARED
        n = (pid - num_routed) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = n.to(tl.int64)
        h_at = shared_h_ptr + token.to(tl.int64) * S + n
    live = (n < S)[:, None]
    gate_at = w_ptr + row[:, None] * K + ks[None, :]
    up_at = gate_at + S.to(tl.int64) * K
    x_at = x_ptr + token.to(tl.int64) * K + ks
    gate = _piece(gate_at, 0, ks, K, live, EVEN)
    up = gate
    if GATED:
        up = _piece(up_at, 0, ks, K, live, EVEN)
    gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = gates
    for k in range(BLOCK_K, K, BLOCK_K):
        x = tl.load(x_at + k - BLOCK_K).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * x
        gate = _piece(gate_at, k, ks, K, live, EVEN)
        if GATED:
            ups += up.to(tl.float32) * x
            up = _piece(up_at, k, ks, K, live, EVEN)
    last = (K - 1) // BLOCK_K * BLOCK_K
    x = tl.load(x_at + last, mask=last + ks < K, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(gates + gate.to(tl.float32) * x, 1)
    other = y
    if GATED:
        other = tl.sum(ups + up.to(tl.float32) * x, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=n < S, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias_ptr + row + S, mask=n < S, other=0.0).to(tl.float32)
    h = activate(y, other, alpha, limit, KIND, FUNCTION, GATED)
    tl.store(h_at, h.to(h_ptr.dtype.element_ty), mask=n < S)


@triton.jit
def _down_kernel(
    h_ptr,
    w_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    out_ptr,
    shared_ptr,
    shared_bias_ptr,
    shared_h_ptr,
    N,
    S,
    S_SHARED,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of a token: the sum over its experts. A tile's rows are (output, expert); for the expert of all tokens,
    if SHARED, (output, part of its inputs)."""
    token = tl.program_id(1)
    at, ks = tl.arange(0, BLOCK_N * BLOCK_TOP), tl.arange(0, BLOCK_K)
    n, j = tl.program_id(0) * BLOCK_N + at // BLOCK_TOP, at % BLOCK_TOP
    real = (n < N) & (j < TOP)
    live = real[:, None]
    if PDL:
        pdl_wait()
    entry = token * TOP + j
    row = tl.load(chosen_ptr + entry, mask=real, other=0).to(tl.int64) * N + n
    w_at = w_ptr + row[:, None] * S + ks[None, :]
    h_at = h_ptr + entry.to(tl.int64)[:, None] * S + ks[None, :]
    w = _piece(w_at, 0, ks, S, live, EVEN)
    acc = tl.zeros((BLOCK_N * BLOCK_TOP, BLOCK_K), tl.float32)
    for k in range(BLOCK_K, S, BLOCK_K):
        acc += w.to(tl.float32) * tl.load(h_at + k - BLOCK_K, mask=live, other=0.0).to(tl.float32)
        w = _piece(w_at, k, ks, S, live, EVEN)
    last = (S - 1) // BLOCK_K * BLOCK_K
    h = tl.load(h_at + last, mask=live & (last + ks < S)[None, :], other=0.0)
    y = tl.sum(acc + w.to(tl.float32) * h.to(tl.float32), 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    y = y * tl.load(weights_ptr + entry, mask=real, other=0.0)
    if SHARED:
        part = tl.cdiv(S_SHARED, BLOCK_TOP * 8) * 8
        start, live = j * part, (n < N)[:, None]
        row = n.to(tl.int64)
        acc = tl.zeros((BLOCK_N * BLOCK_TOP, BLOCK_K), tl.float32)
        for k in range(0, part, BLOCK_K):
            column = start[:, None] + (k + ks)[None, :]
            inside = (k + ks < part)[None, :] & (column < S_SHARED) & live
            w = tl.load(shared_ptr + row[:, None] * S_SHARED + column, mask=inside, other=0.0, eviction_policy="evict_first")
            h = tl.load(shared_h_ptr + token.to(tl.int64) * S_SHARED + column, mask=inside, other=0.0)
            acc += w.to(tl.float32) * h.to(tl.float32)
        y += tl.sum(acc, 1)
        if HAS_BIAS:
            y += tl.load(shared_bias_ptr + row, mask=(j == 0) & (n < N), other=0.0).to(tl.float32)
    out = tl.sum(tl.reshape(y, (BLOCK_N, BLOCK_TOP)), 1)
    ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + token.to(tl.int64) * N + ns, out.to(out_ptr.dtype.element_ty), mask=ns < N)


def moe_small_batch(
    x: Tensor, weights: Tensor, chosen: Tensor, up: Linear, down: Linear, spec: MoESpec, shared: tuple[Linear, Linear] | None
) -> Tensor:
    """x [T, E], contiguous, weights float32 and experts int32 [T, k] → [T, E]. `shared`: of an expert of all tokens, with the
    others' activation, and biases if they have such."""
    (num_tokens, width), top, size = x.shape, spec.num_experts_per_token, spec.expert.intermediate_size
    all_up, all_down = (up, down) if shared is None else shared
    shared_size = 0 if shared is None else all_down.weight.shape[1]
    h, shared_h = (torch.empty(n, dtype=x.dtype, device=x.device) for n in (chosen.numel() * size, num_tokens * shared_size))
    block_k = min(1024 if width % 1024 == 0 else 512, triton.next_power_of_2(width))
    block_n = TILE // 1024 if width % 1024 == 0 else TILE // 512
    num_routed = top * triton.cdiv(size, block_n)
    _up_kernel[(num_routed + triton.cdiv(shared_size, block_n), num_tokens)](
        x,
        up.weight,
        x if up.bias is None else up.bias,
        chosen,
        h,
        all_up.weight,
        x if all_up.bias is None else all_up.bias,
        shared_h,
        size,
        shared_size,
        width,
        num_routed,
        **activation_arguments(spec.expert.activation),
        TOP=top,
        GATED=spec.expert.gated,
        HAS_BIAS=up.bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=width % block_k == 0,
        num_warps=4,
        **overlapped(x),
    )
    out = torch.empty_like(x)
    block_top = triton.next_power_of_2(top)
    block_k = min(max(128, TILE // block_top), triton.next_power_of_2(size))
    _down_kernel[(width, num_tokens)](
        h,
        down.weight,
        x if down.bias is None else down.bias,
        chosen,
        weights,
        out,
        all_down.weight,
        x if all_down.bias is None else all_down.bias,
        shared_h,
        width,
        size,
        shared_size,
        TOP=top,
        SHARED=shared is not None,
        HAS_BIAS=down.bias is not None,
        BLOCK_N=1,
        BLOCK_TOP=block_top,
        BLOCK_K=block_k,
        EVEN=size % block_k == 0,
        num_warps=4,
        **overlapped(x),
    )
    return out
