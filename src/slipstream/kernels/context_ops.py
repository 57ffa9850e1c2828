"""Context parallelism: attention over keys whose tokens are divided among ranks.

1. Block i of a sequence is on rank i mod n, so at any length the ranks have about the same number
   of keys. A block number of the pool stands for n consecutive blocks of a sequence, one on each
   rank. So the engine's block tables are those of one device with blocks n times as long.
2. All ranks have all queries, or gather them: those of all tokens, or where they are tensor parallel
   those of all heads. Each attends to its own keys (`attention_part`), and its results are
   weighted by the sums of its softmax (`merge_parts`; Dao et al. 2023, flash-decoding). No key is sent.
3. Prompts need nothing else: a token sees the keys of earlier blocks and, on one rank, a part of its
   own. Each rank has an n-th of the work at any position.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from slipstream.kernels.layouts import AttentionParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.platform.collectives import RankGroup

Own: TypeAlias = Literal["tokens", "heads"] | None
"""The rows of queries and results that a rank computes alone: those of its tokens, or of its
heads. None: every rank has all of them."""


class ContextOps(ABC):
    """Ops for context parallelism: each rank has the keys of some of the tokens."""

    @abstractmethod
    def attention_part(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """`attention` of each token over the keys of its sequence from `meta.begins` (None: 0) to
        `meta.limits` (`own_keys`), without sinks: q [T, H, D] → [T, H, W + n].

        The first W numbers of a head are its result, as wide as the values. The bits of the last n
        are the natural logarithm of its softmax's sum, float32; −inf without keys.
        """

    def merge_parts(self, parts: Tensor) -> Tensor:
        """Combines the `attention_part` results of all ranks [n, T, H, W + n] → [T, H, W]."""
        out, sums = unpacked(parts)
        weights = (sums - sums.amax(0).clamp(min=-1e30)).exp()
        weights = weights / weights.sum(0).clamp(min=1e-30)
        return (out.float() * weights[..., None]).sum(0).to(parts.dtype)

    def attention_over_ranks(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: AttentionParams,
        group: RankGroup,
        *,
        own: Own = None,
    ) -> Tensor:
        """`attention` over the keys of all ranks of `group`: q [T, H, D] → [T, H, W]. `meta` is from
        `own_keys`.

        `own`: "tokens" gives this rank's, [⌈T / n⌉, H, W] (`RankOps.own_tokens`). "heads": q has
        this rank's heads, all of which read the same kv heads.
        """
        sinks, params = params.sinks, dataclasses.replace(params, sinks=None)
        if own == "heads":
            heads = group.all_gather(q).transpose(0, 1)  # [T, n, H, D]
            part = self.attention_part(heads.flatten(1, 2), kv, meta, params)
            each = part.unflatten(1, (group.size, -1)).transpose(0, 1)
            return self._merged(group.all_to_all(each.flatten(0, 1)), sinks)
        part = self.attention_part(q, kv, meta, params)
        if own is None:
            return self._merged(group.all_gather(part), sinks)
        if missing := -len(part) % group.size:
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        return self._merged(group.all_to_all(part), sinks)

    def _merged(self, parts: Tensor, sinks: Tensor | None) -> Tensor:
        """Computes `merge_parts`, with sinks as a part without values."""
        if sinks is not None:
            _, num_tokens, num_heads, width = parts.shape
            out = parts.new_zeros(num_tokens, num_heads, width - 4 // parts.itemsize)
            own = packed(out, sinks.repeat(num_tokens, 1))
            parts = torch.cat((parts, own[None]))
        return self.merge_parts(parts)

    def own_keys(
        self, meta: AttentionMetadata, block_size: int, group: RankGroup, window: int | None = None
    ) -> AttentionMetadata:
        """A step's metadata for this rank's keys. Tokens of other ranks are written to the null block."""
        size, rank = group.size, group.rank
        return meta.once(
            ("own keys", block_size, rank, window),
            lambda: _own_keys(meta, block_size, rank, size, window),
        )


def own_length(lengths: Tensor, block_size: int, rank: int, size: int) -> Tensor:
    """The number of keys that a rank has of the first `lengths` tokens, int32."""
    whole = block_size * size
    left = (lengths % whole - rank * block_size).clamp(0, block_size)
    return (lengths // whole * block_size + left).int()


def _own_keys(
    meta: AttentionMetadata, block_size: int, rank: int, size: int, window: int | None
) -> AttentionMetadata:
    whole = block_size * size
    slots, lens, longest = meta.slot_mapping, meta.seq_lens, meta.max_seq_len
    place = slots % whole
    block = torch.where(place // block_size == rank, slots // whole, 0)
    seen = lens
    if meta.max_query_len > 1:
        tokens, ends = torch.arange(len(slots), device=slots.device), meta.query_start_loc[1:]
        seq = torch.bucketize(tokens, ends, right=True).clamp(max=len(ends) - 1)
        # padding's tokens come after the last sequence
        seen = torch.minimum(lens[seq], lens[seq] - (ends[seq] - 1 - tokens)).clamp(min=0)
    begins = None
    if window is not None:
        begins = own_length((seen - window).clamp(min=0), block_size, rank, size)
    return dataclasses.replace(
        meta,
        slot_mapping=block * block_size + place % block_size,
        seq_lens=own_length(lens, block_size, rank, size),
        max_seq_len=longest // whole * block_size + min(longest % whole, block_size),
        limits=own_length(seen, block_size, rank, size),
        begins=begins,
        from_start=False,
        shared=None,
        of_steps=None,
        groups=(),
    )


def packed(out: Tensor, sums: Tensor) -> Tensor:
    """Joins results [T, H, W] and the logarithms of their softmax sums, float32 [T, H], into the
    format that `attention_part` returns."""
    return torch.cat((out, sums.float()[..., None].view(out.dtype)), dim=-1)


def unpacked(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the result of `packed` into views: (results, logarithms of their softmax sums)."""
    width = parts.shape[-1] - 4 // parts.itemsize
    return parts[..., :width], parts[..., width:].contiguous().view(torch.float32)[..., 0]
