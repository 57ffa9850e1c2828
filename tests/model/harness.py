"""Runs a `Decoder` over whole sequences, in chunks of any size, with block tables of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.kernels.ops import AttentionMetadata, LayerKV, cache_tensors, select_ops
from slipstream.model.loader import LoadedModel, load_model

CPU = torch.device("cpu")


def load(path: Path, *, kernels: str = "reference", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, ops=select_ops(CPU, kernels), device=CPU, dtype=dtype)


class Paged:
    """A cache of scattered blocks for some sequences, fed a step at a time."""

    def __init__(self, model: LoadedModel, num_seqs: int, max_len: int, block_size: int = 4) -> None:
        self.model, self.block_size = model, block_size
        per_seq = -(-max_len // block_size)
        ids = list(range(1, num_seqs * per_seq + 1))
        random.Random(0).shuffle(ids)
        self.tables = torch.tensor(ids, dtype=torch.int32).view(num_seqs, per_seq)
        dtype = model.decoder.dtype
        self.kv = [
            LayerKV(*cache_tensors(layer.attention, len(ids) + 1, block_size, lambda shape: torch.randn(shape).to(dtype)))
            for layer in model.spec.layers
        ]
        self.computed = [0] * num_seqs

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Each part is (sequence, its next tokens); their logits [n, V]. Parts of one token are put first."""
        order = sorted(range(len(parts)), key=lambda i: len(parts[i][1]) != 1)
        ordered = [parts[i] for i in order]
        lengths = [len(tokens) for _, tokens in ordered]
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        positions = torch.cat([torch.arange(self.computed[s], self.computed[s] + len(t)) for s, t in ordered])
        rows = torch.cat([torch.full((len(t),), s) for s, t in ordered])
        slots = self.tables[rows, positions // self.block_size].long() * self.block_size + positions % self.block_size
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
        )
        tokens = torch.tensor([t for _, part in ordered for t in part], dtype=torch.int32)
        hidden = self.model.decoder.forward(tokens, self.kv, meta)
        logits = self.model.decoder.logits(hidden).split(lengths)
        for s, t in ordered:
            self.computed[s] += len(t)
        result: list[torch.Tensor] = [logits[0]] * len(parts)
        for i, value in zip(order, logits, strict=True):
            result[i] = value
        return result


def run(model: LoadedModel, tokens: Sequence[int], chunks: Sequence[int] = (), block_size: int = 4) -> torch.Tensor:
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
