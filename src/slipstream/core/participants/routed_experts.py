"""Experts of each token, returned with an answer (`enable_return_routed_experts`).

They are stored by the slot of a token's keys in the cache. Results arrive in step order, and each
updates slots and tables here as its step did in the worker. So the entries always match the cache
after that step, whoever owns the block now.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from slipstream.core.extras import Extras
from slipstream.core.participants.base import Participant
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.steps import StepPlan

UNKNOWN = -1


class KeptRoutedExperts(Participant):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._kept: npt.NDArray[np.int16] | None = None  # [blocks, block_size, layers, k]
        self._tables: dict[str, array[int]] = {}  # block tables as of the last step that arrived

    def arrived(self, plan: StepPlan, extras: Extras | None) -> None:
        """Keep the experts of the step's tokens."""
        for request_id in plan.released:
            self._tables.pop(request_id, None)
        for new in plan.new:
            self._tables[new.request_id] = array("i")
        others = () if extras is None else extras.others
        rows = next((x.array for x in others if isinstance(x, RoutedExperts)), None)
        if self._kept is None and rows is not None:
            size = (self._num_blocks, self._block_size, *rows.shape[1:])
            self._kept = np.full(size, UNKNOWN, np.int16)
        kept, first = self._kept, 0
        if kept is not None and plan.block_copies:
            sources, targets = np.array(plan.block_copies).T
            kept[targets] = kept[sources]
        for share in plan.scheduled:
            table = self._tables[share.request_id]
            for update in share.table_updates:
                if update.group == 0:
                    end = update.index + len(update.block_ids)
                    table[update.index : end] = array("i", update.block_ids)
            begin, end = share.num_computed_tokens, first + share.num_tokens
            if kept is not None:
                places = self._places(share.request_id, begin, begin + share.num_tokens)
                kept[places] = UNKNOWN if rows is None else rows[first:end]
            first = end
        if extras is not None:
            extras.completes = self._completed

    def _completed(self, output: TokenOutput) -> TokenOutput:
        """Add a request's experts to its last output."""
        if output.finish_reason is None or self._kept is None:
            return output
        num_tokens = len(self.requests.by_id[output.request_id].token_ids)
        own = self._kept[self._places(output.request_id, 0, num_tokens - 1)]
        return output._replace(routed_experts=RoutedExperts.of(own))

    def _places(self, request_id: str, begin: int, end: int) -> tuple[npt.NDArray[np.intp], ...]:
        """(blocks, offsets within them) of the tokens `begin` … `end`."""
        blocks, places = np.divmod(np.arange(begin, end), self._block_size)
        return np.asarray(self._tables[request_id])[blocks], places
