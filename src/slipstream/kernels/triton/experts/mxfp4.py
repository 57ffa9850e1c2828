"""Experts in 4-bit floats (MXFP4, NVFP4): y[i] = x[token(i)] · W[expert(i)]ᵀ for every token–expert
pair i, in one launch.

Codes are expanded in registers (`float4.py`), from which the tensor cores read them, once for a
tile's pairs. A tile therefore has as many pairs as an expert has on average, up to 144.

The first product of a gated expert alternates 8 gate rows and 8 up rows, so that a thread holds
both and stores their activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.experts.moe_permute import (
    ExpertTiles,
    sort_pairs,
    tile_of,
    unsorted_pairs,
)
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments
from slipstream.kernels.triton.products.float4 import (
    expand,
    expands_in_place,
    inputs,
    instructions,
    is_nvfp4,
)
from slipstream.kernels.weights.forms import Float4Linear
from slipstream.spec.model import DenseSpec, MoESpec


@triton.jit
def _tile(
    x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K, chunks,
    factor, alpha, limit, NVFP4: tl.constexpr, DIVIDES: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, UNSORTED: tl.constexpr, SPLITS: tl.constexpr, ACTIVATE: tl.constexpr,
    KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of an expert's weight with pairs `first` … `end` (at most BLOCK_M +
    MORE), over `chunks` of K. Pairs beyond BLOCK_M are a second product of the same expanded codes.
    """
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    PARTS: tl.constexpr = 2 if NVFP4 else 1
    js = tl.arange(0, GROUP)
    position, live, x_at = _pairs(
        x_ptr, order_ptr, first, end, K, TOP_K, GATHER, UNSORTED, BLOCK_M, GROUP
    )
    # The tile's rows: slabs of a product without a gate, or a slab of gates and one of ups
    # alternating.
    i = tl.arange(0, BLOCK_N)
    if GATED:
        slab = column // 8 + i // 16
        inside = slab < N // 8
        slab = expert * (N // 4) + i // 8 % 2 * (N // 8) + tl.minimum(slab, N // 8 - 1)
    else:
        slab = column // 8 + i // 8
        inside = slab < N // 8
        slab = expert * (N // 8) + tl.minimum(slab, N // 8 - 1)
    at = slab.to(tl.int64) * (tl.cdiv(K, 128) * 8) + i % 8
    w_at = w_ptr + at[:, None] * 32 + js[None, :]
    e_at = exponents_ptr + at * PARTS
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if MORE:
        position2, live2, x2_at = _pairs(
            x_ptr, order_ptr, first + BLOCK_M, end, K, TOP_K, GATHER, UNSORTED, MORE, GROUP
        )
        acc2 = tl.zeros((BLOCK_N, MORE), tl.float32)
    begin = split * chunks
    for chunk in range(begin, tl.minimum(begin + chunks, tl.cdiv(K, 128))):
        for part in tl.static_range(PARTS):
            words = tl.load(w_at + chunk * 256 + part * GROUP)
            exponents = tl.load(e_at + chunk * (8 * PARTS) + part)
            at_k = chunk * 128 + part * 4 * GROUP
            x0, x1, x2, x3 = inputs(x_at + at_k, live, js, K - at_k, GROUP, False)
            if MORE:
                y0, y1, y2, y3 = inputs(x2_at + at_k, live2, js, K - at_k, GROUP, False)
            a, b, c, d = expand(words, exponents, x_ptr.dtype.element_ty, IN_PLACE, NVFP4, ASM)
            acc = tl.dot(a, x0, acc, input_precision=PRECISION)
            acc = tl.dot(b, x1, acc, input_precision=PRECISION)
            acc = tl.dot(c, x2, acc, input_precision=PRECISION)
            acc = tl.dot(d, x3, acc, input_precision=PRECISION)
            if MORE:
                acc2 = tl.dot(a, y0, acc2, input_precision=PRECISION)
                acc2 = tl.dot(b, y1, acc2, input_precision=PRECISION)
                acc2 = tl.dot(c, y2, acc2, input_precision=PRECISION)
                acc2 = tl.dot(d, y3, acc2, input_precision=PRECISION)
    by = tl.full((BLOCK_N,), 1.0, tl.float32) * factor
    if NVFP4:
        rows = tl.load(rows_ptr + slab * 8 + i % 8)
        by = by / rows if DIVIDES else by * rows
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        own = inside & (i < BLOCK_N - split * BLOCK_N)  # of the first part
        bias = tl.load(bias_ptr + slab * 8 + i % 8, mask=own, other=0.0).to(tl.float32)
    _store(
        acc * by[:, None] + bias[:, None], y_ptr, position, live, column, split, N, alpha, limit, SPLITS, ACTIVATE, KIND,
        FUNCTION, GATED,
    )  # fmt: skip
    if MORE:
        _store(
            acc2 * by[:, None] + bias[:, None], y_ptr, position2, live2, column, split, N, alpha, limit, SPLITS, ACTIVATE, KIND,
            FUNCTION, GATED,
        )  # fmt: skip


@triton.jit
def _pairs(
    x_ptr,
    order_ptr,
    first,
    end,
    K,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    UNSORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Pairs `first` … `end`, at most BLOCK_M: (positions, which of them exist, addresses of their
    first inputs [GROUP, BLOCK_M])."""
    position = first + tl.arange(0, BLOCK_M)
    live = position < end
    pair = position
    if not UNSORTED:
        pair = tl.load(order_ptr + position, mask=live, other=0)
    source = (pair // TOP_K if GATHER else position).to(tl.int64)
    return position, live, x_ptr + source[None, :] * K + tl.arange(0, GROUP)[:, None]


@triton.jit
def _store(
    acc, y_ptr, position, live, column, split, N, alpha, limit,
    SPLITS: tl.constexpr, ACTIVATE: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    if ACTIVATE:
        if GATED:
            both = tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(both)
            y = activate(gate, up, alpha, limit, KIND, FUNCTION, True)
            y = tl.reshape(y, (BLOCK_N // 2, BLOCK_M))
            n = column + tl.arange(0, BLOCK_N // 2)
        else:
            y = activate(acc, acc, alpha, limit, KIND, FUNCTION, False)
            n = column + tl.arange(0, BLOCK_N)
    else:
        y = acc
        n = column + tl.arange(0, BLOCK_N)
    out = y_ptr + (position.to(tl.int64) * SPLITS + split)[None, :] * N + n[:, None]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


@triton.jit
def _mxfp4_gemm_kernel(
    x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, order_ptr, starts_ptr, ends_ptr, N, K, X, chunks, factor,
    alpha, limit, NVFP4: tl.constexpr, DIVIDES: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, UNSORTED: tl.constexpr, SPLITS: tl.constexpr, ACTIVATE: tl.constexpr,
    KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr, SMALL_M: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """yᵀ = W · xᵀ for a tile of an expert's pairs and some of its N outputs → [T · k, SPLITS, N],
    in sorted order, one row for each part of K. x has rows in that order too; with GATHER it has
    one per token. ACTIVATE: y is the outputs' activation; GATED: of N gate rows and N up rows. A
    tile has up to BLOCK_M + MORE pairs; with at most SMALL_M or BLOCK_M it multiplies only that
    many. UNSORTED: each pair is a tile."""
    if PDL:
        pdl_wait()
    tile, program = tl.program_id(1), tl.program_id(0)
    split = program % SPLITS
    column = program // SPLITS * (BLOCK_N // 2 if GATED else BLOCK_N)
    if UNSORTED:
        expert, first, end = tl.load(order_ptr + tile), tile, tile + 1
    else:
        expert, first, end = tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M + MORE, BLOCK_X)
        end = tl.minimum(end, first + BLOCK_M + MORE)
    if expert < X:
        if (MORE > 0) & (end - first > BLOCK_M):
            _tile(
                x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K,
                chunks, factor, alpha, limit, NVFP4, DIVIDES, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED,
                HAS_BIAS, IN_PLACE, PRECISION, BLOCK_M, MORE, BLOCK_N, ASM,
            )  # fmt: skip
        elif end - first > SMALL_M:
            _tile(
                x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K,
                chunks, factor, alpha, limit, NVFP4, DIVIDES, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED,
                HAS_BIAS, IN_PLACE, PRECISION, BLOCK_M, 0, BLOCK_N, ASM,
            )  # fmt: skip
        elif SMALL_M > 0:
            _tile(
                x_ptr, w_ptr, exponents_ptr, rows_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K,
                chunks, factor, alpha, limit, NVFP4, DIVIDES, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED,
                HAS_BIAS, IN_PLACE, PRECISION, SMALL_M, 0, BLOCK_N, ASM,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile. `rows`: weight rows per thread block. `pairs`: most pairs of an expert.
    `small`: if a tile has no more pairs than this, it multiplies only this many (0: never). `more`:
    how many pairs a tile may have beyond `pairs`. Without them a few surplus pairs would need a
    tile of their own, for which the codes are expanded again."""

    pairs: int
    rows: int
    warps: int
    stages: int
    splits: int = 1
    small: int = 0
    more: int = 0

    @property
    def most_pairs(self) -> int:
        return self.pairs + self.more


ONE_TILE = Tile(32, 64, 4, 4)
"""The tile of `deterministic`."""


def mxfp4_gemm(
    x: Tensor,
    w: Float4Linear,
    tiles: ExpertTiles,
    *,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    tile: Tile,
    expert: DenseSpec | None = None,
    gather: bool = False,
) -> Tensor:
    """x [T · k, K] in the experts' order, or [T, K] with `gather` → [T · k · splits, N]; with
    `expert` its activation. Sums of parts of K are float32, and `combine` adds them."""
    gated = expert is not None and expert.gated
    outer = w.out_features // num_experts // (2 if gated else 1)
    splits, count = tile.splits, tiles.order.numel()
    y = torch.empty(
        count * splits, outer, dtype=torch.float32 if splits > 1 else dtype, device=x.device
    )
    columns = tile.rows // 2 if gated else tile.rows
    _mxfp4_gemm_kernel[(triton.cdiv(outer, columns) * splits, tiles.max_tiles)](
        x, w.weight, w.exponents, x if w.row_scales is None else w.row_scales, x if w.bias is None else w.bias, y,
        tiles.order, tiles.starts, tiles.tile_ends, outer, w.inner, num_experts, triton.cdiv(w.weight.shape[1], splits),
        w.factor, **activation_arguments("silu" if expert is None else expert.activation), NVFP4=is_nvfp4(w),
        DIVIDES=w.divides, TOP_K=top_k, GATHER=gather, UNSORTED=tiles.inverse is None, SPLITS=splits,
        ACTIVATE=expert is not None, GATED=gated, HAS_BIAS=w.bias is not None, IN_PLACE=expands_in_place(x),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", SMALL_M=tile.small, BLOCK_M=tile.pairs, MORE=tile.more,
        BLOCK_N=tile.rows, BLOCK_X=triton.next_power_of_2(num_experts), ASM=instructions(w), num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return y


def mxfp4_mlp(
    x: Tensor,
    up: Float4Linear,
    down: Float4Linear,
    chosen: Tensor,
    spec: MoESpec,
    num_bins: int,
    *,
    small_batch: bool,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes both products of the experts: x [T, E] → (input of `moe.combine` [T · k · parts, E],
    the pairs' positions). `small_batch`: nothing is sorted. `invariant`: one tile for all numbers
    of pairs."""
    first, second = step_tiles(chosen.numel(), spec.num_experts, small_batch=small_batch)
    if invariant:
        first = second = ONE_TILE
    tiles = (
        unsorted_pairs(chosen)
        if small_batch and not invariant
        else sort_pairs(chosen, num_bins, tile_m=first.most_pairs)
    )
    how: dict[str, Any] = dict(
        num_experts=spec.num_local_experts, top_k=spec.num_experts_per_token, dtype=x.dtype
    )
    h = mxfp4_gemm(x, up, tiles, **how, tile=first, expert=spec.expert, gather=True)
    return mxfp4_gemm(h, down, tiles, **how, tile=second), tiles.inverse


def step_tiles(num_pairs: int, num_experts: int, *, small_batch: bool) -> tuple[Tile, Tile]:
    """Tiles of the experts' first and second linear layer, by the average number of pairs per
    expert (`kernels_cuda_mxfp4_table`, for many pairs `kernels_cuda_mxfp4_pairs`)."""
    if small_batch:
        return Tile(16, 64, 4, 8), Tile(16, 64, 4, 8, splits=2)
    if num_pairs <= 8 * num_experts:
        tile = Tile(16, 64, 4, 5)
    elif num_pairs <= 16 * num_experts:
        tile = Tile(32, 64, 4, 4)
    elif num_pairs <= 64 * num_experts:
        tile = Tile(64, 128, 8, 4)
    elif num_pairs <= 256 * num_experts:
        tile = Tile(128, 256, 8, 3, small=32, more=16)
    else:
        tile = Tile(128, 256, 8, 3)
    return tile, tile
