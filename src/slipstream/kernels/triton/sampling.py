"""The likeliest tokens, log-probabilities and masks of logits [S, V]. Draws: `drawing.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait


@triton.jit
def _argmax_kernel(
    logits_ptr, token_ids_ptr, max_ptr, id_ptr, out_ptr, vocab, row_stride, span,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best of `span` tokens of a row, with its logit. WHOLE: only the row's best token.
    MAPPED: column i is the token token_ids[i]."""
    if PDL:
        pdl_wait()
    row, split = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(vocab, (split + 1) * span)
    maxima, ids = _block_argmax(
        logits_ptr + row.to(tl.int64) * row_stride, split * span, end, BLOCK
    )
    maximum = tl.max(maxima, 0)
    # min: a valid token even if the row is NaN
    best = tl.minimum(tl.min(tl.where(maxima == maximum, ids, 2147483647), 0), vocab - 1)
    if WHOLE:
        tl.store(out_ptr + row, tl.load(token_ids_ptr + best) if MAPPED else best.to(tl.int64))
    else:
        tl.store(max_ptr + row * SPLITS + split, maximum)
        tl.store(id_ptr + row * SPLITS + split, best)


@triton.jit
def _argmax_splits_kernel(
    max_ptr,
    id_ptr,
    token_ids_ptr,
    out_ptr,
    SPLITS: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    maxima = tl.load(max_ptr + row * SPLITS + at, mask=at < SPLITS, other=float("-inf"))
    ids = tl.load(id_ptr + row * SPLITS + at, mask=at < SPLITS, other=2147483647)
    best = tl.min(tl.where(maxima == tl.max(maxima, 0), ids, 2147483647), 0)
    tl.store(out_ptr + row, tl.load(token_ids_ptr + best) if MAPPED else best.to(tl.int64))


@triton.jit
def _block_argmax(row_ptr, start, end, BLOCK: tl.constexpr):
    """Scan tokens `start` … `end` in BLOCK interleaved sets: each set's largest logit and the first
    token with it."""
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = start + tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        ids = tl.where(logits > maxima, at, ids)
        maxima = tl.maximum(maxima, logits)
    return maxima, ids


SPLIT_ROWS = 64
"""Largest number of rows whose tokens are split over several thread blocks, to fill the chip."""
THRESHOLDS = Thresholds(sampled=(SPLIT_ROWS,))


def argmax(logits: Tensor, token_ids: Tensor | None = None, *, block: int = 4096) -> Tensor:
    """`OpSet.argmax`"""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    mapped, is_mapped = out if token_ids is None else token_ids, token_ids is not None
    block, num_splits, span = _splits(num_rows, vocab, block)
    options = dict(SPLITS=num_splits, MAPPED=is_mapped, **pdl_options(logits))
    maxima, best = (out, out) if num_splits == 1 else _of_splits(logits, num_splits)
    _argmax_kernel[(num_rows, num_splits)](
        logits, mapped, maxima, best, out, vocab, logits.stride(0), span,
        WHOLE=num_splits == 1, BLOCK=block, num_warps=8, **options,
    )  # fmt: skip
    if num_splits > 1:
        _argmax_splits_kernel[(num_rows,)](
            maxima,
            best,
            mapped,
            out,
            BLOCK=triton.next_power_of_2(num_splits),
            num_warps=1,
            **options,
        )
    return out


def _splits(num_rows: int, vocab: int, block: int) -> tuple[int, int, int]:
    """Division of rows among thread blocks: (tokens that a thread block scans at a time, thread
    blocks per row, tokens of each)"""
    block = min(block, triton.next_power_of_2(vocab))
    span = vocab if num_rows > SPLIT_ROWS else 2 * block
    return block, triton.cdiv(vocab, span), span


def _of_splits(logits: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Memory for the largest logit of each part of a row, and its column."""
    made = (
        torch.empty(len(logits), num_splits, dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32)
    )
    return next(made), next(made)


EXACT = 2**24
"""Largest range of columns that float32 represents exactly."""


def best_of_rank(logits: Tensor, rank: int, size: int, width: int, *, block: int = 4096) -> Tensor:
    """Logits [N, W], the columns of one of `size` ranks → float32 [N, P]. Numbers 2 · rank and 2 ·
    rank + 1 of a row are its largest logit and that logit's column among all ranks' columns; the
    others are 0, so that the sum over ranks has every rank's pair. Columns from `width` (at most
    EXACT) on do not count. P is a multiple of 4."""
    num_rows, own = logits.shape
    first = rank * own
    vocab = min(own, width - first)  # 0 or less: this rank has no column that counts
    pairs = torch.empty(num_rows, -(-2 * size // 4) * 4, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return pairs
    block, num_splits, span = _splits(num_rows, max(1, vocab), block)
    maxima, best = _of_splits(logits, num_splits)
    options = dict(SPLITS=num_splits, **pdl_options(logits))
    _argmax_kernel[(num_rows, num_splits)](
        logits, best, maxima, best, best, vocab, logits.stride(0), span,
        WHOLE=False, MAPPED=False, BLOCK=block, num_warps=8, **options,
    )  # fmt: skip
    _pair_kernel[(num_rows,)](
        maxima, best, pairs, 2 * rank, first,
        P=pairs.shape[1], BLOCK=triton.next_power_of_2(num_splits), BLOCK_P=triton.next_power_of_2(pairs.shape[1]),
        num_warps=1, **options,
    )  # fmt: skip
    return pairs


def best_of_all(pairs: Tensor, size: int) -> Tensor:
    """Pairs summed over `size` ranks (`best_of_rank`) → int64 [N]: the columns of the largest
    logits, the first one of equals."""
    out = torch.empty(len(pairs), dtype=torch.int64, device=pairs.device)
    if len(pairs):
        grid = (triton.cdiv(len(pairs), 128),)
        _best_pair_kernel[grid](
            pairs,
            out,
            len(pairs),
            P=pairs.shape[1],
            RANKS=size,
            BLOCK=128,
            num_warps=4,
            **pdl_options(pairs),
        )
    return out


@triton.jit
def _pair_kernel(
    max_ptr, id_ptr, pairs_ptr, place, first,
    SPLITS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the best of each split of a row into the format of `best_of_rank`."""
    if PDL:
        pdl_wait()
    row, at, column = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK_P)
    maxima = tl.load(max_ptr + row * SPLITS + at, mask=at < SPLITS, other=float("-inf"))
    ids = tl.load(id_ptr + row * SPLITS + at, mask=at < SPLITS, other=2147483647)
    maximum = tl.max(maxima, 0)
    best = first + tl.min(tl.where(maxima == maximum, ids, 2147483647), 0)
    pair = tl.where(
        column == place, maximum, tl.where(column == place + 1, best.to(tl.float32), 0.0)
    )
    tl.store(pairs_ptr + row * P + column, pair, mask=column < P)


@triton.jit
def _best_pair_kernel(
    pairs_ptr,
    out_ptr,
    num_rows,
    P: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < num_rows
    maximum = tl.load(pairs_ptr + row * P, mask=here, other=0.0)
    best = tl.load(pairs_ptr + row * P + 1, mask=here, other=0.0)
    for rank in tl.static_range(1, RANKS):
        other = tl.load(pairs_ptr + row * P + 2 * rank, mask=here, other=0.0)
        column = tl.load(pairs_ptr + row * P + 2 * rank + 1, mask=here, other=0.0)
        best = tl.where(other > maximum, column, best)
        maximum = tl.maximum(maximum, other)
    tl.store(out_ptr + row, best.to(tl.int64), mask=here)


TOP_BLOCK = 4096
"""Tokens of a row that a thread block of `_best_kernel` holds in registers."""
MAX_TOP = 20
"""Largest number of likeliest tokens for which all numbers share one compiled kernel."""
MIN_KEY = tl.constexpr(-(2**63))
"""A key below every key of `_ordered`."""


@triton.jit
def _ordered(x, at):
    """int64 keys ordered like float32 x; of equal x the lower `at` first. No two keys are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 is 0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - at).to(
        tl.int64
    )


@triton.jit(do_not_specialize=["num_top"])
def _best_kernel(
    logits_ptr,
    tokens_ptr,
    max_ptr,
    sum_ptr,
    count_ptr,
    key_ptr,
    vocab,
    row_stride,
    num_top,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce BLOCK tokens of a row: the largest logit, the sum of exponents relative to it, the
    number of logits above the chosen token's, and the keys of the `num_top` best."""
    if PDL:
        pdl_wait()
    row, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    at = split * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(row_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    best = tl.max(x, 0)
    part = row * num_splits + split
    tl.store(max_ptr + part, best)
    tl.store(sum_ptr + part, tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), 0))
    tl.store(count_ptr + part, tl.sum((x > chosen).to(tl.int32), 0))
    keys = tl.where(inside, _ordered(x, at), MIN_KEY)
    for i in range(num_top):
        key = tl.max(keys, 0)
        tl.store(key_ptr + part * num_top + i, key)
        keys = tl.where(keys == key, MIN_KEY, keys)


@triton.jit(do_not_specialize=["num_top"])
def _merge_best_kernel(
    logits_ptr, tokens_ptr, max_ptr, sum_ptr, count_ptr, key_ptr, out_ptr, row_stride,
    num_splits, num_top, BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge one row's parts: log-probability and rank of the chosen token, and the best tokens with
    theirs."""
    if PDL:
        pdl_wait()
    row = tl.program_id(0)
    parts, at = tl.arange(0, BLOCK), tl.arange(0, BLOCK_KEYS)
    there = parts < num_splits
    maxima = tl.load(max_ptr + row * num_splits + parts, mask=there, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_splits + parts, mask=there, other=0.0)
    best = tl.max(maxima, 0)
    log_z = best + tl.log(tl.sum(sums * tl.exp(maxima - best), 0))
    chosen = tl.load(logits_ptr + row.to(tl.int64) * row_stride + tl.load(tokens_ptr + row)).to(
        tl.float32
    )
    out = out_ptr + row * (2 + 2 * num_top)
    tl.store(out, (chosen - log_z).to(tl.int32, bitcast=True))
    above = tl.load(count_ptr + row * num_splits + parts, mask=there, other=0)
    tl.store(out + 1, tl.sum(above, 0) + 1)
    num_keys = num_splits * num_top
    keys = tl.load(key_ptr + row * num_keys + at, mask=at < num_keys, other=MIN_KEY)
    for i in range(num_top):
        key = tl.max(keys, 0)
        bits = (key >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(out + 2 + i, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32))
        tl.store(out + 2 + num_top + i, (value - log_z).to(tl.int32, bitcast=True))
        keys = tl.where(keys == key, MIN_KEY, keys)


def packed_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, *, block: int = TOP_BLOCK
) -> Tensor:
    """`OpSet.packed_logprobs`. Logits are read once: the `num_top` best of each part of a row are the
    candidates."""
    tokens = tokens.to(torch.int64)  # a prompt's are int32, from any place of a row
    num_rows, vocab = logits.shape
    block = min(block, triton.next_power_of_2(vocab))
    num_splits = triton.cdiv(vocab, block)

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, size, dtype=dtype, device=logits.device)

    packed = empty(2 + 2 * num_top, torch.int32)
    if not num_rows:
        return packed
    parts = (
        empty(num_splits, torch.float32),
        empty(num_splits, torch.float32),
        empty(num_splits, torch.int32),
        empty(num_splits * num_top, torch.int64),
    )
    options = pdl_options(logits)
    _best_kernel[(num_rows, num_splits)](
        logits,
        tokens,
        *parts,
        vocab,
        logits.stride(0),
        num_top,
        BLOCK=block,
        num_warps=8,
        **options,
    )
    _merge_best_kernel[(num_rows,)](
        logits, tokens, *parts, packed, logits.stride(0), num_splits, num_top,
        BLOCK=triton.next_power_of_2(num_splits), BLOCK_KEYS=triton.next_power_of_2(num_splits * max(MAX_TOP, num_top)),
        num_warps=1, **options,
    )  # fmt: skip
    return packed


def best_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, *, block: int = TOP_BLOCK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`OpSet.best_logprobs`"""
    num_top = min(num_top, logits.shape[1])
    packed = packed_logprobs(logits, tokens, num_top, block=block)
    chosen, rank, ids, values = packed.split((1, 1, num_top, num_top), dim=1)
    floats = (x.contiguous().view(torch.float32) for x in (chosen, values))
    return next(floats)[:, 0], rank[:, 0].long(), ids.long(), next(floats)


@triton.jit
def _mask_kernel(
    logits_ptr, rows_ptr, bits_ptr, which_ptr, vocab, row_stride, words, BLOCK: tl.constexpr
):
    """Mask one span of one row's tokens. Only forbidden tokens are written."""
    i, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i).to(tl.int64)
    place = tl.load(which_ptr + i).to(tl.int64)
    has_word = (at // 32 < words) & (place >= 0)
    word = tl.load(bits_ptr + place * words + at // 32, mask=has_word, other=0)
    allowed = (word >> (at % 32)) & 1 | (place < 0)
    tl.store(logits_ptr + row * row_stride + at, float("-inf"), mask=(at < vocab) & (allowed == 0))


def mask_logits(
    logits: Tensor, rows: Tensor, bits: Tensor, which: Tensor | None = None, *, block: int = 4096
) -> None:
    """`OpSet.mask_logits`"""
    if which is None:
        which = torch.arange(len(rows), device=rows.device)
    grid = (len(rows), triton.cdiv(logits.shape[1], block))
    _mask_kernel[grid](
        logits,
        rows,
        bits,
        which,
        logits.shape[1],
        logits.stride(0),
        bits.shape[1],
        BLOCK=block,
        num_warps=8,
    )
