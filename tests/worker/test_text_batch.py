"""An encoder's inputs, made from whole texts without rows."""

from __future__ import annotations

from array import array

import pytest
import torch

from slipstream.messages.texts import TextsPlan
from slipstream.worker.inputs.text_inputs import text_batch

BLOCK = 4


def bytes_of(numbers):
    return array("i", numbers).tobytes()


@pytest.mark.parametrize("lengths", [[1], [4, 1, 9], [5, 8, 1, 1, 17, 3]], ids=str)
@pytest.mark.parametrize("pairs", [False, True])
def test_each_token_has_a_slot_of_its_own_that_its_text_finds(lengths, pairs):
    tokens, num_first = list(range(100, 100 + sum(lengths))), [(n + 1) // 2 for n in lengths]
    plan = TextsPlan(1, bytes_of(tokens), bytes_of(lengths), bytes_of(num_first) if pairs else b"")
    token_ids, meta = text_batch(plan, BLOCK, torch.device("cpu"))
    assert token_ids.tolist() == tokens
    assert meta.seq_lens.tolist() == meta.query_start_loc.diff().tolist() == lengths
    assert (meta.num_decodes, meta.max_query_len, meta.max_seq_len) == (
        0,
        max(lengths),
        max(lengths),
    )
    assert meta.positions.tolist() == [i for n in lengths for i in range(n)]
    assert (meta.positions.dtype, meta.slot_mapping.dtype, meta.block_table.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
    num_blocks = sum(-(-n // BLOCK) for n in lengths)
    assert set((meta.slot_mapping // BLOCK).tolist()) == set(
        range(1, num_blocks + 1)
    )  # never the null block
    assert len(set(meta.slot_mapping.tolist())) == len(tokens)
    assert meta.block_table.min() > 0
    assert meta.block_table.max() == num_blocks
    for i, n in enumerate(lengths):
        start = int(meta.query_start_loc[i])
        found = [int(meta.block_table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)]
        assert meta.slot_mapping[start : start + n].tolist() == found
    if pairs:
        types = [int(i >= f) for n, f in zip(lengths, num_first, strict=True) for i in range(n)]
        assert meta.token_types.tolist() == types
    else:
        assert meta.token_types is None
    for tensor in (token_ids, meta.query_start_loc, meta.seq_lens, meta.block_table):
        assert tensor.storage_offset() % 4 == 0  # 16 bytes, for Triton
