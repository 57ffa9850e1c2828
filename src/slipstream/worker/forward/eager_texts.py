"""Encoder steps without graphs: embeddings of whole texts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import LayerKV
from slipstream.messages.texts import TextsPlan
from slipstream.spec.pooling import PoolingSpec
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.inputs.text_inputs import text_batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class EagerTexts:
    """Runs steps of whole texts op by op, or as one program."""

    def __init__(
        self,
        forwards: ForwardTable,
        how: PoolingSpec,
        kv: Sequence[LayerKV],
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        self.forwards, self.how, self.kv, self.config = forwards, how, kv, config
        self.device = device

    def covers(self, plan: TextsPlan) -> bool:
        return True

    def run(self, plan: TextsPlan) -> Tensor:
        """Computes a step's vectors: [S, …] by text, or [T, …] by token. They are valid until the
        next step."""
        token_ids, meta = text_batch(plan, self.config.cache.block_size, self.device)
        hidden = self.forwards.hidden(token_ids, self.kv, meta)
        return self.forwards.vectors(self.how, hidden, meta.query_start_loc, plan.task)
