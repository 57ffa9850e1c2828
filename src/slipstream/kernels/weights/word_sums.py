"""Sums of which a checksum of a tensor is made. Plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 2**20
"""Words that are widened to 64 bits at a time."""


def words_of(value: Tensor) -> Tensor:
    """The bytes of a tensor as int32, filled up with zeros."""
    data = value.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    return data.view(torch.int32)


def word_sums(values: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Computes two checksums of each tensor: the sum of its 32-bit words, and the sum of each
    word times its number (from 1 on), both modulo 2^64."""
    found = []
    for value in values:
        words, sums = words_of(value), torch.zeros(2, dtype=torch.int64, device=value.device)
        for begin in range(0, words.numel(), AT_ONCE):
            part = words[begin : begin + AT_ONCE].to(torch.int64) & 0xFFFFFFFF
            number = torch.arange(begin + 1, begin + 1 + part.numel(), device=value.device)
            sums += torch.stack([part.sum(), (part * number).sum()])
        found.append((int(sums[0]), int(sums[1])))
    return found
