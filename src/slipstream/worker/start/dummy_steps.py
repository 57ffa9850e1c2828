"""Dummy steps at the start, which measure activations."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, SamplingTensors
from slipstream.kernels.states import state_metadata


def dummy_prefill(
    num_tokens: int, length: int, block_size: int, device: torch.device
) -> tuple[AttentionMetadata, Tensor]:
    """Metadata of a dummy step of whole prompts of `length` tokens each, all written to the null block."""
    positions = torch.arange(num_tokens, device=device) % length
    starts = torch.tensor([*range(0, num_tokens, length), num_tokens], dtype=torch.int32)
    meta = AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=starts.diff().to(device),
        block_table=torch.zeros(
            len(starts) - 1, -(-length // block_size), dtype=torch.int32, device=device
        ),
        positions=positions,
        slot_mapping=positions % block_size,
        num_decodes=0,
        max_query_len=length,
        max_seq_len=length,
        from_start=True,
        states=state_metadata(starts.tolist(), lambda array: torch.from_numpy(array).to(device)),
    )
    return meta, torch.zeros(num_tokens, dtype=torch.int32, device=device)


def dummy_sampling(num_rows: int, device: torch.device) -> SamplingTensors:
    """Dummy sampling parameters of `num_rows` rows with top-p, which takes the most memory."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=full(1.0, torch.float32),
        top_k=full(0, torch.int32),
        top_p=full(0.9, torch.float32),
        min_p=full(0.0, torch.float32),
        seeds=full(1, torch.int64),
        history_lens=full(1, torch.int32),
        any_top_p=True,
    )
