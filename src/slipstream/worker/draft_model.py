"""A smaller model that guesses the tokens which the engine's model then verifies.

It proposes at the begin of a step, token by token on the device, for the requests whose drafts the plan leaves open
(`FROM_MODEL`). It samples as the request does: with its filters, penalties and biases, and with the random number that the
engine's model will draw with at that place. So where both models think alike they draw the same token, and a seed gives the
answer that it gives without drafts (communication-free coupling: Daliri, Musco and Suresh 2024). The worker then keeps what the
engine's model draws, so the answer's distribution is that of plain sampling, whatever the draft model is.

Its keys and values stand in the blocks of the requests' full group, in tensors of its own. Of a request that has no drafts it
computes nothing. When drafts are wanted it first computes the tokens that it has not seen yet (`Row.num_drafted`), after a
prefix hit or a preemption from the first token on: what others have put into a shared block is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.metadata import LayerKV, cache_tensors
from slipstream.kernels.ops import OpSet
from slipstream.model.loader import load_model
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import SCHEMES
from slipstream.types import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.worker.forward import Forwards, InputBatch
from slipstream.worker.input_batch import RowTable
from slipstream.worker.sampler import sampling_tensors


class DraftModel:
    """Loads the model at once; `allocate` must come before `propose`."""

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
        check_draft_model(description.spec, target, config.model.max_model_len)
        assert config.speculation is not None
        quantization = config.speculation.quantization
        self.ops, self.device, self.dtype = ops, device, dtype
        self.platform = platform_of(device)
        self.max_tokens = config.scheduling.max_num_batched_tokens
        self.block_size = config.cache.block_size
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
        self.kv: list[LayerKV] = []

    @property
    def block_bytes(self) -> int:
        return self.model.spec.block_bytes_per_token(self.dtype.itemsize) * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self.kv = self.make_cache(num_blocks)

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        by_dim = self.ops.values_by_dim(self.dtype)
        tensors = [
            cache_tensors(
                layer.attention,
                num_blocks,
                self.block_size,
                lambda shape: self.platform.zeros(shape, self.dtype),
                values_by_dim=by_dim,
            )
            for layer in self.model.spec.layers
        ]
        return [LayerKV(*pair) for pair in tensors]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        for layer in self.kv:
            self.ops.copy_blocks(layer, source, target)

    def propose(self, plan: StepPlan, rows: RowTable) -> Tensor | None:
        """Put drafts behind the last tokens of the requests that want some. All drafts [N], in the plan's order."""
        for s in plan.scheduled:  # wrong drafts are forgotten in the step behind them, before plain ones pass them by
            row = rows.rows[s.request_id]
            row.num_drafted = min(row.num_drafted, s.num_computed_tokens)
        drafted = [s for s in plan.scheduled if FROM_MODEL in s.drafts]
        if not drafted:
            return None
        self._catch_up(drafted, rows)
        for i in range(1, max(len(s.drafts) for s in drafted)):
            self._step(
                [ScheduledRequest(s.request_id, s.num_computed_tokens + i, 1, 1) for s in drafted if len(s.drafts) > i],
                rows,
            )
        where: list[int] = []
        width = rows.tokens.shape[1]
        for s in drafted:
            row = rows.rows[s.request_id]
            row.num_drafted = s.num_computed_tokens + len(s.drafts)
            first = row.index * width + s.num_computed_tokens + 1
            where.extend(range(first, first + len(s.drafts)))
        return rows.tokens.view(-1)[self.platform.upload(np.array(where, np.int64))]

    def _catch_up(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Compute what it has not seen of the requests, up to their last tokens, and draw the first draft of each."""
        begins = {s.request_id: rows.rows[s.request_id].num_drafted for s in drafted}
        while True:
            room, shares = self.max_tokens, []
            for s in drafted:
                begin, end = begins[s.request_id], s.num_computed_tokens + 1
                if count := min(end - begin, room):
                    shares.append(ScheduledRequest(s.request_id, begin, count, int(begin + count == end)))
                    begins[s.request_id] += count
                    room -= count
            if not shares:
                return
            self._step(sorted(shares, key=lambda s: s.num_tokens > 1), rows)

    def _step(self, shares: Sequence[ScheduledRequest], rows: RowTable) -> None:
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
