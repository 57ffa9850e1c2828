"""Experts of each token, returned with an answer (`enable_return_routed_experts`).

They are kept by the place of a token's keys in the cache. So they are there, too, for a prompt's
tokens that come from the prefix cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.core.extras import Extras
from slipstream.core.participants.base import Participant
from slipstream.core.request import Request, Status
from slipstream.messages.outputs import RoutedExperts
from slipstream.messages.steps import StepPlan

UNKNOWN = -1


class RoutedExpertsKept(Participant):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._kept: npt.NDArray[np.int16] | None = None  # [blocks, block_size, layers, k]
        self._known: dict[str, int] = {}  # tokens of running requests that are kept

    def concerns(self, request: Request) -> bool:
        return not request.spec.pooled

    def arrived(self, plan: StepPlan, extras: Extras) -> None:
        """Keep the experts of the step's tokens."""
        if (routed := extras.routed) is None:
            return
        shape = (routed.num_layers, routed.num_chosen)
        rows = np.frombuffer(routed.experts, np.int16).reshape(-1, *shape)
        if self._kept is None:
            size = (self._num_blocks, self._block_size, *shape)
            self._kept = np.full(size, UNKNOWN, np.int16)
        if plan.block_copies:
            sources, targets = np.array(plan.block_copies).T
            self._kept[targets] = self._kept[sources]
        first = 0
        for share in plan.scheduled:
            own, first = rows[first : first + share.num_tokens], first + share.num_tokens
            request = self.requests.by_id.get(share.request_id)
            if request is not None and request.status is Status.RUNNING:
                begin = share.num_computed_tokens
                self._kept[self._places(request, begin, begin + len(own))] = own
                self._known[share.request_id] = begin + len(own)
        extras.routed_of = self._of

    def stopped(self, request: Request) -> None:
        """Forget tokens whose step is still in flight: their blocks may be used again."""
        begin = self._known.pop(request.request_id, request.num_cached_tokens)
        end = min(request.num_computed_tokens, len(request.blocks[0]) * self._block_size)
        if self._kept is not None and begin < end:
            self._kept[self._places(request, begin, end)] = UNKNOWN

    def _of(self, request_id: str) -> RoutedExperts:
        request, kept = self.requests.by_id[request_id], self._kept
        assert kept is not None
        own = kept[self._places(request, 0, len(request.token_ids) - 1)]
        num_layers, num_chosen = own.shape[1:]
        return RoutedExperts(num_layers, num_chosen, own.tobytes())

    def _places(self, request: Request, begin: int, end: int) -> tuple[Any, Any]:
        """The blocks of tokens `begin` … `end`, and the places in them."""
        positions = np.arange(begin, end)
        return np.array(request.blocks[0])[
            positions // self._block_size
        ], positions % self._block_size
