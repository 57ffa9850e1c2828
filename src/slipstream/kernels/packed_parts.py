"""Packed sequences without a cache: tokens of different parts don't attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedParts:
    """T tokens in parts, one after another. A token attends to all tokens of its own part
    (`OpSet.packed_attention`)."""

    # by length: the tokens of all its parts, int64; None: all tokens
    by_length: tuple[tuple[int, Tensor | None], ...]
    positions: Tensor  # int64 [T]: position in the token's part
    ends: Tensor  # int32 [T]: end of the token's part

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedParts:
        """Makes parts of these lengths, none of them 0."""
        import torch

        each = torch.tensor(lengths)
        ends = each.cumsum(0)
        starts, kinds = ends - each, each.unique().tolist()
        index: list[Tensor | None] = [None]
        if len(kinds) > 1:
            index = [
                (starts[each == n][:, None] + torch.arange(n)).flatten().to(device) for n in kinds
            ]
        positions = torch.arange(int(each.sum())) - starts.repeat_interleave(each)
        of_tokens = ends.repeat_interleave(each).int()
        return cls(
            tuple(zip(kinds, index, strict=True)), positions.to(device), of_tokens.to(device)
        )
