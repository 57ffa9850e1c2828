"""Attention whose keys are split over thread blocks (flash-decoding, Dao et al. 2023), where there are too few queries to
fill the chip.

A thread block computes some queries over a *part* of their keys. It writes their outputs and, in units of log 2, the logarithm
of their softmax sums. A second kernel adds the parts of each query in a fixed order, weighted by these sums.

Decodes of different lengths get parts of about the same length (`DecodeParts`): a thread block that walks along 8,000 keys
alone would keep all others waiting. The parts of a step are the same in all layers of a kind, and are found once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

MAX_SPLITS = 64
CTAS_PER_SM = 4
"""Decode thread blocks wanted per multiprocessor, beyond one of each kv head of a sequence."""
FEW_SEQUENCES = 8
"""With more, a sequence has at most half of MAX_SPLITS parts."""


def num_splits(
    num_programs: int, max_seq_len: int, block_n: int, num_processors: int, ctas_per_sm: int = CTAS_PER_SM
) -> int:
    """Of decodes: a power of two that fills the chip, with at least two tiles of the longest sequence in each split."""
    wanted = triton.cdiv(ctas_per_sm * num_processors, num_programs)
    most = max(1, max_seq_len // (2 * block_n))
    splits = int(min(wanted, most, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def num_extra_parts(programs_each: int, num_processors: int) -> int:
    """How many parts there may be beyond one a sequence, each of which takes `programs_each` thread blocks."""
    return max(1, CTAS_PER_SM * num_processors // programs_each)


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of a step's decodes. A whole sequence is one part."""

    parts: Tensor  # int32 [P, 4]: sequence, −1 where there is no part; first and end key; slot in the scratch, −1 if whole
    split: Tensor  # int32 [N, 3]: sequences with several parts, then −1; their first slots; their numbers of parts
    max_parts: int  # of a sequence
    num_slots: int  # of the scratch, [slots, H]

    @classmethod
    def of(cls, meta: AttentionMetadata, window: int | None, num_extra: int, block_n: int) -> DecodeParts:
        """Of `meta`'s decodes, in tiles of `block_n` keys. Made once for all layers of a step."""
        key = (cls, window, num_extra, block_n)
        return meta.once(key, lambda: cls._find(meta.seq_lens, meta.num_decodes, window, num_extra, block_n))

    @classmethod
    def _find(cls, seq_lens: Tensor, num_seqs: int, window: int | None, num_extra: int, block_n: int) -> DecodeParts:
        max_parts = MAX_SPLITS if num_seqs <= FEW_SEQUENCES else MAX_SPLITS // 2
        parts = seq_lens.new_empty(num_seqs + num_extra, 4)
        split = seq_lens.new_empty(min(num_seqs, max(1, num_extra // 2)), 3)
        _find_parts_kernel[(1,)](
            seq_lens, parts, split, num_seqs, window or 0, num_extra, max_parts, len(split),
            BLOCK=128 if num_seqs <= 128 else max(1024, triton.next_power_of_2(num_seqs)),
            BLOCK_EXTRA=triton.next_power_of_2(num_extra), BLOCK_N=block_n, HAS_WINDOW=window is not None,
        )  # fmt: skip
        return cls(parts, split, max_parts, num_extra)


@triton.jit(do_not_specialize=["num_seqs", "window", "num_extra", "max_parts", "most_split"])
def _find_parts_kernel(
    lens_ptr, parts_ptr, split_ptr, num_seqs, window, num_extra, max_parts, most_split,
    BLOCK: tl.constexpr, BLOCK_EXTRA: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """`DecodeParts`. Of L keys in all a part of a split sequence has at least L / num_extra. So there are at most num_extra
    such parts, of at most half as many sequences."""
    seqs = tl.arange(0, BLOCK)
    live = seqs < num_seqs
    lens = tl.load(lens_ptr + seqs, mask=live, other=0)
    low = tl.zeros((BLOCK,), tl.int32)
    if HAS_WINDOW:
        low = tl.maximum(0, lens - window) // BLOCK_N * BLOCK_N
    least = tl.maximum(tl.cdiv(tl.sum(lens - low, 0), num_extra), 2 * BLOCK_N)
    tiles = tl.cdiv(lens - low, BLOCK_N)
    each = tl.cdiv(tiles, tl.maximum(tl.minimum((lens - low) // least, max_parts), 1))  # tiles of a part
    num = tl.where(live, tl.maximum(tl.cdiv(tiles, tl.maximum(each, 1)), 1), 0)
    first = tl.cumsum(num, 0) - num
    in_slots = tl.where(num > 1, num, 0)
    slot = tl.cumsum(in_slots, 0) - in_slots
    for part in range(tl.max(num, 0)):
        begin = low + part * each * BLOCK_N
        at = parts_ptr + (first + part) * 4
        exists = part < num
        tl.store(at, seqs, mask=exists)
        tl.store(at + 1, begin, mask=exists)
        tl.store(at + 2, tl.minimum(begin + each * BLOCK_N, lens), mask=exists)
        tl.store(at + 3, tl.where(num > 1, slot + part, -1), mask=exists)
    extra = tl.arange(0, BLOCK_EXTRA)
    behind = tl.sum(num, 0) + extra
    tl.store(parts_ptr + behind * 4, tl.full((BLOCK_EXTRA,), -1, tl.int32), mask=behind < num_seqs + num_extra)
    is_split = (num > 1).to(tl.int32)
    at = split_ptr + (tl.cumsum(is_split, 0) - is_split) * 3
    tl.store(at, seqs, mask=num > 1)
    tl.store(at + 1, slot, mask=num > 1)
    tl.store(at + 2, num, mask=num > 1)
    behind = tl.sum(is_split, 0) + extra
    tl.store(split_ptr + behind * 3, tl.full((BLOCK_EXTRA,), -1, tl.int32), mask=behind < most_split)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, which_ptr, out_ptr, splits,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    COUNTED: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of BLOCK_G query heads of a kv head. Empty parts are skipped.

    A token's parts are `splits`. COUNTED: `which` [T, K] has their number, 0 for what is in `out` already. LISTED: `which` is
    `DecodeParts.split`, and the scratch is [slots, H] instead of [T, H, splits]."""
    if PDL:
        pdl_wait()
    TILES: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    token, head = tl.program_id(0), tl.program_id(1) // TILES
    gs, ds, ss = tl.program_id(1) % TILES * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    heads = head * G + gs
    num = splits
    if LISTED:
        entry = which_ptr + token * 3
        token, num = tl.load(entry), tl.load(entry + 2)
        if token < 0:
            return
        at = (tl.load(entry + 1) + ss)[None, :] * (K * G) + heads[:, None]
    else:
        if COUNTED:
            num = tl.load(which_ptr + token * K + head)
            if num == 0:
                return
        at = (token * (K * G) + heads)[:, None] * splits + ss[None, :]
    lse = tl.load(lse_ptr + at, mask=(ss < num)[None, :] & (gs < G)[:, None], other=float("-inf"))
    m_i = tl.max(lse, 1)[:, None]
    weights = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(m_i == float("-inf"), 0.0, m_i)))
    l_i = tl.sum(weights, 1)[:, None]
    mask = (lse != float("-inf"))[:, :, None] & (ds < D)[None, None, :]
    partials = tl.load(partial_ptr + at[:, :, None].to(tl.int64) * D + ds[None, None, :], mask=mask, other=0.0)
    out = tl.sum(partials * weights[:, :, None], 1) / tl.where(l_i == 0.0, 1.0, l_i)
    offset = (token * (K * G) + heads)[:, None] * D + ds[None, :]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=(gs < G)[:, None] & (ds < D)[None, :])


def scratch(num_tokens: int, q: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor]:
    """What thread blocks write of `num_tokens` tokens of q [T, H, D]: their outputs, float32 [num_tokens, H, splits, width],
    and float32 [num_tokens, H, splits], which goes with them."""
    shape = (num_tokens, q.shape[1], splits)
    return q.new_empty(*shape, width, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def combine(partial: Tensor, lse: Tensor, out: Tensor, splits: int, counts: Tensor | None = None) -> None:
    """`scratch`'s of T tokens → `out` [T, H, D], contiguous.

    `counts` int32 [T, K]: how many parts each token's heads of a kv head have, 0 for what is in `out` already. None: all have
    `splits`."""
    num_tokens, num_heads, dim = out.shape
    options = dict(D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), LISTED=False, num_warps=4, **pdl_options(out))
    if counts is None:
        _combine_kernel[(num_tokens, num_heads)](
            partial, lse, lse, out, splits, K=num_heads, G=1, BLOCK_G=1, BLOCK_S=MAX_SPLITS, COUNTED=False, **options
        )
        return
    num_kv_heads = counts.shape[1]
    group = num_heads // num_kv_heads
    block_s = triton.next_power_of_2(splits)
    block_g = min(triton.next_power_of_2(group), max(1, MAX_SPLITS // block_s))
    _combine_kernel[(num_tokens, num_kv_heads * triton.cdiv(group, block_g))](
        partial, lse, counts, out, splits, K=num_kv_heads, G=group, BLOCK_G=block_g, BLOCK_S=block_s, COUNTED=True, **options
    )


def combine_decodes(partial: Tensor, lse: Tensor, out: Tensor, parts: DecodeParts) -> None:
    """`scratch`'s of `parts.num_slots` tokens → the rows of `out` [T, H, D], contiguous, of sequences that are split."""
    _, num_heads, dim = out.shape
    block_g = MAX_SPLITS // parts.max_parts
    _combine_kernel[(len(parts.split), triton.cdiv(num_heads, block_g))](
        partial, lse, parts.split, out, 1, K=1, G=num_heads, D=dim, BLOCK_G=block_g,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_S=parts.max_parts, COUNTED=False, LISTED=True, num_warps=4,
        **pdl_options(out),
    )  # fmt: skip
