"""Counts the tokens routed to each expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.experts.rows import swap_rows
from slipstream.messages.stats import ExpertTokens
from slipstream.platform import Event, Platform


class ExpertLoad:
    """Token counts by layer and expert.

    `counts` has an int64 [X] tensor per layer on the device, indexed by place in the router's
    output. Steps add to it. Reading never waits for a GPU: it returns the counts as of an earlier
    call, whose copy has arrived.
    """

    def __init__(self, counts: dict[int, Tensor], platform: Platform) -> None:
        self.counts = counts
        self._expert_at = {layer: list(range(len(c))) for layer, c in counts.items()}
        self._platform = platform
        self._copy: _Copy | None = None
        self._read: ExpertTokens = ()

    def read(self) -> ExpertTokens:
        """Tokens by expert since the start or the last `reset`."""
        if not self.counts:
            return ()
        copied = self._copy
        if copied is None or copied.event is None or copied.event.query():
            counts = self._platform.to_host(torch.cat(list(self.counts.values())))
            self._copy = _Copy(counts, self._platform.record(), self.expert_at())
            copied = copied if self._platform.is_asynchronous else self._copy
            if copied is not None:
                self._read = tuple(zip(self.counts, copied.by_expert(), strict=True))
        return self._read

    def expert_at(self) -> list[list[int]]:
        """The expert at each place now, by layer."""
        return [list(places) for places in self._expert_at.values()]

    def swap(self, layer: int, a: int, b: int) -> None:
        """Record that the experts at two places were swapped. Each keeps its count."""
        swap_rows(self.counts[layer], a, b)
        own = self._expert_at[layer]
        own[a], own[b] = own[b], own[a]

    def reset(self) -> None:
        for counts in self.counts.values():
            counts.zero_()


class _Copy(NamedTuple):
    """Host copy of all layers' token counts by place, with the expert that each place had at that
    time."""

    counts: Tensor
    event: Event | None
    expert_at: list[list[int]]

    def by_expert(self) -> Iterator[tuple[int, ...]]:
        for counts, experts in zip(
            self.counts.split([len(own) for own in self.expert_at]), self.expert_at, strict=True
        ):
            found = torch.empty_like(counts)
            found[experts] = counts
            yield tuple(found.tolist())
