"""The end of a captured step as a graph of its own: output head, argmax, writing tokens to rows.

Launched op by op, the end takes the host 0.45 to 0.75 ms on an H200 machine, half of a decode
step's time there. It is not part of the step's graph, because the requests' sampling settings are
unknown at capture. These steps end op by op:

1. Steps in which a request wants more than the likeliest token.
2. Steps that sample more tokens than the largest end.
3. Steps of pipeline stages, and of ranks that draw together.

The step's graph copies to `places` which hidden states are sampled and where their tokens go. So
one end serves all steps that sample as many tokens. With fewer sampled tokens it also reads the
step's padding, whose tokens go to the null row. So an end may not be larger than the step's graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.costs.graph_sizes import end_sizes
from slipstream.platform import Graph
from slipstream.worker.forward.forwards import Forwards
from slipstream.worker.rows import RowTable

_logger = logging.getLogger("slipstream.engine")

Record = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]
"""Captures device work into a graph. The work runs once before."""


class GreedyEnds:
    """Graphs of step ends.

    `hidden` [T, E] is where the steps' graphs leave hidden states. `sizes` are the sizes of decode
    graphs.
    """

    def __init__(
        self,
        forwards: Forwards,
        rows: RowTable,
        hidden: Tensor,
        sizes: Sequence[int],
        record: Record,
    ) -> None:
        self.forwards, self.rows, self._hidden, self._record = forwards, rows, hidden, record
        self.sizes = end_sizes(sizes)
        # For each sampled token: its row of `hidden`, its row of the table, and its position.
        self.places = torch.zeros(3, max(self.sizes), dtype=torch.int32, device=hidden.device)
        self.places[1] = rows.capacity
        self._captured: dict[int, tuple[Graph, Tensor]] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def take(self, places: Tensor) -> None:
        """Copy `places`, int32 [3, T], as device work of a step's graph.

        After the sampled tokens, `places` has those of the null row.
        """
        count = min(places.shape[1], self.places.shape[1])
        self.places[:, :count].copy_(places[:, :count])

    def run(self, count: int, room: int) -> Tensor | None:
        """Draw and write `count` tokens after the replay of a step's graph.

        The graph has room for `room` tokens. If no captured end fits, one is captured now. Returns
        the tokens, int64 [N]; None if no end fits.
        """
        fits = range(count, room + 1)
        size = min((n for n in self._captured if n in fits), default=None)
        if size is None:
            size = next((n for n in self.sizes if n in fits), None)
            if size is None or not self.capture(size):
                return None
        graph, tokens = self._captured[size]
        graph.replay()
        return tokens[:count]

    def capture(self, size: int) -> bool:
        """Capture the end of this size, unless it exists. True if it exists afterwards.

        Call this right after a step's graph of at least this size, because captured work runs once
        before, with the current places.
        """
        if size in self._captured or size not in self.sizes:
            return size in self._captured
        try:
            self._captured[size] = self._record(lambda: self._end(size))
        except torch.OutOfMemoryError:
            self.sizes = sorted(self._captured)
            _logger.warning(
                "no memory is left for more graphs of step ends than the %d captured",
                len(self.sizes),
            )
            return False
        return True

    def _end(self, size: int) -> Tensor:
        index, rows, positions = self.places[:, :size].unbind(0)
        base = self.forwards.base
        tokens = base.decoder.ops.argmax(base.logits(self._hidden.index_select(0, index)))
        self.rows.write(rows, positions, tokens)
        return tokens
