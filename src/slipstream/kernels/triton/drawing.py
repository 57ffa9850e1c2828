"""Drawing tokens without a sort: every row of logits [S, V] has parameters of its own.

Four kernels, all of them work for a CUDA graph. A row is read once by each, at most:

1. `_extent_kernel`: the largest logit with its token, and the smallest. Greedy rows end here.
2. `_classes_kernel`: the mass of the tokens, and how many there are in each of NUM_CLASSES classes of
   equal width. These counts bound the mass above every class from both sides. So they show in which
   few classes the cuts of top-k and top-p are.
3. `_cuts_kernel`: the mass above those classes, and a list of their tokens. Halving over the list
   finds the exact cuts. If the list is longer than MAX_LISTED, halving reads the whole row.
4. `_draw_kernel`: the mass kept in each block of tokens, then the token at which the sum of the
   masses, in the order of ids, exceeds u · total.

Rows without top-k and top-p skip 2 and 3. Where rows are few, several thread blocks read a row, and
the last to arrive goes on with what all found.

A weight is exp((logit − largest) / temperature), in (0, 1]. Sums are of whole numbers, weight · ONE,
so they do not depend on order. Neither a cut nor a token therefore depends on the other rows, or on
how a row was split. A token with a weight below 1 / ONE = 2⁻⁴² is never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

NUM_CLASSES = 1024
MAX_LISTED = 4096
SPLIT_ROWS = 64
"""Largest number of rows of which a thread block reads one block of tokens."""
MAX_PROGRAMS = 1056
"""Thread blocks that more rows are shared out to, eight for each of an H200's multiprocessors."""

ONE = tl.constexpr(float(2**42))
"""Count of a weight of 1. Sums of up to 2²⁰ tokens fit into 63 bits."""
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0. Weights are ordered like their bits."""
LOWEST_KEY = tl.constexpr(-(2**31))
REACH = tl.constexpr(24.0)
"""Logarithm of the largest weight over the smallest that has a class of its own."""
SURE = tl.constexpr(1e-6)
"""Relative error allowed for in bounds of sums."""
SLACK = tl.constexpr(1e-4)
"""Relative error allowed for in the bounds of a class's weights."""
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
def _class(x, best, width_inv, there, CLASSES: tl.constexpr):
    """Class of each logit that is `there`: 0 has the largest. The last one is open below."""
    return tl.minimum(tl.where(there, best - x, 0.0) * width_inv, CLASSES - 1.0).to(tl.int32)


@triton.jit
def _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS: tl.constexpr):
    """(largest logit of a row, first token with it, smallest finite logit)"""
    at = tl.arange(0, MAX_SPLITS)
    there = at < num_splits
    maxima = tl.load(max_ptr + i * num_splits + at, mask=there, other=float("-inf"))
    ids = tl.load(id_ptr + i * num_splits + at, mask=there, other=2147483647)
    minima = tl.load(min_ptr + i * num_splits + at, mask=there, other=float("inf"))
    best = tl.max(maxima, 0)
    return best, tl.min(tl.where(maxima == best, ids, 2147483647), 0), tl.min(minima, 0)


@triton.jit
def _width_inv(best, least, temperature, CLASSES: tl.constexpr):
    """Classes per unit of a logit."""
    reach = tl.minimum(best - least, REACH * temperature)
    return tl.where(reach > 0.0, CLASSES / tl.where(reach > 0.0, reach, 1.0), 0.0)


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
    """(top_k, 0 if it is off; top_p)"""
    k = tl.load(top_k_ptr + row).to(tl.int32)
    return tl.where((k > 0) & (k < vocab), k, 0), tl.load(top_p_ptr + row)


@triton.jit
def _floor(min_p_ptr, row):
    """Bits of the smallest weight that min_p keeps. A weight of 0 is never kept, 1 always is."""
    least = tl.load(min_p_ptr + row).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(least, 1), ONE_BITS)


@triton.jit
def _row(rows_ptr, i, INDEXED: tl.constexpr):
    """Row of the parameters of row i of the logits."""
    row = i
    if INDEXED:
        row = tl.load(rows_ptr + i).to(tl.int32)
    return row


# What a row's thread blocks leave for one another, int64 [STATE].
STATE = 16
ARRIVED_1 = tl.constexpr(0)  # number of those that are done with classes
ARRIVED_2 = tl.constexpr(1)  # with cuts
ARRIVED_3 = tl.constexpr(2)  # with masses
TOTAL = tl.constexpr(3)  # mass of the tokens that min_p keeps
FIRST = tl.constexpr(4)  # the listed classes
LAST = tl.constexpr(5)
NUM_ABOVE = tl.constexpr(6)  # number of tokens in the classes above them
MASS_ABOVE = tl.constexpr(7)
NUM_LISTED = tl.constexpr(8)
LEAST_KEY = tl.constexpr(9)  # the cuts: a token is kept if it is at or above both
LEAST_BITS = tl.constexpr(10)


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
    logits_ptr, max_ptr, id_ptr, min_ptr, counts_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    BLOCK: tl.constexpr, CLASSES: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The extent of `num_blocks` blocks of a row. The first split also clears the row's state."""
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
        tl.store(counts_ptr + i * CLASSES + tl.arange(0, CLASSES), tl.zeros((CLASSES,), tl.int32))


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _classes_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, id_ptr, min_ptr, counts_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, CLASSES: tl.constexpr, SIZE: tl.constexpr, LIST: tl.constexpr,
    INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts a row's tokens by class, adds up their mass, and chooses the classes that are listed."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row = _row(rows_ptr, i, INDEXED)
    temperature = tl.load(temperature_ptr + row)
    k, p = _cuts(row, vocab, top_k_ptr, top_p_ptr)
    if (temperature > 0.0) & ((k > 0) | (p < 1.0)):
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        state = state_ptr + i * SIZE
        best, _, least = _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS)
        width_inv = _width_inv(best, least, temperature, CLASSES)
        floor = _floor(min_p_ptr, row)
        start = split * num_blocks * BLOCK
        end = tl.minimum(vocab, start + num_blocks * BLOCK)
        mass = tl.zeros((BLOCK,), tl.int64)
        counts = tl.zeros((CLASSES,), tl.int32)
        for first in range(start, end, BLOCK):
            x = _logits(row_ptr, first + tl.arange(0, BLOCK), end)
            w = _weights(x, best, temperature)
            there = w > 0.0
            mass += _mass(w, _bits(w) >= floor)
            counts += tl.histogram(_class(x, best, width_inv, there, CLASSES), CLASSES, mask=there)
        at = tl.arange(0, CLASSES)
        tl.atomic_add(counts_ptr + i * CLASSES + at, counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(state + TOTAL, tl.sum(mass, 0), sem="relaxed")
        if _is_last(state + ARRIVED_1, num_splits):
            counts = tl.load(counts_ptr + i * CLASSES + at, cache_modifier=".cg")
            first_class, last_class = 0, CLASSES - 1
            if k > 0:
                running = tl.cumsum(counts, 0)
                last_class = tl.minimum(tl.sum((running < k).to(tl.int32), 0), CLASSES - 1)
                # with top_p, too, all tokens that top_k keeps must be listed
                up_to = tl.sum(tl.where(at == last_class, running, 0), 0)
                first_class = tl.where((up_to > LIST) & (p >= 1.0), last_class, 0)
            else:
                # bounds of a weight of each class, then of the mass up to the end of each
                width = tl.where(
                    width_inv > 0.0, 1.0 / tl.where(width_inv > 0.0, width_inv, 1.0), 0.0
                )
                width = width / temperature
                kept = floor.to(tl.float32, bitcast=True)
                high = tl.exp(-at.to(tl.float32) * width) * (1.0 + SLACK)
                high = tl.where(high >= kept * (1.0 - SLACK), high, 0.0).to(tl.float64)
                low = tl.exp(-(at + 1).to(tl.float32) * width) * (1.0 - SLACK)
                low = tl.where((low > kept * (1.0 + SLACK)) & (at < CLASSES - 1), low, 0.0).to(
                    tl.float64
                )
                high = high * counts.to(tl.float64)
                low = low * counts.to(tl.float64)
                most, fewest = tl.cumsum(high, 0), tl.cumsum(low, 0)
                whole = _read(state + TOTAL).to(tl.float64) / ONE
                most = tl.minimum(most, whole - (tl.sum(low, 0) - fewest)) + whole * SURE
                fewest = (
                    tl.maximum(fewest, whole - (tl.sum(high, 0) - tl.cumsum(high, 0)))
                    - whole * SURE
                )
                first_class = tl.minimum(tl.sum((most < whole * p).to(tl.int32), 0), CLASSES - 1)
                last_class = tl.minimum(tl.sum((fewest < whole * p).to(tl.int32), 0), CLASSES - 1)
            tl.store(state + FIRST, first_class.to(tl.int64))
            tl.store(state + LAST, last_class.to(tl.int64))
            tl.store(
                state + NUM_ABOVE, tl.sum(tl.where(at < first_class, counts, 0), 0).to(tl.int64)
            )


@triton.jit
def _search(
    x_ptr, length, best, temperature, floor, k, p, num_above, mass_above, total, BLOCK: tl.constexpr
):
    """The cuts of `length` logits, of which others are above: (least key for the k-th token, least
    bits of a weight for top_p). Halving keeps the invariant that enough is at or above `low`."""
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


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _cuts_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, id_ptr, min_ptr, listed_ptr, state_ptr, vocab, row_stride, num_splits, num_blocks,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, CLASSES: tl.constexpr, SIZE: tl.constexpr, LIST: tl.constexpr,
    INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of the chosen classes, and finds the cuts."""
    if PDL:
        pdl_wait()
    i, split = tl.program_id(0), tl.program_id(1)
    row = _row(rows_ptr, i, INDEXED)
    temperature = tl.load(temperature_ptr + row)
    k, p = _cuts(row, vocab, top_k_ptr, top_p_ptr)
    if (temperature > 0.0) & ((k > 0) | (p < 1.0)):
        row_ptr = logits_ptr + i.to(tl.int64) * row_stride
        state, listed = state_ptr + i * SIZE, listed_ptr + i.to(tl.int64) * LIST
        best, _, least = _extent(max_ptr, id_ptr, min_ptr, i, num_splits, MAX_SPLITS)
        width_inv = _width_inv(best, least, temperature, CLASSES)
        floor = _floor(min_p_ptr, row)
        first_class, last_class = (
            tl.load(state + FIRST).to(tl.int32),
            tl.load(state + LAST).to(tl.int32),
        )
        start = split * num_blocks * BLOCK
        end = tl.minimum(vocab, start + num_blocks * BLOCK)
        mass = tl.zeros((BLOCK,), tl.int64)
        for first in range(start, end, BLOCK):
            x = _logits(row_ptr, first + tl.arange(0, BLOCK), end)
            w = _weights(x, best, temperature)
            there = _bits(w) >= floor
            classes = _class(x, best, width_inv, there, CLASSES)
            mass += _mass(w, there & (classes < first_class))
            chosen = (there & (classes >= first_class) & (classes <= last_class)).to(tl.int32)
            count = tl.sum(chosen, 0)
            if count > 0:
                before = tl.atomic_add(state + NUM_LISTED, count.to(tl.int64), sem="relaxed")
                at = before.to(tl.int32) + tl.cumsum(chosen, 0) - chosen
                tl.store(listed + at, x, mask=(chosen > 0) & (at < LIST))
        tl.atomic_add(state + MASS_ABOVE, tl.sum(mass, 0), sem="relaxed")
        if _is_last(state + ARRIVED_2, num_splits):
            num_listed, total = _read(state + NUM_LISTED).to(tl.int32), _read(state + TOTAL)
            if num_listed <= LIST:
                num_above, mass_above = (
                    _read(state + NUM_ABOVE).to(tl.int32),
                    _read(state + MASS_ABOVE),
                )
                key, bits = _search(
                    listed,
                    num_listed,
                    best,
                    temperature,
                    floor,
                    k,
                    p,
                    num_above,
                    mass_above,
                    total,
                    BLOCK,
                )
            else:
                num_above, mass_above = 0, tl.zeros((), tl.int64)
                key, bits = _search(
                    row_ptr,
                    vocab,
                    best,
                    temperature,
                    floor,
                    k,
                    p,
                    num_above,
                    mass_above,
                    total,
                    BLOCK,
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
    """Adds up what each block of a row keeps. The last thread block draws the row's token."""
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
        if _is_last(state + ARRIVED_3, num_splits):
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
    counts, listed = empty(NUM_CLASSES, torch.int32), empty(MAX_LISTED, torch.float32)
    rows = out if params.rows is None else params.rows
    given = logits, rows, params.temperature, params.top_k, params.top_p, params.min_p
    sizes = vocab, logits.stride(0), num_splits, num_blocks
    base = dict(BLOCK=block, SIZE=STATE, num_warps=8, **pdl_options(logits))
    own = dict(MAX_SPLITS=most, INDEXED=params.rows is not None, **base)
    classes = dict(CLASSES=NUM_CLASSES, LIST=MAX_LISTED, **own)
    grid = num_rows, num_splits
    _extent_kernel[grid](logits, *extent, counts, state, *sizes, CLASSES=NUM_CLASSES, **base)
    classes["num_warps"] = (
        16  # 8 would leave room for few warps beside: the searches take many registers
    )
    _classes_kernel[grid](*given, *extent, counts, state, *sizes, **classes)
    _cuts_kernel[grid](*given, *extent, listed, state, *sizes, **classes)
    places = params.seeds, params.history_lens
    _draw_kernel[grid](*given, *places, *extent, masses, state, out, *sizes, **own)
    return out
