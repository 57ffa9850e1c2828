"""Linear layers with FP8 weights that have a scale per FP8 tile of 128 × 128 (`TileScaledLinear`),
for any number of tokens.

y = Σ over FP8 tiles of (w_tile · x_tile) · w_scale · x_scale. Each tensor-core sum over 128 inputs
is scaled and added in float32, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). With few tokens
this is bound by reading the weight, and K is split over thread blocks. With many tokens torch's
scaled GEMM is faster. It supports such products on compute capability 9.0 only, and gave the same
bits where that was measured. All sums have a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.products.split_k import ArrivalCounters, reduce_splits
from slipstream.kernels.weights.forms import Quantized, TileScaledLinear
from slipstream.platform import platform_of
from slipstream.spec.scheme import FP8_TILE

SPLIT_K_TOKENS = 64
"""Maximum number of tokens that fit in one launch tile, so that K may be split."""
THRESHOLDS = Thresholds(tokens=(SPLIT_K_TOKENS,))


@triton.jit(do_not_specialize=["M"])
def _fp8_tile_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ. Weight rows fill the tall side of a launch tile. BLOCK_N divides 128, so its
    rows lie in one row of FP8 tiles."""
    pid, pid_k = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * tiles_n) % group_m
    pid_n = pid % (GROUP_M * tiles_n) // group_m
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    k_tiles = K // 128
    token = tl.minimum(m, M - 1).to(tl.int64)
    w_at = w_ptr + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + ks[None, :]
    x_at = x_ptr + token[None, :] * K + ks[:, None]
    w_scale_at = w_scale_ptr + pid_n * BLOCK_N // 128 * k_tiles
    x_scale_at = x_scale_ptr + token * k_tiles
    span = tl.cdiv(k_tiles, SPLITS)
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k_tile in range(pid_k * span, tl.minimum(pid_k * span + span, k_tiles)):
        w = tl.load(w_at + k_tile * 128)
        x = tl.load(x_at + k_tile * 128)
        scale = tl.load(w_scale_at + k_tile) * tl.load(x_scale_at + k_tile)
        acc += tl.dot(w, x, out_dtype=tl.float32) * scale[None, :]
    is_last = True
    if SPLITS > 1:
        at = n[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        acc, is_last = reduce_splits(
            acc,
            partial_ptr,
            counter_ptr,
            at,
            pid_n,
            pid_k,
            tiles_n * BLOCK_N * BLOCK_M,
            SPLITS,
            BLOCK_N,
            BLOCK_M,
        )
    if is_last:
        live = (m < M)[None, :] & (n < N)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            y_ptr + m[None, :].to(tl.int64) * N + n[:, None],
            acc.to(y_ptr.dtype.element_ty),
            mask=live,
        )


def fp8_tile_linear(
    x: Quantized,
    w: TileScaledLinear,
    scratch: ArrivalCounters | None,
    *,
    tile: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """x · Wᵀ + b → [T, N]. `tile`: (BLOCK_M, BLOCK_N, SPLITS, warps, stages). SPLITS > 1 needs all
    tokens in one tile, and `scratch`. Without splits a token's result depends on that token only.
    """
    (num_tokens, inner), outer = x.values.shape, w.weight.shape[0]
    block_m, block_n, splits, warps, stages = tile or default_tile(num_tokens, outer, inner)
    y = torch.empty(num_tokens, outer, dtype=w.out_dtype, device=x.values.device)
    tiles_n = triton.cdiv(outer, block_n)
    partial = x.scales
    if splits > 1:
        assert num_tokens <= block_m
        partial = torch.empty(
            splits * tiles_n * block_n * block_m, dtype=torch.float32, device=y.device
        )
    if num_tokens:
        _fp8_tile_kernel[(triton.cdiv(num_tokens, block_m) * tiles_n, splits)](
            x.values, x.scales, w.weight, w.scales, x.scales if w.bias is None else w.bias, y, partial,
            x.scales if scratch is None else scratch.counters, num_tokens, outer, inner,
            HAS_BIAS=w.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, SPLITS=splits, GROUP_M=8, num_warps=warps,
            num_stages=stages, **pdl_options(y),
        )  # fmt: skip
    return y


def default_tile(num_tokens: int, outer: int, inner: int) -> tuple[int, int, int, int, int]:
    """A tile within some percent of the fastest at the shapes of DeepSeek-V3 and an 8B Qwen on an
    H200."""
    if num_tokens > SPLIT_K_TOKENS:
        few_tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(outer, 64) < 132
        return (64, 64, 1, 4, 5) if few_tiles else (128, 64, 1, 4, 4)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    stages = 6 if block_m == 16 else 4
    if triton.cdiv(outer, 64) > 150:
        return (16, 128, 1, 8, 4) if num_tokens == 1 else (block_m, 64, 1, 4, stages)
    block_n = 128 if inner > 8192 and outer >= 4096 else 64
    return block_m, block_n, min(4, inner // 128), 4, stages


def has_scaled_mm(x: Quantized, w: TileScaledLinear) -> bool:
    """Whether torch's scaled GEMM is available and faster. Its scales lie in rows of four."""
    return (
        x.values.shape[0] > SPLIT_K_TOKENS
        and platform_of(x.values.device).arch.fp8_tile_library
        and w.weight.shape[1] % (4 * FP8_TILE) == 0
        and w.out_dtype != torch.float32
    )


def fp8_tile_scaled_mm(x: Quantized, w: TileScaledLinear) -> Tensor:
    """Linear layer by `torch._scaled_mm`, with the number of tokens padded to a multiple of four."""
    num_tokens = x.values.shape[0]
    values, scales, pad = x.values, x.scales, -num_tokens % 4
    if pad:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, pad)).view(values.dtype)
        scales = F.pad(scales, (0, 0, 0, pad))
    columns = scales.T.contiguous().T  # the scales of an FP8 tile for all tokens are contiguous
    y: Tensor = torch._scaled_mm(
        values, w.weight.T, scale_a=columns, scale_b=w.scales.T, out_dtype=w.out_dtype
    )
    y = y[:num_tokens]
    return y if w.bias is None else y + w.bias


def fp8_tile_linear_invariant(x: Quantized, w: TileScaledLinear) -> Tensor:
    """`fp8_tile_linear` without splits: a token's result depends on that token only."""
    return fp8_tile_linear(
        x,
        w,
        None,
        tile=(64, 64, 1, 4, 4) if x.values.shape[0] <= SPLIT_K_TOKENS else (128, 64, 1, 4, 4),
    )
