"""CUDA graphs of steps: pure decodes over a ladder of batch sizes, and short steps with prompts over a ladder of tokens.

A step launches some three hundred kernels, for which the host takes longer than the GPU unless there are many tokens; replaying
a graph launches one thing. A step runs in the smallest graph that holds it. In a decode graph the rows too many are the null
row (seq_len 0, writes to the null block). In a short step's graph every sequence is a prompt to attention, a decode one of one
token, and the tokens too many are one more sequence, of the null row. A graph covers everything from the rows' numbers to the
logits; sampling follows eagerly, since it depends on what the rows ask for.

All graphs share one memory pool, and a graph its inputs with its next replay, so logits and sampled rows hold only until then:
on one stream that is after the tokens were sampled and written.
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
from slipstream.kernels.metadata import LayerKV
from slipstream.model.decoder import Decoder
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.input_batch import RowTable, SampledRows, gather_inputs, laid_out, upload

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


def graph_rows(decodes: list[int], short: list[int]) -> int:
    """Rows of logits that graphs of these sizes hold in all: a graph's stay where they are, though none is read again."""
    return sum(decodes) + SHORT_SEQS * len(short)


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int32, as what was captured reads it
    output: Tensor  # of the graph's own: `graph_rows` counts those that are logits [n, V]


class Graphs:
    """Steps that were captured, by kind and size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured: dict[tuple[str, int], Captured] = {}
        self._pool: Any = None  # of the first graph; the others share it
        self._stream: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def _capture(
        self, kind: str, size: int, idle: npt.NDArray[np.int32], forward: Callable[[Tensor, int], Tensor]
    ) -> Captured:
        """`idle`: inputs of a step of nothing but padding."""
        inputs = torch.from_numpy(idle).to(self.device)
        graph, stream = torch.cuda.CUDAGraph(), self._stream or torch.cuda.Stream()
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which collects garbage and empties torch's cache each time.
        with torch.cuda.stream(stream):
            forward(inputs, size)  # kernels compile and choose their tiles outside the capture
            # Other threads of the process may use the GPU meanwhile.
            more = {} if self._pool is None else {"pool": self._pool}
            graph.capture_begin(**more, capture_error_mode="thread_local")
            try:
                output = forward(inputs, size)
            finally:  # a stream left capturing would let no later step run
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or graph.pool()
        captured = self._captured[kind, size] = Captured(graph, inputs, output)
        return captured


class StepGraphs(Graphs):
    def __init__(self, decoder: Decoder, kv: Sequence[LayerKV], rows: RowTable, config: EngineConfig) -> None:
        super().__init__(rows.device)
        self.decoder = decoder
        self.kv = kv
        self.rows = rows
        self.max_model_len = config.model.max_model_len
        self.sizes = ladder(config.scheduling.max_num_seqs)
        self.short_sizes = short_sizes(config, encoded=rows.cross is not None)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=rows.device)  # of a token each

    def capture(self) -> None:
        """Capture some decodes now, the largest first, so that the others fit into its memory. The rest, and short steps, are
        captured when they are first wanted, which takes some tens of milliseconds each: a start does not wait for sizes that
        may never come."""
        for size in reversed(self.sizes):
            if size == self.sizes[-1] or size.bit_count() == 1:
                self._decode_graph(size)

    def run(self, plan: StepPlan) -> tuple[Tensor, SampledRows] | None:
        """Replay a graph if there is one for `plan`: its logits [n, V] and what to sample. Steps that sample nothing, and those
        that want more than logits, have none."""
        if plan.scheduled[-1].num_tokens > 1 or not all(s.num_sampled for s in plan.scheduled):
            return self._run_short(plan.scheduled)
        return self._run_decodes(plan.scheduled)

    # --- Decodes ------------------------------------------------------------------------------------------------------

    def _run_decodes(self, scheduled: tuple[ScheduledRequest, ...]) -> tuple[Tensor, SampledRows] | None:
        num_seqs = len(scheduled)
        if num_seqs > self.sizes[-1]:
            return None
        size = next(n for n in self.sizes if n >= num_seqs)
        table = self.rows.rows
        host = self._idle_decodes(size)
        host[0, :num_seqs] = [table[s.request_id].index for s in scheduled]
        host[1, :num_seqs] = [s.num_computed_tokens for s in scheduled]
        host[2, :num_seqs] = host[1, :num_seqs] + 1
        captured = self._decode_graph(size)
        captured.inputs.copy_(upload(host, self.rows.device), non_blocking=True)
        captured.graph.replay()
        rows, _, new = captured.inputs[:, :num_seqs].unbind(0)
        return captured.output[:num_seqs], SampledRows(requests=scheduled, rows=rows, positions=new)

    def _decode_graph(self, size: int) -> Captured:
        known = self._captured.get(("decodes", size))
        return known or self._capture("decodes", size, self._idle_decodes(size), self._decodes)

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
        return self.decoder.logits(self.decoder.forward(token_ids, self.kv, meta))

    # --- Short steps --------------------------------------------------------------------------------------------------

    def _run_short(self, scheduled: tuple[ScheduledRequest, ...]) -> tuple[Tensor, SampledRows] | None:
        num_tokens = sum(s.num_tokens for s in scheduled)
        if not self.short_sizes or num_tokens > self.short_sizes[-1] or not is_short(self.rows, scheduled):
            return None
        size = next(n for n in self.short_sizes if n >= num_tokens)
        captured = self._captured.get(("short", size))
        if captured is None:
            captured = self._capture("short", size, short_inputs(self.rows, (), size), self._short)
        captured.inputs.copy_(upload(short_inputs(self.rows, scheduled, size), self.rows.device), non_blocking=True)
        captured.graph.replay()
        requests = tuple(s for s in scheduled if s.num_sampled)
        *_, rows, positions, _ = split_short(captured.inputs, size)
        n = len(requests)
        return captured.output[:n], SampledRows(requests=requests, rows=rows[:n], positions=positions[:n])

    def _short(self, inputs: Tensor, size: int) -> Tensor:
        return short_logits(self.decoder, self.kv, self.rows, inputs, size, self.max_model_len)


def short_sizes(config: EngineConfig, *, encoded: bool) -> list[int]:
    """Tokens of the short steps that an engine may capture. The padding, a sequence like others, may have to hold them all.
    `encoded`: behind an encoder there are none."""
    return [] if encoded else short_ladder(min(config.scheduling.max_num_batched_tokens, config.model.max_model_len))


def is_short(table: RowTable, scheduled: Sequence[ScheduledRequest]) -> bool:
    """Whether a step of few tokens can be a short one: it samples, wants nothing but logits of last tokens, and no decode in it
    looks far back."""
    if len(scheduled) >= SHORT_SEQS or table.pooled or max(s.num_sampled for s in scheduled) != 1:
        return False
    if any(s.num_tokens == 1 and s.num_computed_tokens >= SHORT_CONTEXT for s in scheduled):
        return False
    return all(table.rows[s.request_id].sampling.prompt_logprobs is None for s in scheduled)


def short_inputs(table: RowTable, scheduled: Sequence[ScheduledRequest], size: int) -> npt.NDArray[np.int32]:
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
    which = [i for i, s in enumerate(scheduled) if s.num_sampled]
    index[: len(which)] = (begins[1:] - 1)[which]
    sample_rows[: len(which)] = own[which]
    sample_positions[: len(which)] = seq_lens[:num_seqs][which]
    return host


def split_short(inputs: Any, size: int) -> list[Any]:
    """An array's or tensor's parts: each token's row and position; each sequence's length and row; of those that sample the
    last token, row and position of the new token; where the sequences begin."""
    ends = np.cumsum([size, size, *(5 * [SHORT_SEQS]), SHORT_SEQS + 1]).tolist()  # each begins at a multiple of 16 bytes
    return [inputs[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def short_logits(
    decoder: Decoder, kv: Sequence[LayerKV], table: RowTable, inputs: Tensor, size: int, max_model_len: int
) -> Tensor:
    """[SHORT_SEQS, V]: of the sequences that sample, and then of some token."""
    token_rows, positions, seq_lens, rows, index, _, _, starts = split_short(inputs, size)
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
    return decoder.logits(decoder.forward(token_ids, kv, meta)[index.long()])
