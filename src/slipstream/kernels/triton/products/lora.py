"""Low-rank adapters: y += (x · downᵀ) · upᵀ with each token's own adapter, in two kernels per
product.

A *shrink* kernel computes x · downᵀ. An *expand* kernel multiplies that by upᵀ and adds it to the
product's result. A thread block has a tile of tokens of one adapter. A thread block with an empty
tile reads nothing, so a graph may have more tiles than a step needs.

1. Decodes have few tokens per adapter, and are bound by reading the adapters once.
   `_shrink_few_kernel` and `_expand_few_kernel` load a piece of an adapter into registers before
   they wait for anything, and multiply the tile's tokens one by one. If the product allows it
   (`starts_next_behind_inputs`), `shrink` runs at the same time as the product.
2. Prompts have many tokens: `_shrink_kernel` and `_expand_kernel` multiply tiles of 64 tokens on
   tensor cores.

Sums along the inputs are split to use the whole chip, and added in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.weights.adapters import TILES, LoRATokens, LoRAWeights
from slipstream.kernels.weights.forms import Activations, Quantized
from slipstream.spec.scheme import FP8_TILE


@dataclass(frozen=True, slots=True)
class FewTiles:
    """Tile sizes of the LoRA kernels for few tokens. A thread block keeps a tile of weights in
    registers: [`ranks`, `inputs`] of `down` in `shrink`, `expand_numbers` elements of `up` in
    `expand`. Chosen on an H200 (study `kernels_cuda_lora`)."""

    ranks: int = 1
    inputs: int = 4096
    shrink_warps: int = 4
    expand_numbers: int = 8192
    expand_warps: int = 4
    # limit per thread, so that all thread blocks of 64 adapters are resident at once
    expand_registers: int = 96


FEW_TILES = FewTiles()


@triton.jit
def _products(
    a, x_ptr, scales_ptr, token, ks, K, x_stride, scales_stride, SCALES: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Multiplies a [ranks, inputs] with a token's x. The loads bypass the L1 cache, which may have
    stale data from before the wait."""
    x = tl.load(x_ptr + token * x_stride + ks, mask=ks < K, other=0.0, cache_modifier=".cg").to(
        tl.float32
    )
    scale = 1.0
    if SCALES == 1:
        scale = tl.load(scales_ptr + token * scales_stride, cache_modifier=".cg")
    elif SCALES == 2:
        x *= tl.load(
            scales_ptr + token * scales_stride + ks // GROUP,
            mask=ks < K,
            other=0.0,
            cache_modifier=".cg",
        )
    return tl.sum(a.to(tl.float32) * x[None, :], 1) * scale


@triton.jit(do_not_specialize=["T"])
def _shrink_few_kernel(
    x_ptr, scales_ptr, down_ptr, inner_ptr, order_ptr, tiles_ptr, K, R, T, x_stride, scales_stride, slot_stride,
    LIVE_0: tl.constexpr, LIVE_1: tl.constexpr, LIVE_2: tl.constexpr,
    SCALES: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `inner` [SPLITS, T, PARTS · R], where row i belongs to position i of `order`. A
    thread block multiplies BLOCK_R ranks and BLOCK_K inputs of a part, which takes BLOCKS · SPLITS
    thread blocks. SCALES: 0 none, 1 one per row, 2 one per GROUP inputs. BESIDE: the preceding
    kernel is a product of the same inputs, which lets this one start once they are written
    (`pdl_wait_first`). So this kernel waits for it only at its end."""
    if PDL:
        gdc_launch_dependents()
    split, block, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS, tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 3 + 1)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    which = block // BLOCKS
    part = tl.where(which == 0, LIVE_0, tl.where(which == 1, LIVE_1, LIVE_2))
    rank = block % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    ks = split * BLOCK_K + tl.arange(0, BLOCK_K)
    down_rows = down_ptr + slot * slot_stride + (part * R + rank)[:, None] * K + ks[None, :]
    a = tl.load(
        down_rows, mask=(rank < tl.where(begin < end, R, 0))[:, None] & (ks < K)[None, :], other=0.0
    )
    token = tl.load(order_ptr + begin, mask=begin < end, other=0).to(tl.int64)
    if PDL and not BESIDE:
        pdl_wait()
    to = inner_ptr + split * T * (PARTS * R) + part * R + rank
    inner = _products(
        a,
        x_ptr,
        scales_ptr,
        token,
        ks,
        K * tl.where(begin < end, 1, 0),
        x_stride,
        scales_stride,
        SCALES,
        GROUP,
    )
    tl.store(to + begin * (PARTS * R), inner, mask=rank < tl.where(begin < end, R, 0))
    # different numbers in each iteration: kept over a loop, each would take a register
    for at in range(begin + 1, end):
        a = tl.load(down_rows, mask=(rank < R)[:, None] & (ks < K)[None, :], other=0.0)
        token = tl.load(order_ptr + at).to(tl.int64)
        inner = _products(
            a, x_ptr, scales_ptr, token, ks, K, x_stride, scales_stride, SCALES, GROUP
        )
        tl.store(to + at * (PARTS * R), inner, mask=rank < R)
    # this grid then ends after the preceding kernel
    if PDL and BESIDE and split + block + tile == 0:
        gdc_wait()


@triton.jit(do_not_specialize=["T"])
def _expand_few_kernel(
    y_ptr, up_ptr, inner_ptr, order_ptr, tiles_ptr, R, T, y_stride, slot_stride,
    START_1, START_2, END, FIRST_1, FIRST_2,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token] += up · inner, BLOCK_N rows of one part. Parts 1 and 2 begin at rows START_1 and
    START_2, and at thread blocks FIRST_1 and FIRST_2."""
    if PDL:
        gdc_launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 3 + 1)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    part, row, last = 0, block * BLOCK_N, START_1
    if block >= FIRST_2:
        part, row, last = 2, START_2 + (block - FIRST_2) * BLOCK_N, END
    elif block >= FIRST_1:
        part, row, last = 1, START_1 + (block - FIRST_1) * BLOCK_N, START_2
    rows = row + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    there = rows < last
    up_rows = up_ptr + slot * slot_stride + rows[:, None] * R + rank[None, :]
    b = tl.load(
        up_rows, mask=there[:, None] & (rank < tl.where(begin < end, R, 0))[None, :], other=0.0
    )
    token = tl.load(order_ptr + begin, mask=begin < end, other=0).to(tl.int64)
    if PDL:
        pdl_wait()
    inner_of = inner_ptr + part * R + rank
    live = rows < tl.where(begin < end, last, 0)
    _add(
        b,
        inner_of,
        y_ptr + token * y_stride + rows,
        begin,
        rank < R,
        live,
        R,
        T,
        PARTS,
        SPLITS,
        BLOCK_R,
    )
    for at in range(begin + 1, end):
        b = tl.load(up_rows, mask=there[:, None] & (rank < R)[None, :], other=0.0)
        token = tl.load(order_ptr + at).to(tl.int64)
        _add(
            b,
            inner_of,
            y_ptr + token * y_stride + rows,
            at,
            rank < R,
            there,
            R,
            T,
            PARTS,
            SPLITS,
            BLOCK_R,
        )


@triton.jit
def _add(
    b,
    inner_of,
    to,
    at,
    is_rank,
    mask,
    R,
    T,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sum the splits of position `at`, multiply by b [rows, ranks], and add the result to the
    numbers at `to`."""
    y = tl.load(to, mask=mask, other=0.0)
    inner = tl.zeros((BLOCK_R,), tl.float32)
    for split in tl.static_range(SPLITS):
        inner += tl.load(inner_of + (split * T + at) * (PARTS * R), mask=is_rank, other=0.0)
    tl.store(
        to, (y.to(tl.float32) + tl.sum(b.to(tl.float32) * inner[None, :], 1)).to(y.dtype), mask=mask
    )


MAX_SPLITS = 8
THREAD_BLOCKS = 264
"""Thread blocks that read an adapter at the full rate of an H200: two per multiprocessor."""


@triton.jit(do_not_specialize=["T"])
def _shrink_kernel(
    x_ptr, scales_ptr, down_ptr, inner_ptr, order_ptr, tiles_ptr, K, R, T, x_stride, scales_stride, slot_stride,
    LIVE_0: tl.constexpr, LIVE_1: tl.constexpr, LIVE_2: tl.constexpr,
    SCALES: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `inner` [SPLITS, T, PARTS · R], where row i belongs to position i of `order`. SCALES:
    0 none, 1 one per row, 2 one per BLOCK_K. The grid's size says how many of the parts LIVE_0,
    LIVE_1, … are computed.
    """
    if PDL:
        pdl_wait()
    tile, split = tl.program_id(0), tl.program_id(2)
    part = tl.where(tl.program_id(1) == 0, LIVE_0, tl.where(tl.program_id(1) == 1, LIVE_1, LIVE_2))
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 3 + 1)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    if begin < end:
        at = begin + tl.arange(0, BLOCK_T)
        live = at < end
        token = tl.load(order_ptr + at, mask=live, other=0).to(tl.int64)
        rank = tl.arange(0, BLOCK_R)
        down_rows = down_ptr + slot * slot_stride + (part * R + rank)[:, None] * K
        acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for first in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + token[:, None] * x_stride + ks[None, :],
                mask=live[:, None] & (ks < K)[None, :],
                other=0.0,
            )
            a = tl.load(
                down_rows + ks[None, :], mask=(rank < R)[:, None] & (ks < K)[None, :], other=0.0
            )
            if SCALES == 2:
                scale = tl.load(
                    scales_ptr + token * scales_stride + first // BLOCK_K, mask=live, other=0.0
                )
                acc += tl.dot(x.to(a.dtype), tl.trans(a), input_precision="ieee") * scale[:, None]
            else:
                acc = tl.dot(x.to(a.dtype), tl.trans(a), acc, input_precision="ieee")
        if SCALES == 1:
            acc *= tl.load(scales_ptr + token * scales_stride, mask=live, other=0.0)[:, None]
        columns = (split * T + at)[:, None] * (PARTS * R) + part * R + rank[None, :]
        tl.store(inner_ptr + columns, acc, mask=live[:, None] & (rank < R)[None, :])


@triton.jit(do_not_specialize=["T"])
def _expand_kernel(
    y_ptr, up_ptr, inner_ptr, order_ptr, tiles_ptr, R, T, y_stride, slot_stride,
    START_1, START_2, END, FIRST_1, FIRST_2,
    PARTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token] += up · inner, BLOCK_N rows of one part. Parts 1 and 2 begin at rows START_1 and
    START_2, and at thread blocks FIRST_1 and FIRST_2."""
    if PDL:
        pdl_wait()
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 3 + 1)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    if begin < end:
        part, row, last = 0, block * BLOCK_N, START_1
        if block >= FIRST_2:
            part, row, last = 2, START_2 + (block - FIRST_2) * BLOCK_N, END
        elif block >= FIRST_1:
            part, row, last = 1, START_1 + (block - FIRST_1) * BLOCK_N, START_2
        at = begin + tl.arange(0, BLOCK_T)
        live = at < end
        token = tl.load(order_ptr + at, mask=live, other=0).to(tl.int64)
        rank = tl.arange(0, BLOCK_R)
        rows = row + tl.arange(0, BLOCK_N)
        there = rows < last
        b = tl.load(
            up_ptr + slot * slot_stride + rows[:, None] * R + rank[None, :],
            mask=there[:, None] & (rank < R)[None, :],
            other=0.0,
        )
        inner = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            columns = (split * T + at)[:, None] * (PARTS * R) + part * R + rank[None, :]
            inner += tl.load(
                inner_ptr + columns, mask=live[:, None] & (rank < R)[None, :], other=0.0
            )
        acc = tl.dot(inner.to(b.dtype), tl.trans(b), input_precision="ieee")
        to = y_ptr + token[:, None] * y_stride + rows[None, :]
        mask = live[:, None] & there[None, :]
        y = tl.load(to, mask=mask, other=0.0)
        tl.store(to, (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


def num_splits(num_tiles: int, num_parts: int, inner: int, block_k: int) -> int:
    """Number of thread blocks along the inputs. It is a power of two, because each number needs a
    compiled kernel of its own."""
    wanted = THREAD_BLOCKS // max(1, num_tiles * num_parts)
    return 1 << (max(1, min(MAX_SPLITS, wanted, -(-inner // block_k))).bit_length() - 1)


def lora(y: Tensor, x: Activations, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
    """`OpSet.lora`, in place of `y`."""
    return expand(y, shrink(room(x, w, tokens), x, w, tokens), w, tokens)


def room(x: Activations, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
    """Empty memory for `shrink`'s result, float32 [splits, T, parts · R]."""
    values = x.values if isinstance(x, Quantized) else x
    num_tokens, inner_size = values.shape
    if tokens.tile_tokens == TILES[0]:
        splits = triton.cdiv(inner_size, _few_block_k(inner_size))
    else:
        splits = num_splits(len(tokens.tiles), len(w.live), inner_size, _block_k(x, w))
    return torch.empty(
        splits, num_tokens, len(w.starts) * w.rank, dtype=torch.float32, device=values.device
    )


def shrink(
    inner: Tensor, x: Activations, w: LoRAWeights, tokens: LoRATokens, *, beside: bool = False
) -> Tensor:
    """Compute down · x for the tokens in `tokens.order` into `inner` (`room`), in splits that
    `expand` adds. A product has at most three parts; parts that are not live are not written.
    `beside`: the preceding kernel is a product of x for which `starts_next_behind_inputs` holds,
    and `inner` was allocated before that product's memory."""
    assert len(w.starts) <= 3
    num_tiles, num_parts, live, rank = len(tokens.tiles), len(w.starts), w.live, w.rank
    if not num_tiles:
        return inner
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, x)
    kind = 0 if not isinstance(x, Quantized) else 1 if scales.shape[1] == 1 else 2
    (num_tokens, inner_size), splits = values.shape, len(inner)
    parts = dict(LIVE_0=live[0], LIVE_1=live[min(1, len(live) - 1)], LIVE_2=live[-1])
    parts |= dict(SCALES=kind, PARTS=num_parts, SPLITS=splits)
    options = pdl_options(values)
    if tokens.tile_tokens == TILES[0]:
        block_k = _few_block_k(inner_size)
        block_r = min(triton.next_power_of_2(rank), FEW_TILES.ranks)
        blocks = triton.cdiv(rank, block_r)
        _shrink_few_kernel[(splits * blocks * len(live), num_tiles)](
            values, scales, w.down, inner, tokens.order, tokens.tiles, inner_size, rank, num_tokens,
            values.stride(0), scales.stride(0), w.down.stride(0),
            **parts, BLOCKS=blocks, BLOCK_R=block_r, BLOCK_K=block_k, GROUP=FP8_TILE,
            BESIDE=beside and options["PDL"], num_warps=FEW_TILES.shrink_warps, **options,
        )  # fmt: skip
        return inner
    assert not beside
    block_r = max(16, triton.next_power_of_2(rank))
    # with larger ranks several stages exceed the shared memory
    _shrink_kernel[(num_tiles, len(live), splits)](
        values, scales, w.down, inner, tokens.order, tokens.tiles, inner_size, rank, num_tokens,
        values.stride(0), scales.stride(0), w.down.stride(0),
        **parts, BLOCK_T=tokens.tile_tokens, BLOCK_R=block_r, BLOCK_K=_block_k(x, w),
        num_stages=3 if block_r <= 128 else 1, **options,
    )  # fmt: skip
    return inner


def expand(y: Tensor, inner: Tensor, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
    """Add up · (the sum of `inner`'s splits) to y [T, out], in place."""
    num_tiles, num_parts, rank, out = len(tokens.tiles), len(w.starts), w.rank, w.up.shape[1]
    if not num_tiles:
        return y
    few = tokens.tile_tokens == TILES[0]
    if few:
        block_r = triton.next_power_of_2(rank)
        block_n = max(1, FEW_TILES.expand_numbers // block_r)
    else:
        block_r = max(16, triton.next_power_of_2(rank))
        block_n = 128 if block_r <= 64 else 64
    starts = [*w.starts, *[out] * (3 - num_parts)]
    rows = [end - begin for begin, end in zip(starts, [*starts[1:], out], strict=True)]
    blocks = [triton.cdiv(n, block_n) if part in w.live else 0 for part, n in enumerate(rows)]
    ends = (starts[1], starts[2], out, blocks[0], blocks[0] + blocks[1])
    options = pdl_options(y)
    if few:
        _expand_few_kernel[(sum(blocks), num_tiles)](
            y, w.up, inner, tokens.order, tokens.tiles, rank, len(y), y.stride(0), w.up.stride(0), *ends,
            PARTS=num_parts, SPLITS=len(inner), BLOCK_R=block_r, BLOCK_N=block_n, num_warps=FEW_TILES.expand_warps,
            maxnreg=FEW_TILES.expand_registers, **options,
        )  # fmt: skip
    else:
        _expand_kernel[(num_tiles, sum(blocks))](
            y, w.up, inner, tokens.order, tokens.tiles, rank, len(y), y.stride(0), w.up.stride(0), *ends,
            PARTS=num_parts, SPLITS=len(inner), BLOCK_T=tokens.tile_tokens, BLOCK_R=block_r, BLOCK_N=block_n, **options,
        )  # fmt: skip
    return y


def _few_block_k(inner_size: int) -> int:
    least: int = triton.next_power_of_2(inner_size)
    return min(least, FEW_TILES.inputs)


def _block_k(x: Activations, w: LoRAWeights) -> int:
    by_group = isinstance(x, Quantized) and x.scales.shape[1] > 1
    return FP8_TILE if w.down.dtype.itemsize == 2 or by_group else 64
