"""The end of a captured step as a separate graph: output head, sampling, writing tokens to rows.

Launched op by op, the end takes the host 0.45 to 0.75 ms on an H200 machine, half of a decode
step's time there. It is not part of the step's graph, because the requests' sampling settings are
unknown at capture. There are ends of several kinds (`EndKind`). Parameters are read on the device,
from the requests' rows. These steps end op by op:

1. Steps with a list of allowed tokens or a sampler from `sampler_chain.py`.
2. Steps that sample more tokens than the largest end, have more than MAX_BIASES biases, or more
   than MAX_MASKS different masks of grammars.
3. Steps of pipeline stages, and of ranks that sample together.

The step's graph writes to `places` which hidden states are sampled and where their tokens go. So
one end serves all steps that sample equally many tokens. With fewer it also reads the step's
padding, whose tokens go to the null row, so an end must not be larger than the step's graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.costs.graph_sizes import end_sizes
from slipstream.messages.steps import TokenMask
from slipstream.platform import Graph
from slipstream.worker.forward.forwards import Forwards
from slipstream.worker.graphs.mixed_inputs import padded_room
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.biases import Biases, biases_of
from slipstream.worker.sampling.constrained import mask_bits
from slipstream.worker.sampling.sampler import tensors_of_rows

_logger = logging.getLogger("slipstream.engine")

MAX_BIASES = 1024
"""Maximum biases of tokens, bad words and early end tokens in a step that ends in a graph."""

MAX_MASKS = 128
"""Maximum different masks of a step that ends in a graph: 2 MB of device memory for 128,000 tokens."""

NUM_LOGPROBS = (0, 5, 20)
"""Numbers of most likely tokens that ends can report. A step uses the next larger one."""


class EndKind(NamedTuple):
    """Kind of a step's end: the work that it does besides finding the most likely tokens."""

    draws: bool = False
    changes: bool = False  # applies biases and penalties
    num_top: int | None = None  # log-probabilities: the number of most likely tokens
    masked: bool = False  # samples among the tokens that grammars allow


GREEDY, DRAWN = EndKind(), EndKind(draws=True)
"""The kinds that are captured with a size. Others are captured by the first step that needs them."""

Values = tuple[Tensor, Tensor | None]
"""Tokens, int64 [N], and packed log-probabilities (`OpSet.packed_logprobs`)."""

Record = Callable[[Callable[[], Values]], tuple[Graph, Values]]
"""Captures device work as a graph. The work also runs once before."""


def end_kind(rows: RowTable, names: Sequence[str]) -> EndKind | None:
    """Kind of step end that these requests need; None if no captured end has it."""
    if any(rows.wanted(want, names) for want in ("allowed", "chain")):
        return None
    masked = rows.wanted("grammar", names)
    top = None
    if rows.wanted("logprobs", names):
        most = max(rows.rows[name].sampling.logprobs or 0 for name in names)
        top = next((n for n in NUM_LOGPROBS if n >= most), None)
        if top is None:
            return None
    changes = rows.wanted("penalties", names) or rows.wanted("bias", names)
    draws = changes or top is not None or masked or rows.wanted("draw", names)
    return EndKind(draws, changes, top, masked)


class StepEnds:
    """Graphs of step ends.

    `hidden` [T, E]: output buffer of the steps' graphs. `sizes` are the sizes of decode graphs.
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
        width = padded_room(max(self.sizes))
        self.places = torch.zeros(3, width, dtype=torch.int32, device=hidden.device)
        self.places[1] = rows.capacity
        # Unused entries have the value 0.
        places = torch.zeros(2, MAX_BIASES, dtype=torch.int64, device=hidden.device)
        self._biases = Biases(places[0], places[1], torch.zeros(MAX_BIASES, device=hidden.device))
        self._num_biases = 0
        # Row of bits for each sampled token; −1: all tokens are allowed.
        self._which = torch.full((width,), -1, dtype=torch.int64, device=hidden.device)
        self._each = torch.arange(width, device=hidden.device)
        self._captured: dict[tuple[int, EndKind], tuple[Graph, Values]] = {}
        self._complete: set[EndKind] = set()  # kinds for which there is no memory left

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @cached_property
    def _bits(self) -> Tensor:
        words = -(-self.forwards.base.decoder.spec.vocab_size // 32)
        return torch.zeros(MAX_MASKS, words, dtype=torch.int32, device=self._which.device)

    def take(self, places: Tensor) -> None:
        """Copy `places`, int32 [3, T], to the buffer that the ends read. Captured as part of a
        step's graph. The sampled tokens' places are followed by those of the null row.
        """
        count = min(places.shape[1], self.places.shape[1])
        self.places[:, :count].copy_(places[:, :count])

    def run(self, sampled: SampledRows, room: int, mask: TokenMask | None = None) -> Values | None:
        """Sample and write the tokens of `sampled` after the replay of a step's graph.

        The graph has room for `room` tokens. If no captured end fits, one is captured now. None if
        no end fits, or if the step needs a mask that is not yet available.
        """
        kind = end_kind(self.rows, sampled.names)
        if kind is None or kind.masked != (mask is not None):
            return None
        count = len(sampled.rows)
        fits = range(count, room + 1)
        size = min((n for n, k in self._captured if n in fits and k == kind), default=None)
        if size is None:
            size = next((n for n in self.sizes if n in fits), None)
        if size is None or (kind.changes and not self._put_biases(sampled)):
            return None
        if mask is not None and not self._put_masks(mask, size):
            return None
        if not self.capture(size, kind):
            return None
        graph, (tokens, logprobs) = self._captured[size, kind]
        graph.replay()
        return tokens[:count], None if logprobs is None else logprobs[:count]

    def capture(self, size: int, kind: EndKind = GREEDY) -> bool:
        """Capture the end of this size, unless it exists. Returns whether it exists afterwards.

        Call this right after a step's graph of at least this size, because captured work runs once
        before, with the current places.
        """
        if (size, kind) in self._captured or size not in self.sizes or kind in self._complete:
            return (size, kind) in self._captured
        try:
            self._captured[size, kind] = self._record(lambda: self._end(size, kind))
        except torch.OutOfMemoryError:
            self._complete.add(kind)
            _logger.warning(
                "no memory is left for more graphs of step ends than the %d captured",
                len(self._captured),
            )
            return False
        return True

    def _put_biases(self, sampled: SampledRows) -> bool:
        """Copy the step's biases to the buffer that ends read. False if there are too many."""
        found = biases_of(self.rows, sampled, sampled.names)
        count = 0 if found is None else len(found[0])
        if count > MAX_BIASES:
            return False
        if self._num_biases > count:
            self._biases.values[count : self._num_biases].zero_()
            self._biases.rows[count : self._num_biases].zero_()  # a row that every end has
        self._num_biases = count
        for ours, theirs in zip(self._biases, found or (), strict=False):
            ours[:count].copy_(theirs)
        return True

    def _put_masks(self, mask: TokenMask, size: int) -> bool:
        """Copy the step's masks to the buffer that ends read. False if there are too many."""
        (positions, which), bits = mask_bits(mask)
        if len(bits) > MAX_MASKS:
            return False
        platform, places = self.rows.platform, np.full(size, -1, np.int64)
        places[positions] = which
        platform.upload_into(self._which[:size], places)
        ours = self._bits[: len(bits)]  # written here, not by a capture
        if len(bits):
            platform.upload_into(ours, bits)
        return True

    def _end(self, size: int, kind: EndKind) -> Values:
        index, rows, positions = self.places[:, :size].unbind(0)
        base = self.forwards.base
        logits = base.logits(self._hidden.index_select(0, index))
        ops, logprobs = base.decoder.ops, None
        if kind == GREEDY:
            tokens = ops.argmax(logits)
        else:
            raw = logits
            if kind.num_top is not None and (
                kind.masked or (kind.changes and logits.dtype == torch.float32)
            ):
                raw = logits.clone()
            if kind.masked:
                ops.mask_logits(logits, self._each[:size], self._bits, self._which[:size])
            bias, longest = (self._biases, self.rows.tokens.shape[1]) if kind.changes else (None, 0)
            params = tensors_of_rows(self.rows, rows, positions, bias, longest)
            tokens = ops.sample(logits, params)
            if kind.num_top is not None:
                logprobs = ops.packed_logprobs(raw, tokens, kind.num_top)
        self.rows.write(rows, positions, tokens)
        return tokens, logprobs
