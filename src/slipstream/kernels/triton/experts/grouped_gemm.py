"""Grouped GEMM for a mixture of experts with many tokens; weights of 16 bits, or of 8 bits with a
scale per row.

1. `permute_rows` copies tokens' rows into the experts' order, x [T, K] → [T · k, K]. Both products
   then read rows and weights through TMA (compute capability 9.0 and later), and no thread computes
   addresses.
2. `grouped_gemm` multiplies: one thread block takes a tile of an expert's pairs and BLOCK_N of its
   outputs. The first product of a gated expert computes gate and up together and stores their
   activation.

Thread blocks are ordered in groups of GROUP_M tiles that pass over the weight's rows together. A
weight that L2 can't hold (Mixtral's: 117 MB per expert) is thus read once for GROUP_M tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton.experts.moe_permute import ExpertTiles, tile_of
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments, quantize
from slipstream.kernels.weights.forms import Activations, Linear, Quantized, ScaledLinear
from slipstream.platform import platform_of
from slipstream.spec.model import DenseSpec, MoESpec

GROUP_M = 8
"""Number of tiles of pairs that walk over the weight at the same time, so that they share its reads
in L2."""
BLOCK_K_BYTES = 128
"""Bytes of a row that one step along K multiplies."""


@triton.jit
def _permute_kernel(
    x_ptr, scales_ptr, inverse_ptr, out_ptr, out_scales_ptr, K,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy a token's row to the sorted positions of its pairs."""
    if PDL:
        pdl_wait()
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * K + at, mask=at < K)
    for j in tl.static_range(TOP_K):
        position = tl.load(inverse_ptr + token * TOP_K + j)
        tl.store(out_ptr + position.to(tl.int64) * K + at, x, mask=at < K)
        if SCALED and tl.program_id(1) == 0:
            tl.store(out_scales_ptr + position, tl.load(scales_ptr + token))


def permute_rows(x: Activations, tiles: ExpertTiles, top_k: int) -> Activations:
    """Copies rows to the experts' order: x [T, K] → [T · k, K], one row a pair."""
    assert tiles.inverse is not None
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    (num_tokens, inner), count = values.shape, tiles.inverse.numel()
    out = torch.empty(count, inner, dtype=values.dtype, device=values.device)
    out_scales = (
        torch.empty(count, 1, dtype=torch.float32, device=values.device)
        if isinstance(x, Quantized)
        else out
    )
    # as integers: bits are copied
    bits = {1: torch.int8, 2: torch.int16}[values.element_size()]
    block = min(2048, triton.next_power_of_2(inner))
    _permute_kernel[(num_tokens, triton.cdiv(inner, block))](
        values.view(bits), scales, tiles.inverse, out.view(bits), out_scales, inner,
        TOP_K=top_k, SCALED=isinstance(x, Quantized), BLOCK=block, num_warps=min(4, max(1, block // 256)),
        **pdl_options(values),
    )  # fmt: skip
    return Quantized(out, out_scales) if isinstance(x, Quantized) else out


@triton.jit
def _tile_gemm(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, first, end, N, K, alpha, limit,
    ACTIVATE: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes rows `first` … `end` of y (at most BLOCK_M), columns from `column` on, with the
    weight's rows from `row` on."""
    y = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    up = y
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([first, k])
        y = tl.dot(x, w_desc.load([row, k]).T, y, out_dtype=ACC)
        if GATED:
            up = tl.dot(x, w_desc.load([row + N, k]).T, up, out_dtype=ACC)
    y, up = y.to(tl.float32), up.to(tl.float32)
    ms, ns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    live, inside = ms < end, column + ns < N
    if SCALED:
        x_scale = tl.load(x_scale_ptr + ms, mask=live, other=0.0)[:, None]
        y *= x_scale * tl.load(w_scale_ptr + row + ns, mask=inside, other=0.0)[None, :]
        if GATED:
            up *= x_scale * tl.load(w_scale_ptr + row + N + ns, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row + ns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + row + N + ns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATE:
        y = activate(y, up, alpha, limit, KIND, FUNCTION, GATED)
    at = y_ptr + ms.to(tl.int64)[:, None] * N + (column + ns)[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm_kernel(
    x_desc, half_x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, starts_ptr, ends_ptr, N, K, X, num_tiles, alpha,
    limit,
    ACTIVATE: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, GROUP_M: tl.constexpr, HALF_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T · k, N] = x · Wᵀ for one tile of pairs and BLOCK_N of an expert's N outputs.

    GATED: an expert's weight has N gate rows, then N up rows. ACTIVATE: y is their activation. A
    tile with at most HALF_M pairs multiplies only HALF_M rows (0: never)."""
    program, tiles_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first_tile = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(num_tiles - first_tile, GROUP_M)
    tile = first_tile + program % (GROUP_M * tiles_n) % group_m
    column = program % (GROUP_M * tiles_n) // group_m * BLOCK_N
    if PDL:
        pdl_wait()
    expert, first, end = tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X)
    row = expert * N * (2 if GATED else 1) + column
    if expert < X:
        if end - first > HALF_M:
            _tile_gemm(
                x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, first, end, N, K, alpha, limit,
                ACTIVATE, KIND, FUNCTION, GATED, SCALED, HAS_BIAS, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif HALF_M > 0:
            _tile_gemm(
                half_x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, first, end, N, K, alpha, limit,
                ACTIVATE, KIND, FUNCTION, GATED, SCALED, HAS_BIAS, ACC, HALF_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def covers(x: Activations, up: Linear, down: Linear, tiles: ExpertTiles) -> bool:
    """Whether `grouped_mlp` supports these: many pairs, dense or row-scaled weights, rows aligned
    for TMA."""
    values = x.values if isinstance(x, Quantized) else x
    device = values.device
    forms = all(type(w) in (Linear, ScaledLinear) and w.weight.is_contiguous() for w in (up, down))
    rows = all(w.weight.shape[1] * w.weight.element_size() % 16 == 0 for w in (up, down))
    small = values.element_size() <= 2 and up.inputs == down.inputs
    engine = platform_of(device).arch.tma
    return tiles.inverse is not None and tiles.tile_m >= 64 and forms and rows and small and engine


def grouped_mlp(
    x: Activations, up: Linear, down: Linear, tiles: ExpertTiles, spec: MoESpec, dtype: torch.dtype
) -> Tensor:
    """Compute both linear layers of the experts: x [T, E] → [T · k, E]. The result has an
    unweighted row for each pair, in the experts' order."""
    permuted = permute_rows(x, tiles, spec.num_experts_per_token)
    expert, count = spec.expert, spec.num_local_experts
    inner = grouped_gemm(permuted, up, tiles, expert.intermediate_size, count, dtype, expert)
    hidden = quantize(inner, down.inputs) if down.inputs else inner
    return grouped_gemm(hidden, down, tiles, down.weight.shape[0] // count, count, dtype)


def grouped_gemm(
    x: Activations,
    w: Linear,
    tiles: ExpertTiles,
    outer: int,
    num_experts: int,
    dtype: torch.dtype,
    expert: DenseSpec | None = None,
    *,
    tile: tuple[int, int, int, bool] | None = None,
) -> Tensor:
    """x [T · k, K] in the experts' order → [T · k, outer]; with `expert` its activation. `tile`: (BLOCK_N, warps,
    stages, whether a tile's empty second half is skipped)."""
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    gated = expert is not None and expert.gated
    y = torch.empty(values.shape[0], outer, dtype=dtype, device=values.device)
    block_n, warps, stages, skip_half = tile or _default_tile(
        tiles, gated=gated, eight_bits=values.element_size() == 1
    )
    block_k = BLOCK_K_BYTES // values.element_size()
    half = tiles.tile_m // 2 if skip_half else 0
    _grouped_gemm_kernel[(tiles.max_tiles * triton.cdiv(outer, block_n),)](
        TensorDescriptor(values, list(values.shape), list(values.stride()), [tiles.tile_m, block_k]),
        TensorDescriptor(values, list(values.shape), list(values.stride()), [half or tiles.tile_m, block_k]),
        TensorDescriptor(w.weight, list(w.weight.shape), list(w.weight.stride()), [block_n, block_k]), scales,
        w.scales if isinstance(w, ScaledLinear) else values, y if w.bias is None else w.bias, y, tiles.starts,
        tiles.tile_ends, outer, values.shape[1], num_experts, tiles.max_tiles,
        **activation_arguments("silu" if expert is None else expert.activation), ACTIVATE=expert is not None, GATED=gated,
        SCALED=isinstance(w, ScaledLinear), HAS_BIAS=w.bias is not None, ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        GROUP_M=GROUP_M, HALF_M=half, BLOCK_M=tiles.tile_m, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(num_experts), num_warps=warps, num_stages=stages, **pdl_options(values),
    )  # fmt: skip
    return y


def _default_tile(
    tiles: ExpertTiles, *, gated: bool, eight_bits: bool
) -> tuple[int, int, int, bool]:
    """(BLOCK_N, warps, stages, skip_half), measured on an H200 (benchmarks/GPU_NOTES.md)."""
    if tiles.tile_m == 64:
        return 128, 4, 4, False
    # pairs per expert; below it the step is bound by the weights' bytes
    few_tiles = tiles.order.numel() <= 256 * tiles.tile_ends.numel()
    if eight_bits:
        return (128, 8, 4, few_tiles) if gated else (256, 8, 3, False)
    return (128, 8, 4 if few_tiles else 3, few_tiles) if gated else (128, 4, 3, few_tiles)
