"""Steps that sample for requests with a grammar. Their forward runs first. Their tokens are drawn once `constrain` says which
are allowed, which the host works out meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.ops import OpSet
from slipstream.platform import Event, Platform
from slipstream.types import Plan, StepPlan, StepResult, TokenMask


class Drawn(Protocol):
    @property
    def is_done(self) -> bool: ...
    def result(self) -> StepResult: ...


class AwaitingMask:
    """A step that was launched as far as its hidden states. `draw` samples and gives the whole step. `drafts` are on the host
    once `drafted`."""

    def __init__(
        self, plan: StepPlan, draw: Callable[[TokenMask], Drawn], drafts: Tensor | None, drafted: Event | None
    ) -> None:
        self.plan: Plan = plan
        self._draw, self._drafts, self._drafted = draw, drafts, drafted
        self._step: Drawn | None = None

    @property
    def awaits_mask(self) -> bool:
        return self._step is None

    def proposed(self) -> Sequence[int]:
        """The drafts that a draft model proposed in this step, which it ran before the forward."""
        if self._drafted is not None:
            self._drafted.synchronize()
        return () if self._drafts is None else self._drafts.tolist()

    def constrain(self, mask: TokenMask) -> None:
        with torch.inference_mode():
            self._step = self._draw(mask)

    @property
    def is_done(self) -> bool:
        return self._step is not None and self._step.is_done

    def result(self) -> StepResult:
        assert self._step is not None, "constrain() comes first"
        return self._step.result()


def apply_mask(logits: Tensor, mask: TokenMask, ops: OpSet, platform: Platform) -> None:
    """In place."""
    bits = np.frombuffer(bytearray(mask.bits), np.int32).reshape(len(mask.positions), -1)  # torch takes no constant
    ops.mask_logits(logits, platform.upload(np.array(mask.positions, np.int64)), platform.upload(bits))
