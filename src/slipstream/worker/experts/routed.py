"""Copies each token's chosen experts to the host (`enable_return_routed_experts`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.steps import StepPlan
from slipstream.model.decoder import Decoder
from slipstream.platform import Platform
from slipstream.worker.forward.base import Output


class RoutedExpertsTap:
    """Reads the experts recorded by each step's forward. Create it before the forwards, since
    compiled ones would not record. `expert_at`: the expert at each place of each layer's router, if
    experts move."""

    def __init__(
        self,
        decoder: Decoder,
        platform: Platform,
        most_tokens: int,
        expert_at: Callable[[], list[list[int]]] | None = None,
    ) -> None:
        self._noted = decoder.keep_routed_experts(most_tokens)
        self._platform, self._expert_at = platform, expert_at

    def __call__(self, plan: StepPlan, output: Output) -> Callable[[], RoutedExperts]:
        """Launches the copy of a step's experts to the host. Returns a function that returns them
        once the step is done."""
        rows = np.array([output.row(i) for i in range(plan.num_tokens)], np.int64)
        copied = self._platform.to_host(self._noted[:, self._platform.upload(rows)])
        places = None if self._expert_at is None else self._expert_at()

        def experts() -> RoutedExperts:
            found = np.asarray(copied)
            if places is not None:  # −1 is kept
                found = np.stack(
                    [np.append(at, -1)[own] for at, own in zip(places, found, strict=True)]
                )
            return RoutedExperts.of(found.transpose(1, 0, 2))

        return experts
