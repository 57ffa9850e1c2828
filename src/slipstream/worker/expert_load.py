"""Counts the tokens that each expert was chosen for."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.platform import Event, Platform
from slipstream.stats import ExpertTokens


class ExpertLoad:
    """`counts`: by layer int64 [X] on the device, which steps add to. Reading them never waits for a GPU: there the numbers are
    those of an earlier call, whose copy has arrived."""

    def __init__(self, counts: dict[int, Tensor], platform: Platform) -> None:
        self._counts = counts
        self._platform = platform
        self._copy: tuple[Tensor, Event | None] | None = None
        self._read: ExpertTokens = ()

    def read(self) -> ExpertTokens:
        """Since the start, or `reset`."""
        if not self._counts:
            return ()
        copied, event = self._copy or (None, None)
        if event is None or event.query():
            counts = self._platform.to_host(torch.cat(list(self._counts.values())))
            self._copy = counts, self._platform.record()
            copied = copied if self._platform.is_asynchronous else counts
            if copied is not None:
                sizes = [len(c) for c in self._counts.values()]
                by_layer = zip(self._counts, copied.split(sizes), strict=True)
                self._read = tuple((layer, tuple(c.tolist())) for layer, c in by_layer)
        return self._read

    def reset(self) -> None:
        for counts in self._counts.values():
            counts.zero_()
