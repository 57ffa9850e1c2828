"""Steps as one program of the CPU's C++ kernels, for tensors and for arrays. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream.kernels.cpu.host_texts import HostTextOps
from slipstream.kernels.cpu.native import ThreadPool
from slipstream.kernels.cpu.native_program import RunningStep
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.model.decoder import Decoder
from slipstream.model.encoder import TextHeads
from slipstream.model.encoder import pool as pooled
from slipstream.model.layers import AnyTap
from slipstream.model.program import CpuProgram
from slipstream.model.step_program import compile_step
from slipstream.platform import Event, platform_of
from slipstream.spec.pooling import PoolingSpec
from slipstream.spec.reason import NotCovered, Reason
from slipstream.types import TextTask
from slipstream.worker.forward.base import BegunStep, InputBatch, Output, PlainForward, StateCache
from slipstream.worker.sampling.sampler import sampling_tensors
from slipstream.worker.thread_governor import ThreadGovernor

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet

RUN_AHEAD = 8
"""Maximum number of sequences in a CPU step that may run while the host handles the previous step.

This hides the host's work, which is a tenth of a step of one sequence. In exchange, a new request
waits one step longer. Steps of 16 and more sequences gained nothing (benchmarks/CPU_NOTES.md).
"""


class GovernedStep:
    """The event of a running step. Its time is reported when it is first waited for."""

    def __init__(
        self, step: RunningStep, governor: ThreadGovernor, pool: ThreadPool, sizes: tuple[int, int]
    ) -> None:
        self._step: RunningStep | None = step
        self._governor, self._pool, self._sizes = governor, pool, sizes

    def synchronize(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            step.synchronize()
            self._governor.note(*self._sizes, self._pool.last_s)

    def query(self) -> bool:
        return self._step is None

    def wait(self) -> None:
        self.synchronize()


class ProgramForward(PlainForward):
    """Runs steps with a decoder's program.

    A `governor` chooses how many threads compute.
    """

    name = "program"

    def __init__(
        self,
        program: CpuProgram,
        states: StateCache | None = None,
        governor: ThreadGovernor | None = None,
    ) -> None:
        super().__init__(program.decoder, states)
        self.program, self.pool, self.governor = program, program.step.pool, governor

    def run(self, batch: InputBatch) -> Output | BegunStep:
        """Run a step.

        A step of only decodes that want nothing but tokens is just started if it has up to
        `RUN_AHEAD` of them. It must be finished before the next step.
        """
        given, table = batch.gathered, batch.table
        names = given.sampled.names
        if (
            not names
            or given.sample_index is not None
            or table is None
            or not table.is_drawn(names)
        ):
            return super().run(batch)
        params = sampling_tensors(table, given.sampled) if table.wanted("draw", names) else None
        begun = self.program.begin(given.token_ids, batch.kv, given.meta, params)
        if begun is None:
            return super().run(batch)
        tokens, states, running = begun
        done: Event = running
        if self.governor is not None:
            num_keys = sum(s.num_computed_tokens + 1 for s in given.sampled.requests)
            done = GovernedStep(running, self.governor, self.pool, (len(tokens), num_keys))
        step = BegunStep(given.sampled, tokens, done, self.states, (states, given.meta))
        if len(tokens) > RUN_AHEAD or self.pool.num_used == 1:
            step.finish()
        return step

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        if self.governor is None:
            return self._keep(*self.program.tapped(token_ids, kv, meta), meta)
        if meta.max_query_len > 1:
            self.governor.begin_prompts()
        hidden = self._keep(*self.program.tapped(token_ids, kv, meta), meta)
        if meta.max_query_len == 1:
            self.governor.note(len(token_ids), int(meta.seq_lens.sum()), self.pool.last_s)
        return hidden

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.program.encode(given, kv, meta)

    def take(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.program.platform.values.take(hidden, rows)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.program.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.program.greedy(hidden)


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
        self._build()

    def _build(self) -> None:
        step = compile_step(self._decoder, self._pool)
        if isinstance(step, Reason):
            raise NotCovered(step)
        # for what the program leaves out: parts of an encoder, a classifier, pooling
        self.decoder = self._decoder.with_ops(cast("OpSet", HostTextOps(self._pool)))
        program = CpuProgram(self.decoder, step, platform_of(None))
        self.base = ProgramForward(program, self._states, self._governor)
        self.run, self.encode, self.logits = self.base.run, self.base.encode, self.base.logits

    num_cold = 0

    @property
    def token_bytes(self) -> int:
        return self.base.program.token_bytes

    def keep_states(self, states: StateCache, tap: AnyTap | None) -> None:
        """See `Forwards.keep_states`."""
        self._states, self._decoder.tap = states, tap
        self._build()

    def count_experts(self) -> Mapping[int, Any]:
        """See `Forwards.count_experts`."""
        counts = self._decoder.count_experts()
        if counts:
            self._build()
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
