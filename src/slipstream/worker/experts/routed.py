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
    """Reads the experts that each step's forward records. Make the forwards after this object,
    since compiled ones would not record."""

    def __init__(self, decoder: Decoder, platform: Platform, most_tokens: int) -> None:
        self._noted = decoder.keep_routed_experts(most_tokens)
        self._platform = platform

    def __call__(self, plan: StepPlan, output: Output) -> Callable[[], RoutedExperts]:
        """Launches the copy of a step's experts to the host. Returns a function that gives them
        once the step is done."""
        rows = np.array([output.row(i) for i in range(plan.num_tokens)], np.int64)
        copied = self._platform.to_host(self._noted[:, self._platform.upload(rows)])
        return lambda: RoutedExperts.of(np.asarray(copied).transpose(1, 0, 2))
