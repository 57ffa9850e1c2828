"""Attention to compressed keys and residuals in several streams (DeepSeek V4), in plain torch.

Sequences of a step are computed one by one, by lengths that the host reads. So no graph can have these ops.

Shapes: T tokens, H heads, D head dim, I index head dim, N streams, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from slipstream.kernels.layouts import CompressedParams, HyperParams
from slipstream.spec.model import CompressedAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, LayerKV

MAX_SCORES = 1 << 26
"""Maximum number of attention scores computed at once. Longer prompts are computed in parts."""


def attend(
    q: Tensor,
    key: Tensor,
    rows: Tensor | None,
    index: tuple[Tensor, Tensor] | None,
    kv: LayerKV,
    meta: AttentionMetadata,
    params: CompressedParams,
) -> Tensor:
    """Attention to the keys of nearby tokens and to compressed keys (`CompressedAttentionSpec`): q [T, H · D], key
    [T, D] → [T, H · D].

    `rows` holds what each token contributes to compressed keys. `index` is the pair (queries [T, heads · I],
    weights [T, heads]) of the index.
    """
    s, num_tokens = params.spec, len(q)
    table = params.cos_sin[meta.positions]
    queries = _turned(_rms(q.view(num_tokens, s.num_heads, -1), None, s.eps), table)
    keys = _turned(_rms(key, params.norm, s.eps)[:, None], table)[:, 0]
    block, offset = meta.slot_mapping // kv.block_size, meta.slot_mapping % kv.block_size
    kv.k[block, 0, offset] = keys.to(kv.k.dtype)
    if rows is not None and kv.index is not None:
        kv.index[block, 0, offset, : s.source_size] = rows.to(kv.index.dtype)
        for first, last, blocks, _ in sequences(meta):
            _close(first, last, blocks, kv, params)
    scorers = weights = None
    if index is not None and s.index_spec is not None:
        of_heads = index[0].view(num_tokens, s.index_spec.num_heads, -1).float()
        scorers, weights = _turned(of_heads, table), index[1].float()
    out = queries.new_zeros(queries.shape)
    for first, last, blocks, begin in sequences(meta):
        oldest = max(0, first - s.local + 1)
        local = kv.k[cached_places(oldest, last, blocks, kv)].float()
        entries, index_keys = _entries(last, blocks, kv, s)
        seen = torch.cat((local, entries))
        part = max(1, MAX_SCORES // max(1, len(seen) * s.num_heads))
        for start in range(first, last, part):
            at = torch.arange(start, min(last, start + part), device=q.device)
            own = slice(begin + start - first, begin + int(at[-1]) + 1 - first)
            behind = at[:, None] - torch.arange(oldest, last, device=q.device)
            hidden = (behind < 0) | (behind >= s.local)
            if len(entries):
                ready = (at[:, None] + 1) // s.rate
                later = torch.arange(len(entries), device=q.device) >= ready
                if scorers is not None and weights is not None:
                    later = _not_chosen(scorers[own], weights[own], index_keys, later, s)
                hidden = torch.cat((hidden, later), dim=1)
            scores = torch.einsum("nhd,ld->nhl", queries[own], seen) * s.scale
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            sinks = params.sinks.float()[None, :, None].expand(len(at), -1, 1)
            weight = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
            out[own] = weight @ seen
    return _turned(out, table, back=True).flatten(1).to(q.dtype)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h if weight is None else h * weight.float()


def _turned(x: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    """Rotates the last dimensions of float32 x [T, heads, D], in pairs of neighbours."""
    (cos, sin), plain = table[:, None].chunk(2, dim=-1), x.shape[-1] - table.shape[-1]
    sin = -sin if back else sin
    a, b = x[..., plain::2], x[..., plain + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :plain], turned), dim=-1)


def sequences(meta: AttentionMetadata) -> Iterator[tuple[int, int, Tensor, int]]:
    """Yield each sequence's first new position, length, blocks, and first row of the step."""
    starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        if length and count:
            yield length - count, length, meta.block_table[i], starts[i]


def cached_places(first: int, last: int, blocks: Tensor, kv: LayerKV) -> tuple[Tensor, int, Tensor]:
    """Returns an index into a cache tensor that selects the rows of positions [first, last)."""
    at = torch.arange(first, last, device=blocks.device)
    return blocks[at // kv.block_size].long(), 0, at % kv.block_size


def _entry_places(
    first: int, last: int, blocks: Tensor, kv: LayerKV, s: CompressedAttentionSpec
) -> tuple[Tensor, int, Tensor]:
    """Returns the index [entries, parts] of the rows that hold the compressed keys [first, last):
    those of their last tokens."""
    ends = (torch.arange(first, last, device=blocks.device) + 1) * s.rate
    at = ends[:, None] - s.entry_rows + torch.arange(s.entry_rows, device=blocks.device)
    return blocks[at // kv.block_size].long(), 0, at % kv.block_size


def _close(first: int, length: int, blocks: Tensor, kv: LayerKV, p: CompressedParams) -> None:
    """Writes the compressed keys of the windows that end at positions [first, length), those of
    this step."""
    s, index = p.spec, kv.index
    assert index is not None
    assert p.entry_norm is not None
    begin, end = first // s.rate, length // s.rate
    if begin == end:
        return
    before = max(0, begin - s.overlaps)  # the window before, if it counts
    rows = index[cached_places(before * s.rate, end * s.rate, blocks, kv)][
        :, : s.source_size
    ].float()
    rows = rows.view(end - before, s.rate, -1)
    width, made = s.width(s.head_dim), [_made(rows, begin - before, p.gate_bias, s.head_dim, s)]
    made = [_rms(made[0], p.entry_norm, s.eps)]
    if s.index_spec is not None and p.index_norm is not None:
        dim = s.index_spec.head_dim
        own = _made(rows[..., 2 * width :], begin - before, p.index_gate_bias, dim, s)
        made.append(_rms(own, p.index_norm, s.eps))
    table = p.cos_sin[torch.arange(begin, end, device=rows.device) * s.rate]
    entries = torch.cat([_turned(x[:, None], table)[:, 0] for x in made], dim=1)
    block, row, offset = _entry_places(begin, end, blocks, kv, s)
    parts = entries.view(end - begin, s.entry_rows, -1).to(index.dtype)
    index[block, row, offset, s.source_size :] = parts


def _made(
    rows: Tensor, skipped: int, bias: Tensor | None, dim: int, s: CompressedAttentionSpec
) -> Tensor:
    """The weighted means [windows − skipped, D] of the windows' rows [windows, rate, values and gates].

    If windows overlap, a mean is over the first halves of the window before, too, which the very first one lacks.
    """
    assert bias is not None
    width = s.width(dim)
    values, gates = rows[..., :width], rows[..., width : 2 * width] + bias.float()
    if s.overlaps:
        older = [values[:-1, :, :dim], gates[:-1, :, :dim]]
        if not skipped:  # the very first window
            nothing = torch.zeros_like(values[:1, :, :dim])
            older = [torch.cat((nothing, older[0])), torch.cat((nothing - math.inf, older[1]))]
        own = values[skipped:, :, dim:], gates[skipped:, :, dim:]
        values, gates = (torch.cat(pair, dim=1) for pair in zip(older, own, strict=True))
    return (values * gates.softmax(dim=1)).sum(dim=1)


def _entries(
    length: int, blocks: Tensor, kv: LayerKV, s: CompressedAttentionSpec
) -> tuple[Tensor, Tensor]:
    """The compressed keys [entries, D] of a sequence and their index keys [entries, I]; none without compression."""
    if not s.rate or kv.index is None:
        return (kv.k.new_zeros(0, s.head_dim, dtype=torch.float32),) * 2
    parts = kv.index[_entry_places(0, length // s.rate, blocks, kv, s)]
    whole = parts[..., s.source_size :].flatten(1).float()
    return whole[:, : s.head_dim], whole[:, s.head_dim :]


def _not_chosen(
    q: Tensor, weights: Tensor, keys: Tensor, later: Tensor, s: CompressedAttentionSpec
) -> Tensor:
    """Returns a mask [tokens, entries] of the compressed keys that the index does not choose. Of
    equal scores it takes the earlier ones."""
    assert s.index_spec is not None
    scores = torch.einsum("nhd,ld->nhl", q, keys).relu()
    scores = torch.einsum("nh,nhl->nl", weights, scores).masked_fill(later, -math.inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : s.index_spec.top_k]
    return later | torch.ones_like(later).scatter_(1, best, False)


def grouped_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Block-diagonal product: x [T, G · F] → [T, G · R]. Part g of a row is multiplied with rows g · R … of the
    weight [G · R, F]."""
    groups = x.view(len(x), -1, weight.shape[1]).transpose(0, 1)  # [G, T, inner]
    made = torch.bmm(groups, weight.to(x.dtype).view(len(groups), -1, weight.shape[1]).mT)
    return made.transpose(0, 1).flatten(1)


def coefficients(h: Tensor, params: HyperParams) -> Tensor:
    """Coefficients of streams h [T, N · E] (`HyperSpec`), float32 [T, N + N + N · N]; [T, N] after the last layer."""
    n, flat = params.count, h.float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + params.norm_eps)
    found, scale, base = flat @ params.product.float().T, params.scale.float(), params.base.float()
    into = torch.sigmoid(found[:, :n] * scale[0] + base[:n]) + params.eps
    if found.shape[1] == n:
        return into
    out = 2 * torch.sigmoid(found[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mixed = (found[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + params.eps
    mixed = mixed / (mixed.sum(-2, keepdim=True) + params.eps)
    for _ in range(params.iterations - 1):  # Sinkhorn and Knopp: rows and columns of sum 1
        mixed = mixed / (mixed.sum(-1, keepdim=True) + params.eps)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + params.eps)
    return torch.cat((into, out, mixed.flatten(1)), dim=1)


def collapsed(h: Tensor, coefficients: Tensor, *, count: int) -> Tensor:
    """Returns the sum of the streams of h [T, N · E], each weighted by its coefficient of the
    first N: [T, E]."""
    streams = h.view(len(h), count, -1).float()
    return (coefficients[:, :count, None] * streams).sum(1).to(h.dtype)


def merged(h: Tensor, made: Tensor, coefficients: Tensor, *, count: int) -> Tensor:
    """Mixes the streams of h [T, N · E] with each other, and adds `made` [T, E] to each, times its coefficient."""
    streams = h.view(len(h), count, -1)
    out = coefficients[:, count : 2 * count]
    mixed = coefficients[:, 2 * count :].view(-1, count, count)
    kept = mixed.to(h.dtype).mT @ streams
    return (out.to(h.dtype)[..., None] * made[:, None] + kept).view_as(h)
