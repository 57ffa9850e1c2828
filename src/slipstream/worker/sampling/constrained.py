"""Steps that sample for requests with a grammar.

The forward runs first. Meanwhile the host computes the allowed tokens, then `constrain` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.messages.steps import Plan, StepPlan, StepResult, TokenMask

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.platform import Event, Platform


class DrawnStep(Protocol):
    @property
    def is_done(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    def result(self) -> StepResult: ...


class AwaitingMask:
    """Handle of a step whose forward is launched but whose tokens are not sampled yet. `draw`
    samples and returns the handle of the whole step. `drafts` are on the host once the event
    `drafted` has happened.
    """

    def __init__(
        self,
        plan: StepPlan,
        draw: Callable[[TokenMask], DrawnStep],
        drafts: Tensor | None,
        drafted: Event | None,
    ) -> None:
        self.plan: Plan = plan
        self._draw, self._drafts, self._drafted = draw, drafts, drafted
        self._step: DrawnStep | None = None

    @property
    def awaits_mask(self) -> bool:
        return self._step is None

    def proposed(self) -> Sequence[int]:
        """Drafts that a draft model proposed in this step, before the forward."""
        if self._drafted is not None:
            self._drafted.synchronize()
        return () if self._drafts is None else self._drafts.tolist()

    def constrain(self, mask: TokenMask) -> None:
        self._step = self._draw(mask)

    @property
    def is_done(self) -> bool:
        return self._step is not None and self._step.is_done

    @property
    def is_ready(self) -> bool:
        """True if `result()` does not wait."""
        return self._step is not None and self._step.is_ready

    def result(self) -> StepResult:
        assert self._step is not None, "constrain() comes first"
        return self._step.result()


def mask_bits(mask: TokenMask) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """(indices, bits). `indices`, int64 [2, N]: each masked position, and its row in `bits`."""
    if not mask.positions:  # its answers have ended, or are unrestricted
        return np.empty((2, 0), np.int64), np.empty((0, 0), np.int32)
    # torch needs writable memory
    memory = mask.bits if isinstance(mask.bits, bytearray) else bytearray(mask.bits)
    which = range(len(mask.positions)) if mask.which is None else mask.which
    bits = np.frombuffer(memory, np.int32).reshape(max(which) + 1, -1)
    return np.array([mask.positions, which], np.int64), bits


def apply_mask(logits: Tensor, mask: TokenMask, ops: OpSet, platform: Platform) -> None:
    """Mask `logits` in place."""
    positions, bits = mask_bits(mask)
    rows, which = platform.upload(positions)
    ops.mask_logits(logits, rows, platform.upload(bits), which)
