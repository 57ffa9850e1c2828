"""Expert GEMM over gathered rows: y[i] = x[token(i)] · W[expert(i)]ᵀ for every token–expert pair i, in one launch.

`moe_permute` sorts pairs by expert and cuts each expert's pairs into tiles. One thread block multiplies a tile of an
expert's pairs with BLOCK_N rows of its weight. Weights of all experts are stacked, [X · N, K]:

| weights | how K is walked |
| --- | --- |
| dense, fp8, int8 | BLOCK_K at a time (for many pairs `grouped_gemm.py` is faster) |
| fp8-block | 128 at a time; the sum over an FP8 tile is scaled before it is added |
| int4 | a chunk at a time; codes are converted to the model's type first |"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.experts.moe_permute import ExpertTiles, pairs_of_tile
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.weights.forms import (
    Activations,
    GroupedLinear,
    Linear,
    Quantized,
    ScaledLinear,
    TileScaledLinear,
)
from slipstream.platform import platform_of
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import FP8_TILE


@triton.jit
def _expert_gemm_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, starts_ptr, ends_ptr, N, K, X,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, SCALED: tl.constexpr, FP8_TILES: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP_SIZE: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
    UNSORTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ for one tile of an expert's pairs and BLOCK_N of its N rows. y has one row per
    pair, in sorted order. So has x; with GATHER it has one row per token. UNSORTED: each pair is a
    tile."""
    if PDL:
        pdl_wait()
    expert, position, live, pair = pairs_of_tile(
        tl.program_id(1), order_ptr, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X, UNSORTED
    )
    if expert < X:
        source = (pair // TOP_K if GATHER else position).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + n
        tile_row = expert.to(tl.int64) * (N // 128) + tl.program_id(0) * BLOCK_N // 128
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
        if CHUNK == 0:
            ks = tl.arange(0, BLOCK_K)
            for k in range(0, K, BLOCK_K):
                inside = ks + k < K
                w = tl.load(
                    w_ptr + row[:, None] * K + (k + ks)[None, :],
                    mask=(n < N)[:, None] & inside[None, :],
                    other=0.0,
                )
                x = tl.load(
                    x_ptr + source[None, :] * K + (k + ks)[:, None],
                    mask=live[None, :] & inside[:, None],
                    other=0.0,
                )
                if FP8_TILES:  # BLOCK_K is 128, and the BLOCK_N rows share one scale
                    scale = tl.load(w_scale_ptr + tile_row * (K // 128) + k // 128)
                    x_scale = tl.load(
                        x_scale_ptr + source * (K // 128) + k // 128, mask=live, other=0.0
                    )
                    acc += tl.dot(w, x, out_dtype=ACC) * (x_scale * scale)[None, :]
                else:
                    acc = tl.dot(w, x, acc, out_dtype=ACC, input_precision=PRECISION)
        else:
            QUARTER: tl.constexpr = CHUNK // 4
            js = tl.arange(0, QUARTER)
            for chunk in range(K // CHUNK):
                at = row[:, None] * (K // 4) + (chunk * QUARTER + js)[None, :]
                words = tl.load(w_ptr + at, mask=(n < N)[:, None], other=0)
                for i in tl.static_range(4):
                    scales = (
                        chunk * (CHUNK // GROUP_SIZE) + i * QUARTER // GROUP_SIZE
                    ) * X * N + row
                    scale = tl.load(w_scale_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[
                        :, None
                    ]
                    zero = 8.0
                    if HAS_ZEROS:
                        zero = tl.load(zero_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[
                            :, None
                        ]
                    w = (((words >> (4 * i)) & 0xF).to(tl.float32) - zero) * scale
                    k = chunk * CHUNK + i * QUARTER + js
                    x = tl.load(
                        x_ptr + source[None, :] * K + k[:, None], mask=live[None, :], other=0.0
                    )
                    acc = tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION)
        y = acc.to(tl.float32)
        if SCALED:
            y *= tl.load(w_scale_ptr + row, mask=n < N, other=0.0)[:, None]
            y *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = y_ptr + position.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def expert_gemm(
    x: Activations,
    w: Linear,
    tiles: ExpertTiles,
    spec: MoESpec,
    num_rows: int,
    dtype: torch.dtype,
    *,
    gather: bool,
) -> Tensor:
    """[T or T · k, K] → [T · k, num_rows]: each pair times its expert's weight. `gather`: x has one
    row per token."""
    values = x.values if isinstance(x, Quantized) else x
    inner = values.shape[1]
    scaled, packed, fp8_tiles = (
        isinstance(w, kind) for kind in (ScaledLinear, GroupedLinear, TileScaledLinear)
    )
    scales = w.scales if isinstance(w, (ScaledLinear, TileScaledLinear, GroupedLinear)) else values
    zeros = w.zeros if isinstance(w, GroupedLinear) else None
    y = torch.empty(tiles.order.numel(), num_rows, dtype=dtype, device=values.device)
    usual = _default_tile(tiles.tile_m, values.element_size(), packed=packed, fp8_tiles=fp8_tiles)
    block_n, block_k, warps, stages = usual
    if isinstance(w, GroupedLinear):
        assert w.codes == "int4"
        # the four quarters of a chunk's inputs are in flight at once
        weight_bytes = block_n * w.chunk
        input_bytes = tiles.tile_m * w.chunk * values.element_size()
        stages = max(
            1, min(stages, (platform_of(values.device).shared_bytes - weight_bytes) // input_bytes)
        )
    _expert_gemm_kernel[(triton.cdiv(num_rows, block_n), tiles.max_tiles)](
        values, x.scales if isinstance(x, Quantized) else values, w.weight, scales, scales if zeros is None else zeros,
        values if w.bias is None else w.bias, y, tiles.order, tiles.starts, tiles.tile_ends, num_rows, inner,
        spec.num_local_experts,
        TOP_K=spec.num_experts_per_token, GATHER=gather, SCALED=scaled, FP8_TILES=fp8_tiles, HAS_ZEROS=zeros is not None,
        HAS_BIAS=w.bias is not None,
        GROUP_SIZE=w.group_size if isinstance(w, GroupedLinear) else 1,
        CHUNK=w.chunk if isinstance(w, GroupedLinear) else 0, ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        PRECISION="ieee" if dtype == torch.float32 else "tf32", BLOCK_M=tiles.tile_m, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(spec.num_local_experts), UNSORTED=tiles.inverse is None,
        num_warps=warps, num_stages=stages, **pdl_options(values),
    )  # fmt: skip
    return y


def _default_tile(
    tile_m: int, element_size: int, *, packed: bool, fp8_tiles: bool
) -> tuple[int, int, int, int]:
    if fp8_tiles:  # a taller tile's sums would not fit the registers
        return 64, FP8_TILE, 4, 4
    block_k = 64 if packed or element_size == 4 else (256 if tile_m < 128 else 128) // element_size
    return (64, block_k, 4, 3) if tile_m < 64 else (128, block_k, 8, 3)
