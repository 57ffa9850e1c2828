"""The torch ops that are fast on a CPU. No Python loop over sequences for decodes; the arithmetic stays that of the reference.

What was measured (benchmarks/cpu_ops.py): oneDNN with a weight reordered once is 2.5 × `F.linear` in bfloat16 at one token;
`scaled_dot_product_attention` with the query heads of a kv head packed as rows reads the cache once, where `enable_gqa`
does not; sorting a whole vocabulary costs more than the decode step, a partial top-k does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.ops import AttentionMetadata, LayerKV, Linear, SamplingTensors
from slipstream.kernels.reference import (
    ReferenceOps,
    apply_bias_and_penalties,
    attend,
    draw,
    filter_probs,
    gather_sequence,
    uniform,
)

MAX_MASK_BYTES = 64 * 2**20
"""A prefill chunk's mask is made for as many queries at a time as fit in this."""

NUCLEUS = 512
"""How many of the likeliest tokens are sorted before top-p falls back to sorting all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear(Linear):
    """`packed` is the weight in oneDNN's order; `weight` is an empty stand-in of the right shape (on the meta device)."""

    packed: Tensor


class CpuOps(ReferenceOps):
    name = "cpu"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
            return Linear(weight=weight, bias=bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        return PackedLinear(weight=weight.to("meta"), bias=bias, packed=packed)

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        if isinstance(w, PackedLinear):
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.packed, w.bias, "none", [], "")
            return y
        return F.linear(x, w.weight, w.bias)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        if weight_offset:
            return super().rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset)
        total = x if residual is None else x + residual
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return F.layer_norm(total, (total.shape[-1],), weight, bias, eps), total

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        lens = meta.seq_lens.tolist()
        for rows, num_blocks in _buckets(lens[: meta.num_decodes], kv.block_size):
            if len(rows) == meta.num_decodes:
                self._decode(out, q, slice(0, meta.num_decodes), num_blocks, kv, meta, scale, window, softcap, alibi_slopes)
            else:
                self._decode(out, q, torch.tensor(rows), num_blocks, kv, meta, scale, window, softcap, alibi_slopes)
        starts = meta.query_start_loc.tolist()
        for i in range(meta.num_decodes, len(lens)):
            begin, end, length = starts[i], starts[i + 1], lens[i]
            if length == 0:
                out[begin:end] = 0
                continue
            keys, values = gather_sequence(kv, meta.block_table[i], length)
            if softcap is None and alibi_slopes is None:
                _prefill(out[begin:end], q[begin:end], keys, values, scale, window)
            else:
                _tiled(out[begin:end], q[begin:end], keys, values, scale, window, softcap, alibi_slopes)
        return out

    def _decode(
        self,
        out: Tensor,
        q: Tensor,
        rows: slice | Tensor,
        num_blocks: int,
        kv: LayerKV,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
    ) -> None:
        """One token of each of some sequences, all padded to `num_blocks` blocks. Writes into `out`."""
        num_kv_heads, size, head_dim = kv.k.shape[1:]
        queries = q[rows]
        num_seqs, num_heads = queries.shape[:2]
        queries = queries.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
        lens = meta.seq_lens[rows][:, None]
        # Rows of the cache seen as [B · K, block_size · D]: one gather lays a head's blocks end to end.
        blocks = meta.block_table[rows, :num_blocks].long()
        index = (blocks[:, None, :] * num_kv_heads + torch.arange(num_kv_heads)[None, :, None]).flatten()
        shape = (num_seqs, num_kv_heads, num_blocks * size, head_dim)
        keys, values = (t.view(-1, size * head_dim).index_select(0, index).view(shape) for t in (kv.k, kv.v))
        at = torch.arange(num_blocks * size)
        seen = at < lens
        if window is not None:
            seen &= at >= lens - window
        if softcap is None and alibi_slopes is None:
            mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -math.inf)[:, None, None, :]
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = queries.float() @ keys.float().transpose(-1, -2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distance = (lens - 1 - at).float()[:, None, None, :]
                scores = scores - alibi_slopes.view(1, num_kv_heads, -1, 1) * distance
            weights = scores.masked_fill(~seen[:, None, None, :], -math.inf).softmax(dim=-1)
            mixed = (weights @ values.float()).to(q.dtype)
        mixed = mixed.reshape(num_seqs, num_heads, head_dim)
        out[rows] = torch.where(lens[:, :, None] > 0, mixed, 0.0)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        biased = params.bias_rows is not None or params.history is not None
        if params.all_greedy:
            return (apply_bias_and_penalties(logits.float(), params) if biased else logits).argmax(dim=-1)
        if not (params.any_top_k or params.any_top_p):
            return super().sample(logits, params)
        logits = apply_bias_and_penalties(logits.float(), params)
        greedy = logits.argmax(dim=-1)
        temperature = params.temperature[:, None]
        probs = (logits / torch.where(temperature > 0, temperature, 1.0)).softmax(dim=-1)
        kept = _filter(probs, params)
        drawn = draw(kept, uniform(params.seeds, params.history_lens))
        return torch.where(params.temperature > 0, drawn, greedy)


def _filter(probs: Tensor, params: SamplingTensors) -> Tensor:
    """`filter_probs` without sorting the vocabulary, where the likeliest tokens decide; the same kept sets."""
    if params.any_min_p:
        probs = probs.where(probs >= params.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    vocab = probs.shape[-1]
    count = min(NUCLEUS, vocab)
    ordered = probs.topk(count, dim=-1).values
    # A row with a larger k, or whose likeliest tokens do not make up top_p even of everything, needs the full sort.
    wide = params.top_k > count
    if params.any_top_p:
        reached = ordered.sum(-1) >= params.top_p * probs.sum(-1)
        # With a top_k that is within the sorted part, top_p applies to those tokens only.
        wide |= ~reached & (params.top_p < 1.0) & ~((params.top_k > 0) & (params.top_k < count))
    if count < vocab and bool(wide.any()):
        return filter_probs(probs, _without_min_p(params))
    if params.any_top_k:
        k = torch.where(params.top_k > 0, params.top_k, count).clamp(max=count).long()
        least = torch.where(params.top_k > 0, ordered.gather(1, k[:, None] - 1)[:, 0], 0.0)[:, None]
        probs = probs.where(probs >= least, 0.0)
        ordered = ordered.where(ordered >= least, 0.0)
    if params.any_top_p:
        mass = ordered.cumsum(-1)
        wanted = params.top_p[:, None] * probs.sum(-1, keepdim=True)
        needed = ((mass - ordered) < wanted) & (ordered > 0)
        last = needed.sum(-1, keepdim=True).clamp(min=1) - 1
        least = torch.where(params.top_p[:, None] < 1.0, ordered.gather(1, last), 0.0)
        probs = probs.where(probs >= least, 0.0)
    return probs


def _without_min_p(params: SamplingTensors) -> SamplingTensors:
    import dataclasses

    return dataclasses.replace(params, any_min_p=False)


def _buckets(lens: list[int], block_size: int) -> list[tuple[list[int], int]]:
    """Sequences grouped so that none is padded to more than about twice its length: [(which, blocks)]. One group where
    padding costs little."""
    if not lens:
        return []
    needed = [max(1, -(-length // block_size)) for length in lens]
    longest = max(needed)
    if longest * len(needed) <= 1.5 * sum(needed) + 8 * len(needed):
        return [(list(range(len(lens))), longest)]
    groups: dict[int, list[int]] = {}
    for i, count in enumerate(needed):
        groups.setdefault(count.bit_length(), []).append(i)
    return [(rows, max(needed[i] for i in rows)) for rows in groups.values()]


def _prefill(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> None:
    """q [n, H, D] at the end of keys, values [K, L, D]; writes into `out`."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    if num_queries == length and (window is None or window >= length):
        full = (keys, values) if group == 1 else (t.repeat_interleave(group, dim=0) for t in (keys, values))
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], *(t[None] for t in full), is_causal=True, scale=scale
        )
        out.copy_(mixed[0].transpose(0, 1))
        return
    step = max(1, MAX_MASK_BYTES // (length * group * q.element_size()))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        first, last = length - num_queries + begin, length - num_queries + end  # positions of these queries
        low = 0 if window is None else max(0, first - window + 1)
        at = torch.arange(first, last)[:, None]
        seen = torch.arange(low, last)[None, :]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf).repeat(group, 1)
        # The query heads of a kv head are rows of one problem: [K, group · n, D].
        rows = q[begin:end].view(end - begin, num_kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
        mixed = F.scaled_dot_product_attention(
            rows[None], keys[None, :, low:last], values[None, :, low:last], attn_mask=mask, scale=scale
        )[0]
        mixed = mixed.view(num_kv_heads, group, end - begin, -1).permute(2, 0, 1, 3)
        out[begin:end] = mixed.flatten(1, 2)


def _tiled(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> None:
    """The reference's attention, a few queries at a time, so that the scores stay small."""
    num_queries, num_heads, _ = q.shape
    length = keys.shape[1]
    step = max(1, MAX_MASK_BYTES // (length * num_heads * 4))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        last = length - num_queries + end
        out[begin:end] = attend(q[begin:end], keys[:, :last], values[:, :last], scale, window, softcap, alibi_slopes)
