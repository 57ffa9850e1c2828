"""Drawing tokens without a sort: every row of logits [S, V] has parameters of its own.

Four kernels, all of them work for a CUDA graph. A row is read once by each launch, by the third twice:

1. `_extent_kernel`: the largest logit with its token, and the smallest. Greedy rows end here.
2. `_level_kernel`, once for each of LEVELS: the mass, or the number, of the tokens above some logits
   between two bounds. The cut is between two of these, the next bounds.
3. `_cuts_kernel`: the mass above the bounds, and a list of the tokens between them. Halving over the
   list finds the exact cuts. If the list is longer than MAX_LISTED, halving reads the whole row.
4. `_draw_kernel`: the mass kept in each block of tokens, then the token at which the sum of the
   masses, in the order of ids, exceeds u · total.

Rows without top-k and top-p skip 2 and 3. Where rows are few, several thread blocks read a row, and
the last to arrive goes on with what all found.

A weight is exp((logit − largest) / temperature), in (0, 1]. Sums are of whole numbers, weight · ONE,
so they do not depend on order. Those of `_level_kernel` are rounded, and its bounds leave room for that: they
only choose what is listed. Neither a cut nor a token therefore depends on the other rows, or on
how a row was split. A token with a weight below 1 / ONE = 2⁻⁴² is never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

LEVELS = 8, 8, 8
"""Logits that each level of bounds is divided by: powers of two. The last bounds are a 448th of the logits' range apart."""
MAX_LISTED = 4096
TILE = 1024
"""Logits that a thread block of a level adds up at once, for each of its sums."""
SPLIT_ROWS = 32
"""Maximum number of rows for which each thread block reads a single block of tokens."""
MAX_PROGRAMS = 1056
"""Maximum number of thread blocks for more rows than SPLIT_ROWS: eight for each of an H200's
multiprocessors."""

ONE = tl.constexpr(float(2**42))
"""Count of a weight of 1. Sums of up to 2²⁰ tokens fit into 63 bits."""
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0. Weights are ordered like their bits."""
LOWEST_KEY = tl.constexpr(-(2**31))
REACH = tl.constexpr(24.0)
"""Range of the first level: logarithm of the ratio between the largest weight and the smallest one
that it distinguishes from smaller ones."""
SURE = tl.constexpr(2e-5)
"""Bound on the relative error of rounded sums."""
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _logits(row_ptr, at, end):
    return tl.load(row_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, best, temperature):
    """exp((logit − best) / temperature); 0 for NaN."""
    w = tl.exp((x - best) / temperature)
    return tl.where(w <= 1.0, w, 0.0)


@triton.jit
def _mass(w, kept):
    return (tl.where(kept, w, 0.0) * ONE).to(tl.int64)


@triton.jit
def _bits(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def _ordered(x):
    """int32 keys ordered like float32 x."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS: tl.constexpr):
    """Returns (largest logit of a row, first token with it, smallest finite logit)."""
    at = tl.arange(0, MAX_SPLITS)
    there = at < num_splits
    maxima = tl.load(max_ptr + i * num_splits + at, mask=there, other=float("-inf"))
    ids = tl.load(id_ptr + i * num_splits + at, mask=there, other=2147483647)
    minima = tl.load(min_ptr + i * num_splits + at, mask=there, other=float("inf"))
    best = tl.max(maxima, 0)
    return best, tl.min(tl.where(maxima == best, ids, 2147483647), 0), tl.min(minima, 0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full((), MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, counter):
    """`reference.uniform`, in float64."""
    golden = tl.full((), GOLDEN, tl.uint64)
    x = seed.to(tl.int64).to(tl.uint64, bitcast=True) + counter.to(tl.uint64) * golden
    x = _mix(_mix(x) + golden)
    return ((x >> 41).to(tl.float64) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def _cuts(row, vocab, top_k_ptr, top_p_ptr):
    """Returns a row's (top_k, top_p). top_k is 0 if it is off."""
    k = tl.load(top_k_ptr + row).to(tl.int32)
    return tl.where((k > 0) & (k < vocab), k, 0), tl.load(top_p_ptr + row)


@triton.jit
def _floor(min_p_ptr, row):
    """Bits of the smallest weight that min_p keeps. A weight of 0 is never kept, 1 always is."""
    least = tl.load(min_p_ptr + row).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(least, 1), ONE_BITS)


@triton.jit
def _row(rows_ptr, i, INDEXED: tl.constexpr):
    """Returns the row of the sampling parameters for row i of the logits."""
    row = i
    if INDEXED:
        row = tl.load(rows_ptr + i).to(tl.int32)
    return row


# Number of values that a row's thread blocks pass to one another, int64 [STATE].
STATE = 16
ARRIVED = tl.constexpr(0)  # number of those that are done with cuts
ARRIVED_2 = tl.constexpr(1)  # with masses
TOTAL = tl.constexpr(2)  # mass of the tokens that min_p keeps
NUM_ABOVE = tl.constexpr(3)  # number of tokens above the bounds
MASS_ABOVE = tl.constexpr(4)
NUM_LISTED = tl.constexpr(5)
LEAST_KEY = tl.constexpr(6)  # the cuts: a token is kept if it is at or above both
LEAST_BITS = tl.constexpr(7)
ARRIVED_LEVEL = tl.constexpr(8)  # and more: with each level

# Number of bounds that a row's levels store, float32 [BOUNDS], before the sums of each level.
BOUNDS = tl.constexpr(4)
LOW, HIGH = tl.constexpr(0), tl.constexpr(1)  # the cut is at or above LOW, and below HIGH
WHOLE = tl.constexpr(2)  # the mass, or number, of all


@triton.jit
def _is_last(counter_ptr, num_splits):
    """True in the last of a row's thread blocks, which then sees what the others wrote."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, tl.full((), 1, tl.int64), sem="acq_rel") == num_splits - 1


@triton.jit
def _read(state_ptr):
    return tl.load(state_ptr, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _extent_kernel(
    logits_ptr, max_ptr, id_ptr, min_ptr, sums_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    BLOCK: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds the extent (`_extent`) of `num_blocks` blocks of a row. The row's first thread block
    also clears its state."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + i.to(tl.int64) * row_stride
    start = split * num_blocks * BLOCK
    end = tl.minimum(vocab, start + num_blocks * BLOCK)
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    minima = tl.full((BLOCK,), float("inf"), tl.float32)
    ids = start + tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = _logits(row_ptr, at, end)
        ids = tl.where(x > maxima, at, ids)
        maxima = tl.where(x > maxima, x, maxima)
        minima = tl.where((x < minima) & (x > float("-inf")), x, minima)
    best = tl.max(maxima, 0)
    part = i * num_splits + split
    tl.store(max_ptr + part, best)
    # a valid token even if the row is NaN
    chosen = tl.minimum(tl.min(tl.where(maxima == best, ids, 2147483647), 0), vocab - 1)
    tl.store(id_ptr + part, chosen)
    tl.store(min_ptr + part, tl.min(minima, 0))
    if split == 0:
        tl.store(state_ptr + i * SIZE + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int64))
        tl.store(sums_ptr + i * SUMS + tl.arange(0, SUMS), tl.zeros((SUMS,), tl.float32))


@triton.jit
def _thresholds(best, least, floor, temperature, sums_ptr, K: tl.constexpr, IS_FIRST: tl.constexpr):
    """Returns the K logits at which a level of the search divides the range between the bounds, the
    largest first. The last one of the first level is below all logits."""
    at = tl.arange(0, K)
    reach = tl.minimum(best - least, REACH * temperature)
    # below min_p is nothing that counts
    reach = tl.minimum(reach, -tl.log(floor.to(tl.float32, bitcast=True)) * temperature)
    end = best - reach
    if IS_FIRST:
        found = best - (reach / (K - 1)) * (at + 1).to(tl.float32)
        return tl.where(at == K - 1, float("-inf"), found)
    low, high = tl.load(sums_ptr + LOW), tl.load(sums_ptr + HIGH)
    high = tl.minimum(high, best)
    low = tl.maximum(low, end)
    return high - ((high - low) / K) * (at + 1).to(tl.float32)


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _level_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, id_ptr, min_ptr, sums_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, LEVEL: tl.constexpr,
    FIRST: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a level of the search for the cuts. For each of K logits it adds up the tokens at or
    above it: their number for top-k, their mass for top-p alone. Its sums are from FIRST on. The
    last thread block sets the bounds."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row = _row(rows_ptr, i, INDEXED)
    temperature = tl.load(temperature_ptr + row)
    k, p = _cuts(row, vocab, top_k_ptr, top_p_ptr)
    if (temperature > 0.0) & ((k > 0) | (p < 1.0)):
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        own_ptr = sums_ptr + i * SUMS
        best, _, least = _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS)
        floor = _floor(min_p_ptr, row)
        bounds = _thresholds(best, least, floor, temperature, own_ptr, K, LEVEL == 0)
        at = tl.arange(0, K)
        each, sums = (), ()
        for j in tl.static_range(K):
            each = each + (tl.sum(tl.where(at == j, bounds, 0.0), 0),)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + (tl.zeros((TILE,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        start = split * num_blocks * BLOCK
        end = tl.minimum(vocab, start + num_blocks * BLOCK)
        for first in range(start, end, TILE):
            x = _logits(row_ptr, first + tl.arange(0, TILE), end)
            w = _weights(x, best, temperature)
            value = tl.where(_bits(w) >= floor, tl.where(k > 0, 1.0, w), 0.0)
            new = ()
            for j in tl.static_range(K):
                more = value * (x >= each[j]).to(tl.float32)
                new = new + (sums[j] + more,)  # type: ignore[assignment]  # noqa: RUF005
            sums = new
        found = tl.zeros((K,), tl.float32)
        for j in tl.static_range(K):
            found = tl.where(at == j, tl.sum(sums[j], 0), found)
        tl.atomic_add(own_ptr + FIRST + at, found, sem="relaxed")
        if _is_last(state_ptr + i * SIZE + ARRIVED_LEVEL + LEVEL, num_splits):
            found = tl.load(own_ptr + FIRST + at, cache_modifier=".cg")
            if LEVEL == 0:
                low, high = float("-inf"), float("inf")
                whole = tl.max(found, 0)
                tl.store(own_ptr + WHOLE, whole)
            else:
                low, high = tl.load(own_ptr + LOW), tl.load(own_ptr + HIGH)
                whole = tl.load(own_ptr + WHOLE)
            enough = tl.where(k > 0, k.to(tl.float32), tl.minimum(whole * p * (1.0 + SURE), whole))
            too_few = tl.where(k > 0, k.to(tl.float32), whole * p * (1.0 - SURE))
            low = tl.maximum(low, tl.max(tl.where(found >= enough, bounds, float("-inf")), 0))
            high = tl.minimum(high, tl.min(tl.where(found < too_few, bounds, float("inf")), 0))
            tl.store(own_ptr + LOW, low)
            tl.store(own_ptr + HIGH, high)


@triton.jit
def _search(
    x_ptr, length, best, temperature, floor, k, p, num_above, mass_above, total, BLOCK: tl.constexpr
):
    """Finds the cuts among `length` logits by halving: (least key that top_k keeps, least bits of a
    weight that top_p keeps). Larger logits were counted before. The invariant is that enough tokens
    are at or above `low`."""
    some_x = tl.zeros((BLOCK,), tl.int32)  # of all logits that count: the largest and smallest key
    high_keys, low_keys = some_x + LOWEST_KEY, some_x + 2147483647
    counts = some_x
    for first in range(0, length, BLOCK):
        x = _logits(x_ptr, first + tl.arange(0, BLOCK), length)
        w = _weights(x, best, temperature)
        kept = _bits(w) >= floor
        keys = _ordered(x)
        high_keys = tl.maximum(high_keys, tl.where(kept, keys, LOWEST_KEY))
        low_keys = tl.minimum(low_keys, tl.where(kept, keys, 2147483647))
        counts += kept.to(tl.int32)
    least_key = tl.full((), LOWEST_KEY, tl.int64)
    if (k > 0) & (tl.sum(counts, 0) + num_above >= k):
        low, high = tl.min(low_keys, 0).to(tl.int64), tl.max(high_keys, 0).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            counts = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, length, BLOCK):
                x = _logits(x_ptr, first + tl.arange(0, BLOCK), length)
                w = _weights(x, best, temperature)
                counts += ((_bits(w) >= floor) & (_ordered(x) >= middle.to(tl.int32))).to(tl.int32)
            if tl.sum(counts, 0) + num_above >= k:
                low = middle
            else:
                high = middle - 1
        least_key = low
    least_bits = floor.to(tl.int64)
    if p < 1.0:
        mass = tl.zeros((BLOCK,), tl.int64)
        high_bits, low_bits = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), ONE_BITS, tl.int32)
        for first in range(0, length, BLOCK):
            x = _logits(x_ptr, first + tl.arange(0, BLOCK), length)
            w = _weights(x, best, temperature)
            kept = (_bits(w) >= floor) & (_ordered(x) >= least_key.to(tl.int32))
            mass += _mass(w, kept)
            high_bits = tl.maximum(high_bits, tl.where(kept, _bits(w), 0))
            low_bits = tl.minimum(low_bits, tl.where(kept, _bits(w), ONE_BITS))
        if k > 0:
            total = tl.sum(mass, 0) + mass_above
        wanted = total.to(tl.float64) * p
        low, high = tl.min(low_bits, 0), tl.max(high_bits, 0)
        while low < high:
            middle = low + (high - low + 1) // 2
            mass = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, length, BLOCK):
                x = _logits(x_ptr, first + tl.arange(0, BLOCK), length)
                w = _weights(x, best, temperature)
                kept = (_bits(w) >= middle) & (_ordered(x) >= least_key.to(tl.int32))
                mass += _mass(w, kept)
            if (tl.sum(mass, 0) + mass_above).to(tl.float64) >= wanted:
                low = middle
            else:
                high = middle - 1
        least_bits = low.to(tl.int64)
    return least_key, least_bits


@triton.jit
def _search_list(
    x_ptr, length, best, temperature, floor, k, p, num_above, mass_above, total, LIST: tl.constexpr
):
    """Runs `_search` on logits that fit into registers. Also returns whether the cuts are among them."""
    x = _logits(x_ptr, tl.arange(0, LIST), length)
    w = _weights(x, best, temperature)
    kept = _bits(w) >= floor
    keys, masses = _ordered(x), _mass(w, kept)
    bits = tl.where(kept, _bits(w), 0)
    least_key, is_found = tl.full((), LOWEST_KEY, tl.int64), num_above >= 0
    if k > 0:
        is_found = num_above < k
        if tl.sum(kept.to(tl.int32), 0) + num_above >= k:
            low = tl.min(tl.where(kept, keys, 2147483647), 0).to(tl.int64)
            high = tl.max(tl.where(kept, keys, LOWEST_KEY), 0).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                count = tl.sum((kept & (keys >= middle.to(tl.int32))).to(tl.int32), 0)
                if count + num_above >= k:
                    low = middle
                else:
                    high = middle - 1
            least_key = low
    least_bits = floor.to(tl.int64)
    if p < 1.0:
        kept = kept & (keys >= least_key.to(tl.int32))
        bits, masses = tl.where(kept, bits, 0), tl.where(kept, masses, 0)
        listed = tl.sum(masses, 0)
        if k > 0:
            total = listed + mass_above
        wanted = total.to(tl.float64) * p
        is_found = is_found & (mass_above.to(tl.float64) < wanted)
        is_found = is_found & ((listed + mass_above).to(tl.float64) >= wanted)
        low, high = tl.min(tl.where(kept, bits, ONE_BITS), 0), tl.max(bits, 0)
        while low < high:
            middle = low + (high - low + 1) // 2
            mass = tl.sum(tl.where(bits >= middle, masses, 0), 0)
            if (mass + mass_above).to(tl.float64) >= wanted:
                low = middle
            else:
                high = middle - 1
        least_bits = low.to(tl.int64)
    return least_key, least_bits, is_found


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _cuts_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, id_ptr, min_ptr, sums_ptr, listed_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr,
    LIST: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists the tokens whose logits are between the bounds, and finds the cuts of top-k and top-p
    among them."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row = _row(rows_ptr, i, INDEXED)
    temperature = tl.load(temperature_ptr + row)
    k, p = _cuts(row, vocab, top_k_ptr, top_p_ptr)
    if (temperature > 0.0) & ((k > 0) | (p < 1.0)):
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        state, listed = state_ptr + i * SIZE, listed_ptr + i.to(tl.int64) * LIST
        best, _, _ = _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS)
        floor = _floor(min_p_ptr, row)
        low, high = tl.load(sums_ptr + i * SUMS + LOW), tl.load(sums_ptr + i * SUMS + HIGH)
        # with top_p, too, all tokens that top_k keeps must be listed
        high = tl.where((k > 0) & (p < 1.0), float("inf"), high)
        start = split * num_blocks * BLOCK
        end = tl.minimum(vocab, start + num_blocks * BLOCK)
        mass, above = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        num_above, counts = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
        for first in range(start, end, TILE):
            x = _logits(row_ptr, first + tl.arange(0, TILE), end)
            w = _weights(x, best, temperature)
            kept = _bits(w) >= floor
            own = _mass(w, kept)
            mass += own
            above += tl.where(x >= high, own, 0)
            num_above += (kept & (x >= high)).to(tl.int32)
            counts += (kept & (x >= low) & (x < high)).to(tl.int32)
        tl.atomic_add(state + TOTAL, tl.sum(mass, 0), sem="relaxed")
        tl.atomic_add(state + MASS_ABOVE, tl.sum(above, 0), sem="relaxed")
        tl.atomic_add(state + NUM_ABOVE, tl.sum(num_above, 0).to(tl.int64), sem="relaxed")
        count = tl.sum(counts, 0)
        if count > 0:
            before = tl.atomic_add(state + NUM_LISTED, count.to(tl.int64), sem="relaxed")
            if before + count <= LIST:
                at = before.to(tl.int32) + tl.cumsum(counts, 0) - counts
                for first in range(start, end, TILE):
                    x = _logits(row_ptr, first + tl.arange(0, TILE), end)
                    kept = _bits(_weights(x, best, temperature)) >= floor
                    chosen = kept & (x >= low) & (x < high)
                    tl.store(listed + at, x, mask=chosen)
                    at += chosen.to(tl.int32)
        if _is_last(state + ARRIVED, num_splits):
            num_listed, total = _read(state + NUM_LISTED).to(tl.int32), _read(state + TOTAL)
            num_over, mass_over = _read(state + NUM_ABOVE).to(tl.int32), _read(state + MASS_ABOVE)
            key, bits, is_found = tl.full((), LOWEST_KEY, tl.int64), floor.to(tl.int64), False
            if num_listed <= LIST:
                key, bits, is_found = _search_list(
                    listed, num_listed, best, temperature, floor, k, p, num_over, mass_over, total, LIST
                )  # fmt: skip
            if not is_found:
                none = tl.zeros((), tl.int64)
                key, bits = _search(
                    row_ptr, vocab, best, temperature, floor, k, p, 0, none, total, TILE
                )
            tl.store(state + LEAST_KEY, key)
            tl.store(state + LEAST_BITS, bits)


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _draw_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    max_ptr, id_ptr, min_ptr, mass_ptr, state_ptr, out_ptr, vocab, row_stride, num_splits, num_blocks,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, INDEXED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the weights of the tokens that each block of a row keeps. The last thread block draws
    the row's token."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row = _row(rows_ptr, i, INDEXED)
    temperature = tl.load(temperature_ptr + row)
    best, chosen, _ = _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS)
    if temperature > 0.0:
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        state, masses = state_ptr + i * SIZE, mass_ptr + i * MAX_SPLITS
        least_bits, least_key = _floor(min_p_ptr, row), tl.full((), LOWEST_KEY, tl.int32)
        k, p = _cuts(row, vocab, top_k_ptr, top_p_ptr)
        if (k > 0) | (p < 1.0):
            least_bits = tl.load(state + LEAST_BITS).to(tl.int32)
            least_key = tl.load(state + LEAST_KEY).to(tl.int32)
        start = split * num_blocks * BLOCK
        end = tl.minimum(vocab, start + num_blocks * BLOCK)
        for first in range(start, end, BLOCK):
            x = _logits(row_ptr, first + tl.arange(0, BLOCK), end)
            w = _weights(x, best, temperature)
            kept = (_bits(w) >= least_bits) & (_ordered(x) >= least_key)
            tl.store(masses + first // BLOCK, tl.sum(_mass(w, kept), 0))
        if _is_last(state + ARRIVED_2, num_splits):
            at = tl.arange(0, MAX_SPLITS)
            mass = tl.load(masses + at, mask=at * BLOCK < vocab, other=0, cache_modifier=".cg")
            running = tl.cumsum(mass, 0)
            total = tl.sum(mass, 0)
            u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + i))
            target = (u * total.to(tl.float64)).to(tl.int64)
            if total > 0:  # not if all logits are NaN, or some infinite
                block = tl.min(tl.where(running > target, at, MAX_SPLITS - 1), 0)
                before = tl.sum(tl.where(at < block, mass, 0), 0)
                ids = block * BLOCK + tl.arange(0, BLOCK)
                x = _logits(row_ptr, ids, vocab)
                w = _weights(x, best, temperature)
                kept = (_bits(w) >= least_bits) & (_ordered(x) >= least_key)
                sums = before + tl.cumsum(_mass(w, kept), 0)
                chosen = tl.min(tl.where(sums > target, ids, 2147483647), 0)
            tl.store(out_ptr + i, chosen.to(tl.int64))
    elif split == 0:
        tl.store(out_ptr + i, chosen.to(tl.int64))


def draw(logits: Tensor, params: SamplingTensors, *, block: int = 4096) -> Tensor:
    """Logits [S, V], after bias and penalties → int64 [S]. The same kernels run whatever rows want,
    so that no step has to compile others."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, size, dtype=dtype, device=logits.device)

    block = min(block, triton.next_power_of_2(vocab))
    of_row = triton.cdiv(vocab, block)
    num_blocks = 1 if num_rows <= SPLIT_ROWS else min(of_row, -(-num_rows * of_row // MAX_PROGRAMS))
    num_splits, most = triton.cdiv(of_row, num_blocks), triton.next_power_of_2(of_row)
    extent = [empty(num_splits, d) for d in (torch.float32, torch.int32, torch.float32)]
    state, masses = empty(STATE, torch.int64), empty(most, torch.int64)
    num_sums = triton.next_power_of_2(BOUNDS.value + sum(LEVELS))
    sums, listed = empty(num_sums, torch.float32), empty(MAX_LISTED, torch.float32)
    rows = out if params.rows is None else params.rows
    given = logits, rows, params.temperature, params.top_k, params.top_p, params.min_p
    sizes = vocab, logits.stride(0), num_splits, num_blocks
    base = dict(BLOCK=block, SIZE=STATE, num_warps=8, **pdl_options(logits))
    own = dict(MAX_SPLITS=most, INDEXED=params.rows is not None, **base)
    grid = num_rows, num_splits
    _extent_kernel[grid](logits, *extent, sums, state, *sizes, SUMS=num_sums, **base)
    tiles = dict(TILE=min(TILE, block), SUMS=num_sums, **own)
    first = BOUNDS.value
    for level, count in enumerate(LEVELS):
        _level_kernel[grid](
            *given, *extent, sums, state, *sizes, K=count, LEVEL=level, FIRST=first, **tiles
        )
        first += count
    _cuts_kernel[grid](*given, *extent, sums, listed, state, *sizes, LIST=MAX_LISTED, **tiles)
    places = params.seeds, params.history_lens
    _draw_kernel[grid](*given, *places, *extent, masses, state, out, *sizes, **own)
    return out
