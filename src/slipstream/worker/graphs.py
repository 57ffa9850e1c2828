"""CUDA graphs of steps: pure decodes over a ladder of batch sizes, and mixed steps over a grid of (decodes, prompt tokens).

A step launches some three hundred kernels, for which the host takes longer than the GPU unless there are many tokens. Replaying
a graph is one launch. A step runs in the smallest graph that holds it:

1. In a decode graph the rows too many are the null row: seq_len 0, writes to the null block.
2. A mixed graph has room for so many decodes, padded in the same way, and behind them for so many tokens of prompts. The prompt
   tokens too many are one more sequence, of the null row.
3. A graph covers everything from the rows' numbers to the hidden states. The head and the sampler follow eagerly, since what
   they compute depends on what the rows ask for.

All graphs share one memory pool, and a graph's inputs stay where they are, so hidden states and sampled rows hold only until
the next replay. On one stream that is after the tokens were sampled and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.plan.graph_sizes import MIXED_PROMPTS, ladder, mixed_decodes, mixed_prompts
from slipstream.platform import Graph, platform_of
from slipstream.spec.reason import Reason
from slipstream.types import ScheduledRequest
from slipstream.worker.forward import NO_PLAN, Forward, Forwards, InputBatch, Output
from slipstream.worker.input_batch import RowTable, SampledRows, gather_inputs, laid_out

SLACK = 1.3
"""While its graph is not captured, a step runs in one with up to so many times its tokens."""

PATIENCE = 4
"""A mixed step whose size is not captured runs op by op, until the size is wanted for the fourth time. Op by op it takes some
9 ms more on an H200; to capture it takes 60, which everybody waits for."""

Size: TypeAlias = tuple[int, int]
"""(decodes or texts, tokens behind them): what a graph has room for."""


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Graph
    inputs: Tensor  # int32, as what was captured reads it
    output: Tensor  # the graph's own: every replay writes it


class Graphs:
    """Steps that were captured, by size."""

    def __init__(self, device: torch.device) -> None:
        self.platform = platform_of(device)
        self._recorder = self.platform.graphs() if device.type != "cpu" else None
        self._captured: dict[Size, Captured] = {}

    def _capture(self, size: Size, idle: npt.NDArray[np.int32], forward: Callable[[Tensor], Tensor]) -> Captured:
        """`idle`: inputs of a step of nothing but padding."""
        assert self._recorder is not None
        inputs = torch.from_numpy(idle).to(self.platform.device)
        graph, output = self._recorder.capture(lambda: forward(inputs))
        captured = self._captured[size] = Captured(graph, inputs, output)
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
        self.decode_sizes = mixed_decodes(config.scheduling.max_num_seqs)
        self.prompt_sizes = mixed_prompts(config, encoded=rows.cross is not None)
        largest = max(self.sizes[-1], self.decode_sizes[-1] + max(self.prompt_sizes, default=0))
        decoder = forwards.decoder
        # One buffer for all graphs: each would keep its own for good, though none is read after the next replay.
        self._hidden = torch.empty(largest, decoder.spec.hidden_size, dtype=decoder.dtype, device=rows.device)
        self._ahead: list[Size] = []  # to be captured, the next one last
        self._wanted: Counter[Size] = Counter()  # by mixed steps before their sizes were captured
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=rows.device)  # of a token each

    def capture(self) -> None:
        """Capture some decodes now, the largest first, so that the others fit into its memory. The rest are captured by
        `capture_next`, or when they are first wanted, which takes some tens of milliseconds each."""
        for size in reversed(self.sizes):
            if size == self.sizes[-1] or size.bit_count() == 1:
                self._decode_graph(size)
        # Small sizes are the commonest, and waiting for one costs a small step the most.
        wanted = [(n, 0) for n in self.sizes] + [(d, p) for d in self.decode_sizes for p in self.prompt_sizes]
        wanted.sort(key=lambda size: (max(size), sum(size)))
        self._ahead = [size for size in reversed(wanted) if size not in self._captured]

    def capture_next(self) -> bool:
        """Capture the commonest size that is not captured yet. False: there is none."""
        while self._ahead:
            size = self._ahead.pop()
            if size not in self._captured:
                self._graph(size)
                return True
        return False

    def covers(self, batch: InputBatch) -> Reason | None:
        """Asked once a step: it counts the mixed sizes that are wanted and not captured."""
        if batch.plan is None:
            return NO_PLAN
        scheduled = batch.plan.scheduled
        if scheduled[-1].num_tokens == 1:
            return None if len(scheduled) <= self.sizes[-1] else Reason("more sequences than a graph holds")
        num_decodes = num_leading_decodes(scheduled)
        if not self.prompt_sizes or batch.num_tokens - num_decodes > self.prompt_sizes[-1]:
            return Reason("more prompt tokens than a graph holds")
        if num_decodes > self.decode_sizes[-1] or len(scheduled) - num_decodes >= MIXED_PROMPTS:
            return Reason("more sequences than a mixed graph holds")
        size = self._mixed_size_for(num_decodes, batch.num_tokens - num_decodes)
        if size not in self._captured and self._wanted[size] + 1 < PATIENCE:
            self._wanted[size] += 1
            self._ahead.append(size)
            return Reason("its graph is not captured yet")
        return None

    def run(self, batch: InputBatch) -> Output:
        assert batch.plan is not None
        scheduled = batch.plan.scheduled
        if scheduled[-1].num_tokens == 1:
            return self._run_decodes(scheduled)
        return self._run_mixed(scheduled, batch.num_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.forwards.logits(hidden)

    def _graph(self, size: Size) -> Captured:
        known = self._captured.get(size)
        if known is not None:
            return known
        return self._mixed_graph(size) if size[1] else self._decode_graph(size[0])

    def _size_for(self, num_seqs: int) -> int:
        """The smallest decode graph that holds so many sequences, or, while that is not captured, a slightly larger one that
        is."""
        size = next(n for n in self.sizes if n >= num_seqs)
        ready = (n for n in self.sizes if n >= size and (n, 0) in self._captured)
        other = next(ready, None)
        return other if other is not None and other <= SLACK * num_seqs else size

    def _mixed_size_for(self, num_decodes: int, num_prompt: int) -> Size:
        """The same of a mixed step."""
        size = (
            next(n for n in self.decode_sizes if n >= num_decodes),
            next(n for n in self.prompt_sizes if n >= num_prompt),
        )
        if size in self._captured:
            return size
        most = SLACK * (num_decodes + num_prompt)
        ready = [s for s in self._captured if s[1] and s[0] >= num_decodes and s[1] >= num_prompt and sum(s) <= most]
        return min(ready, key=sum, default=size)

    # --- Decodes ------------------------------------------------------------------------------------------------------

    def _run_decodes(self, scheduled: tuple[ScheduledRequest, ...]) -> Output:
        num_seqs = len(scheduled)
        size = self._size_for(num_seqs)
        table = self.rows.rows
        host = self._idle_decodes(size)
        host[0, :num_seqs] = [table[s.request_id].index for s in scheduled]
        host[1, :num_seqs] = [s.num_computed_tokens for s in scheduled]
        host[2, :num_seqs] = host[1, :num_seqs] + 1
        captured = self._graph((size, 0))
        captured.inputs.copy_(self.platform.upload(host), non_blocking=True)
        captured.graph.replay()
        rows, _, new = captured.inputs[:, :num_seqs].unbind(0)
        which = [i for i, s in enumerate(scheduled) if s.num_sampled]
        if len(which) == num_seqs:
            return Output(self, captured.output[:num_seqs], SampledRows(requests=scheduled, rows=rows, positions=new))
        index = self.platform.upload(np.array(which, np.int64))
        sequences = tuple(scheduled[i] for i in which)
        return Output(self, captured.output, SampledRows(requests=sequences, rows=rows[index], positions=new[index]), index)

    def _decode_graph(self, size: int) -> Captured:
        captured = self._capture((size, 0), self._idle_decodes(size), lambda inputs: self._decodes(inputs, size))
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
        return self._kept(self.forwards.hidden(token_ids, self.kv, meta))

    def _kept(self, hidden: Tensor) -> Tensor:
        return self._hidden[: len(hidden)].copy_(hidden)

    # --- Mixed steps --------------------------------------------------------------------------------------------------

    def _run_mixed(self, scheduled: tuple[ScheduledRequest, ...], num_tokens: int) -> Output:
        num_decodes = num_leading_decodes(scheduled)
        size = self._mixed_size_for(num_decodes, num_tokens - num_decodes)
        captured = self._graph(size)
        host, sequences, n = mixed_inputs(self.rows, scheduled, size)
        captured.inputs.copy_(self.platform.upload(host), non_blocking=True)
        captured.graph.replay()
        parts = MixedInputs(captured.inputs, size)
        sampled = SampledRows(requests=sequences, rows=parts.sample_rows[:n], positions=parts.sample_positions[:n])
        index, padding = parts.sample_index[:n], size[0] - num_decodes
        return Output(self, captured.output, sampled, index, num_decodes=num_decodes, padding=padding)

    def _mixed_graph(self, size: Size) -> Captured:
        idle, _, _ = mixed_inputs(self.rows, (), size)
        return self._capture(size, idle, lambda inputs: self._mixed(inputs, size))

    def _mixed(self, inputs: Tensor, size: Size) -> Tensor:
        return self._kept(self.forwards.hidden(*mixed_step(self.rows, self.kv, inputs, size, self.max_model_len)))


def num_leading_decodes(scheduled: Sequence[ScheduledRequest]) -> int:
    """How many sequences of one token stand first."""
    return next((i for i, s in enumerate(scheduled) if s.num_tokens > 1), len(scheduled))


class MixedInputs:
    """The parts of a mixed step's inputs, an array's or a tensor's, with room for D decodes and P prompt tokens: T = D + P
    tokens of S = D + MIXED_PROMPTS sequences. Each part begins at a multiple of 16 bytes."""

    def __init__(self, inputs: Any, size: Size) -> None:
        num_tokens, num_seqs = sum(size), size[0] + MIXED_PROMPTS
        ends = np.cumsum([*(5 * [num_tokens]), num_seqs, num_seqs, num_seqs + 1]).tolist()
        parts = [inputs[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        self.token_rows, self.positions = parts[:2]  # of each token [T]
        self.sample_index, self.sample_rows, self.sample_positions = parts[2:5]  # of those that are sampled: it, what follows
        self.seq_lens, self.rows = parts[5:7]  # of each sequence [S]
        self.starts = parts[7]  # where sequences begin [S + 1]

    @staticmethod
    def length(size: Size) -> int:
        return 5 * sum(size) + 3 * (size[0] + MIXED_PROMPTS) + 1


def mixed_inputs(
    table: RowTable, scheduled: Sequence[ScheduledRequest], size: Size
) -> tuple[npt.NDArray[np.int32], tuple[ScheduledRequest, ...], int]:
    """A step's inputs for the graph of `size`, the sequences that sample, and at how many positions. The null row stands in the
    decodes' free places. The prompt tokens too many are a sequence of the null row, all at position 0."""
    num_decodes = num_leading_decodes(scheduled)
    host = np.zeros(MixedInputs.length(size), np.int32)
    to, first = MixedInputs(host, size), size[0]
    own = np.array([table.rows[s.request_id].index for s in scheduled], np.int64)
    computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
    lengths = np.array([s.num_tokens for s in scheduled], np.int64)
    to.token_rows[:], to.rows[:] = table.capacity, table.capacity
    to.token_rows[:num_decodes] = to.rows[:num_decodes] = own[:num_decodes]
    to.positions[:num_decodes] = computed[:num_decodes]
    to.seq_lens[:num_decodes] = computed[:num_decodes] + 1
    to.starts[: first + 1] = np.arange(first + 1)
    of_tokens, at, begins = laid_out(own[num_decodes:], computed[num_decodes:], lengths[num_decodes:])
    total, num_prompts = len(at), len(scheduled) - num_decodes
    to.token_rows[first : first + total] = of_tokens
    to.positions[first : first + total] = at
    prompts = slice(first, first + num_prompts)
    to.rows[prompts] = own[num_decodes:]
    to.seq_lens[prompts] = (computed + lengths)[num_decodes:]
    to.seq_lens[first + num_prompts] = size[1] - total
    to.starts[first : first + num_prompts + 1] = first + begins
    to.starts[first + num_prompts + 1 :] = sum(size)
    counts = np.array([s.num_sampled for s in scheduled], np.int64)
    ends = np.concatenate((np.arange(1, num_decodes + 1), first + begins[1:]))  # of the sequences, in the step
    rows, index, _ = laid_out(own, ends - counts, counts)
    n = len(rows)
    to.sample_rows[:n], to.sample_index[:n] = rows, index
    to.sample_positions[:n] = laid_out(own, computed + lengths - counts, counts)[1] + 1
    return host, tuple(s for s in scheduled if s.num_sampled), n


def mixed_step(
    table: RowTable, kv: Sequence[LayerKV], inputs: Tensor, size: Size, max_model_len: int
) -> tuple[Tensor, Sequence[LayerKV], AttentionMetadata]:
    """What `Forwards.hidden` is given of a mixed step: tokens [T], the cache, and where the tokens stand."""
    given = MixedInputs(inputs, size)
    token_ids, meta = gather_inputs(
        table,
        token_rows=given.token_rows,
        positions=given.positions,
        rows=given.rows,
        query_start_loc=given.starts,
        seq_lens=given.seq_lens,
        num_decodes=size[0],
        max_query_len=size[1],
        max_seq_len=max_model_len,
    )
    return token_ids, kv, meta
