"""Linear layers y = x · Wᵀ + b: which kernel runs, by scheme and number of tokens.

| scheme | 1 token | 2 … 64 | more |
| --- | --- | --- | --- |
| dense | `gemv` | cuBLAS; on Hopper `hopper_linear` | cuBLAS |
| fp8 | `skinny_gemm` | `skinny_gemm` | torch's scaled GEMM (row-wise scales, fast accumulation) |
| fp8 on Hopper | `hopper_linear` | `hopper_linear` if faster (`covers`) | narrow weights to 128 `skinny_gemm`, else as above |
| int8 | `skinny_gemm` | `skinny_gemm` | `gemm` |
| fp8-block | `fp8_tile_linear` | `fp8_tile_linear` | torch's scaled GEMM on Hopper, else `fp8_tile_linear` |
| int4 | `int4_gemv` | `int4_linear` | cuBLAS, on the dense copy or on the dequantised weight |
| nvfp4, mxfp4 | `float4_linear` | `float4_linear` | to 512 `float4_linear`, else cuBLAS on the expanded weight |
| GGUF types | `gguf.linear` | `gguf.linear` | dense copy, or expanded |

With few tokens a product is bound by reading the weight. All sums have a fixed order. Tiles come
from `spec.devices.autotune_table`; shapes that it lacks use the heuristics here. `deterministic`:
`invariant.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.gluon_support import runs_on_hopper
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait, pdl_wait_first
from slipstream.kernels.triton.pointwise import quantize
from slipstream.kernels.triton.products import float4, gguf, gguf_packing
from slipstream.kernels.triton.products.fp8_block import (
    fp8_tile_linear,
    fp8_tile_scaled_mm,
    has_scaled_mm,
)
from slipstream.kernels.triton.products.int4_groupwise import (
    dequantize_int4,
    gemv_block,
    int4_gemv,
    int4_linear,
)
from slipstream.kernels.triton.products.sparse24 import sparse24_linear
from slipstream.kernels.triton.products.split_k import ArrivalCounters, reduce_splits
from slipstream.kernels.weights.forms import (
    Activations,
    BlockLinear,
    CodedLinear,
    Float4Linear,
    GroupedLinear,
    JoinedLinear,
    Linear,
    Quantized,
    ScaledLinear,
    TileScaledLinear,
)
from slipstream.platform import platform_of
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable

SKINNY_TOKENS = 64
"""Maximum number of tokens for which reading the weight bounds a linear layer, so that our own
kernels run."""

NARROW = 12_288
NARROW_TOKENS = 128
"""The same limit for fp8 weights with fewer than NARROW rows on Hopper. The scaled GEMM gives a
thread block 128 rows and all of K, so that most of the chip would idle."""

INT4_DENSE_TOKENS = 16
"""Maximum number of tokens for which a 4-bit weight is faster than its dense copy, if it has one."""
THRESHOLDS = Thresholds(tokens=(1, SKINNY_TOKENS, NARROW_TOKENS, INT4_DENSE_TOKENS))


def pack(w: Linear, *, dense_copies: bool) -> Linear:
    """`OpSet.pack_weight`; with `dense_copies`, 4-bit and GGUF weights have a dense copy for steps of
    many tokens."""
    if isinstance(w, BlockLinear):
        return gguf_packing.pack(w, dense=dense_copies)
    if not isinstance(w, GroupedLinear):
        return w
    packed = float4.pack_float4(w) if w.codes == "e2m1" else w
    return replace(packed, dense=dense(packed, w.scales.dtype)) if dense_copies else packed


def linear(
    x: Activations, w: Linear, scratch: ArrivalCounters | None, tiles: TileTable = NO_TILES
) -> Tensor:
    """`OpSet.linear`. `scratch` is on the weight's device; without it a dense weight can't use
    Hopper's own kernel."""
    if isinstance(w, CodedLinear | JoinedLinear):
        assert isinstance(x, Tensor)
        assert scratch is not None
        return gguf.linear(x, w, scratch)
    if (
        w.sparse is not None
        and (x if isinstance(x, Tensor) else x.values).shape[0] >= w.sparse.from_tokens
    ):
        return sparse24_linear(x, w)
    if isinstance(w, TileScaledLinear):
        q = x if isinstance(x, Quantized) else quantize(x, w.inputs)
        if has_scaled_mm(q, w):
            return fp8_tile_scaled_mm(q, w)
        num_tokens, inner = q.values.shape
        found = (
            tiles.find("fp8_block", w.inputs, w.out_features, inner, num_tokens)
            if num_tokens <= SKINNY_TOKENS
            else None
        )
        return fp8_tile_linear(
            q, w, scratch, tile=found and (max(16, triton.next_power_of_2(num_tokens)), *found)
        )
    if isinstance(w, ScaledLinear):
        q = x if isinstance(x, Quantized) else quantize(x, w.inputs)
        num_tokens, inner = q.values.shape
        if _is_skinny(num_tokens, w):
            assert scratch is not None
            if (y := _on_hopper(q, w, scratch)) is not None:
                return y
            return skinny_gemm(
                q,
                w,
                scratch,
                tile=tiles.find("skinny_gemm", w.inputs, w.out_features, inner, num_tokens),
            )
        if w.inputs == "fp8":
            return fp8_scaled_mm(q, w)
        return gemm(q, w, tile=tiles.find("gemm", w.inputs, w.out_features, inner, num_tokens))
    assert isinstance(x, Tensor)
    if isinstance(w, Float4Linear):
        if x.shape[0] <= (float4.MAX_TOKENS if w.dense is None else float4.DENSE_TOKENS):
            assert scratch is not None
            return float4.float4_linear(x, w, scratch)
        return F.linear(x, float4.expanded(w, x.dtype) if w.dense is None else w.dense, w.bias)
    if isinstance(w, GroupedLinear):
        if x.shape[0] == 1 and (block_w := gemv_block(w)):
            return int4_gemv(x, w, block_w)
        if x.shape[0] <= (SKINNY_TOKENS if w.dense is None else INT4_DENSE_TOKENS):
            assert scratch is not None
            kind = "int4" if w.group_size == 128 else "int4-g32"
            return int4_linear(
                x,
                w,
                scratch,
                tile=tiles.find("int4_groupwise", kind, w.out_features, x.shape[1], x.shape[0]),
            )
        return F.linear(x, dense(w, x.dtype), w.bias)
    if x.shape[0] == 1 and w.weight.is_contiguous():
        tile = tiles.find("gemv", str(x.dtype).removeprefix("torch."), *w.weight.shape)
        return gemv(x.contiguous(), w.weight, w.bias, tile=tile)
    y = _on_hopper(x, w, scratch)
    return F.linear(x, w.weight, w.bias) if y is None else y


def linear_added(
    x: Activations, w: Linear, added: Tensor, scratch: ArrivalCounters | None
) -> Tensor | None:
    """`OpSet.linear_added` for rows in the weight's format, in one kernel and in the place of
    `added`. None if `linear` takes another kernel than Hopper's."""
    is_gemv = isinstance(x, Tensor) and len(x) == 1
    return None if is_gemv else _on_hopper(x, w, scratch, added)


def _on_hopper(
    x: Activations, w: Linear, scratch: ArrivalCounters | None, added: Tensor | None = None
) -> Tensor | None:
    """Linear layer by Hopper's kernel for few tokens; None if it can't run, does not support the weight
    and inputs, or is not the fastest for this number of tokens."""
    if scratch is None or not runs_on_hopper(w.weight.device):
        return None
    from slipstream.kernels.triton.products import hopper as hopper_linear

    values = x.values if isinstance(x, Quantized) else x
    return (
        hopper_linear.skinny_gemm(x, w, scratch, added) if hopper_linear.covers(values, w) else None
    )


def starts_next_behind_inputs(x: Activations, w: Linear) -> bool:
    """Whether `linear` is one kernel after whose start the next kernel may read x before it has
    waited (`pdl_wait_first`)."""
    return isinstance(w, ScaledLinear) and isinstance(x, Quantized) and _is_skinny(len(x.values), w)


def _is_skinny(num_tokens: int, w: ScaledLinear) -> bool:
    return num_tokens <= SKINNY_TOKENS or (num_tokens <= NARROW_TOKENS and _is_narrow(w))


def _is_narrow(w: ScaledLinear) -> bool:
    return w.inputs == "fp8" and w.out_features < NARROW and platform_of(w.weight.device).arch.wgmma


def dense(w: GroupedLinear | Float4Linear, dtype: torch.dtype) -> Tensor:
    if isinstance(w, Float4Linear):
        return float4.expanded(w, dtype)
    return dequantize_int4(w, dtype) if w.dense is None else w.dense


def fp8_scaled_mm(x: Quantized, w: ScaledLinear) -> Tensor:
    y: Tensor = torch._scaled_mm(
        x.values,
        w.weight.T,
        scale_a=x.scales,
        scale_b=w.scales[None],
        bias=w.bias,
        out_dtype=w.out_dtype,
        use_fast_accum=True,
    )
    return y


# --- Dense, one token ------------------------------------------------------------------------------------------------


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, N, K,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Product for one token. A thread block computes BLOCK_N outputs and walks along K with a
    partial sum per thread.

    The next tile of the weight is loaded before the current one is multiplied; the first one before
    the inputs are ready. The tail of K is masked. Rows beyond the last one repeat the last one and
    are not stored."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + tl.minimum(rows, N - 1)[:, None].to(tl.int64) * K + ks[None, :]
    full = K // BLOCK_K * BLOCK_K
    if EVEN:
        w = tl.load(w_rows, eviction_policy="evict_first")
    else:
        w = tl.load(w_rows, mask=(ks < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(BLOCK_K, full, BLOCK_K):
        acc += w.to(tl.float32) * tl.load(x_ptr + k - BLOCK_K + ks).to(tl.float32)[None, :]
        w = tl.load(w_rows + k, eviction_policy="evict_first")
    if EVEN:
        acc += w.to(tl.float32) * tl.load(x_ptr + K - BLOCK_K + ks).to(tl.float32)[None, :]
    else:
        inside = full + ks < K
        tail = tl.load(
            w_rows + full, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        if full > 0:
            acc += w.to(tl.float32) * tl.load(x_ptr + full - BLOCK_K + ks).to(tl.float32)[None, :]
        acc += (
            tail.to(tl.float32)
            * tl.load(x_ptr + full + ks, mask=inside, other=0.0).to(tl.float32)[None, :]
        )
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=rows < N)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tile: tuple[int, int, int] | None = None
) -> Tensor:
    """x [1, K] · weight [N, K]ᵀ + bias → [1, N]; contiguous, accumulated in float32. `tile`: (BLOCK_N, BLOCK_K,
    warps)."""
    outer, inner = weight.shape
    block_n, block_k, num_warps = tile or ((2, 1024, 4) if inner % 1024 == 0 else (4, 512, 4))
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outer, block_n),)](
        x, weight, weight if bias is None else bias, y, outer, inner,
        HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, EVEN=inner % block_k == 0, num_warps=num_warps,
        **pdl_options(x),
    )  # fmt: skip
    return y


# --- 8 bits, few tokens ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ on tensor cores. Weight rows fill the tall side of a tile, so few tokens waste
    little. K is split over SPLITS thread blocks if there are too few rows to fill the chip."""
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    span = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    ks = pid_k * span + tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + ks[None, :]
    x_at = x_ptr + m[None, :] * K + ks[:, None]
    if PDL:
        pdl_wait_first()
    acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
    if EVEN:
        for k in range(0, span, BLOCK_K):
            w = tl.load(w_at + k, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=(m < M)[None, :], other=0.0)
            acc = tl.dot(w, x, acc, out_dtype=ACC)
    else:
        for k in range(0, tl.minimum(span, K - pid_k * span), BLOCK_K):
            inside = ks + k < K
            w = tl.load(w_at + k, mask=(n < N)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_at + k, mask=(m < M)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w, x, acc, out_dtype=ACC)
    total = acc.to(tl.float32)
    is_last = True
    if SPLITS > 1:
        at = n[:, None] * BLOCK_M + m[None, :]
        total, is_last = reduce_splits(
            total,
            partial_ptr,
            counter_ptr,
            at,
            pid_n,
            pid_k,
            tl.num_programs(0) * BLOCK_N * BLOCK_M,
            SPLITS,
            BLOCK_N,
            BLOCK_M,
        )
    if is_last:
        y = total * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[:, None]
        y *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            y_ptr + m[None, :] * N + n[:, None],
            y.to(y_ptr.dtype.element_ty),
            mask=(m < M)[None, :] & (n < N)[:, None],
        )


def skinny_gemm(
    x: Quantized,
    w: ScaledLinear,
    scratch: ArrivalCounters,
    *,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Product for up to NARROW_TOKENS tokens. `tile`: (BLOCK_N, BLOCK_K, SPLITS, stages)."""
    (num_tokens, inner), outer = x.values.shape, w.weight.shape[0]
    block_m = max(16, triton.next_power_of_2(num_tokens))
    block_n, block_k, splits, stages = tile or _default_skinny_tile(outer, inner, block_m)
    y = torch.empty(num_tokens, outer, dtype=w.out_dtype, device=x.values.device)
    partial = x.scales
    if splits > 1:
        rows = triton.cdiv(outer, block_n) * block_n
        partial = torch.empty(splits * rows * block_m, dtype=torch.float32, device=x.values.device)
    _skinny_gemm_kernel[(triton.cdiv(outer, block_n), splits)](
        x.values, x.scales, w.weight, w.scales, x.scales if w.bias is None else w.bias, y, partial, scratch.counters,
        num_tokens, outer, inner,
        HAS_BIAS=w.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLITS=splits,
        EVEN=outer % block_n == 0 and inner % (splits * block_k) == 0, ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        num_warps=4, num_stages=stages, **pdl_options(y),
    )  # fmt: skip
    return y


def _default_skinny_tile(outer: int, inner: int, block_m: int) -> tuple[int, int, int, int]:
    """Tile measured on an H200 at an 8B Llama's shapes: 200 thread blocks or more, long reads, 48
    to 96 KB in flight."""
    programs = triton.cdiv(outer, 64)
    if block_m > SKINNY_TOKENS:
        return 64, 256, 2 if programs <= 64 < inner // 128 else 1, 4
    if block_m > 16:
        return 64, 256, 1 if programs > 150 else 2, 3 if programs > 90 else 4
    if programs > 150:
        return 64, 256, 1, 4
    if programs > 80:
        return 64, 256, 2, 3
    return (64, 512, 2, 3) if inner % 1024 == 0 else (64, 256, 4, 4)


# --- Many tokens -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, M, N, K,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = x · Wᵀ, scaled when it is stored."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * tiles_n) % group_m
    pid_n = pid % (GROUP_M * tiles_n) // group_m
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + ks[None, :]
    w_at = w_ptr + tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for k in range(0, K, BLOCK_K):
        inside = ks + k < K
        x = tl.load(x_at + k, mask=inside[None, :], other=0.0)
        w = tl.load(w_at + k, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=ACC)
    y = acc.to(tl.float32)
    if SCALED:
        y *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
        y *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(
    x: Activations, w: Linear, *, tile: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """Product for any number of tokens, with dense or 8-bit weights. `tile`: (BLOCK_M, BLOCK_N,
    BLOCK_K, warps, stages)."""
    values, x_scales = (x.values, x.scales) if isinstance(x, Quantized) else (x.contiguous(), x)
    scaled = isinstance(w, ScaledLinear)
    (num_tokens, inner), outer = values.shape, w.weight.shape[0]
    block_m, block_n, block_k, warps, stages = tile or (128, 256, 128, 8, 3)
    dtype = w.out_dtype if isinstance(w, ScaledLinear) else values.dtype
    y = torch.empty(num_tokens, outer, dtype=dtype, device=values.device)
    _gemm_kernel[(triton.cdiv(num_tokens, block_m) * triton.cdiv(outer, block_n),)](
        values, x_scales, w.weight.contiguous(), w.scales if isinstance(w, ScaledLinear) else x_scales,
        x_scales if w.bias is None else w.bias, y, num_tokens, outer, inner,
        SCALED=scaled, HAS_BIAS=w.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8,
        ACC=tl.int32 if values.dtype == torch.int8 else tl.float32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
