"""Dummy steps at the start, which measure activations and set the scales of an 8-bit cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors
from slipstream.spec.scheme import FORMAT_MAX
from slipstream.worker.forward.forwards import Forwards

CALIBRATION_TOKENS = 1024
"""Random tokens whose keys and values set the scales of an 8-bit cache."""


def dummy_prefill(
    num_tokens: int, length: int, block_size: int, device: torch.device
) -> tuple[AttentionMetadata, Tensor]:
    """A step of whole prompts of `length` tokens, all written to the null block."""
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
    )
    return meta, torch.zeros(num_tokens, dtype=torch.int32, device=device)


def dummy_sampling(num_rows: int, device: torch.device) -> SamplingTensors:
    """Parameters of `num_rows` rows drawn with top-p, which takes the most memory."""

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


def calibrated_scales(
    forwards: Forwards,
    make_cache: Callable[[int], list[LayerKV]],
    kind: str,
    *,
    vocab_size: int,
    num_tokens: int,
    block_size: int,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Scales of an 8-bit cache of `kind`: float32 [K] for each layer's keys and for its values.

    The largest magnitude of a head on random text of `num_tokens`, times a margin, maps to the end
    of the range. A float's precision does not depend on the scale, so fp8 has a wide margin.
    `make_cache` allocates blocks in the model's own type.
    """
    meta, tokens = dummy_prefill(num_tokens, num_tokens, block_size, device)
    num_blocks = -(-num_tokens // block_size)
    table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None]
    meta = dataclasses.replace(meta, block_table=table, slot_mapping=meta.positions + block_size)
    # NumPy's generator, like `HostRunner`, so that both find the same scales
    text = np.random.default_rng(0)
    tokens.copy_(torch.from_numpy(text.integers(0, vocab_size, num_tokens, dtype=np.int32)))
    kv = make_cache(num_blocks + 1)
    forwards.hidden(tokens, kv, meta)
    top = FORMAT_MAX[kind] / (2.0 if kind == "fp8" else 1.1)  # type: ignore[index]

    def scale(cache: Tensor) -> Tensor:
        return cache.float().abs().amax(dim=(0, 2, 3)).clamp(min=1e-6) / top

    return [(scale(layer.k), scale(layer.v)) for layer in kv]
