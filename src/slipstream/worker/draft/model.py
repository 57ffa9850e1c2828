"""A `Drafter` (`worker/draft/drafter.py`) whose smaller model proposes tokens one by one on the device.

Every block also holds the draft model's keys and values. So it finds them in a shared block,
whichever request wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import model_chain_bytes
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.model.loader import load_model
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts import check_draft_model
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import SCHEMES
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.draft.drafter import Chain
from slipstream.worker.draft.memory import DeviceMemory
from slipstream.worker.forward.forwards import Forwards, InputBatch
from slipstream.worker.graphs.chain_graphs import ChainGraphs
from slipstream.worker.rows import RowTable
from slipstream.worker.sampling.sampler import sampling_tensors


class DraftModel(Chain):
    """Draft model, loaded when constructed."""

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        target: ModelSpec,
        *,
        ops: OpSet,
        device: torch.device,
        dtype: torch.dtype,
        weights_folder: Path | None,
    ) -> None:
        super().__init__(config, DeviceMemory(ops, device, dtype))
        self.ops = ops
        check_draft_model(description.spec, target, config.model.max_model_len)
        assert config.speculation is not None
        quantization = config.speculation.quantization
        self.model = load_model(
            description,
            ops=ops,
            device=device,
            dtype=dtype,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format if description.format != "gguf" else "auto",
            seed=config.model.seed,
            scheme=SCHEMES[quantization] if quantization is not None else None,
            weights_folder=weights_folder,
        )
        self.forwards = Forwards(self.model.decoder)
        self.weights_bytes, self.layers = self.model.weights_bytes, self.model.spec.layers

    @property
    def token_bytes(self) -> int:
        return self.forwards.token_bytes or 0

    def probe(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        self.forwards.hidden(token_ids, self.make_cache(1), meta)

    def graph_bytes(self, config: EngineConfig) -> int:
        return model_chain_bytes(config, self.model.spec, self.memory.itemsize)

    def make_graphs(self, rows: RowTable, config: EngineConfig) -> None:
        self.graphs = ChainGraphs.of(self, rows, config)

    def likeliest(
        self, token_ids: Tensor, meta: AttentionMetadata, states: None, num: int
    ) -> tuple[Tensor, None]:
        hidden = self.forwards.hidden(token_ids, self.kv, meta)[-num:]
        return self.ops.argmax(self.forwards.logits(hidden)), None

    def step(
        self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False
    ) -> None:
        batch = InputBatch(self.kv, StepPlan(0, tuple(shares)), rows, adapted=False)
        output = self.forwards.run(batch)
        sampled, tokens = output.sampled, output.tokens
        assert sampled is not None
        if output.running is not None:
            output.running.synchronize()
        elif sampled.requests:
            hidden = output.sampled_states
            tokens = output.forward.greedy(hidden) if batch.is_greedy else None
            if tokens is None:
                tokens = self.ops.sample(
                    output.forward.logits(hidden), sampling_tensors(rows, sampled)
                )
        if tokens is not None:
            rows.write(sampled.rows, sampled.positions, tokens)
