"""The two products of a mixture of experts over all experts at once: a program multiplies one tile of an expert's entries
(`moe_permute`) with some rows of its weight.

| weights | as `kernels.weights` holds them, the experts one below the other |
| --- | --- |
| dense, fp8, int8 | K in blocks (for many entries `grouped_gemm`) |
| fp8-block | the same, a block's sum scaled before it is added |
| int4, mxfp4 | K in chunks, codes made numbers of the model's type first |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.moe_permute import Groups, tile_of
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.weights import Activations, BlockScaledLinear, GroupedLinear, Linear, Quantized, ScaledLinear
from slipstream.platform import platform_of
from slipstream.spec.model import MoESpec
from slipstream.spec.scheme import BLOCK


@triton.jit
def _e2m1(code):
    """The number that a 4-bit float stands for, / 2^14: its bits, a sign, two of exponent, one of mantissa, where float16 has
    them. Without an exponent both are subnormal."""
    code = code.to(tl.uint16, bitcast=True)
    return ((code & 7) << 9 | (code & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _experts_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    order_ptr,
    starts_ptr,
    ends_ptr,
    N,
    K,
    X,
    TOP: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    E2M1: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """yᵀ = W · xᵀ for one tile of an expert's entries and BLOCK_N of its N rows. y has a row an entry in the experts' order,
    and so has x, or with GATHER a row a token."""
    if PDL:
        pdl_wait()
    tile = tl.program_id(1)
    ms = tl.arange(0, BLOCK_M)
    if SINGLE:
        expert = tl.load(order_ptr + tile)
        place, live = tile + ms, ms == 0
        entry = place
    else:
        expert, first, end = tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X)
        place = first + ms
        live = place < end
        entry = tl.load(order_ptr + place, mask=live, other=0)
    if expert < X:
        source = (entry // TOP if GATHER else place).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + n
        row_of_blocks = expert.to(tl.int64) * (N // 128) + tl.program_id(0) * BLOCK_N // 128
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
        if CHUNK == 0:
            ks = tl.arange(0, BLOCK_K)
            for k in range(0, K, BLOCK_K):
                inside = ks + k < K
                w = tl.load(w_ptr + row[:, None] * K + (k + ks)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
                x = tl.load(x_ptr + source[None, :] * K + (k + ks)[:, None], mask=live[None, :] & inside[:, None], other=0.0)
                if BLOCKED:  # BLOCK_K is 128, and the tile's rows have one scale
                    scale = tl.load(w_scale_ptr + row_of_blocks * (K // 128) + k // 128)
                    of_x = tl.load(x_scale_ptr + source * (K // 128) + k // 128, mask=live, other=0.0)
                    acc += tl.dot(w, x, out_dtype=ACC) * (of_x * scale)[None, :]
                else:
                    acc = tl.dot(w, x, acc, out_dtype=ACC, input_precision=PRECISION)
        else:
            QUARTER: tl.constexpr = CHUNK // 4
            js = tl.arange(0, QUARTER)
            for chunk in range(K // CHUNK):
                at = row[:, None] * (K // 4) + (chunk * QUARTER + js)[None, :]
                words = tl.load(w_ptr + at, mask=(n < N)[:, None], other=0)
                for i in tl.static_range(4):
                    scales = (chunk * (CHUNK // SIZE) + i * QUARTER // SIZE) * X * N + row
                    scale = tl.load(w_scale_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[:, None]
                    zero = 8.0
                    if HAS_ZEROS:
                        zero = tl.load(zero_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[:, None]
                    code = (words >> (4 * i)) & 0xF
                    if E2M1:
                        w = _e2m1(code) * (scale * 16384.0)
                    else:
                        w = (code.to(tl.float32) - zero) * scale
                    k = chunk * CHUNK + i * QUARTER + js
                    x = tl.load(x_ptr + source[None, :] * K + k[:, None], mask=live[None, :], other=0.0)
                    acc = tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION)
        y = acc.to(tl.float32)
        if SCALED:
            y *= tl.load(w_scale_ptr + row, mask=n < N, other=0.0)[:, None]
            y *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = y_ptr + place.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def experts(
    x: Activations,
    w: Linear,
    groups: Groups,
    spec: MoESpec,
    rows: int,
    dtype: torch.dtype,
    *,
    gather: bool,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """[T or T · k, K] → [T · k, rows], each entry by its expert's weight; `gather` as in `_experts_kernel`. `tile`: (BLOCK_N,
    BLOCK_K, warps, stages)."""
    values = x.values if isinstance(x, Quantized) else x
    inner = values.shape[1]
    scaled, packed, blocked = (isinstance(w, kind) for kind in (ScaledLinear, GroupedLinear, BlockScaledLinear))
    scales = w.scales if isinstance(w, (ScaledLinear, BlockScaledLinear, GroupedLinear)) else values
    zeros = w.zeros if isinstance(w, GroupedLinear) else None
    y = torch.empty(groups.order.numel(), rows, dtype=dtype, device=values.device)
    block_n, block_k, warps, stages = tile or _tile(groups.block, values.element_size(), packed=packed, blocked=blocked)
    if isinstance(w, GroupedLinear):  # a chunk's four pieces of the inputs are under way at once
        taken, each = block_n * w.chunk, groups.block * w.chunk * values.element_size()
        stages = max(1, min(stages, (platform_of(values.device).shared_bytes - taken) // each))
    _experts_kernel[(triton.cdiv(rows, block_n), groups.max_tiles)](
        values,
        x.scales if isinstance(x, Quantized) else values,
        w.weight,
        scales,
        scales if zeros is None else zeros,
        values if w.bias is None else w.bias,
        y,
        groups.order,
        groups.starts,
        groups.tile_ends,
        rows,
        inner,
        spec.num_experts,
        TOP=spec.num_experts_per_token,
        GATHER=gather,
        SCALED=scaled,
        BLOCKED=blocked,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=w.bias is not None,
        E2M1=isinstance(w, GroupedLinear) and w.codes == "e2m1",
        SIZE=w.group_size if isinstance(w, GroupedLinear) else 1,
        CHUNK=w.chunk if isinstance(w, GroupedLinear) else 0,
        ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        BLOCK_M=groups.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(spec.num_experts),
        SINGLE=groups.places is None,
        num_warps=warps,
        num_stages=stages,
        **overlapped(values),
    )
    return y


def _tile(block: int, element_size: int, *, packed: bool, blocked: bool) -> tuple[int, int, int, int]:
    if blocked:  # a taller tile's sums do not fit the registers
        return 64, BLOCK, 4, 4
    block_k = 64 if packed or element_size == 4 else (256 if block < 128 else 128) // element_size
    return (64, block_k, 4, 3) if block < 64 else (128, block_k, 8, 3)
