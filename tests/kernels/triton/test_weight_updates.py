"""Kernels of weight updates, in Triton's interpreter: bit for bit what torch makes."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.triton import weight_updates
from slipstream.kernels.weights.quantize import round_linear
from slipstream.kernels.weights.word_sums import word_sums
from slipstream.spec.scheme import SCHEMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_the_codes_and_scales_that_torch_gives(dtype):
    weight, bias = (torch.randn(5, 2100) * 3).to(dtype), torch.randn(5)
    weight[2] = 0
    ours, theirs = (
        weight_updates.round_rows(weight, bias),
        round_linear(weight, bias, SCHEMES["fp8"]),
    )
    assert torch.equal(ours.weight.view(torch.uint8), theirs.weight.view(torch.uint8))
    assert torch.equal(ours.scales, theirs.scales)
    assert (ours.out_dtype, ours.bias) == (theirs.out_dtype, theirs.bias)


def test_sums_of_words_equal_torchs_for_lengths_beyond_a_thread_block_and_odd_bytes(monkeypatch):
    monkeypatch.setattr(weight_updates, "BLOCK", 64)
    values = [
        torch.randn(70, 40),
        torch.randn(33).bfloat16(),
        torch.arange(5, dtype=torch.uint8),
        torch.full((3000,), -1, dtype=torch.int32),
    ]
    mod = 2**64
    ours, theirs = (
        [(a % mod, b % mod) for a, b in sums(values)]
        for sums in (weight_updates.word_sums, word_sums)
    )
    assert ours == theirs
    assert len(set(ours)) == len(values)
