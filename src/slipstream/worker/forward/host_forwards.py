"""The forward path without torch: a model's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream.kernels.cpu.host_texts import HostTextOps
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.texts import TextTask
from slipstream.model.compile_step import compile_step
from slipstream.model.decoder import Decoder
from slipstream.model.encoder import TextHeads
from slipstream.model.encoder import pool as pooled
from slipstream.model.layers.taps import AnyTap
from slipstream.platform import platform_of
from slipstream.spec.pooling import PoolingSpec
from slipstream.spec.reason import NotCovered, Reason
from slipstream.worker.forward.program import ProgramForward
from slipstream.worker.forward.state_cache import StateCache
from slipstream.worker.thread_governor import ThreadGovernor

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet


class HostForwards:
    """`Forwards` without torch, whose only path is the program.

    NotCovered if the program lacks something that the model needs.
    """

    def __init__(
        self, decoder: Decoder, pool: ThreadPool, governor: ThreadGovernor | None = None
    ) -> None:
        self._decoder, self._pool, self._governor = decoder, pool, governor
        self._states: StateCache | None = None
        self.heads = TextHeads()
        self.rebuild()

    def rebuild(self) -> None:
        """See `ForwardTable.rebuild`."""
        # for what the program leaves out: parts of an encoder, a classifier, pooling
        self.decoder = self._decoder.with_ops(cast("OpSet", HostTextOps(self._pool)))
        program = compile_step(self._decoder, self._pool, platform_of(None), self.decoder)
        if isinstance(program, Reason):
            raise NotCovered(program)
        self.base = ProgramForward(program, self._states, self._governor)
        self.run, self.encode, self.logits = self.base.run, self.base.encode, self.base.logits

    num_cold = 0

    @property
    def token_bytes(self) -> int:
        return self.base.program.token_bytes

    def keep_states(self, states: StateCache, tap: AnyTap | None) -> None:
        """See `Forwards.keep_states`."""
        self._states, self._decoder.tap = states, tap
        self.rebuild()

    def count_experts(self) -> Mapping[int, Any]:
        """See `Forwards.count_experts`."""
        counts = self._decoder.count_experts()
        if counts:
            self.rebuild()
        return counts

    def hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """Token ids [T] to hidden states [T, E]."""
        return self.base.program.forward(token_ids, kv, meta)

    def vectors(self, how: PoolingSpec, hidden: Any, starts: Any, task: TextTask = "embed") -> Any:
        """See `Forwards.vectors`."""
        decoder: Any = self.decoder
        if how.score_tokens is not None:
            logits: Any = self.logits(hidden)
            yes, no = how.score_tokens
            return logits[:, [yes]] - (np.float32(0.0) if no is None else logits[:, [no]])
        if decoder.classifier is not None:
            return decoder.classifier(decoder.ops, hidden, starts)
        found: Any
        if task != "embed":
            found = self.heads.of_tokens(hidden, task, np)
        else:
            assert how.kind != "tokens"
            found = pooled(decoder.ops, hidden, starts, how.kind)
            for step in self.heads.dense:
                found = step(found, np)
        if not how.normalize or task == "sparse_embed":
            return found
        return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), np.float32(1e-12))
