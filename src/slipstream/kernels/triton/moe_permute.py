"""Entries of a mixture of experts in the experts' order.

An *entry* is a token's place in one of its experts: T · k of them, entry t · k + j being token t's j-th choice. They are sorted
by counting: each program takes a share of them, finds how many of the same expert stand ahead of each, in its own share and in
others', and that is its place. Each expert's entries are cut into tiles. How many tiles there are is known on the device alone:
as many programs start as there can be at most, and those without a tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import overlapped, pdl_wait

SHARE = 256
"""Entries that a program sorts; of many twice as many, since each reads what all have counted."""
MANY_SHARES = 128


@dataclass(frozen=True, slots=True)
class Groups:
    """Entries by expert: expert e has order[starts[e] : starts[e + 1]], in tiles up to tile_ends[e] of all experts' tiles.
    Entry i stands at places[i] of that order. Without places each entry is a tile of its own, in the tokens' order; then
    `order` holds the entries' experts."""

    order: Tensor  # int32 [T · k]
    places: Tensor | None  # int32 [T · k]
    starts: Tensor  # int32 [X + 1]
    tile_ends: Tensor  # int32 [X]
    block: int  # entries in a tile
    max_tiles: int


@triton.jit(do_not_specialize=["N"])
def _count_kernel(chosen_ptr, counts_ptr, N, X, SHARE: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr):
    """A share's entries of each expert."""
    if PDL:
        pdl_wait()
    share, at, xs = tl.program_id(0), tl.arange(0, SHARE), tl.arange(0, BLOCK_X)
    there = share * SHARE + at < N
    expert = tl.load(chosen_ptr + share * SHARE + at, mask=there, other=0)
    tl.store(counts_ptr + share * X + xs, tl.histogram(expert, BLOCK_X, mask=there), mask=xs < X)


@triton.jit(do_not_specialize=["N", "num_shares"])
def _place_kernel(
    chosen_ptr,
    counts_ptr,
    order_ptr,
    places_ptr,
    starts_ptr,
    ends_ptr,
    N,
    X,
    num_shares,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """A share's entries to their places; ALONE: there is no other share, and its entries were not counted."""
    if PDL:
        pdl_wait()
    share, at, xs = tl.program_id(0), tl.arange(0, SHARE), tl.arange(0, BLOCK_X)
    mine = share * SHARE + at
    there = mine < N
    expert = tl.load(chosen_ptr + mine, mask=there, other=0)
    if ALONE:
        totals = tl.histogram(expert, BLOCK_X, mask=there)
        before = xs * 0
    else:
        sums = tl.zeros((TOGETHER, BLOCK_X), tl.int32)
        sums_before = sums
        for first in range(0, num_shares, TOGETHER):
            others = first + tl.arange(0, TOGETHER)
            known = (others < num_shares)[:, None] & (xs < X)[None, :]
            counts = tl.load(counts_ptr + others[:, None] * X + xs[None, :], mask=known, other=0)
            sums += counts
            sums_before += tl.where((others < share)[:, None], counts, 0)
        totals, before = tl.sum(sums, 0), tl.sum(sums_before, 0)
    ends = tl.cumsum(totals, 0)
    ahead = tl.zeros((SHARE,), tl.int32)
    UNROLLED: tl.constexpr = 8 if SHARE <= 256 else 1  # the loads of a larger share's loop would not fit the registers
    for first in tl.range(0, SHARE, 32, loop_unroll_factor=UNROLLED):
        others = first + tl.arange(0, 32)
        them = tl.load(chosen_ptr + share * SHARE + others, mask=share * SHARE + others < N, other=-1)
        # others down, a thread's own entries across: no two threads sum together
        ahead += tl.sum(((them[:, None] == expert[None, :]) & (others[:, None] < at[None, :])).to(tl.int32), 0)
    place = tl.gather(ends - totals + before, expert, 0) + ahead
    tl.store(order_ptr + place, mine, mask=there)
    tl.store(places_ptr + mine, place, mask=there)
    if share == 0:
        tl.store(starts_ptr + xs, ends - totals, mask=xs < X)
        tl.store(starts_ptr + X, N)
        tl.store(ends_ptr + xs, tl.cumsum((totals + BLOCK_M - 1) // BLOCK_M, 0), mask=xs < X)


@triton.jit
def tile_of(tile, starts_ptr, ends_ptr, X, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """Of a tile its expert (X: there is no such tile), its first place, and where the expert's places end."""
    xs = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + xs, mask=xs < X, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(xs == expert - 1, ends, 0), 0)
    start = tl.load(starts_ptr + expert, mask=expert < X, other=0)
    return expert, start + (tile - before) * BLOCK_M, tl.load(starts_ptr + expert + 1, mask=expert < X, other=0)


def entries_of_a_tile(count: int, num_experts: int) -> int:
    """Tiles grow with the entries that an expert has on average: one that holds most experts' reads their weights once."""
    return next((size for size, most in ((16, 8), (32, 32), (64, 48)) if count <= most * num_experts), 128)


def group(chosen: Tensor, num_experts: int, *, block: int | None = None) -> Groups:
    """chosen int32 [T, k] → its entries by expert, in tiles of `block`."""
    count, device = chosen.numel(), chosen.device
    block = block or entries_of_a_tile(count, num_experts)
    share = 2 * SHARE if count > MANY_SHARES * SHARE else min(SHARE, max(32, triton.next_power_of_2(count)))
    num_shares = triton.cdiv(count, share)
    order, places = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    sizes = dict(SHARE=share, BLOCK_X=max(16, triton.next_power_of_2(num_experts)))
    counts = starts
    if num_shares > 1:
        counts = torch.empty(num_shares, num_experts, dtype=torch.int32, device=device)
        _count_kernel[(num_shares,)](chosen, counts, count, num_experts, **sizes, num_warps=4, **overlapped(chosen))
    _place_kernel[(num_shares,)](
        chosen,
        counts,
        order,
        places,
        starts,
        tile_ends,
        count,
        num_experts,
        num_shares,
        ALONE=num_shares == 1,
        BLOCK_M=block,
        TOGETHER=32,
        **sizes,
        num_warps=8,
        **overlapped(chosen),
    )
    return Groups(order, places, starts, tile_ends, block, min(count, triton.cdiv(count, block) + num_experts))


def singles(chosen: Tensor) -> Groups:
    """So few entries that hardly two meet in one expert: nothing is sorted."""
    return Groups(chosen.flatten(), None, chosen, chosen, 16, chosen.numel())
