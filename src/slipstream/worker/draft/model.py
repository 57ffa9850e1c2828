"""A `Drafter` (`worker/draft/drafter.py`) whose smaller model proposes tokens one by one on the device.

Every block also holds the draft model's keys and values. So it finds them in a shared block,
whichever request wrote them. No torch: values are tensors or NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import model_chain_bytes
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.model.load.loaded import LoadedModel
from slipstream.worker.draft.drafter import Chain
from slipstream.worker.draft.memory import DraftMemory
from slipstream.worker.forward.base import BegunStep, InputBatch
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.sampler import sampling_tensors

if TYPE_CHECKING:
    from torch import Tensor


class DraftModel(Chain):
    """Drafter that runs a smaller model."""

    def __init__(
        self, config: EngineConfig, memory: DraftMemory, model: LoadedModel, forwards: ForwardTable
    ) -> None:
        super().__init__(config, memory)
        self.model, self.forwards = model, forwards
        self.weights_bytes, self.layers = model.weights_bytes, model.spec.layers

    @property
    def token_bytes(self) -> int:
        return self.forwards.token_bytes or 0

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        self.forwards.hidden(token_ids, self.make_cache(1), meta)

    def graph_bytes(self, config: EngineConfig) -> int:
        return model_chain_bytes(config, self.model.spec, self.memory.itemsize)

    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: None, num: int
    ) -> tuple[Tensor, None]:
        hidden = self.forwards.hidden(token_ids, self.kv, meta)[-num:]
        return self.memory.ops.argmax(self.forwards.logits(hidden)), None

    def step(
        self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False
    ) -> None:
        batch = InputBatch(self.kv, StepPlan(0, tuple(shares)), rows, adapted=False)
        output = self.forwards.run(batch)
        sampled = output.sampled
        if isinstance(output, BegunStep):
            output.finish()
            rows.write(sampled.rows, sampled.positions, output.tokens)
        elif sampled.requests:
            hidden = output.sampled_states
            tokens = output.forward.greedy(hidden) if batch.is_greedy else None
            if tokens is None:
                logits = output.forward.logits(hidden)
                tokens = self.memory.ops.sample(logits, sampling_tensors(rows, sampled))
            rows.write(sampled.rows, sampled.positions, tokens)
