"""A smaller model that guesses the tokens which the engine's model then verifies, token by token on the device
(`worker/drafter.py`). What others have put into a shared block is what it would put there itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.model.loader import load_model
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import SCHEMES
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.drafter import Chain
from slipstream.worker.forward import Forwards, InputBatch
from slipstream.worker.input_batch import RowTable
from slipstream.worker.sampler import sampling_tensors


class DraftModel(Chain):
    """Loads the model at once."""

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
        super().__init__(config, ops=ops, device=device, dtype=dtype)
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

    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
        batch = InputBatch(self.kv, StepPlan(0, tuple(shares)), rows)
        output = self.forwards.run(batch)
        sampled, tokens = output.sampled, output.tokens
        assert sampled is not None
        if output.running is not None:
            output.running.synchronize()
        elif sampled.requests:
            assert output.hidden is not None
            hidden = (
                output.hidden if output.sample_index is None else output.hidden.index_select(0, output.sample_index)
            )
            tokens = output.forward.greedy(hidden) if batch.is_greedy else None
            if tokens is None:
                tokens = self.ops.sample(output.forward.logits(hidden), sampling_tensors(rows, sampled))
        if tokens is not None:
            rows.write(sampled.rows, sampled.positions, tokens)


def check_draft_model(draft: ModelSpec, target: ModelSpec, max_model_len: int) -> None:
    """ConfigError says why `draft` can't propose tokens for `target`."""
    reason = None
    if not draft.generates or draft.kind != "a decoder":
        reason = f"the draft model is {draft.kind}; it must be a decoder that writes text"
    elif target.encoder is not None or target.cache_groups[0].kind != "full":
        reason = "the model has no group of layers that keep all tokens of a request; take method 'ngram' or 'suffix'"
    elif len(draft.cache_groups) > 1 or draft.cache_groups[0].kind != "full":
        reason = "the draft model has sliding windows; take one without"
    elif draft.vocab_size != target.vocab_size:
        sizes = f"{draft.vocab_size} tokens and the model {target.vocab_size}"
        reason = f"the draft model has {sizes}; take one with the same tokenizer"
    elif draft.max_position < max_model_len:
        reason = f"the draft model was made for {draft.max_position} tokens; lower max_model_len={max_model_len}"
    if reason is not None:
        raise ConfigError(f"speculative_config: {reason}", field="speculative_config")
