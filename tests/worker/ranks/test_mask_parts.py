"""A step's mask, split among ranks that own its requests."""

from __future__ import annotations

import numpy as np

from slipstream.messages.steps import ScheduledRequest, StepPlan, TokenMask
from slipstream.worker.ranks.request_owners import masks_of_parts


def test_parts_get_each_shared_row_of_bits_once():
    scheduled = [
        ScheduledRequest(name, 3, n, n) for name, n in zip("abcd", (1, 2, 1, 1), strict=True)
    ]
    parts = [StepPlan(1, tuple(scheduled[i::2])) for i in range(2)]
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)
    mask = TokenMask((0, 1, 2, 3, 4), rows.tobytes(), (2, 0, 1, 2, 2))
    first, second = masks_of_parts(parts, StepPlan(1, tuple(scheduled)), mask)

    def bits(own):
        return np.frombuffer(bytes(own.bits), np.int32).reshape(-1, 2)[list(own.which)].tolist()

    assert first.positions == (0, 1)  # of a and c
    assert bits(first) == rows[[2, 2]].tolist()
    assert len(first.bits) == rows[0].nbytes
    assert second.positions == (0, 1, 2)  # of b and d
    assert bits(second) == rows[[0, 1, 2]].tolist()
