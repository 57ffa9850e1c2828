"""Products with FP8 weights in blocks of 128 × 128 (`BlockScaledLinear`), for any number of tokens.

A tensor core's sum over 128 inputs is scaled by the block's and the token's scales and added up in float32, as DeepSeek-V3 has
it (arXiv:2412.19437, section 3.3.2). With few tokens the weight's bytes decide, and the inner dimension is split so that enough
programs read them. With many Hopper's library is the faster (it has such products for compute capability 9.0 alone), and gave
the same bits where it was measured. All sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.split_k import Scratch, sum_parts
from slipstream.kernels.weights import BlockScaledLinear, Quantized
from slipstream.platform import platform_of
from slipstream.spec.scheme import BLOCK

FEW = 64
"""Up to so many tokens one tile holds them all, and the inner dimension may be split."""


@triton.jit(do_not_specialize=["M"])
def _blocks_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    part_ptr,
    counter_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """yᵀ = W · xᵀ: the weight's rows fill the tall side of a tile, which lies in one row of blocks (BLOCK_N divides 128). Tiles
    of GROUP columns of tokens are taken together, for the L2 cache."""
    pid, pid_k = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    pid_m = first + pid % (GROUP * tiles_n) % height
    pid_n = pid % (GROUP * tiles_n) // height
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    blocks = K // 128
    token = tl.minimum(m, M - 1).to(tl.int64)
    w_at = w_ptr + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + ks[None, :]
    x_at = x_ptr + token[None, :] * K + ks[:, None]
    w_scale_at = w_scale_ptr + pid_n * BLOCK_N // 128 * blocks
    x_scale_at = x_scale_ptr + token * blocks
    span = tl.cdiv(blocks, SPLITS)
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(pid_k * span, tl.minimum(pid_k * span + span, blocks)):
        w = tl.load(w_at + block * 128)
        x = tl.load(x_at + block * 128)
        scale = tl.load(w_scale_at + block) * tl.load(x_scale_at + block)
        acc += tl.dot(w, x, out_dtype=tl.float32) * scale[None, :]
    mine = True
    if SPLITS > 1:
        at = n[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        acc, mine = sum_parts(
            acc, part_ptr, counter_ptr, at, pid_n, pid_k, tiles_n * BLOCK_N * BLOCK_M, SPLITS, BLOCK_N, BLOCK_M
        )
    if mine:
        live = (m < M)[None, :] & (n < N)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=live)


def blocks(
    x: Quantized, w: BlockScaledLinear, scratch: Scratch | None, *, tile: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """`tile`: (BLOCK_M, BLOCK_N, SPLITS, warps, stages); splits only if one tile holds all tokens, and then with `scratch`.
    Without splits a token's result depends on nothing but the token."""
    (num_tokens, inner), outer = x.values.shape, w.weight.shape[0]
    block_m, block_n, splits, warps, stages = tile or blocks_tile(num_tokens, outer, inner)
    y = torch.empty(num_tokens, outer, dtype=w.out_dtype, device=x.values.device)
    tiles_n = triton.cdiv(outer, block_n)
    part = x.scales
    if splits > 1:
        assert num_tokens <= block_m
        part = torch.empty(splits * tiles_n * block_n * block_m, dtype=torch.float32, device=y.device)
    if num_tokens:
        _blocks_kernel[(triton.cdiv(num_tokens, block_m) * tiles_n, splits)](
            x.values,
            x.scales,
            w.weight,
            w.scales,
            x.scales if w.bias is None else w.bias,
            y,
            part,
            x.scales if scratch is None else scratch.counters,
            num_tokens,
            outer,
            inner,
            HAS_BIAS=w.bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SPLITS=splits,
            GROUP=8,
            num_warps=warps,
            num_stages=stages,
            **overlapped(y),
        )
    return y


def blocks_tile(num_tokens: int, outer: int, inner: int) -> tuple[int, int, int, int, int]:
    """The fastest, or within some percent of it, at the shapes of DeepSeek-V3 and an 8B Qwen on an H200."""
    if num_tokens > FEW:
        few_tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(outer, 64) < 132
        return (64, 64, 1, 4, 5) if few_tiles else (128, 64, 1, 4, 4)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    stages = 6 if block_m == 16 else 4
    if triton.cdiv(outer, 64) > 150:
        return (16, 128, 1, 8, 4) if num_tokens == 1 else (block_m, 64, 1, 4, stages)
    block_n = 128 if inner > 8192 and outer >= 4096 else 64
    return block_m, block_n, min(4, inner // 128), 4, stages


def has_library(x: Quantized, w: BlockScaledLinear) -> bool:
    """Whether the library's product is the faster one. Its scales lie in rows of four."""
    return (
        x.values.shape[0] > FEW
        and platform_of(x.values.device).arch.fp8_tile_library
        and w.weight.shape[1] % (4 * BLOCK) == 0
        and w.out_dtype != torch.float32
    )


def library(x: Quantized, w: BlockScaledLinear) -> Tensor:
    """`torch._scaled_mm`, with tokens made a multiple of four."""
    num_tokens = x.values.shape[0]
    values, scales, pad = x.values, x.scales, -num_tokens % 4
    if pad:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, pad)).view(values.dtype)
        scales = F.pad(scales, (0, 0, 0, pad))
    columns = scales.T.contiguous().T  # a block's scales of all tokens lie together
    y: Tensor = torch._scaled_mm(values, w.weight.T, scale_a=columns, scale_b=w.scales.T, out_dtype=w.out_dtype)
    y = y[:num_tokens]
    return y if w.bias is None else y + w.bias


def invariant(x: Quantized, w: BlockScaledLinear) -> Tensor:
    """`blocks`, without splits."""
    return blocks(x, w, None, tile=(64, 64, 1, 4, 4) if x.values.shape[0] <= FEW else (128, 64, 1, 4, 4))
