"""Drafts in a pipeline: the last stage, which knows all tokens, proposes them and sends them to the first.

1. The last stage has the whole draft model or head. It proposes at the beginning of its step, as a single device does, and
   sends the drafts back (`Pipe.send_back`). Earlier stages pass on the states that a head reads (`Decoder.relays`).
2. The first stage receives the tokens of all earlier steps, then the drafts. So it waits for the last stage: while a request
   has drafts, steps do not overlap.
3. Stages in between need no tokens, and have no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config import EngineConfig
from slipstream.messages.steps import ScheduledRequest
from slipstream.worker.draft.drafter import Drafter
from slipstream.worker.draft.memory import DraftMemory
from slipstream.worker.inputs.rows import RowTable

if TYPE_CHECKING:
    from slipstream.platform.collectives import Pipe
    from slipstream.worker.ranks.stage_tokens import FirstStage


class ReceivedDrafts(Drafter):
    """Drafter of a pipeline's first stage, which receives the last stage's drafts. `stage` must be
    set before the first step."""

    layers, computes_all = (), False
    weights_bytes = 0
    stage: FirstStage

    def __init__(self, config: EngineConfig, memory: DraftMemory, pipe: Pipe) -> None:
        super().__init__(config, memory)
        self._pipe = pipe

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        import torch

        self.stage.take_all()
        places = [
            (rows.rows[s.request_id].index, s.num_computed_tokens + 1 + i)
            for s in drafted
            for i in range(len(s.drafts))
        ]
        own = rows.upload(np.array(places, np.int64).T.copy())
        tokens = self._pipe.receive_back((len(places),), torch.int64)
        rows.write(own[0], own[1], tokens)
