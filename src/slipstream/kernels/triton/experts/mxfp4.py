"""Experts in MXFP4: y[i] = x[token(i)] · W[expert(i)]ᵀ for every token–expert pair i, in one
launch.

Weights are stored in the order in which the kernel reads them (`pack_mxfp4`). A shift and a mask
make a bfloat16 of a code: its sign, exponent and mantissa bits land on those of the bfloat16, whose
exponent is then 126 too small. One multiplication by the group's power of two corrects that. Codes
are thus expanded in registers, from which the tensor cores read them, once for a tile's pairs. A
tile therefore has as many pairs as an expert has on average, up to 144.

The first product of a gated expert alternates 8 gate rows and 8 up rows, so that a thread holds
both and stores their activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.quantize import unpack4
from slipstream.kernels.triton.experts.moe_permute import (
    ExpertTiles,
    sort_pairs,
    tile_of,
    unsorted_pairs,
)
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import activate, activation_arguments
from slipstream.kernels.weights import GroupedLinear, Mxfp4Linear
from slipstream.platform import platform_of
from slipstream.spec.model import DenseSpec, MoESpec

CHUNK = 128
"""Inputs of a row whose codes are stored together: 64 bytes, four groups. The last chunk may be
half empty."""
SLAB = 8
"""Rows whose chunks are stored together."""


def pack_mxfp4(w: GroupedLinear) -> Mxfp4Linear:
    """Copy codes and scales into the order in which the kernel reads them."""
    (rows, quarter), groups = w.weight.shape, len(w.scales)
    inner, chunks = quarter * 4, triton.cdiv(quarter * 4, CHUNK)
    # so ranks with different experts have the same factor, and can exchange experts
    factor = max(1.0, float(w.scales.max()))
    words = torch.empty(
        rows // SLAB, chunks, SLAB, CHUNK // 4, dtype=torch.int16, device=w.weight.device
    )
    exponents = torch.empty(rows // SLAB, chunks, SLAB, dtype=torch.int32, device=w.weight.device)
    step = 4096
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        slabs = slice(part.start // SLAB, part.stop // SLAB)
        codes = torch.nn.functional.pad(
            unpack4(w.weight[part], w.chunk), (0, chunks * CHUNK - inner)
        )
        bits = [
            _placed(c, at)
            for c, at in zip(codes.unflatten(1, (chunks, 4, -1)).unbind(2), _PLACES, strict=True)
        ]
        word = bits[0] | bits[1] | bits[2] | bits[3]
        words[slabs] = word.to(torch.int16).unflatten(0, (-1, SLAB)).transpose(1, 2)
        e = ((w.scales[:, part].float() / factor).log2().round().int().T + 253).clamp(min=0)
        e = torch.nn.functional.pad(e, (0, 4 * chunks - groups)).unflatten(1, (chunks, 4))
        made = e[..., 0] | e[..., 1] << 8 | e[..., 2] << 16 | e[..., 3] << 24
        exponents[slabs] = made.unflatten(0, (-1, SLAB)).transpose(1, 2)
    return Mxfp4Linear(weight=words, exponents=exponents, factor=factor, bias=w.bias, inner=inner)


_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""Bits of a word for a code's sign, its two exponent bits and its mantissa bit, for each of the four codes."""


def _placed(codes: Tensor, places: tuple[int, int, int, int]) -> Tensor:
    made = torch.zeros_like(codes)
    for source, target in zip((3, 2, 1, 0), places, strict=True):
        made |= (codes >> source & 1) << target
    return made


INSTRUCTIONS = """
{
.reg .b32 a, b, c;
and.b32 $0, $4, 0x81C081C0;
shl.b32 a, $4, 3;
and.b32 $1, a, 0x81C081C0;
shl.b32 a, $4, 6;
and.b32 $2, a, 0x81C081C0;
shl.b32 a, $4, 1;
and.b32 a, a, 0x80008000;
shr.u32 b, $4, 3;
and.b32 b, b, 0x01800180;
shr.u32 c, $4, 7;
and.b32 c, c, 0x00400040;
or.b32 a, a, b;
or.b32 $3, a, c;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $6;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $8;
}
"""
"""PTX: two words → four pairs of bfloat16, each times its group's scale."""


@triton.jit
def _scale_bits(exponents, i: tl.constexpr):
    """The scale of group i as the bits of a float32, without the low 16."""
    return ((exponents >> (8 * i)) & 0xFF) << 7


@triton.jit
def _number(bits, scale_bits):
    """A code whose bits are laid out as a bfloat16's, times its scale."""
    return (bits << 16).to(tl.float32, bitcast=True) * (scale_bits << 16).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _expand(words, exponents, dtype: tl.constexpr, IN_PLACE: tl.constexpr, ASM: tl.constexpr):
    """Words [N, 32] → the numbers [N, 32] of each of a word's four codes, divided by
    `Mxfp4Linear.factor`. IN_PLACE: by INSTRUCTIONS."""
    s0, s1 = _scale_bits(exponents, 0)[:, None], _scale_bits(exponents, 1)[:, None]
    s2, s3 = _scale_bits(exponents, 2)[:, None], _scale_bits(exponents, 3)[:, None]
    if IN_PLACE:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r",
            [words, s0.to(tl.int16).to(tl.bfloat16, bitcast=True), s1.to(tl.int16).to(tl.bfloat16, bitcast=True),
             s2.to(tl.int16).to(tl.bfloat16, bitcast=True), s3.to(tl.int16).to(tl.bfloat16, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w = words.to(tl.int32)
        a = _number(w & 0x81C0, s0).to(dtype)
        b = _number((w << 3) & 0x81C0, s1).to(dtype)
        c = _number((w << 6) & 0x81C0, s2).to(dtype)
        d = _number((w << 1) & 0x8000 | (w >> 3) & 0x0180 | (w >> 7) & 0x0040, s3).to(dtype)
    return a, b, c, d


@triton.jit
def _tile(
    x_ptr, w_ptr, exponents_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K, chunks, factor, alpha,
    limit,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, UNSORTED: tl.constexpr, SPLITS: tl.constexpr, ACTIVATE: tl.constexpr,
    KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of an expert's weight with pairs `first` … `end` (at most BLOCK_M +
    MORE), over `chunks` of K. Pairs beyond BLOCK_M are a second product of the same expanded codes.
    """
    js = tl.arange(0, 32)
    position, live, x_at = _pairs(x_ptr, order_ptr, first, end, K, TOP_K, GATHER, UNSORTED, BLOCK_M)
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
    e_at = exponents_ptr + at
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if MORE:
        position2, live2, x2_at = _pairs(
            x_ptr, order_ptr, first + BLOCK_M, end, K, TOP_K, GATHER, UNSORTED, MORE
        )
        acc2 = tl.zeros((BLOCK_N, MORE), tl.float32)
    begin = split * chunks
    for chunk in range(begin, tl.minimum(begin + chunks, tl.cdiv(K, 128))):
        words = tl.load(w_at + chunk * 256)
        exponents = tl.load(e_at + chunk * 8)
        x0, x1, x2, x3 = _inputs(x_at + chunk * 128, live, js, K - chunk * 128)
        if MORE:
            y0, y1, y2, y3 = _inputs(x2_at + chunk * 128, live2, js, K - chunk * 128)
        a, b, c, d = _expand(words, exponents, x_ptr.dtype.element_ty, IN_PLACE, ASM)
        acc = tl.dot(a, x0, acc, input_precision=PRECISION)
        acc = tl.dot(b, x1, acc, input_precision=PRECISION)
        acc = tl.dot(c, x2, acc, input_precision=PRECISION)
        acc = tl.dot(d, x3, acc, input_precision=PRECISION)
        if MORE:
            acc2 = tl.dot(a, y0, acc2, input_precision=PRECISION)
            acc2 = tl.dot(b, y1, acc2, input_precision=PRECISION)
            acc2 = tl.dot(c, y2, acc2, input_precision=PRECISION)
            acc2 = tl.dot(d, y3, acc2, input_precision=PRECISION)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        own = inside & (i < BLOCK_N - split * BLOCK_N)  # of the first part
        bias = tl.load(bias_ptr + slab * 8 + i % 8, mask=own, other=0.0).to(tl.float32)
    _store(
        acc * factor + bias[:, None], y_ptr, position, live, column, split, N, alpha, limit, SPLITS, ACTIVATE, KIND, FUNCTION,
        GATED,
    )  # fmt: skip
    if MORE:
        _store(
            acc2 * factor + bias[:, None], y_ptr, position2, live2, column, split, N, alpha, limit, SPLITS, ACTIVATE, KIND,
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
):
    """Pairs `first` … `end`, at most BLOCK_M: (positions, which of them exist, addresses of their
    first 32 inputs [32, BLOCK_M])."""
    position = first + tl.arange(0, BLOCK_M)
    live = position < end
    pair = position
    if not UNSORTED:
        pair = tl.load(order_ptr + position, mask=live, other=0)
    source = (pair // TOP_K if GATHER else position).to(tl.int64)
    return position, live, x_ptr + source[None, :] * K + tl.arange(0, 32)[:, None]


@triton.jit
def _inputs(at, live, js, left):
    """A chunk's inputs, of which `left` are in the row, by quarters [32, BLOCK_M]."""
    x0 = tl.load(at, mask=live[None, :], other=0.0)
    x1 = tl.load(at + 32, mask=live[None, :] & (js < left - 32)[:, None], other=0.0)
    x2 = tl.load(at + 64, mask=live[None, :] & (js < left - 64)[:, None], other=0.0)
    x3 = tl.load(at + 96, mask=live[None, :] & (js < left - 96)[:, None], other=0.0)
    return x0, x1, x2, x3


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
    x_ptr, w_ptr, exponents_ptr, bias_ptr, y_ptr, order_ptr, starts_ptr, ends_ptr, N, K, X, chunks, factor, alpha,
    limit,
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
                x_ptr, w_ptr, exponents_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K, chunks,
                factor, alpha, limit, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED, HAS_BIAS, IN_PLACE,
                PRECISION, BLOCK_M, MORE, BLOCK_N, ASM,
            )  # fmt: skip
        elif end - first > SMALL_M:
            _tile(
                x_ptr, w_ptr, exponents_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K, chunks,
                factor, alpha, limit, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED, HAS_BIAS, IN_PLACE,
                PRECISION, BLOCK_M, 0, BLOCK_N, ASM,
            )  # fmt: skip
        elif SMALL_M > 0:
            _tile(
                x_ptr, w_ptr, exponents_ptr, bias_ptr, y_ptr, order_ptr, expert, column, first, end, split, N, K, chunks,
                factor, alpha, limit, TOP_K, GATHER, UNSORTED, SPLITS, ACTIVATE, KIND, FUNCTION, GATED, HAS_BIAS, IN_PLACE,
                PRECISION, SMALL_M, 0, BLOCK_N, ASM,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile. `rows`: weight rows per thread block. `pairs`: most pairs of an expert.
    `small`: if a tile has no more pairs than this, it multiplies only this many (0: never). `more`:
    pairs beyond `pairs`, which spare an expert a tile whose codes are expanded again."""

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


def mxfp4_gemm(
    x: Tensor,
    w: Mxfp4Linear,
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
    in_place = x.dtype == torch.bfloat16 and platform_of(x.device).arch.wgmma
    columns = tile.rows // 2 if gated else tile.rows
    _mxfp4_gemm_kernel[(triton.cdiv(outer, columns) * splits, tiles.max_tiles)](
        x, w.weight, w.exponents, x if w.bias is None else w.bias, y, tiles.order, tiles.starts, tiles.tile_ends, outer,
        w.inner, num_experts, triton.cdiv(w.weight.shape[1], splits), w.factor,
        **activation_arguments("silu" if expert is None else expert.activation), TOP_K=top_k, GATHER=gather,
        UNSORTED=tiles.inverse is None, SPLITS=splits, ACTIVATE=expert is not None, GATED=gated, HAS_BIAS=w.bias is not None,
        IN_PLACE=in_place, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", SMALL_M=tile.small, BLOCK_M=tile.pairs,
        MORE=tile.more, BLOCK_N=tile.rows, BLOCK_X=triton.next_power_of_2(num_experts), ASM=INSTRUCTIONS, num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return y


def mxfp4_mlp(
    x: Tensor,
    up: Mxfp4Linear,
    down: Mxfp4Linear,
    chosen: Tensor,
    spec: MoESpec,
    num_bins: int,
    *,
    small_batch: bool,
) -> tuple[Tensor, Tensor | None]:
    """Both products: x [T, E] → the input of `moe.combine` [T · k · parts, E], and the pairs'
    positions. `small_batch`: nothing is sorted."""
    first, second = step_tiles(chosen.numel(), spec.num_experts, small_batch=small_batch)
    tiles = (
        unsorted_pairs(chosen)
        if small_batch
        else sort_pairs(chosen, num_bins, tile_m=first.most_pairs)
    )
    how: dict[str, Any] = dict(
        num_experts=spec.num_local_experts, top_k=spec.num_experts_per_token, dtype=x.dtype
    )
    h = mxfp4_gemm(x, up, tiles, **how, tile=first, expert=spec.expert, gather=True)
    return mxfp4_gemm(h, down, tiles, **how, tile=second), tiles.inverse


def step_tiles(num_pairs: int, num_experts: int, *, small_batch: bool) -> tuple[Tile, Tile]:
    """Tiles of the first and the second product, by the average number of pairs per expert
    (`kernels_cuda_mxfp4_table`, for many pairs `kernels_cuda_mxfp4_pairs`)."""
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
