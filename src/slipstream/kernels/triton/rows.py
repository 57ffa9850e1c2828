"""One kernel each for a step's reads from and writes to its sequences' token rows, and for rows of
embeddings. torch needs up to two dozen kernels for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.chains import ChainPlaces, num_places
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait

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
    tl.store(
        ids_ptr + at, tl.load(tokens_ptr + row * row_size + position, mask=live, other=0), mask=live
    )
    block = tl.load(blocks_ptr + row * num_blocks + position // BLOCK_SIZE, mask=live, other=0).to(
        tl.int64
    )
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


@triton.jit
def _embed_kernel(
    ids_ptr,
    table_ptr,
    out_ptr,
    size,
    scale,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + source * size + at, mask=at < size, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + at, x, mask=at < size)


def embed(token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """`OpSet.embed`. The table is contiguous."""
    size, token_ids = table.shape[1], token_ids.contiguous()
    out = torch.empty(len(token_ids), size, dtype=table.dtype, device=table.device)
    block = min(2048, triton.next_power_of_2(size))
    if len(token_ids):
        _embed_kernel[(len(token_ids), triton.cdiv(size, block))](
            token_ids, table, out, size, 1.0 if scale == 1.0 else torch.tensor(scale, dtype=table.dtype).item(),
            SCALED=scale != 1.0, BLOCK=block, num_warps=4, **pdl_options(table),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["room", "size", "null", "row_size", "kept_size", "first", "begin"])
def _chain_places_kernel(
    tokens_ptr, kept_ptr, inputs_ptr, rows_ptr, positions_ptr, lens_ptr, draft_rows_ptr, draft_positions_ptr,
    room, size, null, row_size, kept_size, first, begin,
    K: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given, live = at < room, at < size
    row = tl.load(inputs_ptr + at, mask=given, other=0)
    known = tl.load(inputs_ptr + room + at, mask=given, other=0)
    wanted = tl.load(inputs_ptr + 2 * room + at, mask=given, other=0)
    sampled = tl.load(inputs_ptr + 3 * room + at, mask=given, other=0)
    right = tl.full((BLOCK,), 1, tl.int32)
    num_right = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(K):
        place = tl.minimum(known + 1 + i, row_size - 1)
        drawn = tl.load(tokens_ptr + row.to(tl.int64) * row_size + place, mask=given, other=0)
        draft = tl.load(kept_ptr + row.to(tl.int64) * kept_size + i, mask=given, other=0)
        right = right & ((drawn == draft) & (i < sampled - 1)).to(tl.int32)
        num_right += right
    last = known + tl.minimum(num_right + 1, sampled)
    for i in tl.static_range(AGAIN):
        position = last - (AGAIN - 1 + first) + i
        tl.store(rows_ptr + i * size + at, row, mask=live)
        tl.store(positions_ptr + i * size + at, position, mask=live)
        tl.store(lens_ptr + i * size + at, position + 1, mask=live)
    padding = AGAIN * size + at
    is_padding = (padding < begin) & (at < 4)
    tl.store(rows_ptr + padding, tl.full((BLOCK,), 0, tl.int32) + null, mask=is_padding)
    tl.store(positions_ptr + padding, tl.zeros((BLOCK,), tl.int32), mask=is_padding)
    tl.store(lens_ptr + padding, tl.full((BLOCK,), 1, tl.int32), mask=is_padding)
    for i in tl.static_range(K):
        idle = wanted <= i
        own, place = tl.where(idle, null, row), tl.where(idle, 0, last + 1 + i)
        tl.store(draft_rows_ptr + i * size + at, own, mask=live)
        tl.store(draft_positions_ptr + i * size + at, place, mask=live)
        if i > 0:
            position = tl.maximum(place - 1 - first, 0)
            tl.store(rows_ptr + begin + (i - 1) * room + at, own, mask=given)
            tl.store(positions_ptr + begin + (i - 1) * room + at, position, mask=given)
            tl.store(lens_ptr + begin + (i - 1) * room + at, position + 1, mask=given)


def chain_places(
    tokens: Tensor,
    kept: Tensor,
    inputs: Tensor,
    *,
    num_drafts: int,
    size: int,
    num_again: int,
    first: int,
) -> ChainPlaces:
    """`OpSet.chain_places`"""
    room = inputs.shape[1]
    begin, total = num_places(size, room, num_drafts, num_again)
    made = torch.empty(3, -(-total // 4) * 4, dtype=torch.int32, device=tokens.device)
    rows, positions, lens = made[:, :total].unbind(0)
    count = num_drafts * size  # each part begins at a multiple of 16 bytes
    drafts = torch.empty(2, -(-count // 4) * 4, dtype=torch.int32, device=tokens.device)
    draft_rows, draft_positions = drafts[:, :count].unbind(0)
    _chain_places_kernel[(triton.cdiv(room, TOKENS_PER_PROGRAM),)](
        tokens, kept, inputs, rows, positions, lens, draft_rows, draft_positions,
        room, size, len(tokens) - 1, tokens.stride(0), kept.stride(0), first, begin,
        K=num_drafts, AGAIN=num_again, BLOCK=TOKENS_PER_PROGRAM,
    )  # fmt: skip
    return ChainPlaces(rows, positions, lens, draft_rows, draft_positions, begin, room)
