"""Experts of many tokens, weights of 16 bits or of 8 by rows: tokens' rows are copied into the experts' order once, so that
both products read rows and weights through the copy engine (TMA, compute capability 9.0 and later) and no thread reckons
addresses.

Programs that share weights or rows stand side by side: of BAND tiles all that multiply with the same rows of a weight, then the
next rows. So a weight that the L2 cache does not hold (Mixtral's: 117 MB an expert) is read once for BAND tiles. The first
product of a gated expert multiplies with the gate's rows and the up's and leaves their activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton.moe_permute import Groups, tile_of
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments, quantize
from slipstream.kernels.weights import Activations, Linear, Quantized, ScaledLinear
from slipstream.platform import platform_of
from slipstream.spec.model import DenseSpec, MoESpec

BAND = 8
"""Tiles of entries."""
BLOCK_BYTES = 128
"""Of a row that are multiplied at once."""


@triton.jit
def _sort_kernel(
    x_ptr,
    scales_ptr,
    places_ptr,
    out_ptr,
    out_scales_ptr,
    K,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's row to the places of its entries."""
    if PDL:
        pdl_wait()
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * K + at, mask=at < K)
    for j in tl.static_range(TOP):
        place = tl.load(places_ptr + token * TOP + j)
        tl.store(out_ptr + place.to(tl.int64) * K + at, x, mask=at < K)
        if SCALED and tl.program_id(1) == 0:
            tl.store(out_scales_ptr + place, tl.load(scales_ptr + token))


def sort_rows(x: Activations, groups: Groups, top: int) -> Activations:
    """x [T, K] → [T · k, K], a row an entry in the experts' order."""
    assert groups.places is not None
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    (num_tokens, inner), count = values.shape, groups.places.numel()
    out = torch.empty(count, inner, dtype=values.dtype, device=values.device)
    out_scales = torch.empty(count, 1, dtype=torch.float32, device=values.device) if isinstance(x, Quantized) else out
    # as whole numbers: bits are copied
    bits = {1: torch.int8, 2: torch.int16}[values.element_size()]
    block = min(2048, triton.next_power_of_2(inner))
    _sort_kernel[(num_tokens, triton.cdiv(inner, block))](
        values.view(bits),
        scales,
        groups.places,
        out.view(bits),
        out_scales,
        inner,
        TOP=top,
        SCALED=isinstance(x, Quantized),
        BLOCK=block,
        num_warps=min(4, max(1, block // 256)),
        **overlapped(values),
    )
    return Quantized(out, out_scales) if isinstance(x, Quantized) else out


@triton.jit
def _multiply(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    row,
    column,
    first,
    end,
    N,
    K,
    alpha,
    limit,
    ACTIVE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Places `first` to `end` of y, at most BLOCK_M, and its columns `column` on, by rows `row` on of the weights."""
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
        of_x = tl.load(x_scale_ptr + ms, mask=live, other=0.0)[:, None]
        y *= of_x * tl.load(w_scale_ptr + row + ns, mask=inside, other=0.0)[None, :]
        if GATED:
            up *= of_x * tl.load(w_scale_ptr + row + N + ns, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row + ns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + row + N + ns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVE:
        y = activate(y, up, alpha, limit, KIND, FUNCTION, GATED)
    at = y_ptr + ms.to(tl.int64)[:, None] * N + (column + ns)[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _sorted_kernel(
    x_desc,
    half_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    starts_ptr,
    ends_ptr,
    N,
    K,
    X,
    num_tiles,
    alpha,
    limit,
    ACTIVE: tl.constexpr,
    KIND: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BAND: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T · k, N] = x · Wᵀ, for a tile of entries and BLOCK_N of an expert's N outputs. An expert's weight has N rows, or with
    GATED N of the gate and then N of the up. ACTIVE: y is their activation. Of a tile that is not filled beyond HALF (0: never)
    only so many rows are multiplied."""
    program, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first_tile = program // (BAND * across) * BAND
    tiles = tl.minimum(num_tiles - first_tile, BAND)
    tile, column = first_tile + program % (BAND * across) % tiles, program % (BAND * across) // tiles * BLOCK_N
    if PDL:
        pdl_wait()
    expert, first, end = tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X)
    row = expert * N * (2 if GATED else 1) + column
    if expert < X:
        if end - first > HALF:
            _multiply(
                x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, first, end, N, K, alpha, limit,
                ACTIVE, KIND, FUNCTION, GATED, SCALED, HAS_BIAS, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif HALF > 0:
            _multiply(
                half_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, first, end, N, K, alpha, limit,
                ACTIVE, KIND, FUNCTION, GATED, SCALED, HAS_BIAS, ACC, HALF, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def covers(x: Activations, up: Linear, down: Linear, groups: Groups) -> bool:
    """Whether `grouped_gemm` takes these: many entries, weights of its forms, rows as the copy engine wants them."""
    values = x.values if isinstance(x, Quantized) else x
    device = values.device
    forms = all(type(w) in (Linear, ScaledLinear) and w.weight.is_contiguous() for w in (up, down))
    rows = all(w.weight.shape[1] * w.weight.element_size() % 16 == 0 for w in (up, down))
    small = values.element_size() <= 2 and up.inputs == down.inputs
    engine = platform_of(device).arch.tma
    return groups.places is not None and groups.block >= 64 and forms and rows and small and engine


def grouped_gemm(
    x: Activations, up: Linear, down: Linear, groups: Groups, spec: MoESpec, dtype: torch.dtype
) -> Tensor:
    """x [T, E] → [T · k, E], a row an entry in the experts' order, not yet weighed."""
    given = sort_rows(x, groups, spec.num_experts_per_token)
    expert, count = spec.expert, spec.num_experts
    inner = product(given, up, groups, expert.intermediate_size, count, dtype, expert)
    then = quantize(inner, down.inputs) if down.inputs else inner
    return product(then, down, groups, down.weight.shape[0] // count, count, dtype)


def product(
    x: Activations,
    w: Linear,
    groups: Groups,
    outer: int,
    num_experts: int,
    dtype: torch.dtype,
    expert: DenseSpec | None = None,
    *,
    tile: tuple[int, int, int, bool] | None = None,
) -> Tensor:
    """x [T · k, K] in the experts' order → [T · k, outer], with `expert` its activation. `tile`: (BLOCK_N, warps, stages,
    whether a tile's second half is left out where it is empty)."""
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    gated = expert is not None and expert.gated
    y = torch.empty(values.shape[0], outer, dtype=dtype, device=values.device)
    block_n, warps, stages, halved = tile or _tile(groups, gated=gated, eight_bits=values.element_size() == 1)
    block_k = BLOCK_BYTES // values.element_size()
    half = groups.block // 2 if halved else 0
    _sorted_kernel[(groups.max_tiles * triton.cdiv(outer, block_n),)](
        TensorDescriptor(values, list(values.shape), list(values.stride()), [groups.block, block_k]),
        TensorDescriptor(values, list(values.shape), list(values.stride()), [half or groups.block, block_k]),
        TensorDescriptor(w.weight, list(w.weight.shape), list(w.weight.stride()), [block_n, block_k]),
        scales,
        w.scales if isinstance(w, ScaledLinear) else values,
        y if w.bias is None else w.bias,
        y,
        groups.starts,
        groups.tile_ends,
        outer,
        values.shape[1],
        num_experts,
        groups.max_tiles,
        **activation_arguments("silu" if expert is None else expert.activation),
        ACTIVE=expert is not None,
        GATED=gated,
        SCALED=isinstance(w, ScaledLinear),
        HAS_BIAS=w.bias is not None,
        ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        BAND=BAND,
        HALF=half,
        BLOCK_M=groups.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(num_experts),
        num_warps=warps,
        num_stages=stages,
        **overlapped(values),
    )
    return y


def _tile(groups: Groups, *, gated: bool, eight_bits: bool) -> tuple[int, int, int, bool]:
    """(BLOCK_N, warps, stages, halved), measured on an H200 (`benchmarks/gpu_experts.py`)."""
    if groups.block == 64:
        return 128, 4, 4, False
    few_tiles = groups.order.numel() <= 256 * groups.tile_ends.numel()  # of each expert; a step is bound by its weights
    if eight_bits:
        return (128, 8, 4, few_tiles) if gated else (256, 8, 3, False)
    return (128, 8, 4 if few_tiles else 3, few_tiles) if gated else (128, 4, 3, few_tiles)
