"""Attention whose keys are split over thread blocks (flash-decoding, Dao et al. 2023), where there are too few queries to
fill the chip.

A thread block computes some queries over a *part* of their keys. It writes their outputs and, in units of log 2, the logarithm
of their softmax sums. A second kernel adds the parts of each query in a fixed order, weighted by these sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

MAX_SPLITS = 64
CTAS_PER_SM = 4
"""Decode thread blocks wanted per multiprocessor; with more, sequences are not split."""


def num_splits(
    num_programs: int, max_seq_len: int, block_n: int, num_processors: int, ctas_per_sm: int = CTAS_PER_SM
) -> int:
    """Of decodes: a power of two that fills the chip, with at least two tiles of the longest sequence in each split."""
    wanted = triton.cdiv(ctas_per_sm * num_processors, num_programs)
    most = max(1, max_seq_len // (2 * block_n))
    splits = int(min(wanted, most, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, parts_ptr, out_ptr, splits,
    HEADS_EACH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, HAS_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a (token, query head). Empty ones are skipped."""
    if PDL:
        pdl_wait()
    row = tl.program_id(0)
    num_parts = splits
    if HAS_PARTS:
        num_parts = tl.load(parts_ptr + row // HEADS_EACH)
        if num_parts == 0:
            return
    ds = tl.arange(0, BLOCK_D)
    at = tl.arange(0, BLOCK_S)
    lse = tl.load(lse_ptr + row * splits + at, mask=at < num_parts, other=float("-inf"))
    m_i = tl.max(lse, 0)
    weights = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(m_i == float("-inf"), 0.0, m_i)))
    l_i = tl.sum(weights, 0)
    mask = (lse != float("-inf"))[:, None] & (ds < D)[None, :]
    offsets = partial_ptr + (row * splits + at)[:, None].to(tl.int64) * D + ds[None, :]
    partials = tl.load(offsets, mask=mask, other=0.0)
    out = tl.sum(partials * weights[:, None], 0) / tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(out_ptr + row * D + ds, out.to(out_ptr.dtype.element_ty), mask=ds < D)


def scratch(num_tokens: int, q: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor]:
    """What thread blocks write of `num_tokens` tokens of q [T, H, D]: their outputs, float32 [num_tokens, H, splits, width],
    and float32 [num_tokens, H, splits], which goes with them."""
    shape = (num_tokens, q.shape[1], splits)
    return q.new_empty(*shape, width, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def combine(
    partial: Tensor, lse: Tensor, out: Tensor, splits: int, *, parts: Tensor | None = None, max_splits: int = MAX_SPLITS
) -> None:
    """`scratch`'s of T tokens → `out` [T, H, D], contiguous.

    `parts` int32 [T, K]: how many parts each token's heads of a kv head have, 0 for what is in `out` already. None: all have
    `splits`."""
    num_tokens, num_heads, dim = out.shape
    _combine_kernel[(num_tokens * num_heads,)](
        partial, lse, lse if parts is None else parts, out, splits,
        HEADS_EACH=1 if parts is None else num_heads // parts.shape[1], D=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_S=max_splits, HAS_PARTS=parts is not None,
        num_warps=4, **pdl_options(out),
    )  # fmt: skip
