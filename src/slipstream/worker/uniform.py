"""Steps of like sequences, for measurements."""

from __future__ import annotations

import torch

from slipstream.kernels.ops import AttentionMetadata


def uniform_step(num_seqs: int, num_new: int, length: int, block_size: int) -> AttentionMetadata:
    """`num_seqs` sequences of `length` tokens, the last `num_new` of them new; each has blocks of its own, from block 1 on."""
    num_blocks = -(-length // block_size)
    table = (torch.arange(num_seqs * num_blocks, dtype=torch.int32) + 1).view(num_seqs, num_blocks)
    positions = torch.arange(length - num_new, length).repeat(num_seqs)
    rows = torch.arange(num_seqs).repeat_interleave(num_new)
    return AttentionMetadata(
        query_start_loc=torch.arange(0, num_seqs * num_new + 1, num_new, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        block_table=table,
        positions=positions,
        slot_mapping=table[rows, positions // block_size].long() * block_size + positions % block_size,
        num_decodes=num_seqs if num_new == 1 else 0,
        max_query_len=num_new,
        max_seq_len=length,
    )
