"""The part of an op set for exchanges between ranks: sums, tokens and columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.platform.collectives import OverlappedSum, RankGroup


class RankOps:
    """Ops of ranks alone. `OpSet` has the ops that use these and others."""

    def all_reduce(self, x: Tensor, group: RankGroup) -> Tensor:
        """Sums x [T, E] over the ranks of `group` → [T, E]. x may be overwritten."""
        return group.all_reduce(x)

    def sum_of_parts(self, x: Tensor, group: RankGroup) -> Tensor:
        """Runs `all_reduce` without overwriting x."""
        return self.all_reduce(x.clone(), group)

    def pieces(self, x: Tensor, group: RankGroup) -> Sequence[slice]:
        """Returns the pieces of the tokens of x [T, E] whose sums over `group` overlap with
        products; empty if sums are made at once."""
        return () if group.overlapped is None else group.overlapped.pieces(len(x))

    def begin_sum(
        self, x: Tensor, group: RankGroup, *, place: int, index: int, rows: slice
    ) -> OverlappedSum:
        """Starts summing x over `group` without waiting. x is this rank's part of the sum for a
        piece of the step's tokens (`OverlappedSums.begin`)."""
        assert group.overlapped is not None
        return group.overlapped.begin(x, place=place, index=index, rows=rows)

    def sum_arriving(self, sums: Sequence[OverlappedSum]) -> Tensor:
        """Waits for the sums of consecutive pieces and returns them joined: [T, E]."""
        whole = [functools.reduce(torch.add, s.parts()) for s in sums]
        return whole[0] if len(whole) == 1 else torch.cat(whole)

    def scatter_tokens(self, x: Tensor, group: RankGroup) -> Tensor:
        """Returns this rank's tokens of the sum of x over the ranks of `group`: [T, E] →
        [⌈T / n⌉, E].

        The last ranks' tokens are padded with zeros.
        """
        return group.reduce_scatter(x)

    def gather_tokens(self, x: Tensor, group: RankGroup, num_tokens: int) -> Tensor:
        """Gathers all ranks' tokens: [⌈T / n⌉, E] → [T, E]."""
        return group.all_gather(x).flatten(0, 1)[:num_tokens]

    def filled_up(self, x: Tensor, num_tokens: int) -> Tensor:
        """Pads x [T, …] with zeros to [num_tokens, …]."""
        missing = num_tokens - len(x)
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def own_tokens(self, x: Tensor, group: RankGroup) -> Tensor:
        """Returns this rank's share of the tokens of x [T, …], a tensor that all ranks hold: [⌈T /
        n⌉, …]."""
        each = -(-len(x) // group.size)
        return self.filled_up(x[group.rank * each : (group.rank + 1) * each], each)

    def all_gather(self, x: Tensor, group: RankGroup, width: int) -> Tensor:
        """Gathers the ranks' columns side by side, without those beyond `width`: [N, W] →
        [N, width]."""
        parts = group.all_gather(x)
        if parts.shape[1] == 1:  # they are already side by side
            return parts.view(1, -1)[:, :width]
        out = x.new_empty(len(x), width)
        for start, part in zip(range(0, width, x.shape[1]), parts, strict=False):
            out[:, start : start + x.shape[1]] = part[:, : width - start]
        return out
