"""Merge of ranks' attention results over keys divided by tokens (`ContextOps.merge_parts`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

ROWS = 8
"""Rows that a thread block merges. A row is one head of one token."""


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    parts_ptr, out_ptr, num_rows,
    RANKS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_R rows. A part's row has D numbers, then the bits of a float32."""
    if PDL:
        pdl_wait()
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ds, live = tl.arange(0, BLOCK_D), rows < num_rows
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        at = parts_ptr + (rank * num_rows + rows).to(tl.int64) * WIDTH + D
        sums = tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=live, other=0.0)
        largest = tl.maximum(largest, sums)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    acc, total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for rank in tl.static_range(RANKS):
        at = parts_ptr + (rank * num_rows + rows).to(tl.int64) * WIDTH
        sums = tl.load((at + D).to(tl.pointer_type(tl.float32), bitcast=True), mask=live, other=0.0)
        weight = tl.exp(sums - largest)
        part = tl.load(at[:, None] + ds[None, :], mask=live[:, None] & (ds < D)[None, :], other=0.0)
        acc += part.to(tl.float32) * weight[:, None]
        total += weight
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = out_ptr + rows.to(tl.int64)[:, None] * D + ds[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (ds < D)[None, :])


def merge_parts(parts: Tensor) -> Tensor:
    """`ContextOps.merge_parts`."""
    ranks, num_tokens, num_heads, width = parts.shape
    dim = width - 4 // parts.element_size()
    out = torch.empty(num_tokens, num_heads, dim, dtype=parts.dtype, device=parts.device)
    if num_rows := num_tokens * num_heads:
        _merge_kernel[(triton.cdiv(num_rows, ROWS),)](
            parts, out, num_rows, RANKS=ranks, D=dim, WIDTH=width, BLOCK_R=ROWS,
            BLOCK_D=triton.next_power_of_2(dim), num_warps=4, **pdl_options(parts),
        )  # fmt: skip
    return out
