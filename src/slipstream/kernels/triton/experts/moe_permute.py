"""Sorts token–expert pairs by expert.

Pair t · k + j is token t's j-th chosen expert. Pairs are sorted by counting. A thread block takes a
chunk of pairs and counts, for each pair, the pairs of the same expert before it in all chunks; that
is its sorted position. Each expert's pairs are cut into tiles. Only the device knows the number of
tiles: the grid has the largest possible number, and surplus thread blocks exit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

CHUNK = 256
"""Pairs per thread block; twice as many if there are many, since each reads all counts."""
MANY_CHUNKS = 128


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Token–expert pairs sorted by expert, in tiles. Expert e has the pairs order[starts[e] :
    starts[e + 1]]; its tiles end before number tile_ends[e]. Pair i is at position inverse[i].
    Without `inverse` each pair is a tile, in token order, and `order` has the pairs' experts."""

    order: Tensor  # int32 [T · k]
    inverse: Tensor | None  # int32 [T · k]
    starts: Tensor  # int32 [X + 1]
    tile_ends: Tensor  # int32 [X]
    tile_m: int  # pairs in a tile
    max_tiles: int


@triton.jit(do_not_specialize=["N"])
def _count_kernel(
    chosen_ptr, counts_ptr, N, X, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr
):
    """Count a chunk's pairs per expert."""
    if PDL:
        pdl_wait()
    chunk, at, xs = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, BLOCK_X)
    mask = chunk * CHUNK + at < N
    expert = tl.load(chosen_ptr + chunk * CHUNK + at, mask=mask, other=0)
    tl.store(counts_ptr + chunk * X + xs, tl.histogram(expert, BLOCK_X, mask=mask), mask=xs < X)


@triton.jit(do_not_specialize=["N", "num_chunks"])
def _sort_kernel(
    chosen_ptr, counts_ptr, order_ptr, inverse_ptr, starts_ptr, ends_ptr, N, X, num_chunks,
    ONE_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a chunk's pairs to their sorted positions. ONE_CHUNK: it is the only one, and nothing
    was counted before."""
    if PDL:
        pdl_wait()
    chunk, at, xs = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, BLOCK_X)
    pair = chunk * CHUNK + at
    mask = pair < N
    expert = tl.load(chosen_ptr + pair, mask=mask, other=0)
    if ONE_CHUNK:
        totals = tl.histogram(expert, BLOCK_X, mask=mask)
        before = xs * 0
    else:
        sums = tl.zeros((CHUNKS_AT_ONCE, BLOCK_X), tl.int32)
        sums_before = sums
        for first in range(0, num_chunks, CHUNKS_AT_ONCE):
            others = first + tl.arange(0, CHUNKS_AT_ONCE)
            known = (others < num_chunks)[:, None] & (xs < X)[None, :]
            counts = tl.load(counts_ptr + others[:, None] * X + xs[None, :], mask=known, other=0)
            sums += counts
            sums_before += tl.where((others < chunk)[:, None], counts, 0)
        totals, before = tl.sum(sums, 0), tl.sum(sums_before, 0)
    ends = tl.cumsum(totals, 0)
    ahead = tl.zeros((CHUNK,), tl.int32)
    # a larger chunk's loads would not fit the registers
    UNROLLED: tl.constexpr = 8 if CHUNK <= 256 else 1
    for first in tl.range(0, CHUNK, 32, loop_unroll_factor=UNROLLED):
        others = first + tl.arange(0, 32)
        other_experts = tl.load(
            chosen_ptr + chunk * CHUNK + others, mask=chunk * CHUNK + others < N, other=-1
        )
        # others along rows, own pairs along columns: no two threads share a sum
        ahead += tl.sum(
            ((other_experts[:, None] == expert[None, :]) & (others[:, None] < at[None, :])).to(
                tl.int32
            ),
            0,
        )
    position = tl.gather(ends - totals + before, expert, 0) + ahead
    tl.store(order_ptr + position, pair, mask=mask)
    tl.store(inverse_ptr + pair, position, mask=mask)
    if chunk == 0:
        tl.store(starts_ptr + xs, ends - totals, mask=xs < X)
        tl.store(starts_ptr + X, N)
        tl.store(ends_ptr + xs, tl.cumsum((totals + BLOCK_M - 1) // BLOCK_M, 0), mask=xs < X)


@triton.jit
def tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """Finds a tile: (its expert, or X if there is no such tile; its first position; the end of the
    expert's positions)."""
    xs = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + xs, mask=xs < X, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(xs == expert - 1, ends, 0), 0)
    start = tl.load(starts_ptr + expert, mask=expert < X, other=0)
    return (
        expert,
        start + (tile - before) * BLOCK_M,
        tl.load(starts_ptr + expert + 1, mask=expert < X, other=0),
    )


@triton.jit
def pairs_of_tile(
    tile, order_ptr, starts_ptr, ends_ptr, X,
    BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr, UNSORTED: tl.constexpr,
):  # fmt: skip
    """Finds a tile's pairs: (its expert, or X if there is no such tile; positions; which of them exist; the pairs).
    UNSORTED: each pair is a tile."""
    ms = tl.arange(0, BLOCK_M)
    if UNSORTED:
        expert = tl.load(order_ptr + tile)
        position, live = tile + ms, ms == 0
        pair = position
    else:
        expert, first, end = tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M, BLOCK_X)
        position = first + ms
        live = position < end
        pair = tl.load(order_ptr + position, mask=live, other=0)
    return expert, position, live, pair


def pairs_per_tile(count: int, num_experts: int) -> int:
    """Pairs per tile, growing with the average number of pairs per expert: an expert in one tile
    reads its weight once."""
    return next(
        (size for size, most in ((16, 8), (32, 32), (64, 48)) if count <= most * num_experts), 128
    )


def sort_pairs(chosen: Tensor, num_experts: int, *, tile_m: int | None = None) -> ExpertTiles:
    """chosen int32 [T, k] → its pairs by expert, in tiles of `tile_m`."""
    count, device = chosen.numel(), chosen.device
    tile_m = tile_m or pairs_per_tile(count, num_experts)
    chunk = (
        2 * CHUNK
        if count > MANY_CHUNKS * CHUNK
        else min(CHUNK, max(32, triton.next_power_of_2(count)))
    )
    num_chunks = triton.cdiv(count, chunk)
    order, inverse = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    sizes = dict(CHUNK=chunk, BLOCK_X=max(16, triton.next_power_of_2(num_experts)))
    counts = starts
    if num_chunks > 1:
        counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=device)
        _count_kernel[(num_chunks,)](
            chosen, counts, count, num_experts, **sizes, num_warps=4, **pdl_options(chosen)
        )
    _sort_kernel[(num_chunks,)](
        chosen, counts, order, inverse, starts, tile_ends, count, num_experts, num_chunks,
        ONE_CHUNK=num_chunks == 1, BLOCK_M=tile_m, CHUNKS_AT_ONCE=32, **sizes, num_warps=8, **pdl_options(chosen),
    )  # fmt: skip
    return ExpertTiles(
        order,
        inverse,
        starts,
        tile_ends,
        tile_m,
        min(count, triton.cdiv(count, tile_m) + num_experts),
    )


def unsorted_pairs(chosen: Tensor) -> ExpertTiles:
    """(token, expert) pairs without sorting, for so few that hardly two share an expert."""
    return ExpertTiles(chosen.flatten(), None, chosen, chosen, 16, chosen.numel())
