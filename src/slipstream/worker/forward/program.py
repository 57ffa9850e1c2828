"""Steps as one program of the CPU's C++ kernels, for tensors and for arrays. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slipstream.kernels.cpu.program.programs import Beyond
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.steps import TokenMask
from slipstream.model.step_program import StepProgram
from slipstream.worker.forward.base import BegunStep, InputBatch, Output, PlainForward
from slipstream.worker.forward.state_cache import StateCache
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.constrained import mask_bits
from slipstream.worker.sampling.draws import DrawnTokens
from slipstream.worker.sampling.sampler import sampling_tensors
from slipstream.worker.thread_governor import ThreadGovernor

if TYPE_CHECKING:
    from torch import Tensor


RUN_AHEAD = 8
"""Maximum number of sequences in a CPU step that may run while the host handles the previous step.

This hides the host's work, a tenth of a step of one sequence. In exchange, a new request waits one
step longer. Steps of 16 and more sequences gained nothing (benchmarks/CPU_NOTES.md).
"""


class ProgramForward(PlainForward):
    """Runs steps with a decoder's program.

    A `governor` chooses how many threads compute.
    """

    name = "program"

    def __init__(
        self,
        program: StepProgram,
        states: StateCache | None = None,
        governor: ThreadGovernor | None = None,
    ) -> None:
        super().__init__(program.decoder, states)
        self.program, self.pool, self.governor = program, program.pool, governor

    def run(self, batch: InputBatch) -> Output | BegunStep:
        """Run a step.

        A step of up to `RUN_AHEAD` decodes that need nothing but tokens is only started; it must be
        finished before the next step.
        """
        given, table = batch.gathered, batch.table
        names = given.sampled.names
        if (
            not names
            or given.sample_index is not None
            or table is None
            or table.wanted("grammar", names)
            or table.changes_logits(names)
        ):
            return super().run(batch)
        params = sampling_tensors(table, given.sampled) if table.wanted("draw", names) else None
        which, counts = given.sampled.wanted_logprobs(table)
        beyond = Beyond(None, which, max(counts)) if which else None
        begun = self.program.begin(given.token_ids, batch.kv, given.meta, params, beyond)
        if begun is None:
            return super().run(batch)
        tokens, packed, states, running = begun
        if self.governor is not None:
            num_keys = sum(s.num_computed_tokens + 1 for s in given.sampled.requests)
            note = partial(self.governor.note, len(tokens), num_keys)
            running.ended = lambda: note(self.pool.last_s)
        logprobs = None if packed is None else (which, packed, counts)
        step = BegunStep(
            given.sampled, tokens, running, self.states, (states, given.meta), logprobs
        )
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

    def drawn(
        self, hidden: Tensor, table: RowTable, sampled: SampledRows, mask: TokenMask | None
    ) -> DrawnTokens | None:
        if not self.program.writes_no_logits or table.changes_logits(sampled.names):
            return None
        which, counts = sampled.wanted_logprobs(table)
        bits = None if mask is None or not mask.positions else mask_bits(mask)
        beyond = Beyond(bits, which, max(counts, default=0))
        tokens, packed = self.program.drawn(hidden, sampling_tensors(table, sampled), beyond)
        return DrawnTokens(tokens, (which, packed, counts) if which else None)
