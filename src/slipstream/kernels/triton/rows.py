"""A step's reads from and writes to its sequences' token rows: one kernel each, where torch needs a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 128


@triton.jit(do_not_specialize=["T", "row_size", "num_blocks"])
def _gather_inputs_kernel(
    tokens_ptr, blocks_ptr, rows_ptr, positions_ptr, ids_ptr, wide_ptr, slots_ptr, T, row_size, num_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < T
    row = tl.load(rows_ptr + at, mask=live, other=0).to(tl.int64)
    position = tl.load(positions_ptr + at, mask=live, other=0).to(tl.int64)
    tl.store(ids_ptr + at, tl.load(tokens_ptr + row * row_size + position, mask=live, other=0), mask=live)
    block = tl.load(blocks_ptr + row * num_blocks + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(wide_ptr + at, position, mask=live)
    tl.store(slots_ptr + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


def gather_inputs(
    tokens: Tensor, block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`OpSet.gather_inputs`."""
    rows, positions = rows.contiguous(), positions.contiguous()
    count, device = len(rows), rows.device
    ids = torch.empty(count, dtype=torch.int32, device=device)
    wide, slots = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    if count:
        _gather_inputs_kernel[(triton.cdiv(count, TOKENS_PER_PROGRAM),)](
            tokens, block_table, rows, positions, ids, wide, slots, count, tokens.stride(0), block_table.stride(0),
            BLOCK_SIZE=block_size, BLOCK=TOKENS_PER_PROGRAM,
        )  # fmt: skip
    return ids, wide, slots


@triton.jit(do_not_specialize=["N", "row_size"])
def _write_kernel(tokens_ptr, rows_ptr, positions_ptr, new_ptr, N, row_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < N
    place = tl.load(rows_ptr + at, mask=live, other=0).to(tl.int64) * row_size
    place += tl.load(positions_ptr + at, mask=live, other=0).to(tl.int64)
    tl.store(tokens_ptr + place, tl.load(new_ptr + at, mask=live, other=0).to(tl.int32), mask=live)


def write_tokens(tokens: Tensor, rows: Tensor, positions: Tensor, new: Tensor) -> None:
    """`OpSet.write_tokens`."""
    if count := len(rows):
        rows, positions, new = rows.contiguous(), positions.contiguous(), new.contiguous()
        _write_kernel[(triton.cdiv(count, TOKENS_PER_PROGRAM),)](
            tokens, rows, positions, new, count, tokens.stride(0), BLOCK=TOKENS_PER_PROGRAM
        )
