"""CUDA graphs of pure decode steps, over a ladder of batch sizes.

A decode step launches some three hundred kernels; replaying a graph launches one thing. A step of n sequences runs in the
smallest graph of at least n rows; the rows too many are the null row (seq_len 0, writes to the null block). A graph covers
everything from the rows' numbers to the logits; sampling follows eagerly, since it depends on what the rows ask for.

All graphs share one memory pool, so a graph's logits hold only until the next replay: on one stream that is after they
were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import LayerKV
from slipstream.model.decoder import Decoder
from slipstream.types import StepPlan
from slipstream.worker.input_batch import RowTable, SampledRows, look_up, upload


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: few enough to start fast, near enough that padding wastes little (≤ 1/8 from 16 on)."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    n, step = 16, 8
    while n < max_num_seqs:
        sizes.append(n)
        step = max(8, n // 8 // 8 * 8)
        n += step
    return sorted({*sizes, max_num_seqs})


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int32 [2, n]: rows, seq_lens
    logits: Tensor  # [n, V]


class DecodeGraphs:
    def __init__(self, decoder: Decoder, kv: Sequence[LayerKV], rows: RowTable, config: EngineConfig) -> None:
        self.decoder = decoder
        self.kv = kv
        self.rows = rows
        self.max_model_len = config.model.max_model_len
        self.sizes = ladder(config.scheduling.max_num_seqs)
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # of the first graph; the others share it
        self._stream = torch.cuda.Stream()

    def capture(self) -> None:
        """Capture some sizes now, the largest first, so that the others fit into its memory. The rest are captured when they
        are first wanted, which takes some tens of milliseconds each: a start does not wait for sizes that may never come."""
        for size in reversed(self.sizes):
            if size == self.sizes[-1] or size.bit_count() == 1:
                self._capture(size)

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        inputs = torch.zeros(2, size, dtype=torch.int32, device=self.rows.device)
        inputs[0] = self.rows.capacity
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which collects garbage and empties torch's cache each time.
        with torch.cuda.stream(stream):
            self._forward(inputs)  # kernels compile and choose their tiles outside the capture
            if self._pool is None:
                graph.capture_begin()
            else:
                graph.capture_begin(pool=self._pool)
            logits = self._forward(inputs)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or graph.pool()
        captured = self._captured[size] = _Captured(graph, inputs, logits)
        return captured

    def run(self, plan: StepPlan) -> tuple[Tensor, SampledRows] | None:
        """Replay a graph if `plan` is a decode step that fits one: its logits [n, V] and what to sample."""
        scheduled = plan.scheduled
        num_seqs = len(scheduled)
        if num_seqs > self.sizes[-1] or scheduled[-1].num_tokens != 1:
            return None
        if not all(s.samples for s in scheduled):  # a prompt's chunk of one token
            return None
        size = next(n for n in self.sizes if n >= num_seqs)
        captured = self._captured.get(size) or self._capture(size)
        table = self.rows.rows
        host = np.zeros((2, size), dtype=np.int32)
        host[0, num_seqs:] = self.rows.capacity
        host[0, :num_seqs] = [table[s.request_id].index for s in scheduled]
        host[1, :num_seqs] = [s.num_computed_tokens + 1 for s in scheduled]
        captured.inputs.copy_(upload(host, self.rows.device), non_blocking=True)
        captured.graph.replay()
        live = captured.inputs[:, :num_seqs].long()  # a copy: the next replay overwrites the inputs
        return captured.logits[:num_seqs], SampledRows(sequences=scheduled, rows=live[0], positions=live[1])

    def _forward(self, inputs: Tensor) -> Tensor:
        rows, seq_lens = inputs.unbind(0)
        size = inputs.shape[1]
        token_ids, meta = look_up(
            self.rows,
            token_rows=rows,
            positions=(seq_lens - 1).clamp(min=0),
            rows=rows,
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=inputs.device),
            seq_lens=seq_lens,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self.max_model_len,
        )
        return self.decoder.logits(self.decoder.forward(token_ids, self.kv, meta))
