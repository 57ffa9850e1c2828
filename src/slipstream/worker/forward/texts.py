"""Encoder steps: vectors of whole texts, op by op or as CUDA graphs of several token counts.

A small encoder's kernels take less GPU time than their launches take host time. So a step is one
graph, from uploaded tokens to embeddings.

1. A graph runs steps of up to its number of tokens, however they are divided into texts, because
   launches depend only on the number of tokens (`OpSet.bidirectional_attention`).
2. Padding tokens belong to no text, have position 0 and attend to themselves.
3. Padding texts have no tokens, and nothing reads their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.texts import TextsPlan, TextTask
from slipstream.platform import platform_of
from slipstream.spec.pooling import PoolingSpec
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.graphs.graph_store import Captured, GraphStore
from slipstream.worker.inputs.rows import IntArray


def text_ladder(longest: int) -> list[int]:
    """Token counts to capture graphs for, up to `longest`.

    From 128 on, padding is at most 1/5 of a step.
    """
    sizes, n = [], 32
    while n < longest:
        sizes.append(n)
        n += max(32, 1 << (n.bit_length() - 3))
    return [*sizes, longest]


def most_texts(config: EngineConfig, num_tokens: int) -> int:
    """Maximum number of texts in a step of `num_tokens` tokens."""
    return min(config.scheduling.max_num_seqs, num_tokens)


class TextGraphs(GraphStore):
    """Runs steps of whole texts as graphs."""

    def __init__(
        self,
        forwards: ForwardTable,
        how: PoolingSpec,
        kv: Sequence[LayerKV],
        config: EngineConfig,
        task: TextTask = "embed",
    ) -> None:
        decoder = forwards.decoder
        super().__init__(platform_of(decoder.device))
        self.forwards = forwards
        self.how = how
        self.task = task
        self.kv = kv
        self.config = config
        self.sizes = text_ladder(config.scheduling.max_num_batched_tokens)
        # whether texts have two parts
        self.pairs = decoder.classifier is not None and decoder.spec.num_token_types > 1

    def capture(self) -> None:
        """Capture the largest graph and the smallest.

        The others are captured when they are first needed. The largest comes first, so that the
        others fit into its memory. The smallest is captured now because few rows take other kernels
        (`pointwise.rows_per_program`, `linear.SKINNY_TOKENS`, `bidirectional.LONG`), and a short
        first text should not wait for their compilation.
        """
        for size in (self.sizes[-1], self.sizes[0]):
            self._of(size)

    def covers(self, plan: TextsPlan) -> bool:
        """Tells whether the plan's task is the model's own one, for which graphs are captured."""
        return plan.task == self.task

    def run(self, plan: TextsPlan) -> Tensor:
        """Computes a step's vectors for `task`: [S, …] by text, or [T, …] by token. They are valid
        until the next step."""
        size = next(n for n in self.sizes if n >= plan.num_tokens)
        captured = self._of(size)
        inputs = text_inputs(
            plan, size, most_texts(self.config, size), self.config.cache.block_size
        )
        self.platform.upload_into(captured.inputs, inputs)
        captured.graph.replay()
        rows = len(plan.lengths) // 4 if self.task == "embed" else plan.num_tokens
        return captured.output[:rows]

    def _of(self, size: int) -> Captured:
        known = self._captured.get((0, size))
        if known is not None:
            return known
        num_texts, block_size = most_texts(self.config, size), self.config.cache.block_size
        idle = text_inputs(TextsPlan(0, b"", b""), size, num_texts, block_size)
        return self._capture((0, size), idle, lambda inputs: self._texts(inputs, size))

    def _texts(self, inputs: Tensor, size: int) -> Tensor:
        config = self.config
        token_ids, meta = lay_out(
            inputs,
            size,
            most_texts(config, size),
            block_size=config.cache.block_size,
            longest=min(size, config.model.max_model_len),
            pairs=self.pairs,
        )
        hidden = self.forwards.hidden(token_ids, self.kv, meta)
        return self.forwards.vectors(self.how, hidden, meta.query_start_loc, self.task)


def text_inputs(plan: TextsPlan, num_tokens: int, num_texts: int, block_size: int) -> IntArray:
    """Inputs of a step with room for `num_tokens` and `num_texts`, in the layout of `_split`.

    Texts have the blocks 1, 2, … in order. Text i's keys and values begin at slot first_slots[i].
    """
    lengths = np.frombuffer(plan.lengths, np.int32)
    count, total = len(lengths), plan.num_tokens
    inputs = np.zeros(_ends(num_tokens, num_texts)[-1], np.int32)
    token_ids, starts, first_slots, num_first = _split(inputs, num_tokens, num_texts)
    token_ids[:total] = np.frombuffer(plan.token_ids, np.int32)
    np.cumsum(lengths, out=starts[1 : count + 1])
    starts[count + 1 :] = total
    num_blocks = -(-lengths // block_size)
    first_slots[:count] = (1 + np.cumsum(num_blocks) - num_blocks) * block_size
    num_first[:count] = np.frombuffer(plan.num_first or plan.lengths, np.int32)
    return inputs


def _ends(num_tokens: int, num_texts: int) -> list[int]:
    """Ends of the parts of `_split`.

    Each part begins at a multiple of 16 bytes, because Triton recompiles a kernel for pointers of
    another alignment.
    """
    sizes = (num_tokens, num_texts + 1, num_texts, num_texts)
    return np.cumsum([-(-n // 4) * 4 for n in sizes]).tolist()  # type: ignore[no-any-return]


def _split(inputs: Any, num_tokens: int, num_texts: int) -> list[Any]:
    """Split an array or tensor into its parts.

    1. Token ids [T].
    2. Starts of the texts [S + 1].
    3. First slots of the texts [S].
    4. Number of tokens in each pair's first part [S].
    """
    sizes = (num_tokens, num_texts + 1, num_texts, num_texts)
    begins = [0, *_ends(num_tokens, num_texts)]
    return [inputs[begin : begin + n] for begin, n in zip(begins, sizes, strict=False)]


def lay_out(
    inputs: Tensor, num_tokens: int, num_texts: int, *, block_size: int, longest: int, pairs: bool
) -> tuple[Tensor, AttentionMetadata]:
    """Build a step's tokens [T] and metadata from `text_inputs`.

    No text may be longer than `longest`. This is device work only, so that a graph can capture it.
    In particular no scalar comes from the host, as one in `torch.where` would.
    """
    token_ids, starts, first_slots, num_first = _split(inputs, num_tokens, num_texts)
    at = torch.arange(num_tokens, dtype=torch.int32, device=inputs.device)
    text = torch.bucketize(at, starts[1:], right=True)
    of_text = text < num_texts
    text = text.clamp(max=num_texts - 1)
    positions = (at - starts[text]) * of_text
    lengths = starts.diff()
    blocks = first_slots // block_size
    last = blocks + (lengths - 1).clamp(min=0) // block_size
    columns = torch.arange(-(-longest // block_size), dtype=torch.int32, device=inputs.device)
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=torch.minimum(blocks[:, None] + columns, last[:, None]),
        positions=positions.long(),
        slot_mapping=((first_slots[text] + positions) * of_text).long(),
        num_decodes=0,
        max_query_len=longest,
        max_seq_len=longest,
        token_types=(positions >= num_first[text]).long() if pairs else None,
        text_ends=torch.where(of_text, starts[text + 1], at + 1),
    )
    return token_ids, meta
