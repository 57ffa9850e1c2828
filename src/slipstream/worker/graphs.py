"""CUDA graphs of steps: pure decodes over a ladder of batch sizes, and short steps with prompts over a ladder of tokens.

A step launches some three hundred kernels, for which the host takes longer than the GPU unless there are many tokens. Replaying
a graph is one launch. A step runs in the smallest graph that holds it:

1. In a decode graph the rows too many are the null row: seq_len 0, writes to the null block.
2. In a short step's graph every sequence is a prompt to attention, a decode one of one token. The tokens too many are one more
   sequence, of the null row.
3. A graph covers everything from the rows' numbers to the hidden states. The head and the sampler follow eagerly, since what
   they compute depends on what the rows ask for.

All graphs share one memory pool, and a graph's inputs stay where they are, so hidden states and sampled rows hold only until
the next replay. On one stream that is after the tokens were sampled and written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.platform import Graph, platform_of
from slipstream.spec.reason import Reason
from slipstream.types import ScheduledSequence
from slipstream.worker.forward import NO_PLAN, Forward, Forwards, InputBatch, Output
from slipstream.worker.input_batch import RowTable, SampledRows, gather_inputs, laid_out

SHORT_SEQS = 64
"""Sequences that a short step's graph has room for, the padding's among them."""

SHORT_CONTEXT = 4096
"""Longest context of a decode in such a step: prefill attention reads it with one program a head, not with many."""


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: few enough to start fast, near enough that padding wastes little (≤ 1/8 from 16 on)."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    n, step = 16, 8
    while n < max_num_seqs:
        sizes.append(n)
        step = max(8, n // 8 // 8 * 8)
        n += step
    return sorted({*sizes, max_num_seqs})


def short_ladder(longest: int) -> list[int]:
    """Tokens of short steps to capture, up to `longest`. With more than 512 the GPU takes longer than the host's launches (an
    8B model's on an H200 in bfloat16; in FP8 from about 1,000 on)."""
    return [n for n in (32, 64, 128, 192, 256, 320, 384, 448, 512) if n <= longest]


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Graph
    inputs: Tensor  # int32, as what was captured reads it
    output: Tensor  # the graph's own: every replay writes it


class Graphs:
    """Steps that were captured, by kind and size."""

    def __init__(self, device: torch.device) -> None:
        self.platform = platform_of(device)
        self._recorder = self.platform.graphs() if device.type != "cpu" else None
        self._captured: dict[tuple[str, int], Captured] = {}

    def _capture(
        self, kind: str, size: int, idle: npt.NDArray[np.int32], forward: Callable[[Tensor, int], Tensor]
    ) -> Captured:
        """`idle`: inputs of a step of nothing but padding."""
        assert self._recorder is not None
        inputs = torch.from_numpy(idle).to(self.platform.device)
        graph, output = self._recorder.capture(lambda: forward(inputs, size))
        captured = self._captured[kind, size] = Captured(graph, inputs, output)
        return captured


class StepGraphs(Graphs, Forward):
    """`forwards` run what is captured, and `logits`."""

    name = "graphs"

    def __init__(self, forwards: Forwards, kv: Sequence[LayerKV], rows: RowTable, config: EngineConfig) -> None:
        super().__init__(rows.device)
        self.forwards = forwards
        self.kv = kv
        self.rows = rows
        self.max_model_len = config.model.max_model_len
        self.sizes = ladder(config.scheduling.max_num_seqs)
        self.short_sizes = short_sizes(config, encoded=rows.encoder_table is not None)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=rows.device)  # of a token each

    def capture(self) -> None:
        """Capture some decodes now, the largest first, so that the others fit into its memory. The rest, and short steps, are
        captured when they are first wanted, which takes some tens of milliseconds each: a start does not wait for sizes that
        may never come."""
        for size in reversed(self.sizes):
            if size == self.sizes[-1] or size.bit_count() == 1:
                self._decode_graph(size)

    def covers(self, batch: InputBatch) -> Reason | None:
        if batch.plan is None:
            return NO_PLAN
        scheduled = batch.plan.scheduled
        if scheduled[-1].num_tokens == 1:
            return None if len(scheduled) <= self.sizes[-1] else Reason("more sequences than a graph holds")
        if not self.short_sizes or batch.num_tokens > self.short_sizes[-1]:
            return Reason("more tokens than a graph holds")
        if len(scheduled) >= SHORT_SEQS:
            return Reason("more sequences than a short step's graph holds")
        if any(s.num_tokens == 1 and s.num_computed_tokens >= SHORT_CONTEXT for s in scheduled):
            return Reason("a decode with a long context among prompts")
        return None

    def run(self, batch: InputBatch) -> Output:
        assert batch.plan is not None
        scheduled = batch.plan.scheduled
        if scheduled[-1].num_tokens == 1:
            return self._run_decodes(scheduled)
        return self._run_short(scheduled, batch.num_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.forwards.logits(hidden)

    # --- Decodes ------------------------------------------------------------------------------------------------------

    def _run_decodes(self, scheduled: tuple[ScheduledSequence, ...]) -> Output:
        num_seqs = len(scheduled)
        size = next(n for n in self.sizes if n >= num_seqs)
        table = self.rows.rows
        host = self._idle_decodes(size)
        host[0, :num_seqs] = [table[s.request_id].index for s in scheduled]
        host[1, :num_seqs] = [s.num_computed_tokens for s in scheduled]
        host[2, :num_seqs] = host[1, :num_seqs] + 1
        captured = self._decode_graph(size)
        captured.inputs.copy_(self.platform.upload(host), non_blocking=True)
        captured.graph.replay()
        rows, _, new = captured.inputs[:, :num_seqs].unbind(0)
        which = [i for i, s in enumerate(scheduled) if s.samples]
        if len(which) == num_seqs:
            return Output(self, captured.output[:num_seqs], SampledRows(sequences=scheduled, rows=rows, positions=new))
        index = self.platform.upload(np.array(which, np.int64))
        sequences = tuple(scheduled[i] for i in which)
        return Output(self, captured.output, SampledRows(sequences=sequences, rows=rows[index], positions=new[index]), index)

    def _decode_graph(self, size: int) -> Captured:
        known = self._captured.get(("decodes", size))
        if known is not None:
            return known
        captured = self._capture("decodes", size, self._idle_decodes(size), self._decodes)
        self.logits(captured.output)  # its kernels are compiled now, not in the first step of this size
        return captured

    def _idle_decodes(self, size: int) -> npt.NDArray[np.int32]:
        """Rows, positions and lengths of nothing but padding. Each begins at a multiple of 16 bytes: Triton compiles a kernel
        anew for pointers that don't."""
        inputs = np.zeros((3, -(-size // 4) * 4), dtype=np.int32)
        inputs[0] = self.rows.capacity
        return inputs

    def _decodes(self, inputs: Tensor, size: int) -> Tensor:
        rows, positions, seq_lens = inputs[:, :size].unbind(0)
        token_ids, meta = gather_inputs(
            self.rows,
            token_rows=rows,
            positions=positions,
            rows=rows,
            query_start_loc=self._starts[: size + 1],
            seq_lens=seq_lens,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self.max_model_len,
        )
        return self.forwards.hidden(token_ids, self.kv, meta)

    # --- Short steps --------------------------------------------------------------------------------------------------

    def _run_short(self, scheduled: tuple[ScheduledSequence, ...], num_tokens: int) -> Output:
        size = next(n for n in self.short_sizes if n >= num_tokens)
        captured = self._captured.get(("short", size))
        if captured is None:
            captured = self._capture("short", size, short_inputs(self.rows, (), size), self._short)
        captured.inputs.copy_(self.platform.upload(short_inputs(self.rows, scheduled, size)), non_blocking=True)
        captured.graph.replay()
        sequences = tuple(s for s in scheduled if s.samples)
        *_, index, rows, positions, _ = split_short(captured.inputs, size)
        n = len(sequences)
        sampled = SampledRows(sequences=sequences, rows=rows[:n], positions=positions[:n])
        return Output(self, captured.output, sampled, index[:n])

    def _short(self, inputs: Tensor, size: int) -> Tensor:
        return self.forwards.hidden(*short_step(self.rows, self.kv, inputs, size, self.max_model_len))


def short_sizes(config: EngineConfig, *, encoded: bool) -> list[int]:
    """Tokens of the short steps that an engine may capture. The padding, a sequence like others, may have to hold them all.
    `encoded`: behind an encoder there are none."""
    return [] if encoded else short_ladder(min(config.scheduling.max_num_batched_tokens, config.model.max_model_len))


def short_inputs(table: RowTable, scheduled: Sequence[ScheduledSequence], size: int) -> npt.NDArray[np.int32]:
    """The inputs of a short step of at most `size` tokens, as `split_short` takes them apart. The tokens too many are those of
    one more sequence, of the null row, all at position 0."""
    num_seqs = len(scheduled)
    host = np.zeros(2 * size + 6 * SHORT_SEQS + 1, np.int32)
    token_rows, positions, seq_lens, rows, index, sample_rows, sample_positions, starts = split_short(host, size)
    own = np.array([table.rows[s.request_id].index for s in scheduled], np.int64)
    computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
    lengths = np.array([s.num_tokens for s in scheduled], np.int64)
    of_tokens, at, begins = laid_out(own, computed, lengths)
    total = len(at)
    starts[: num_seqs + 1], starts[num_seqs + 1 :] = begins, size
    token_rows[:total], token_rows[total:] = of_tokens, table.capacity
    positions[:total] = at
    seq_lens[:num_seqs], seq_lens[num_seqs] = computed + lengths, size - total
    rows[:num_seqs], rows[num_seqs:] = own, table.capacity
    which = [i for i, s in enumerate(scheduled) if s.samples]
    index[: len(which)] = (begins[1:] - 1)[which]
    sample_rows[: len(which)] = own[which]
    sample_positions[: len(which)] = seq_lens[:num_seqs][which]
    return host


def split_short(inputs: Any, size: int) -> list[Any]:
    """An array's or tensor's parts: each token's row and position; each sequence's length and row; of those that sample the
    last token, row and position of the new token; where the sequences begin."""
    ends = np.cumsum([size, size, *(5 * [SHORT_SEQS]), SHORT_SEQS + 1]).tolist()  # each begins at a multiple of 16 bytes
    return [inputs[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def short_step(
    table: RowTable, kv: Sequence[LayerKV], inputs: Tensor, size: int, max_model_len: int
) -> tuple[Tensor, Sequence[LayerKV], AttentionMetadata]:
    """What `Forwards.hidden` is given of a short step: tokens [size], the cache, and where the tokens stand."""
    token_rows, positions, seq_lens, rows, _, _, _, starts = split_short(inputs, size)
    token_ids, meta = gather_inputs(
        table,
        token_rows=token_rows,
        positions=positions,
        rows=rows,
        query_start_loc=starts,
        seq_lens=seq_lens,
        num_decodes=0,
        max_query_len=size,
        max_seq_len=max_model_len,
    )
    return token_ids, kv, meta
