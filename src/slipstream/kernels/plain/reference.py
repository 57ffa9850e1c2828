"""The oracle: every op in plain torch, on any device. It is written to be read and checked, not to
be fast.

All arithmetic is in float32, whatever the type of the inputs. Results are rounded once, at the end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cache import int4 as int4_cache
from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.context_ops import packed
from slipstream.kernels.metadata import AttentionMetadata, ExpertCounters, LayerKV, SamplingTensors
from slipstream.kernels.ops import AttentionParams, Experts, NormParams, OpSet, QKVLayout
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.weights.forms import (
    Activations,
    GroupedLinear,
    Linear,
    Quantized,
    ScaledLinear,
    SplitLinear,
    TileScaledLinear,
)
from slipstream.kernels.weights.quantize import dequantize, numbers, quantize_rows, round_linear
from slipstream.spec.model import (
    Activation,
    ClampedSilu,
    ClampedSwiglu,
    MoESpec,
    OwnActivation,
    OwnNorm,
    Xielu,
)
from slipstream.spec.scheme import NATIVE_PRODUCTS, InputFormat, Scheme

# --- Layers ---


def activate_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Input of an MLP's down projection, float32: the gate's activation times up."""
    if isinstance(activation, ClampedSwiglu):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(gate * activation.alpha) * (up + 1)
    if isinstance(activation, ClampedSilu):
        limit = activation.limit
        return F.silu(gate).clamp(max=activation.highest) * up.clamp(-limit, limit)
    if isinstance(activation, OwnActivation):
        made: Tensor = activation.function(gate, up)
        return made
    return activate(gate, activation) * up


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Applies an activation function by name. A new one is a line here and in
    `triton/pointwise.py`."""
    match activation:
        case ClampedSwiglu() | ClampedSilu():
            raise AssertionError("gated only")
        case OwnActivation(function=function):
            made: Tensor = function(x)
            return made
        case Xielu(positive=positive, negative=negative):
            low, high = x.clamp(max=0), x.clamp(min=0)
            return x / 2 + positive * high.square() + negative * (torch.expm1(low) - low)
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()


def route(
    router_logits: Tensor,
    spec: MoESpec,
    correction: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (weights float32, experts int64), [T, num_experts_per_token] each."""
    logits = router_logits.float()
    if spec.scores == "sqrt_softplus":
        scores = F.softplus(logits).sqrt()
    else:
        scores = logits.softmax(dim=-1) if spec.scores == "softmax" else logits.sigmoid()
    merits = logits if spec.correction == "logits" else scores
    merits = merits if correction is None else merits + correction
    if (limit := spec.groups) is not None:
        groups = merits.unflatten(-1, (limit.num_groups, -1))
        best = groups.topk(1 if limit.by == "best" else 2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(limit.num_chosen, dim=-1).indices, True
        )
        merits = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    chosen = merits.topk(spec.num_experts_per_token, dim=-1).indices
    weights = _near_weights(logits, chosen, spec) if spec.nearness else scores.gather(1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_WEIGHT)
    weights = weights * spec.weight_scale
    return weights if scales is None else weights * scales[chosen], chosen


def identity_part(x: Tensor, weights: Tensor, chosen: Tensor, spec: MoESpec) -> Tensor:
    """The sum of a choice's identity experts, float32 [T, E]: the input times their weights. `chosen` counts from the model's
    first expert."""
    of_identity = weights.masked_fill(chosen < spec.num_experts, 0.0).sum(dim=1, keepdim=True)
    return x.float() * of_identity


def local_choice(weights: Tensor, chosen: Tensor, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """A choice whose experts count from the first one that this rank has. Any other is the number after the last one, with
    weight 0."""
    first, count = (0, spec.num_experts) if spec.held is None else spec.held
    here = (chosen >= first) & (chosen < first + count)
    return weights.where(here, 0.0), (chosen - first).where(here, count)


def _near_weights(logits: Tensor, chosen: Tensor, spec: MoESpec) -> Tensor:
    """Returns the weights of the choices by `MoESpec.nearness`."""
    left, weights = logits, []
    for j in range(chosen.shape[1]):
        most = left.max(dim=-1, keepdim=True).values
        far = (most - logits) / torch.maximum(logits.abs(), most) > spec.nearness
        weights.append(
            left.masked_fill(far, -math.inf).softmax(dim=-1).gather(1, chosen[:, j : j + 1])
        )
        left = left.scatter(1, chosen[:, j : j + 1], -math.inf)
    return torch.cat(weights, dim=1)


def count_experts(chosen: Tensor, load: ExpertCounters | None) -> None:
    """Adds the choices [T, k] to `load.counts`. Padded tokens do not count."""
    if load is not None:
        there = (load.slots >= load.block_size).long()[:, None].expand(chosen.shape)
        load.counts.index_add_(0, chosen.flatten(), there.flatten())


MIN_WEIGHT = 1e-20
"""Constant added to the sum by which experts' weights are divided, because with logistic functions
the sum may be 0."""


ROUNDED = (ScaledLinear, TileScaledLinear, GroupedLinear)


class ReferenceOps(OpSet):
    name = "reference"
    rounded = NATIVE_PRODUCTS["reference"]

    def quantize_weight(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Linear:
        return (
            Linear(weight=weight, bias=bias)
            if scheme is None
            else round_linear(weight, bias, scheme)
        )

    def linear(self, x: Activations, w: Linear) -> Tensor:
        if isinstance(w, SplitLinear):
            assert isinstance(x, Tensor)
            return self.split_linear(x, w)
        if isinstance(w, (ScaledLinear, TileScaledLinear)):
            q = x if isinstance(x, Quantized) else self.quantize(x, w.inputs)
            x, dtype = numbers(q), w.out_dtype
        else:
            assert isinstance(x, Tensor)
            dtype = x.dtype
        y = x.float() @ (dequantize(w) if isinstance(w, ROUNDED) else w.weight.float()).T
        return (y if w.bias is None else y + w.bias.float()).to(dtype)

    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        return quantize_rows(x, inputs)

    def norm(
        self,
        x: Tensor,
        norm: NormParams,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        if isinstance(norm.kind, OwnNorm):
            return self._own_norm(x, norm, residual, inputs)
        total = x if residual is None else x + residual
        h = total.float()
        if norm.kind == "rms":
            h = rms(h, norm.weight, norm.eps, norm.offset)
        else:
            h = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(
                h.var(-1, unbiased=False, keepdim=True) + norm.eps
            )
            h = h * (norm.weight.float() + norm.offset) + (
                0.0 if norm.bias is None else norm.bias.float()
            )
        return self._as(h, x.dtype, inputs), total

    def _as(self, x: Tensor, dtype: torch.dtype, inputs: InputFormat | None) -> Activations:
        return x.to(dtype) if inputs is None else self.quantize(x, inputs)

    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        h, num_turned = heads, heads.num_heads + heads.num_kv_heads
        rows: Tensor = qkv.unflatten(1, (-1, h.head_dim))
        q, k = rows[:, : h.num_heads].float(), rows[:, h.num_heads : num_turned].float()
        v = rows[:, num_turned:] if h.has_values else rows[:, h.num_heads :]  # none if kv.latent
        if h.value_eps is not None:
            v = rms(v, v.new_ones(h.head_dim), h.value_eps, 0.0)
        if not h.norm_after:
            q, k = _normed(q, k, h)
        if h.cos_sin is not None:
            table = h.cos_sin[meta.positions]
            q, k = rotate(q, table, h.interleaved), rotate(k, table, h.interleaved)
        if h.norm_after:
            q, k = _normed(q, k, h)
        if kv.fold is not None:
            q = int4_cache.folded_queries(q, kv.fold)
        if not h.num_kv_heads:
            return q.to(qkv.dtype).contiguous()
        block, offset = meta.slot_mapping // kv.block_size, meta.slot_mapping % kv.block_size
        if kv.fold is not None:
            int4_cache.write(kv, k, v, block, offset)
            return q.to(qkv.dtype).contiguous()
        kv.k[block, :, offset] = to_cache(k, kv.k_scale, kv.k.dtype)
        if not kv.latent:
            kv.v[block, :, offset] = to_cache(v, kv.v_scale, kv.v.dtype)
        return q.to(qkv.dtype).contiguous()

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        int4 = kv.fold is not None
        out = q.new_zeros(*q.shape[:2], q.shape[2] if int4 else kv.v.shape[3])
        starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        for i, length in enumerate(lens):
            begin, end = starts[i], starts[i + 1]
            if length == 0 or begin == end:
                continue
            keys, values = gather_sequence(kv, meta.block_table[i], length)
            found = attend(q[begin:end], keys, values, params)
            out[begin:end] = int4_cache.rotated(found).to(q.dtype) if int4 else found
        return out

    def attention_part(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:2], kv.v.shape[3])
        sums = torch.full(q.shape[:2], -math.inf, device=q.device)
        starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        assert meta.limits is not None
        for i, length in enumerate(lens):
            rows = slice(starts[i], starts[i + 1])
            if length == 0 or rows.start == rows.stop:
                continue
            keys, values = (
                x.float().repeat_interleave(q.shape[1] // len(x), dim=0)
                for x in gather_sequence(kv, meta.block_table[i], length)
            )
            scores = torch.einsum("nhd,hld->nhl", q[rows].float(), keys) * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            places = torch.arange(length, device=q.device)
            hidden = places >= meta.limits[rows, None]
            if meta.begins is not None:
                hidden |= places < meta.begins[rows, None]
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            sums[rows] = scores.logsumexp(-1)
            weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a token without keys here
            out[rows] = torch.einsum("nhl,hld->nhd", weights, values).to(q.dtype)
        return packed(out, sums)

    def best_keys(
        self, q: Tensor, weights: Tensor, kv: LayerKV, meta: AttentionMetadata, top_k: int
    ) -> Tensor:
        found = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
        starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        for i, length in enumerate(lens):
            rows = slice(starts[i], starts[i + 1])
            keys = gather_sequence(kv, meta.block_table[i], length)[0][0].float()
            scores = torch.einsum("nhd,ld->nhl", q[rows].float(), keys).relu()
            scores = torch.einsum("nh,nhl->nl", weights[rows].float(), scores)
            hidden = torch.arange(length, device=q.device) > meta.positions[rows, None]
            best = scores.masked_fill(hidden, -math.inf).sort(dim=1, descending=True, stable=True)
            best_k = best.indices[:, :top_k]
            own = best_k.masked_fill(hidden.gather(1, best_k), -1)
            found[rows, : own.shape[1]] = own.int()
        return found

    def sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, scale: float
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:2], kv.v.shape[3])
        starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        for i, length in enumerate(lens):
            rows = slice(starts[i], starts[i + 1])
            if length == 0 or rows.start == rows.stop:
                continue
            keys, values = (x[0].float() for x in gather_sequence(kv, meta.block_table[i], length))
            marked = torch.zeros(rows.stop - rows.start, length + 1, device=q.device)
            at = torch.where(chosen[rows] < 0, length, chosen[rows]).long()  # the last column: none
            seen = marked.scatter_(1, at, 1.0)[:, :length] > 0
            scores = torch.einsum("nhd,ld->nhl", q[rows].float(), keys) * scale
            weight = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)
            out[rows] = torch.einsum("nhl,ld->nhd", weight, values).to(q.dtype)
        return out

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, parts: PackedParts, *, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        for length, index in parts.by_length:
            tokens = torch.arange(len(q), device=q.device) if index is None else index
            for own in tokens.split(length):
                scores = torch.einsum("nhd,lhd->hnl", q[own].float(), k[own].float()) * scale
                out[own] = torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1), v[own].float()).to(
                    q.dtype
                )
        return out

    def activation(
        self,
        x: Tensor,
        activation: Activation,
        *,
        gated: bool = False,
        inputs: InputFormat | None = None,
    ) -> Activations:
        if not gated:
            return self._as(activate(x.float(), activation), x.dtype, inputs)
        gate, up = x.float().chunk(2, dim=-1)
        return self._as(activate_gated(gate, up, activation), x.dtype, inputs)

    def route(
        self,
        router_logits: Tensor,
        spec: MoESpec,
        correction: Tensor | None = None,
        load: ExpertCounters | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = route(router_logits, spec, correction, scales)
        count_experts(chosen, load)
        return weights, chosen

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None = None
    ) -> Tensor:
        spec = experts.spec
        weights, chosen = self.route(router_logits, spec, experts.correction, load, experts.scales)
        own = chosen - (0 if spec.held is None else spec.held[0])
        made = self.moe_of_choice(x, weights, own, experts)
        if not (spec.identity and spec.adds_identity):
            return made
        return (made.float() + identity_part(x, weights, chosen, spec)).to(x.dtype)

    def moe_of_choice(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        up, down, spec = experts.up, experts.down, experts.spec
        how: dict[str, Any] = dict(
            activation=spec.expert.activation, gated=spec.expert.gated, inputs=down.inputs
        )
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in (i for i in chosen.unique().tolist() if 0 <= i < spec.num_local_experts):
            tokens, slots = torch.where(chosen == expert)
            up_rows, down_rows = (
                slice(expert * n, (expert + 1) * n)
                for n in (spec.expert.up_rows, down.out_features // spec.num_local_experts)
            )
            rows, factors = x[tokens], weights[tokens, slots, None]
            if spec.scales_input:
                rows, factors = rows * factors.to(x.dtype), torch.ones_like(factors)
            h = self.activation(self.linear(rows, up.part(up_rows)), **how)
            out[tokens] += self.linear(h, down.part(down_rows)).float() * factors
        return out.to(x.dtype)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        logits = apply_bias_and_penalties(logits.float(), params)
        greedy = logits.argmax(dim=-1)
        if params.all_greedy:
            return greedy
        kept = filter_probs(logits, scaled_probs(logits, params), params)
        drawn = draw(kept, uniform(params.seeds, params.history_lens))
        return torch.where(params.temperature > 0, drawn, greedy)

    def copy_blocks(
        self, source: BlockTensors, target: BlockTensors, sources: Tensor, targets: Tensor
    ) -> None:
        for theirs, ours in zip(source.rows, target.rows, strict=True):
            ours[targets] = theirs[sources]


# --- Attention ---


def gather_sequence(kv: LayerKV, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies one sequence's keys and values, [K, length, D] each, out of its blocks."""
    count = -(-length // kv.block_size)
    index = blocks[:count].long()
    if kv.fold is not None:
        keys, values = int4_cache.read(kv, index, kv.fold.shape[2])
        return keys[:, :length], values[:, :length]
    keys, values = (t[index].transpose(0, 1).flatten(1, 2)[:, :length] for t in (kv.k, kv.v))
    if kv.k_scale is not None and kv.v_scale is not None:
        return keys.float() * kv.k_scale[:, None, None], values.float() * kv.v_scale[:, None, None]
    return keys, values


def to_cache(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Converts [T, K, D] to the cache's type. For 8 bits it is divided by each head's scale,
    clamped and rounded."""
    if scale is None:
        return x.to(dtype)
    x = x.float() / scale[None, :, None]
    return (
        x.clamp(-448, 448).to(dtype)
        if dtype == torch.float8_e4m3fn
        else x.round().clamp(-127, 127).to(dtype)
    )


def attend(
    q: Tensor, keys: Tensor, values: Tensor, s: AttentionParams, *, first: int | None = None
) -> Tensor:
    """Attention in float32: q [n, H, D] over keys, values [K, L, D] → [n, H, D].

    The queries are at positions `first` …, by default at the last n. Values may have another width
    than keys.
    """
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = (t.float().repeat_interleave(group, dim=0) for t in (keys, values))
    scores = torch.einsum("nhd,hld->hnl", q.float(), keys) * s.scale
    if s.softcap is not None:
        scores = s.softcap * torch.tanh(scores / s.softcap)
    first = length - num_queries if first is None else first
    at = torch.arange(first, first + num_queries, device=q.device)[:, None]
    distance = at - torch.arange(length, device=q.device)[None, :]
    if s.alibi_slopes is not None:
        scores = scores - s.alibi_slopes.float()[:, None, None] * distance
    if s.distance_bias is not None:
        scores = scores + biases(s.distance_bias, -distance)
    hidden = distance < 0 if s.causal else torch.zeros_like(distance, dtype=torch.bool)
    if s.window is not None:
        hidden |= distance.abs() >= s.window
    weights = softmax(
        scores.masked_fill(hidden, -math.inf), None if s.sinks is None else s.sinks[:, None, None]
    )
    return torch.einsum("hnl,hld->nhd", weights, values).to(q.dtype)


def biases(distance_bias: Tensor, distance: Tensor) -> Tensor:
    """Looks up `distance_bias` [H, 2R + 1] at each `distance` (key position − query position, a
    tensor of any shape) → [H, *shape]."""
    reach = distance_bias.shape[1] // 2
    return distance_bias[:, distance.clamp(-reach, reach) + reach]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of float32 scores, with an extra score per row (`sinks`) that
    gets no weight."""
    if sinks is None:
        return scores.softmax(dim=-1)
    return torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1).softmax(dim=-1)[
        ..., :-1
    ]


def rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first rotary_dim dimensions of float32 x [T, heads, D] by `table` [T, rotary_dim]
    (cos, then sin)."""
    rotary = table.shape[-1]
    cos, sin = table[:, None].chunk(2, dim=-1)
    turned, passed = x[..., :rotary], x[..., rotary:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, passed), dim=-1)


def _normed(q: Tensor, k: Tensor, h: QKVLayout) -> tuple[Tensor, Tensor]:
    """Norms heads of q and k, if they have norms."""
    if h.q_norm is None or h.k_norm is None:
        return q, k
    how = h.norm_eps, h.norm_offset
    return rms(q, h.q_norm, *how), rms(k, h.k_norm, *how)


def rms(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """x / rms(x) over the last dimension, times weight + weight_offset; float32."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h * (weight.float() + weight_offset)


# --- Sampling ---


def apply_bias_and_penalties(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Applies allowed tokens, logit bias, then repetition, frequency and presence penalties, in
    place on float32 [S, V].

    No [S, V] table of counts is made: the tokens so far are gathered, changed and scattered back.
    Where a token occurs twice both write the same value, so that the order of writing does not
    matter. Only the frequency penalty adds up.
    """
    if (
        params.limited_rows is not None
        and params.allowed_rows is not None
        and params.allowed_tokens is not None
    ):
        allowed = params.allowed_rows, params.allowed_tokens
        kept = logits[allowed]
        logits.index_fill_(0, params.limited_rows, -math.inf).index_put_(allowed, kept)
    if (
        params.bias_rows is not None
        and params.bias_tokens is not None
        and params.bias_values is not None
    ):
        logits.index_put_(
            (params.bias_rows, params.bias_tokens), params.bias_values, accumulate=True
        )
    if params.history is None:
        return logits
    assert params.prompt_lens is not None
    assert params.repetition_penalty is not None
    assert params.presence_penalty is not None
    assert params.frequency_penalty is not None
    lens, prompt_lens = params.history_lens[:, None], params.prompt_lens[:, None]
    at = torch.arange(params.history.shape[1], device=logits.device)[None, :]
    # Positions that do not count are redirected to a token that does: beyond the end to the first
    # token, ...
    tokens = torch.where(at < lens, params.history, params.history[:, :1]).long()
    before = logits.gather(1, tokens)
    penalty = params.repetition_penalty[:, None]
    logits.scatter_(1, tokens, torch.where(before > 0, before / penalty, before * penalty))
    # ... and in the prompt to the last token, which is in the answer if there is one.
    in_answer = (at >= prompt_lens) & (at < lens)
    last = params.history.gather(1, (lens - 1).clamp(min=0).long())
    tokens = torch.where(in_answer, params.history, last).long()
    logits.scatter_add_(1, tokens, -params.frequency_penalty[:, None] * in_answer)
    presence = params.presence_penalty[:, None] * (lens > prompt_lens)
    return logits.scatter_(1, tokens, logits.gather(1, tokens) - presence)


def scaled_probs(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Returns softmax(logits / temperature) in float32. Greedy rows, whose result is not used, have
    temperature 1."""
    temperature = params.temperature[:, None]
    return (logits / torch.where(temperature > 0, temperature, 1.0)).softmax(dim=-1)


def filter_probs(logits: Tensor, probs: Tensor, params: SamplingTensors) -> Tensor:
    """Returns probabilities [S, V] with the tokens that min_p, top_k or top_p drop set to 0,
    without normalizing again.

    Each filter keeps all tokens at or above a threshold, so ties are kept together and no sorting
    order matters.
    """
    if params.any_min_p:
        probs = probs.where(probs >= params.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    if params.any_top_k:
        vocab = logits.shape[-1]
        k = torch.where(params.top_k > 0, params.top_k, vocab).clamp(max=vocab)
        least = logits.sort(dim=-1, descending=True).values.gather(1, k[:, None].long() - 1)
        probs = probs.where(logits >= least, 0.0)
    if params.any_top_p:
        probs = probs.where(
            probs >= nucleus(probs.sort(dim=-1, descending=True).values, probs, params.top_p), 0.0
        )
    return probs


def nucleus(ordered: Tensor, probs: Tensor, top_p: Tensor) -> Tensor:
    """Returns the smallest probability [S, 1] that top_p keeps.

    `ordered` holds the largest of each row of `probs`, descending, as many as make up top_p of the
    row's mass. A token is needed while the mass before it is less than that. The first is always
    needed, and with top_p = 1 all are.
    """
    wanted = top_p[:, None] * probs.sum(-1, keepdim=True, dtype=torch.float64)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    last = (before < wanted).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(top_p[:, None] < 1.0, ordered.gather(1, last), 0.0)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draws a token for each row of weights [S, V] ≥ 0: the first one, in the order of ids, at
    which the running sum exceeds u · total."""
    return first_beyond(
        weights, u.double()[:, None] * weights.sum(-1, keepdim=True, dtype=torch.float64)
    )


def first_beyond(weights: Tensor, target: Tensor) -> Tensor:
    """Returns the first token with a weight at which the running sum exceeds target [S, 1].

    If rounding leaves none, it is the last one with a weight. A token without a weight is never
    returned.
    """
    kept = weights > 0
    reached = kept & (weights.cumsum(dim=-1, dtype=torch.float64) > target)
    last = weights.shape[-1] - 1 - kept.flip(-1).int().argmax(-1)
    return torch.where(reached.any(-1), reached.int().argmax(-1), last)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Returns numbers in (0, 1), float32 [S], that depend on (seed, counter) alone.

    The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    2014), started at the seed, in its counter-th state. The state passes twice through the
    finaliser, since seeds and counters are both small and consecutive. The upper 23 bits plus a
    half are exact in float32. Int64 arithmetic wraps, so all devices give the same bits.
    """
    x = seeds.long() + counters.long() * _GOLDEN
    x = _mix(_mix(x) + _GOLDEN)
    return (_shift(x, 41).float() + 0.5) * (1.0 / 2**23)


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
