"""Runs a `Decoder` over whole sequences, in chunks of any size, with block tables of its own; encoders, encoder-decoders."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.kernels.cache.tensors import cache_tensors, index_tensor
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.select import select_ops
from slipstream.kernels.states import StateMetadata, chunk_table, layer_state
from slipstream.model.compile_step import compile_program
from slipstream.model.decoder import Decoder
from slipstream.model.load.loaded import LoadedModel
from slipstream.model.load.loader import load_model
from slipstream.model.one_token import compile_one_token
from slipstream.model.step_program import StepProgram
from slipstream.spec.reason import Reason

CPU = torch.device("cpu")
BLOCK_SIZE = 4
"""Block size for whole texts."""


def load(
    path: Path, *, kernels: str = "reference", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    return load_model(path, ops=select_ops(CPU, kernels), device=CPU, dtype=dtype)


def is_program(decoder: Decoder) -> bool:
    """Whether its steps are C++ programs, an encoder's prompts too."""
    return isinstance(fast(decoder).program, StepProgram)


class Fast:
    """A decoder as an engine runs it: as a C++ program, a step of one token as one kernel, else by its own loop."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.layers = decoder, list(decoder.layers)
        self.program, self.one_token = compile_program(decoder), compile_one_token(decoder)
        self.base = decoder if isinstance(self.program, Reason) else self.program
        self.logits, self.encode = self.base.logits, self.base.encode

    def forward(
        self, token_ids: torch.Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> torch.Tensor:
        one = len(token_ids) == 1 and not isinstance(self.one_token, Reason)
        return (self.one_token if one else self.base).forward(token_ids, kv, meta)


def fast(decoder: Decoder) -> Fast:
    """Made anew when the decoder's layers are others (experts are counted, say)."""
    known = vars(decoder).get("fast")
    if known is None or any(a is not b for a, b in zip(known.layers, decoder.layers, strict=True)):
        known = vars(decoder)["fast"] = Fast(decoder)
    return known


class Paged:
    """A cache of scattered blocks for some sequences, fed a step at a time."""

    def __init__(
        self, model: LoadedModel, num_seqs: int, max_len: int, block_size: int = 4
    ) -> None:
        self.model, self.block_size = model, block_size
        part = model.decoder.partition
        if part is not None and part.context is not None:  # a rank's part of a block
            block_size //= part.context.size
        per_seq = -(-max_len // self.block_size)
        ids = list(range(1, num_seqs * per_seq + 1))
        random.Random(0).shuffle(ids)
        self.tables = torch.tensor(ids, dtype=torch.int32).view(num_seqs, per_seq)
        dtype = model.decoder.dtype
        own = [
            LayerKV(
                *cache_tensors(
                    layer.attention,
                    len(ids) + 1,
                    block_size,
                    lambda shape: torch.randn(shape).to(dtype),
                ),
                state=layer_state(layer.recurrent, num_seqs + 1, dtype, torch.float32, torch.zeros),
                index=index_tensor(
                    layer.attention,
                    len(ids) + 1,
                    block_size,
                    lambda shape: torch.randn(shape).to(dtype),
                ),
            )
            for layer in (model.spec.layers[i] for i in model.spec.local_layers)
        ]
        first = model.spec.local_layers.start
        self.kv = [own[model.spec.owners[i] - first] for i in model.spec.local_layers]
        self.computed = [0] * num_seqs

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Each part is (sequence, its next tokens); their logits [n, V]. Parts of one token are put first."""
        order = sorted(range(len(parts)), key=lambda i: len(parts[i][1]) != 1)
        ordered = [parts[i] for i in order]
        lengths = [len(tokens) for _, tokens in ordered]
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        positions = torch.cat(
            [torch.arange(self.computed[s], self.computed[s] + len(t)) for s, t in ordered]
        )
        rows = torch.cat([torch.full((len(t),), s) for s, t in ordered])
        slots = (
            self.tables[rows, positions // self.block_size].long() * self.block_size
            + positions % self.block_size
        )
        seq_lens = torch.tensor([self.computed[s] + len(t) for s, t in ordered], dtype=torch.int32)
        meta = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=self.tables[[s for s, _ in ordered]],
            positions=positions,
            slot_mapping=slots,
            num_decodes=sum(n == 1 for n in lengths),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            states=self._states(ordered, starts.tolist()),
        )
        tokens = torch.tensor([t for _, part in ordered for t in part], dtype=torch.int32)
        way = fast(self.model.decoder)
        hidden = way.forward(tokens, self.kv, meta)
        ends = self.model.spec.has_last and self.model.spec.generates
        logits = (way.logits(hidden) if ends else hidden).split(lengths)
        for s, t in ordered:
            self.computed[s] += len(t)
        result: list[torch.Tensor] = [logits[0]] * len(parts)
        for i, value in zip(order, logits, strict=True):
            result[i] = value
        return result

    def _states(
        self, parts: Sequence[tuple[int, Sequence[int]]], starts: list[int]
    ) -> StateMetadata:
        """Sequence i has slot i + 1 for its recurrent states."""
        read = [s + 1 if self.computed[s] else 0 for s, _ in parts]
        write = torch.zeros(starts[-1], dtype=torch.int32)
        write[torch.tensor(starts[1:]) - 1] = torch.tensor([s + 1 for s, _ in parts]).int()
        decodes = sum(len(tokens) == 1 for _, tokens in parts)
        chunks = torch.from_numpy(chunk_table(starts, write.numpy(), decodes))
        return StateMetadata(read=torch.tensor(read, dtype=torch.int32), write=write, chunks=chunks)


def run(
    model: LoadedModel, tokens: Sequence[int], chunks: Sequence[int] = (), block_size: int = 4
) -> torch.Tensor:
    """Logits [n, V] of one sequence, computed in chunks of the given sizes (the last is repeated)."""
    cache, found, begin = Paged(model, 1, len(tokens), block_size), [], 0
    sizes = list(chunks) or [len(tokens)]
    while begin < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        found += cache.step([(0, tokens[begin : begin + size])])
        begin += size
    return torch.cat(found)


def greedy(model: LoadedModel, tokens: Sequence[int], count: int) -> list[int]:
    cache = Paged(model, 1, len(tokens) + count)
    found, part = [], list(tokens)
    for _ in range(count):
        part = [int(cache.step([(0, part)])[0][-1].argmax())]
        found += part
    return found


# --- Whole texts ------------------------------------------------------------------------------------------------------


def whole(texts: list[list[int]], first_block: int = 1) -> tuple[AttentionMetadata, int]:
    """A step of whole texts in blocks of their own; the first block that is left."""
    lens = [len(t) for t in texts]
    needed = [-(-n // BLOCK_SIZE) for n in lens]
    ids = iter(range(first_block, first_block + sum(needed)))
    table = torch.zeros(len(texts), max(needed), dtype=torch.int32)
    for row, n in zip(table, needed, strict=True):
        row[:n] = torch.tensor([next(ids) for _ in range(n)])
    text = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(lens))
    positions = torch.cat([torch.arange(n) for n in lens])
    meta = AttentionMetadata(
        query_start_loc=torch.tensor(
            [0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32
        ),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        positions=positions,
        slot_mapping=table[text, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        num_decodes=0,
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )
    return meta, first_block + sum(needed)


def caches(model: LoadedModel, num_blocks: int) -> LayerKV:
    a = model.spec.layers[0].attention
    shape, dtype = (num_blocks, a.num_kv_heads, BLOCK_SIZE, a.head_dim), model.decoder.dtype
    return LayerKV(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


@torch.inference_mode()
def states(
    model: LoadedModel, texts: list[list[int]], num_first: list[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Each text's states, computed in one step."""
    meta, num_blocks = whole(texts)
    if num_first is not None:
        types = [(torch.arange(len(t)) >= n).long() for t, n in zip(texts, num_first, strict=True)]
        meta = dataclasses.replace(meta, token_types=torch.cat(types))
    kv = [caches(model, num_blocks)] * model.spec.num_layers  # one for all layers, in turn
    tokens = torch.tensor([t for text in texts for t in text], dtype=torch.int32)
    return fast(model.decoder).forward(tokens, kv, meta).split([len(t) for t in texts])


@torch.inference_mode()
def written(
    model: LoadedModel, texts: list[list[int]], answers: list[list[int]]
) -> tuple[torch.Tensor, ...]:
    """An encoder-decoder's logits for the tokens of each answer, all in one step; answers of one token stand first."""
    read, next_block = whole(texts)
    step, num_blocks = whole(answers, next_block)
    num_decodes = sum(len(a) == 1 for a in answers)
    cross = dataclasses.replace(
        read,
        query_start_loc=step.query_start_loc,
        max_query_len=step.max_query_len,
        num_decodes=num_decodes,
    )
    step = dataclasses.replace(step, num_decodes=num_decodes).with_groups(cross)
    kv = [caches(model, num_blocks) for _ in model.spec.layers]
    way = fast(model.decoder)
    way.encode(torch.tensor([t for text in texts for t in text], dtype=torch.int32), kv, read)
    hidden = way.forward(torch.tensor([t for a in answers for t in a], dtype=torch.int32), kv, step)
    return way.logits(hidden).split([len(a) for a in answers])
