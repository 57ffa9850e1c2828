"""Experts of few tokens with dense weights: two kernels, without sorting.

1. `_up_kernel`: h = activation(x · W_gateᵀ, x · W_upᵀ) for every token–expert pair.
2. `_down_kernel`: y = Σ over a token's experts of weight · (h · W_downᵀ).

With so few tokens hardly two pairs share an expert, so each pair multiplies by itself, without
tensor cores. Both kernels are bound by reading the weights. As in `linear.gemv`, the next tile of a
weight is loaded before the current one is multiplied. A shared expert of all tokens is computed in
the same launches. All sums have a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments
from slipstream.kernels.weights.forms import Linear
from slipstream.spec.model import MoESpec

TILE_SIZE = 2048
"""Elements of a weight that a thread block loads at once; with a gate, as many of gate and of
up."""


@triton.jit
def _load_weight(at, k, ks, K, live, EVEN: tl.constexpr):
    """[rows, BLOCK_K] of a weight, columns k + ks."""
    if EVEN:
        return tl.load(at + k, mask=live, other=0.0, eviction_policy="evict_first")
    return tl.load(
        at + k, mask=live & (k + ks < K)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _up_kernel(
    x_ptr, w_ptr, bias_ptr, chosen_ptr, h_ptr, shared_ptr, shared_bias_ptr, shared_h_ptr, F, F_SHARED, K, num_routed, alpha,
    limit,
    TOP_K: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of a pair's F hidden numbers. An expert's weight has F gate rows, then F up
    rows; without a gate F rows. Thread blocks from `num_routed` on do the same for the shared
    expert of F_SHARED hidden numbers."""
    pid, token = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BLOCK_K)
    if PDL:
        pdl_wait()
    if pid < num_routed:
        tiles = num_routed // TOP_K
        pair = token * TOP_K + pid // tiles
        n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.load(chosen_ptr + pair).to(tl.int64) * F * (2 if GATED else 1) + n
        h_at = h_ptr + pair.to(tl.int64) * F + n
    else:
        w_ptr, bias_ptr, F = shared_ptr, shared_bias_ptr, F_SHARED
        n = (pid - num_routed) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = n.to(tl.int64)
        h_at = shared_h_ptr + token.to(tl.int64) * F + n
    live = (n < F)[:, None]
    gate_at = w_ptr + row[:, None] * K + ks[None, :]
    up_at = gate_at + F.to(tl.int64) * K
    x_at = x_ptr + token.to(tl.int64) * K + ks
    gate = _load_weight(gate_at, 0, ks, K, live, EVEN)
    up = gate
    if GATED:
        up = _load_weight(up_at, 0, ks, K, live, EVEN)
    gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = gates
    for k in range(BLOCK_K, K, BLOCK_K):
        x = tl.load(x_at + k - BLOCK_K).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * x
        gate = _load_weight(gate_at, k, ks, K, live, EVEN)
        if GATED:
            ups += up.to(tl.float32) * x
            up = _load_weight(up_at, k, ks, K, live, EVEN)
    last = (K - 1) // BLOCK_K * BLOCK_K
    x = tl.load(x_at + last, mask=last + ks < K, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(gates + gate.to(tl.float32) * x, 1)
    other = y
    if GATED:
        other = tl.sum(ups + up.to(tl.float32) * x, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=n < F, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias_ptr + row + F, mask=n < F, other=0.0).to(tl.float32)
    h = activate(y, other, alpha, limit, KIND, FUNCTION, GATED)
    tl.store(h_at, h.to(h_ptr.dtype.element_ty), mask=n < F)


@triton.jit
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, chosen_ptr, weights_ptr, out_ptr, shared_ptr, shared_bias_ptr, shared_h_ptr, N, F, F_SHARED,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of a token, summed over its experts. A tile's rows are (output,
    expert); for a shared expert (output, stretch of its inputs)."""
    token = tl.program_id(1)
    at, ks = tl.arange(0, BLOCK_N * BLOCK_TOP_K), tl.arange(0, BLOCK_K)
    n, j = tl.program_id(0) * BLOCK_N + at // BLOCK_TOP_K, at % BLOCK_TOP_K
    real = (n < N) & (j < TOP_K)
    live = real[:, None]
    if PDL:
        pdl_wait()
    pair = token * TOP_K + j
    row = tl.load(chosen_ptr + pair, mask=real, other=0).to(tl.int64) * N + n
    w_at = w_ptr + row[:, None] * F + ks[None, :]
    h_at = h_ptr + pair.to(tl.int64)[:, None] * F + ks[None, :]
    w = _load_weight(w_at, 0, ks, F, live, EVEN)
    acc = tl.zeros((BLOCK_N * BLOCK_TOP_K, BLOCK_K), tl.float32)
    for k in range(BLOCK_K, F, BLOCK_K):
        acc += w.to(tl.float32) * tl.load(h_at + k - BLOCK_K, mask=live, other=0.0).to(tl.float32)
        w = _load_weight(w_at, k, ks, F, live, EVEN)
    last = (F - 1) // BLOCK_K * BLOCK_K
    h = tl.load(h_at + last, mask=live & (last + ks < F)[None, :], other=0.0)
    y = tl.sum(acc + w.to(tl.float32) * h.to(tl.float32), 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    y = y * tl.load(weights_ptr + pair, mask=real, other=0.0)
    if SHARED:
        stretch = tl.cdiv(F_SHARED, BLOCK_TOP_K * 8) * 8
        start, live = j * stretch, (n < N)[:, None]
        row = n.to(tl.int64)
        acc = tl.zeros((BLOCK_N * BLOCK_TOP_K, BLOCK_K), tl.float32)
        for k in range(0, stretch, BLOCK_K):
            column = start[:, None] + (k + ks)[None, :]
            inside = (k + ks < stretch)[None, :] & (column < F_SHARED) & live
            w = tl.load(
                shared_ptr + row[:, None] * F_SHARED + column,
                mask=inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            h = tl.load(
                shared_h_ptr + token.to(tl.int64) * F_SHARED + column, mask=inside, other=0.0
            )
            acc += w.to(tl.float32) * h.to(tl.float32)
        y += tl.sum(acc, 1)
        if HAS_BIAS:
            y += tl.load(shared_bias_ptr + row, mask=(j == 0) & (n < N), other=0.0).to(tl.float32)
    out = tl.sum(tl.reshape(y, (BLOCK_N, BLOCK_TOP_K)), 1)
    ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + token.to(tl.int64) * N + ns, out.to(out_ptr.dtype.element_ty), mask=ns < N)


def moe_small_batch(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    up: Linear,
    down: Linear,
    spec: MoESpec,
    shared: tuple[Linear, Linear] | None,
) -> Tensor:
    """x [T, E], contiguous; weights float32 and experts int32 [T, k] → [T, E]. `shared`: up and
    down of an expert for all tokens, with the others' activation, and with biases if they have
    them."""
    (num_tokens, width), top_k, size = (
        x.shape,
        spec.num_experts_per_token,
        spec.expert.intermediate_size,
    )
    all_up, all_down = (up, down) if shared is None else shared
    shared_size = 0 if shared is None else all_down.weight.shape[1]
    h, shared_h = (
        torch.empty(n, dtype=x.dtype, device=x.device)
        for n in (chosen.numel() * size, num_tokens * shared_size)
    )
    block_k = min(1024 if width % 1024 == 0 else 512, triton.next_power_of_2(width))
    block_n = TILE_SIZE // 1024 if width % 1024 == 0 else TILE_SIZE // 512
    num_routed = top_k * triton.cdiv(size, block_n)
    _up_kernel[(num_routed + triton.cdiv(shared_size, block_n), num_tokens)](
        x, up.weight, x if up.bias is None else up.bias, chosen, h, all_up.weight,
        x if all_up.bias is None else all_up.bias, shared_h, size, shared_size, width, num_routed,
        **activation_arguments(spec.expert.activation), TOP_K=top_k, GATED=spec.expert.gated, HAS_BIAS=up.bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, EVEN=width % block_k == 0, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    out = torch.empty_like(x)
    block_top_k = triton.next_power_of_2(top_k)
    block_k = min(max(128, TILE_SIZE // block_top_k), triton.next_power_of_2(size))
    _down_kernel[(width, num_tokens)](
        h, down.weight, x if down.bias is None else down.bias, chosen, weights, out, all_down.weight,
        x if all_down.bias is None else all_down.bias, shared_h, width, size, shared_size,
        TOP_K=top_k, SHARED=shared is not None, HAS_BIAS=down.bias is not None, BLOCK_N=1, BLOCK_TOP_K=block_top_k,
        BLOCK_K=block_k, EVEN=size % block_k == 0, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out
