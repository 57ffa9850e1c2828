"""Attention to the blocks of keys that an index chooses (MiniMax M3), in plain torch.

Sequences of a step are computed one by one, by lengths that the host reads. So no graph can have this op.

Shapes: T tokens, H query heads, K kv heads, D head dim, I index head dim, L keys of a sequence, B its blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from slipstream.kernels.plain.compressed import MAX_SCORES, cached_places, sequences

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.spec.model import BlockIndexSpec


def attend(
    q: Tensor,
    scorers: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    scale: float,
    spec: BlockIndexSpec,
) -> Tensor:
    """`OpSet.block_sparse_attention` of q [T, H, D] and normed, rotated index queries `scorers` [T, K, I]."""
    out, index = torch.zeros_like(q), kv.index
    assert index is not None
    for first, last, blocks, begin in sequences(meta):
        block, _, offset = cached_places(0, last, blocks, kv)
        keys, values = (x[block, :, offset].transpose(0, 1).float() for x in (kv.k, kv.v))
        index_keys = index[block, 0, offset].float()
        part = max(1, MAX_SCORES // (last * q.shape[1]))
        for start in range(first, last, part):
            at = torch.arange(start, min(last, start + part), device=q.device)
            own = slice(begin + start - first, begin + start - first + len(at))
            seen = chosen(scorers[own].float(), index_keys, at, spec)
            queries = q[own].float().unflatten(1, (len(keys), -1))
            scores = torch.einsum("nkgd,kld->nkgl", queries, keys) * scale
            weight = scores.masked_fill(~seen[:, :, None], -math.inf).softmax(dim=-1)
            out[own] = torch.einsum("nkgl,kld->nkgd", weight, values).flatten(1, 2).to(q.dtype)
    return out


def chosen(q: Tensor, keys: Tensor, at: Tensor, spec: BlockIndexSpec) -> Tensor:
    """Mask [T, K, L] of the keys that tokens at positions `at` [T] attend to: index queries q [T, K, I], keys [L, I].

    Of blocks with equal scores the earlier ones are taken.
    """
    later = torch.arange(len(keys), device=q.device) > at[:, None]
    scores = torch.einsum("nki,li->nkl", q, keys).masked_fill(later[:, None], -math.inf)
    blocks = F.pad(scores, (0, -len(keys) % spec.block), value=-math.inf)
    best = blocks.unflatten(2, (-1, spec.block)).amax(dim=3)
    behind = (at // spec.block)[:, None] - torch.arange(best.shape[2], device=q.device)
    near = (behind >= 0) & (behind < spec.local)
    best = best.masked_fill(near[:, None], math.inf)
    taken = best.sort(dim=2, descending=True, stable=True).indices[..., : spec.top_k]
    found = torch.zeros_like(best, dtype=torch.bool).scatter_(2, taken, True)
    return found.repeat_interleave(spec.block, dim=2)[..., : len(keys)] & ~later[:, None]
