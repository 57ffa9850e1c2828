"""Attention with the keys split over thread blocks (flash-decoding, Dao et al. 2023), for too few
queries to fill the chip.

A thread block computes some queries over a *part* of their keys. It writes their outputs and the
logarithm (in units of log 2) of their softmax sums. The parts of each query are added in a fixed
order, weighted by these sums. With more than a few decodes the thread block that ends last adds
them; otherwise a second kernel does.

Decodes of different lengths get parts of about the same length (`DecodeParts`): a single thread
block with 8,000 keys would keep all others waiting. The parts of a step are the same in all layers
of a kind, and are computed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, JoinedSteps
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

MAX_SPLITS, CTAS_PER_SM = 64, 4
"""Maximum number of equal parts of a sequence's keys, and the thread blocks per multiprocessor from
which keys are not split."""
PARTS_PER_SM = 16
"""Thread blocks of further parts of decodes per multiprocessor, in addition to the sequences' first
parts."""
MAX_PARTS, MIN_KEYS = 32, 128
"""Maximum number of parts of a decode's keys, and minimum number of keys in a part. The thread
block that ends last merges the parts alone."""
FEW_SEQUENCES = 4
"""Maximum number of decodes whose keys are all split into the same number of parts. There are many
parts then, so a separate kernel merges them."""
THRESHOLDS = Thresholds(decodes=(FEW_SEQUENCES, 128))


def num_splits(
    num_programs: int,
    max_seq_len: int,
    block_n: int,
    num_processors: int,
    ctas_per_sm: int = CTAS_PER_SM,
) -> int:
    """Number of splits of each decode's keys: a power of two that fills the chip, with at least two
    tiles of the longest sequence in each split."""
    wanted = triton.cdiv(ctas_per_sm * num_processors, num_programs)
    most = max(1, max_seq_len // (2 * block_n))
    splits = int(min(wanted, most, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of a step's decodes: first the first part of each sequence, then all others. A
    whole sequence is one part.

    The scratch is [slots, H], with a sequence's slots next to each other. For few sequences it is
    [T, H, splits] (`scratch`)."""

    # int32 [P, 8]: sequence (−1: no part); first and end key; slot (−1 for a whole sequence; for
    # few sequences the index among their parts); the sequence's first slot; its number of parts
    parts: Tensor
    # int32 [slots, programs_each]: finished parts of a sequence, at its first slot. 0 between
    # kernels
    arrived: Tensor
    splits: int  # per sequence, if there are few; else 0

    @classmethod
    def of(
        cls,
        meta: AttentionMetadata,
        window: int | None,
        programs_each: int,
        block_n: int,
        num_processors: int,
        ctas_per_sm: int = CTAS_PER_SM,
    ) -> DecodeParts:
        """Parts of `meta`'s decodes, in tiles of `block_n` keys; `programs_each` thread blocks
        compute each part. `ctas_per_sm`: see `num_splits`. Made once for all layers of a step."""
        num_extra = max(1, PARTS_PER_SM * num_processors // programs_each)
        splits = 0
        if meta.num_decodes <= FEW_SEQUENCES:
            splits = num_splits(
                meta.num_decodes * programs_each,
                meta.max_seq_len,
                block_n,
                num_processors,
                ctas_per_sm,
            )
        sizes = dict(
            programs_each=programs_each, block_n=block_n, num_extra=num_extra, splits=splits
        )
        steps = meta.of_steps or JoinedSteps(meta, 0, 1)
        lens, sizes["num_seqs"], sizes["num_steps"] = (
            steps.all.seq_lens,
            meta.num_decodes,
            steps.count,
        )
        return steps.all.once(
            (cls, window, *sizes.values()), lambda: cls.find(lens, window=window, **sizes)
        )[steps.index]

    @classmethod
    def find(
        cls,
        lens: Tensor,
        *,
        num_seqs: int,
        window: int | None,
        programs_each: int,
        block_n: int,
        num_extra: int,
        splits: int,
        num_steps: int = 1,
    ) -> list[DecodeParts]:
        """Finds the parts of each of `num_steps` steps, whose `num_seqs` decodes are at equal
        distances in `lens`. Without `splits`, `num_extra` limits the parts after the first ones."""
        num_slots = 1
        if splits:
            num_extra = num_seqs * (splits - 1)
        else:
            num_slots = num_extra = min(num_extra, num_seqs * (MAX_PARTS - 1))
        parts = lens.new_empty(num_steps, num_seqs + num_extra, 8)
        # a step's counters begin at a multiple of 16 bytes
        arrived = lens.new_empty(num_steps, -(-num_slots * programs_each // 4) * 4)
        _find_parts_kernel[(num_steps,)](
            lens, parts, arrived, num_seqs, window or 0, num_extra, num_slots * programs_each, splits, len(lens) // num_steps,
            BLOCK=128 if num_seqs <= 128 else max(1024, triton.next_power_of_2(num_seqs)),
            BLOCK_N=block_n, MAX=MAX_PARTS, LEAST=MIN_KEYS, HAS_WINDOW=window is not None,
        )  # fmt: skip
        counters = arrived[:, : num_slots * programs_each].unflatten(1, (num_slots, programs_each))
        return [cls(p, a, splits) for p, a in zip(parts, counters, strict=True)]


@triton.jit(
    do_not_specialize=["num_seqs", "window", "num_extra", "num_arrived", "splits", "distance"]
)
def _find_parts_kernel(
    lens_ptr, parts_ptr, arrived_ptr, num_seqs, window, num_extra, num_arrived, splits, distance,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute `DecodeParts`. Without `splits` a split sequence with l keys of L in all has at most
    l · num_extra / L parts, so there are at most num_extra such parts."""
    step = tl.program_id(0)
    lens_ptr += step * distance
    parts_ptr += step * (num_seqs + num_extra) * 8
    arrived_ptr += step * tl.cdiv(num_arrived, 4) * 4
    seqs = tl.arange(0, BLOCK)
    live = seqs < num_seqs
    lens = tl.load(lens_ptr + seqs, mask=live, other=0)
    low = tl.zeros((BLOCK,), tl.int32)
    if HAS_WINDOW:
        low = tl.maximum(0, lens - window) // BLOCK_N * BLOCK_N
    least = tl.maximum(tl.cdiv(tl.sum(lens - low, 0), tl.maximum(num_extra, 1)), LEAST)
    tiles = tl.cdiv(lens - low, BLOCK_N)
    each = tl.cdiv(tiles, tl.maximum(tl.minimum((lens - low) // least, MAX), 1))  # tiles of a part
    num = tl.maximum(tl.cdiv(tiles, tl.maximum(each, 1)), 1)
    if splits > 0:
        each = tl.cdiv(tiles, splits)
        num = tl.zeros((BLOCK,), tl.int32) + splits
    num = tl.where(live, num, 0)
    in_slots = tl.where(num > 1, num, 0)
    slot = tl.cumsum(in_slots, 0) - in_slots
    behind = tl.where(live, num - 1, 0)
    others = num_seqs + tl.cumsum(behind, 0) - num  # start of the other parts, minus one
    for part in range(tl.max(num, 0)):
        begin = tl.minimum(low + part * each * BLOCK_N, lens)
        at = parts_ptr + tl.where(part == 0, seqs, others + part) * 8
        exists = part < num
        tl.store(at, seqs, mask=exists)
        tl.store(at + 1, begin, mask=exists)
        tl.store(at + 2, tl.minimum(begin + each * BLOCK_N, lens), mask=exists)
        tl.store(
            at + 3, tl.where(num == 1, -1, tl.where(splits > 0, part, slot + part)), mask=exists
        )
        tl.store(at + 4, slot, mask=exists)
        tl.store(at + 5, num, mask=exists)
    total = tl.sum(num, 0)
    for begin in range(total, num_seqs + num_extra, BLOCK):
        at = parts_ptr + (begin + seqs) * 8
        tl.store(at, tl.full((BLOCK,), -1, tl.int32), mask=begin + seqs < num_seqs + num_extra)
    for begin in range(0, num_arrived, BLOCK):
        tl.store(
            arrived_ptr + begin + seqs,
            tl.zeros((BLOCK,), tl.int32),
            mask=begin + seqs < num_arrived,
        )


@triton.jit
def store_sums(at, m_i, l_i, live):
    """Store the natural logarithm of sums l_i · 2^m_i as the bits of float32 at `at` [N]; −inf for
    empty ones. Pointers to 16-bit numbers are at multiples of 4 bytes."""
    empty = l_i == 0.0
    found = (m_i + tl.log2(tl.where(empty, 1.0, l_i))) * 0.6931471805599453
    pointers = at.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(pointers, tl.where(empty, float("-inf"), found), mask=live)


@triton.jit
def merge_parts(
    partial_ptr, lse_ptr, out_ptr, first, num, row, heads, live,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MAX: tl.constexpr, SUMS: tl.constexpr = 0,
):  # fmt: skip
    """Merge the results of parts `first` … `first` + num for these query heads into row `row` of
    `out`. The scratch is [slots, H], written by other thread blocks. SUMS: as in
    `_combine_kernel`."""
    ds, ss = tl.arange(0, BLOCK_D), tl.arange(0, MAX)
    at = (first + ss)[:, None] * H + heads[None, :]
    mask = (ss < num)[:, None] & live[None, :]
    lse = tl.load(lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    m_i = tl.where(live, tl.max(lse, 0), 0.0)  # finite: no part is empty
    l_i = tl.where(live, tl.sum(tl.exp2(lse - m_i[None, :]), 0), 1.0)
    acc = tl.zeros((heads.shape[0], BLOCK_D), tl.float32)
    # parts loaded at once; more registers would cost thread blocks
    EACH: tl.constexpr = max(1, 16 // heads.shape[0])
    for begin in range(0, num, EACH):
        these = begin + tl.arange(0, EACH)
        exists = (these < num)[:, None] & live[None, :]
        rows = (first + these)[:, None] * H + heads[None, :]
        weights = tl.exp2(
            tl.load(lse_ptr + rows, mask=exists, other=float("-inf"), cache_modifier=".cg")
            - m_i[None, :]
        )
        numbers = partial_ptr + rows[:, :, None] * D + ds[None, None, :]
        inside = exists[:, :, None] & (ds < D)[None, None, :]
        acc += tl.sum(
            tl.load(numbers, mask=inside, other=0.0, cache_modifier=".cg") * weights[:, :, None], 0
        )
    offset = (row * H + heads)[:, None] * (D + SUMS) + ds[None, :]
    if SUMS:
        store_sums(out_ptr + (row * H + heads) * (D + SUMS) + D, m_i, l_i, live)
    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, out, mask=live[:, None] & (ds < D)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, counts_ptr, out_ptr, splits,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    COUNTED: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of BLOCK_G query heads of a kv head. Empty parts are skipped. COUNTED:
    `counts` [T, K] has their number, 0 for rows already in `out`; else all have `splits`. SUMS: the
    rows of `out` end in SUMS numbers for the logarithm of the sum (`store_sums`)."""
    if PDL:
        pdl_wait()
    TILES: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    token, head = tl.program_id(0), tl.program_id(1) // TILES
    gs, ds, ss = (
        tl.program_id(1) % TILES * BLOCK_G + tl.arange(0, BLOCK_G),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_S),
    )
    heads = head * G + gs
    num = splits
    if COUNTED:
        num = tl.load(counts_ptr + token * K + head)
        if SUMS == 0 and num == 0:
            return
    at = (token * (K * G) + heads)[:, None] * splits + ss[None, :]
    lse = tl.load(lse_ptr + at, mask=(ss < num)[None, :] & (gs < G)[:, None], other=float("-inf"))
    m_i = tl.max(lse, 1)[:, None]
    weights = tl.where(
        lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(m_i == float("-inf"), 0.0, m_i))
    )
    l_i = tl.sum(weights, 1)[:, None]
    mask = (lse != float("-inf"))[:, :, None] & (ds < D)[None, None, :]
    partials = tl.load(
        partial_ptr + at[:, :, None].to(tl.int64) * D + ds[None, None, :], mask=mask, other=0.0
    )
    out = tl.sum(partials * weights[:, :, None], 1) / tl.where(l_i == 0.0, 1.0, l_i)
    row = (token * (K * G) + heads) * (D + SUMS)
    if SUMS:
        m_i, l_i = tl.reshape(m_i, (BLOCK_G,)), tl.reshape(l_i, (BLOCK_G,))
        store_sums(out_ptr + row + D, m_i, l_i, gs < G)
    tl.store(
        out_ptr + row[:, None] + ds[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(gs < G)[:, None] & (ds < D)[None, :],
    )


def scratch(num_tokens: int, q: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor]:
    """Allocates scratch for `num_tokens` tokens of q [T, H, D]: outputs, float32 [num_tokens, H,
    splits, width], and the logarithms of their sums, float32 [num_tokens, H, splits]."""
    shape = (num_tokens, q.shape[1], splits)
    return q.new_empty(*shape, width, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def combine(
    partial: Tensor,
    lse: Tensor,
    out: Tensor,
    splits: int,
    counts: Tensor | None = None,
    *,
    sums: int = 0,
) -> None:
    """Merge the parts of T tokens in `scratch` into `out` [T, H, D], contiguous.

    `sums`: how many more numbers a row of `out` has, for the logarithm of the sum of exponentials
    (`ContextOps.attention_part`).

    `counts` int32 [T, K]: number of parts of each token's heads of a kv head, 0 for rows already in
    `out`. None: all have `splits`."""
    num_tokens, num_heads, dim = out.shape
    dim -= sums
    options = dict(
        SUMS=sums,
        D=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
        **pdl_options(out),
    )
    if counts is None:
        _combine_kernel[(num_tokens, num_heads)](
            partial,
            lse,
            lse,
            out,
            splits,
            K=num_heads,
            G=1,
            BLOCK_G=1,
            BLOCK_S=MAX_SPLITS,
            COUNTED=False,
            **options,
        )
        return
    num_kv_heads = counts.shape[1]
    group = num_heads // num_kv_heads
    block_s = triton.next_power_of_2(splits)
    block_g = min(triton.next_power_of_2(group), max(1, MAX_SPLITS // block_s))
    _combine_kernel[(num_tokens, num_kv_heads * triton.cdiv(group, block_g))](
        partial,
        lse,
        counts,
        out,
        splits,
        K=num_kv_heads,
        G=group,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        COUNTED=True,
        **options,
    )
