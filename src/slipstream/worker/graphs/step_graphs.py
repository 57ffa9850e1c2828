"""CUDA graphs of steps: decodes by batch size, and mixed steps by (decodes, prompt tokens).

A step launches about three hundred kernels, which takes the host longer than the GPU unless there
are many tokens. Replaying a graph is one launch. A step runs in the smallest graph that holds it:

1. In a decode graph, surplus rows are the null row: seq_len 0, writes to the null block. A step
   that verifies drafts also runs there. Each of its tokens takes a row, whose sequence ends with
   that token.
2. A mixed graph has room for a number of decodes, padded in the same way, and after them for a
   number of prompt tokens. Surplus prompt tokens form one more sequence, of the null row.
3. A graph covers everything from the row numbers to the hidden states. The rest depends on the
   rows' settings: tokens are sampled by another graph (`step_ends.py`), or op by op.

Ranks that compute different requests choose a size by the largest of their parts of a step, so that
all replay the same one.

A pipeline stage copies its input to its graphs' buffer, and sends its result after the replay.
Stages exchange a step's tokens without padding, so two stages need not use graphs of one size.

All graphs share one memory pool, and a graph's inputs keep their addresses. So hidden states and sampled
rows are only valid until the next replay. All run on one stream, so tokens were sampled and written by then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.steps import StepPlan, TokenMask
from slipstream.model.layers.layer import one_of_each_kind
from slipstream.platform.collectives import Pipe
from slipstream.spec.reason import Reason
from slipstream.worker.forward.forwards import NO_PLAN, Forward, Forwards, InputBatch, Output
from slipstream.worker.graphs.graph_inputs import GraphInput
from slipstream.worker.graphs.graph_store import Captured, GraphStore
from slipstream.worker.graphs.ladder import NOT_CAPTURED, STALL_S, GraphLadder
from slipstream.worker.graphs.mixed_inputs import (
    MAX_MARKS,
    MixedInputs,
    Size,
    mixed_inputs,
    mixed_step,
    num_marks,
    padded_room,
)
from slipstream.worker.graphs.step_ends import DRAWN, GREEDY, StepEnds
from slipstream.worker.inputs.device_inputs import gather_inputs
from slipstream.worker.inputs.input_batch import SampledRows, laid_out
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.step_shape import num_leading_decodes

_logger = logging.getLogger("slipstream.engine")


TOO_MANY_MARKS = Reason("more kept states than a graph has room for")


class StagePipe(Pipe):
    """Stand-in for a pipeline stage's pipe while a step is captured: it sends nothing. The stage's
    input is in `incoming`; its result is sent after the replay.
    """

    def __init__(self, incoming: Tensor | None) -> None:
        self._incoming = incoming

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._incoming is None:
            raise ValueError("the first stage receives nothing")
        return self._incoming[: shape[0]].clone()  # layers add to it in place

    def send(self, x: Tensor) -> Tensor:
        return x


class StepGraphs(GraphStore, Forward):
    """Graphs of decodes and mixed steps. `forwards` run the captured work, and compute `logits`."""

    def __init__(
        self,
        forwards: Forwards,
        kv: Sequence[LayerKV],
        rows: RowTable,
        config: EngineConfig,
        given: GraphInput | None = None,
        beside: StepGraphs | None = None,
    ) -> None:
        """`given`: additional inputs of the steps besides rows and tokens. The graphs `beside`
        share their memory with these, since only one replays at a time."""
        super().__init__(rows.platform)
        self.given = given or GraphInput()
        self.name = self.given.name
        self.forwards = forwards
        self.kv = kv
        self.rows = rows
        self.max_model_len = config.model.max_model_len
        decoder = forwards.decoder
        part = decoder.partition  # ranks sample together, unless they compute different requests
        num_ranks = 0 if part is None else part.group.size
        self.ladder = GraphLadder(config, decoder.spec, self._captured.keys(), num_ranks)
        self.sizes = self.ladder.sizes
        self.most_prompts = self.ladder.most_prompts
        self._pipe = decoder.pipe
        # indices of the layers that are run to compile kernels; None: all
        self._compiled: list[int] | None = None
        self._ends: StepEnds | None = None
        self._hidden: Tensor  # of all graphs; not read after the next replay
        self._incoming: Tensor | None  # input from the previous stage
        if beside is not None:
            self._recorder, self._hidden = beside._recorder, beside._hidden
            self._incoming, self._ends = beside._incoming, beside._ends
        else:
            self._hidden = torch.empty(  # one per graph would never be freed
                self.ladder.max_tokens,
                decoder.spec.hidden_size,
                dtype=decoder.dtype,
                device=rows.device,
            )
            if self._recorder is not None and (
                part is None or (part.shard.deals_requests and part.pipe is None)
            ):
                self._ends = StepEnds(forwards, rows, self._hidden, self.sizes, self._record)
            self._incoming = None if decoder.spec.has_first else torch.zeros_like(self._hidden)
        # query_start_loc of decodes
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=rows.device)

    def capture(self, *, few: bool = False) -> None:
        """Capture the largest mixed step, then the commonest sizes (`few`: see there).

        The largest comes first so that all others fit into its memory. The rest is captured by
        `capture_next`, during long steps, or by the first step that needs it, which takes about 40
        ms longer.
        """
        ladder = self.ladder
        if not self.given.at_start:
            return
        if ladder.prompt_sizes:
            self._graph((ladder.decode_sizes[-1], ladder.prompt_sizes[-1]))
        first, ladder.soon = ladder.commonest(few=few)
        for size in first:
            self._graph(size)
        ladder.queue()

    def capture_next(self) -> bool:
        """Capture the next size that is not captured yet. False if there is none."""
        while self.ladder.ahead:
            size = self.ladder.ahead.pop()
            if size not in self._captured:
                return self._has_captured(size)
        return False

    def capture_beside(self, plan: StepPlan) -> bool:
        """Capture some of the commonest sizes while the GPU runs a step of long prompts.

        True if any was captured. If decodes are in the step, at most one is captured, because
        requests wait for their tokens.
        """
        ladder = self.ladder
        if not ladder.soon:
            return False
        num_tokens = sum(s.num_tokens for s in plan.scheduled)
        count = ladder.num_beside(num_tokens, has_decodes=plan.scheduled[0].num_tokens == 1)
        num_cold = self.num_cold
        while count and ladder.ahead and ladder.ahead[-1] in ladder.soon:
            begin = time.monotonic()
            self.capture_next()
            count = count - 1 if time.monotonic() - begin < STALL_S else 0
        return self.num_cold > num_cold

    def _has_captured(self, size: Size) -> bool:
        """Capture this graph unless it exists. False if there is not enough memory.

        From then on, steps use existing graphs, or run op by op. With several ranks the error is raised and
        they end, because otherwise only one rank would notice it, and the others would wait.
        """
        try:
            self._graph(size)
        except torch.OutOfMemoryError:
            if self.forwards.decoder.partition is not None:
                raise
            self.ladder.stop()
            count = len(self._captured)
            remedy = "lower gpu_memory_utilization, or max_num_batched_tokens"
            _logger.warning(
                "no memory is left for more %s than the %d captured; for all of them %s",
                self.name,
                count,
                remedy,
            )
            return False
        return True

    def covers(self, batch: InputBatch) -> Reason | None:
        if batch.plan is None:
            return NO_PLAN
        if (reason := self.given.refusal(batch, batch.plan)) is not None:
            return reason
        if self.rows.states is not None and num_marks(batch.plan) > MAX_MARKS:
            return TOO_MANY_MARKS
        reason = self.ladder.refusal(batch.shape)
        if reason is None and self.given.waits:
            size = self.ladder.size_for(batch.shape.num_tokens), 0
            return None if size in self._captured or self.ladder.is_due(size) else NOT_CAPTURED
        return reason

    def adapters_changed(self) -> None:
        """Forget the graphs if the launches of a step have changed."""
        if self.given.has_changed():
            self.platform.synchronize()  # the last replay
            self._captured.clear()
            self.ladder.forget()

    @contextlib.contextmanager
    def _compiling(self, size: Size) -> Iterator[None]:
        """Context manager that compiles with one layer of each kind, since layers of a kind run the
        same kernels.

        For the first graphs all layers run, because an op then creates the data that it stores for
        a weight. For graphs of one token all layers run, too, for the one-token kernel.
        """
        decoder = self.forwards.decoder
        is_first = all(bool(known[1]) != bool(size[1]) for known in self._captured)
        is_special = any(x is not None for x in (decoder.tap, decoder.stream, decoder.partition))
        if is_first or is_special or sum(size) == 1:
            yield
            return
        self._compiled = self._of_each_kind
        try:
            yield
        finally:
            self._compiled = None

    @cached_property
    def _of_each_kind(self) -> list[int]:
        return one_of_each_kind(self.forwards.decoder.layers)

    def passed_over(self, batch: InputBatch, reason: Reason) -> None:
        """Count a needed mixed size, and capture it next."""
        if reason is not NOT_CAPTURED or batch.plan is None:
            return
        if self.given.waits:
            self.ladder.wanted[self.ladder.size_for(batch.shape.num_tokens), 0] += 1
            return
        self.ladder.note_wanted(
            self.ladder.mixed_size_for(batch.shape.num_decodes, batch.shape.num_prompt_tokens)
        )
        self.num_cold += 1

    def run(self, batch: InputBatch) -> Output | None:
        step, by_rows = batch.shape, self.ladder.by_rows(batch.shape)
        if by_rows:
            size = self.ladder.size_for(step.num_tokens), 0
        else:
            size = self.ladder.mixed_size_for(step.num_decodes, step.num_prompt_tokens)
        if not self._has_captured(size):  # there may be a larger graph
            return None if self.covers(batch) is not None else self.run(batch)
        return self._run_decodes(batch, size) if by_rows else self._run_mixed(batch, size)

    def _drawn(self, output: Output, size: Size) -> Output:
        """Sample and write tokens by a graph, if one supports their requests' options.

        With a grammar this is done when the masks are available.
        """
        if self._ends is not None and output.sampled.requests:
            if self.rows.wanted("grammar", output.sampled.names):
                output.end = partial(self._end, output, size)
            else:
                self._end(output, size)
        return output

    def _end(self, output: Output, size: Size, mask: TokenMask | None = None) -> None:
        assert self._ends is not None
        before = self._ends.num_captured
        drawn = self._ends.run(output.sampled, sum(size), mask)
        self.num_cold += self._ends.num_captured - before
        if drawn is not None:
            output.tokens, output.logprobs = drawn

    def logits(self, hidden: Tensor) -> Tensor:
        return self.forwards.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.forwards.base.greedy(hidden)

    def _replay(self, captured: Captured, num_decodes: int, num_behind: int, first: int) -> None:
        """Replay a graph of `num_decodes` tokens, and `num_behind` more tokens from row `first` on."""
        rows = ((0, num_decodes), (first, num_behind))
        if self._incoming is not None and self._pipe is not None:
            x = self._pipe.receive(
                (num_decodes + num_behind, self._incoming.shape[1]), self._incoming.dtype
            )
            for (begin, count), own in zip(rows, x.split((num_decodes, num_behind)), strict=True):
                self._incoming[begin : begin + count] = own
        captured.graph.replay()
        if self._pipe is not None and not self.forwards.decoder.spec.has_last:
            self._pipe.send(
                torch.cat([captured.output[begin : begin + count] for begin, count in rows])
            )

    def _graph(self, size: Size) -> Captured:
        known = self._captured.get(size)
        if known is not None:
            return known
        return self._mixed_graph(size) if size[1] else self._decode_graph(size[0])

    # --- Decodes ------------------------------------------------------------------------------------------------------

    def _run_decodes(self, batch: InputBatch, size: Size) -> Output:
        (plan, _), num_tokens = batch.step, batch.num_tokens
        scheduled = plan.scheduled
        self.ladder.note_wanted((self.ladder.decode_size(batch.shape.num_tokens), 0))
        table = self.rows.rows
        host = self._idle_decodes(size[0])
        index, sample_rows, sample_positions, of_tokens, at, lens = host
        rows = [table[s.request_id].index for s in scheduled]
        positions = [s.num_computed_tokens for s in scheduled]
        if num_tokens > len(scheduled):
            lengths = np.array([s.num_tokens for s in scheduled], np.int64)
            of_tokens[:num_tokens], at[:num_tokens], _ = laid_out(
                np.array(rows), np.array(positions), lengths
            )
        else:
            of_tokens[:num_tokens], at[:num_tokens] = rows, positions
        lens[:num_tokens] = at[:num_tokens] + 1
        which, samples_all = np.arange(num_tokens), all(s.num_sampled for s in scheduled)
        if not samples_all:
            which = which[
                np.repeat([s.num_sampled > 0 for s in scheduled], [s.num_tokens for s in scheduled])
            ]
        count = len(which)
        index[:count], sample_rows[:count], sample_positions[:count] = (
            which,
            of_tokens[which],
            lens[which],
        )
        captured = self._captured[size]
        self.platform.upload_into(captured.inputs, host)
        self.given.fill(size, plan)
        # without a request its token is padding
        self._replay(captured, max(1, num_tokens), 0, size[0])
        sampled_index, of_sampled, new = captured.inputs[:3, :count].unbind(0)
        if samples_all:
            sampled = SampledRows(requests=scheduled, rows=of_sampled, positions=new)
            return self._drawn(Output(self, captured.output[:num_tokens], sampled), size)
        sequences = tuple(s for s in scheduled if s.num_sampled)
        sampled = SampledRows(requests=sequences, rows=of_sampled, positions=new)
        return self._drawn(Output(self, captured.output, sampled, sampled_index), size)

    def _decode_graph(self, size: int) -> Captured:
        self.given.allot((size, 0))
        captured = self._capture(
            (size, 0), self._idle_decodes(size), lambda inputs: self._decodes(inputs, size)
        )
        if self._ends is not None:
            for kind in (GREEDY, DRAWN):
                self._ends.capture(size, kind)
        if self.forwards.decoder.spec.has_last:
            # compiles its kernels now, not in the first step of this size
            self.logits(captured.output)
        return captured

    def _idle_decodes(self, size: int) -> npt.NDArray[np.int32]:
        """Inputs that consist of padding, int32 [6, …].

        1. Of sampled tokens: the row of hidden states, the row of the table, and the position.
        2. Of all tokens: the row, the position, and the length that ends with them.

        Each begins at a multiple of 16 bytes, because Triton recompiles a kernel for pointers of
        another alignment.
        """
        inputs = np.zeros((6, padded_room(size)), dtype=np.int32)
        inputs[[1, 3]] = self.rows.capacity
        return inputs

    def _decodes(self, inputs: Tensor, size: int) -> Tensor:
        if self._ends is not None:
            self._ends.take(inputs[:3, :size])
        rows, positions, seq_lens = inputs[3:, :size].unbind(0)
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
        return self._kept(self._forward((size, 0), token_ids, self.kv, meta))

    def _kept(self, hidden: Tensor) -> Tensor:
        return self._hidden[: len(hidden)].copy_(hidden)

    # --- Mixed steps --------------------------------------------------------------------------------------------------

    def _run_mixed(self, batch: InputBatch, size: Size) -> Output:
        plan, _ = batch.step
        num_decodes = num_leading_decodes(plan.scheduled)
        num_behind = batch.num_tokens - num_decodes
        self.ladder.note_wanted(
            self.ladder.mixed_size(batch.shape.num_decodes, batch.shape.num_prompt_tokens)
        )
        captured = self._captured[size]
        host, sequences, count = mixed_inputs(self.rows, plan, size, self.most_prompts)
        self.platform.upload_into(captured.inputs, host)
        self.given.fill(size, plan)
        self._replay(captured, num_decodes, num_behind if plan.scheduled else 1, size[0])
        index, rows, positions = MixedInputs.sampled(captured.inputs, size)[:, :count].unbind(0)
        sampled = SampledRows(requests=sequences, rows=rows, positions=positions)
        padding = size[0] - num_decodes
        output = Output(
            self, captured.output, sampled, index, num_decodes=num_decodes, padding=padding
        )
        return self._drawn(output, size)

    def _mixed_graph(self, size: Size) -> Captured:
        self.given.allot(size)
        idle, _, _ = mixed_inputs(self.rows, StepPlan(0, ()), size, self.most_prompts)
        return self._capture(size, idle, lambda inputs: self._mixed(inputs, size))

    def _mixed(self, inputs: Tensor, size: Size) -> Tensor:
        if self._ends is not None:
            self._ends.take(MixedInputs.sampled(inputs, size))
        given = MixedInputs(inputs, size, self.most_prompts, self.rows.states is not None)
        return self._kept(
            self._forward(size, *mixed_step(self.rows, self.kv, given, size, self.max_model_len))
        )

    # --- What is captured ---------------------------------------------------------------------------------------------

    def _forward(
        self, size: Size, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> Tensor:
        """Run a stage's part without receiving or sending, which happens before and after the replay.

        The shared decoder is unchanged: a view of it has other layers and another pipe.
        """
        decoder = self.forwards.decoder
        if self._pipe is not None:
            decoder = decoder.with_(pipe=StagePipe(self._incoming))
        if self._compiled is not None:
            decoder = decoder.with_(layers=[decoder.layers[i] for i in self._compiled])
            kv = [kv[i] for i in self._compiled]
        return self.given.hidden(size, self.forwards, token_ids, kv, meta, decoder)
