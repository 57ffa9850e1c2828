"""The op set: the ops that a model is computed with. `OpSet` has every op's signature, shapes and
meaning.

1. Implementations are `plain/reference.py` (the oracle), `cpu/ops.py` (C++), `cpu/torch_ops.py`
   (torch's fast ops, where the C++ kernels are not built) and `triton/` (GPUs). The decoder gets an
   `OpSet` and does not know which.
2. An op that few models need has a default in plain torch here.
3. `weights/weight_ops.py` has how weights are laid out at a load, `rank_ops.py` what ranks send each
   other.
4. `weights/forms.py` has the weights of products, `layouts.py` the parameters of layers,
   `metadata.py` those of a step.
5. A step's keys and values are written to the cache, and then attention reads the cache. So
   prefill, chunked prefill and decode are one op.

Shapes: T tokens in the step, S sequences, H query heads, K kv heads, D head dim, B blocks, V
vocabulary, E hidden size, F feed-forward size.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.chains import ChainPlaces, chain_places
from slipstream.kernels.layouts import AttentionParams as AttentionParams
from slipstream.kernels.layouts import CompressedParams as CompressedParams
from slipstream.kernels.layouts import DisentangledParams as DisentangledParams
from slipstream.kernels.layouts import Experts as Experts
from slipstream.kernels.layouts import HyperParams as HyperParams
from slipstream.kernels.layouts import IndexParams as IndexParams
from slipstream.kernels.layouts import LayerTensors as LayerTensors
from slipstream.kernels.layouts import MLAParams as MLAParams
from slipstream.kernels.layouts import NormParams as NormParams
from slipstream.kernels.layouts import QKVLayout as QKVLayout
from slipstream.kernels.layouts import TokenShape as TokenShape
from slipstream.kernels.metadata import AttentionMetadata, ExpertCounters, LayerKV, SamplingTensors
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.plain import compressed, recurrent
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.rank_ops import RankOps
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.weights.adapters import LoRATokens, LoRAWeights
from slipstream.kernels.weights.forms import Activations, Linear, Pair, Quantized, SplitLinear
from slipstream.kernels.weights.quantize import numbers
from slipstream.kernels.weights.weight_ops import WeightOps
from slipstream.platform.collectives import OverlappedSum, RankGroup
from slipstream.spec.model import Activation, AttentionSpec, DenseSpec, Mamba2Spec, MoESpec, OwnNorm
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import InputFormat


class OpSet(WeightOps, RankOps):
    """The ops of a decoder and sampler. Implementations have no state except tuned choices."""

    thresholds = Thresholds()
    """Sizes of steps at which the launched kernels change."""

    has_host_experts = False
    """True if the host computes experts next to another device (`host_experts.HostExpertOps`)."""

    shares_prefixes = False
    """True if `attention` reads shared prefixes once (`AttentionMetadata.shared`)."""

    takes_rows = False
    """True if `sample` finds parameters by `SamplingTensors.rows`."""

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        """Tells whether values of a cache of type `dtype` have the layout `by_dim`. Otherwise they
        have the keys' layout."""
        return False

    def position_tables(self, max_model_len: int, device: torch.device) -> PositionTables:
        return PositionTables(max_model_len, device)

    def new_counts(self, num_experts: int, device: torch.device) -> Tensor:
        """Makes counters of a layer's tokens by expert: int64 [X] zeros."""
        return torch.zeros(num_experts, dtype=torch.int64, device=device)

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[LayerTensors],
        product: Linear,
        cos_sin: Tensor | None,
        group: RankGroup | None = None,
        experts: Linear | None = None,
    ) -> Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor] | Reason:
        """Makes a function for all layers of a one-token step: x [1, E] → the residual after the
        last layer [1, E].

        Returns a `Reason` if this op set has none. `layers` are each layer's tensors by name; a
        layer with a "router" has experts. `product` is any of the products, as all have the same
        format. `experts`, if given, is any of the experts', which have another format. With a
        `group` this rank has a part of each layer, and all ranks must make this call and those of
        the function.
        """
        return Reason(
            f"kernels={self.name!r} has no kernel for a whole step of one token", notable=False
        )

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """[T] int → [T, E]: rows of `table` [V, E], times `scale` rounded to the table's dtype (as
        Gemma does)."""
        rows = F.embedding(token_ids, table)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype).item()

    def embed_part(
        self, token_ids: Tensor, table: Any, scale: float = 1.0, *, first: int, size: int
    ) -> Tensor:
        """Runs `embed` with a `table` of the `size` rows from token `first` on: [T, E], zeros for
        all other tokens."""
        local = token_ids - first
        mine = (local >= 0) & (local < size)
        return self.embed(local.masked_fill(~mine, 0), table, scale).masked_fill(
            ~mine[:, None], 0.0
        )

    def all_reduce_norm(
        self,
        x: Tensor,
        norm: NormParams,
        *,
        group: RankGroup,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """Runs `norm` on the result of `all_reduce`, which rounds the sum to the model's type. x
        may be overwritten.

        Without `residual` the second result is the sum.
        """
        return self.norm(self.all_reduce(x, group), norm, residual=residual, inputs=inputs)

    def norm_arriving(
        self,
        sums: Sequence[OverlappedSum],
        norm: NormParams,
        *,
        residual: Tensor,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """Runs `norm` on the result of `sum_arriving`, which rounds the sums to the model's type.
        The new residual overwrites the old one."""
        rows, total = self.norm(self.sum_arriving(sums), norm, residual=residual, inputs=inputs)
        if total.data_ptr() != residual.data_ptr():
            residual.copy_(total)
        return rows, residual

    def best_of_ranks(self, logits: Tensor, group: RankGroup, width: int) -> Tensor:
        """Returns the index of the first maximum in the ranks' columns side by side: [N, W] → int64
        [N].

        Columns beyond `width` are ignored. A rank sends two numbers per row.
        """
        first = group.rank * logits.shape[1]
        own = logits[:, : max(1, width - first)]
        best = self.argmax(own)
        values = own.gather(1, best[:, None])[:, 0].float()
        if first >= width:  # only padding
            values.fill_(float("-inf"))
        every = group.all_gather(torch.stack((values.view(torch.int32), (best + first).int())))
        ranks = every[:, 0].view(torch.float32).argmax(0, keepdim=True)
        return every[:, 1].gather(0, ranks)[0].long()

    def embed_positions(self, meta: AttentionMetadata, table: Tensor, offset: int) -> Tensor:
        """Learned positions of the step's tokens: rows of `table` at position + offset, [T, E]."""
        return self.embed(meta.positions + offset, table)

    def embed_token_types(self, meta: AttentionMetadata, table: Tensor) -> Tensor:
        """Rows of `table` by the tokens' types, [T, E]. If all tokens have the first type, it is
        [E], for all of them."""
        return table[0] if meta.token_types is None else self.embed(meta.token_types, table)

    def place(self, x: Tensor, into: Tensor | None, *, column: int, width: int) -> Tensor:
        """Writes x [T, E] to the columns of `into` [T, width] from `column` on, and returns `into`.

        With None it makes new rows, whose other columns are not set.
        """
        rows = x.new_empty(len(x), width) if into is None else into
        rows[:, column : column + x.shape[1]] = x
        return rows

    @abstractmethod
    def linear(self, x: Activations, w: Linear) -> Tensor:
        """[T, in] → [T, out]: x · weightᵀ + bias, accumulated in float32 (int32 for int8).

        x is quantized to the format `w.inputs` if it is not yet. The result has the model's type.
        """

    def linear_added(self, x: Activations, w: Linear, added: Tensor) -> Tensor:
        """Returns `linear` plus `added` [T, out], which may be overwritten."""
        return self.linear(x, w) + added

    def lora(self, y: Tensor, x: Activations, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
        """Adds the adapters' results for x [T, in] to y [T, out].

        A token with slot s gets up[s] · (down[s] · x) in each part of the product; one without a
        slot keeps y. Products are rounded to the model's type. `y` may be overwritten. 8-bit rows
        of x are read as the product itself reads them, quantized.
        """
        rows = numbers(x) if isinstance(x, Quantized) else x.float()
        for t, slot in enumerate(tokens.slots.tolist()):
            if slot >= 0:
                inner = (w.down[slot].float() @ rows[t]).unflatten(0, (-1, w.rank))
                for part, own in zip(w.parts, inner, strict=True):
                    y[t, part] = (y[t, part].float() + w.up[slot, part].float() @ own).to(y.dtype)
        return y

    def adapted_linear(
        self, x: Activations, w: Linear, own: LoRAWeights, tokens: LoRATokens
    ) -> Tensor:
        """Returns `linear` plus the adapters' results."""
        return self.lora(self.linear(x, w), x, own, tokens)

    def split_linear(self, x: Tensor, w: SplitLinear) -> Tensor:
        """Computes `linear` with a `SplitLinear`, by the op set's 8-bit product and a dense one."""
        rest = self.linear(x.index_fill(1, w.columns, 0.0), w.rest)
        return torch.addmm(rest, x[:, w.columns], w.dense.T)

    @abstractmethod
    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        """[T, E] → 8 bits with a scale per row, or per 128 elements of it. The largest magnitude
        becomes the largest code."""

    @abstractmethod
    def norm(
        self,
        x: Tensor,
        norm: NormParams,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """[T, E] → (normed [T, E], sum [T, E]). `inputs` is the format that normed rows are
        quantized to.

        With `residual`, x + residual is normed, and returned as the second value, which may reuse
        residual's memory. Without it the second value is x.
        """

    def joined(self, x: Tensor, y: Tensor) -> Tensor | Pair:
        """Returns x + y of two branches of a layer, for a norm. It is a `Pair` if `norm_pair` is
        faster."""
        return x + y

    def norm_pair(
        self,
        pair: Pair,
        norm: NormParams,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """Runs `norm` on the pair's sum."""
        return self.norm(pair.x + pair.y, norm, residual=residual, inputs=inputs)

    def _own_norm(
        self, x: Tensor, norm: NormParams, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """Runs `norm` with the user's function."""
        assert isinstance(norm.kind, OwnNorm)
        total = x if residual is None else x + residual
        normed: Tensor = norm.kind.function(total.float(), norm.weight, norm.bias, norm.eps).to(
            x.dtype
        )
        return normed if inputs is None else self.quantize(normed, inputs), total

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Clamps each element to ±limit."""
        return x.clamp(-limit, limit)

    def scale_queries(
        self, x: Tensor, *, meta: AttentionMetadata, table: Tensor, size: int
    ) -> Tensor:
        """Multiplies the first `size` numbers of rows [T, …] by `table` (float32 [positions]) at
        each token's position."""
        q, rest = x[:, :size], x[:, size:]
        scaled = (q.float() * table[meta.positions][:, None]).to(x.dtype)
        return torch.cat((scaled, rest), dim=1) if rest.shape[1] else scaled

    def norm_qk(self, qkv: Tensor, spec: AttentionSpec, q_norm: Any, k_norm: Any) -> Tensor:
        """Norms q and k in rows [T, (H + 2K) · D] by `spec.qk_norm`: over the row of all heads, or
        over each head with its own weight, or with a layer norm (`NormParams`) that all share.

        `rope_and_cache` norms heads that share one weight.
        """
        norm = spec.qk_norm
        assert norm is not None
        q, k, v = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=1)
        if norm.over == "layer":
            heads_of = ((x.reshape(-1, spec.head_dim), n) for x, n in ((q, q_norm), (k, k_norm)))
            q, k = (self.norm(x, n)[0].reshape(len(qkv), -1) for x, n in heads_of)  # type: ignore[union-attr]
            return torch.cat((q, k, v), dim=1)
        if norm.over == "each":
            qk = torch.cat((q, k), dim=1).float().unflatten(1, (-1, spec.head_dim))
            heads = (
                F.layer_norm(qk, qk.shape[-1:], eps=norm.eps) * torch.cat((q_norm, k_norm)).float()
            )
            return torch.cat((heads.flatten(1).to(v.dtype), v), dim=1)
        normed = [
            self.norm(
                x, NormParams(kind="rms", weight=weight, eps=norm.eps, offset=norm.weight_offset)
            )[0]
            for x, weight in ((q, q_norm), (k, k_norm))
        ]
        return torch.cat((*normed, v), dim=1)  # type: ignore[arg-type]

    def norm_qk_part(
        self, qkv: Tensor, spec: AttentionSpec, q_norm: Any, k_norm: Any, group: RankGroup
    ) -> Tensor:
        """Runs `norm_qk` on rows of which each rank of `group` has the heads of `spec`.

        A kv head counts as often as it is held, which is the same for all. Padding heads do not
        count.
        """
        norm = spec.qk_norm
        assert norm is not None
        assert spec.of_heads is not None
        q, k, v = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=1)
        squares = torch.stack([x.float().square().sum(1) for x in (q, k)])
        sizes = (heads * spec.head_dim for heads in spec.of_heads)
        means = [total / size for total, size in zip(group.all_reduce(squares), sizes, strict=True)]
        normed = [
            (
                x.float() * torch.rsqrt(mean + norm.eps)[:, None] * (w.float() + norm.weight_offset)
            ).to(x.dtype)
            for x, mean, w in ((q, means[0], q_norm), (k, means[1], k_norm))
        ]
        return torch.cat((*normed, v), dim=1)

    def norm_groups_part(
        self, x: Tensor, *, spec: Mamba2Spec, weight: Any, group: RankGroup
    ) -> Tensor:
        """The norm of Mamba-2's results x [T, H · V] by groups, of which each rank of `group` has the
        parts `spec.norm_part`. Padding heads are 0 and do not count."""
        part = spec.norm_part
        assert part is not None
        rows = x.float().unflatten(1, (len(part.of), -1))
        own = rows.square().sum(-1).unbind(1)
        sums = rows.new_zeros(part.num_groups, len(x))
        for i, of in enumerate(part.of):  # no index on the host: graphs can't copy one
            sums[of] += own[i]
        factors = torch.rsqrt(group.all_reduce(sums) / part.size + spec.eps)
        normed = rows * torch.stack([factors[of] for of in part.of], dim=1)[..., None]
        result: Tensor = (normed.flatten(1) * weight.float()).to(x.dtype)
        return result

    def added(self, x: Tensor, y: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """(x + y) · factor for x, y [T, E], rounded once. y may be overwritten. A tensor has one
        number."""
        if isinstance(factor, float) and factor == 1.0:
            return x + y
        return ((x.float() + y.float()) * factor).to(x.dtype)

    def layer_inputs(
        self,
        token_ids: Tensor,
        projected: Tensor,
        table: Any,
        norm: NormParams,
        *,
        scale: float,
        factor: float,
        limit: int | None = None,
    ) -> Tensor:
        """(norm(projected) + scale · row) · factor, [T, L · P], for the tokens' rows of `table`.

        The norm is over each P numbers, where P is its weight's size. `projected` may be overwritten.
        Tokens from `limit` on have the table's first row.
        """
        if limit is not None:
            token_ids = token_ids.masked_fill(token_ids >= limit, 0)
        parts, _ = self.norm(projected.reshape(-1, norm.weight.shape[0]), norm)
        assert isinstance(parts, Tensor)
        rows = self.embed(token_ids, table, scale)
        return self.added(parts.view_as(projected), rows, factor)

    def gated_by(self, x: Tensor, inputs: Tensor, activation: Activation, *, column: int) -> Tensor:
        """act(x) · inputs[:, column : column + P] for x [T, P]."""
        gates = self.activation(x, activation)
        assert isinstance(gates, Tensor)
        return gates * inputs[:, column : column + x.shape[1]]

    def mixed_streams(self, h: Tensor, coefficients: Tensor) -> Tensor:
        """h [T, N · E], coefficients [T, N · N] → h plus for each of its N streams j the sum of
        coefficients[:, j · N + i] · stream i."""
        n = math.isqrt(coefficients.shape[1])
        mixed = coefficients.view(-1, n, n) @ h.view(len(h), n, -1)
        return h + mixed.view_as(h)

    def corrected_streams(
        self, h: Tensor, made: Tensor, coefficients: Tensor, *, active: int
    ) -> Tensor:
        """h [T, N · E] → each stream plus (1 + its coefficient [T, N]) · (made − stream `active`)."""
        streams = h.view(len(h), coefficients.shape[1], -1)
        change = made - streams[:, active]
        return (streams + change[:, None] * (coefficients + 1)[..., None]).view_as(h)

    def stream_coefficients(self, h: Tensor, params: HyperParams) -> Tensor:
        """Coefficients of streams h [T, N · E] (`HyperSpec`), float32 [T, N + N + N · N]; [T, N] after the last layer."""
        return compressed.coefficients(h, params)

    def collapsed_streams(self, h: Tensor, coefficients: Tensor, *, count: int) -> Tensor:
        """h [T, N · E] → the sum of its streams, times their first coefficients [T, E]."""
        return compressed.collapsed(h, coefficients, count)

    def merged_streams(
        self, h: Tensor, made: Tensor, coefficients: Tensor, *, count: int
    ) -> Tensor:
        """h [T, N · E], made [T, E] → the streams mixed with each other, plus `made` times a coefficient each."""
        return compressed.merged(h, made, coefficients, count)

    def grouped_linear(self, x: Tensor, *, weight: Tensor) -> Tensor:
        """x [T, G · F] → [T, G · R]: each of G parts of a row times rows of its own, of weight [G · R, F]."""
        return compressed.grouped_linear(x, weight)

    def hashed_logits(self, logits: Tensor, meta: AttentionMetadata, table: Tensor) -> Tensor:
        """Logits [T, X] of the experts that a token has in `table` [V, k], and −∞ of others."""
        assert meta.token_ids is not None
        hidden = torch.ones_like(logits, dtype=torch.bool)
        chosen = table[meta.token_ids.long()].long()
        return logits.masked_fill(hidden.scatter_(1, chosen, False), -math.inf)

    def compressed_attention(
        self,
        q: Tensor,
        key: Tensor,
        rows: Tensor | None,
        index: tuple[Tensor, Tensor] | None,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: CompressedParams,
    ) -> Tensor:
        """Attention to near keys and to compressed ones (`CompressedAttentionSpec`): q [T, H · D], key [T, D] → [T, H · D].

        `rows` has what a token gives to compressed keys, `index` the queries [T, heads · I] and weights [T, heads] of the
        index.
        """
        return compressed.attend(q, key, rows, index, kv, meta, params)

    def widened(self, h: Tensor, x: Tensor) -> Tensor:
        """h [T, N · E] → x [T, E] added to all streams but the first."""
        streams = h.view(len(h), -1, x.shape[1])
        return torch.cat((streams[:, :1], streams[:, 1:] + x[:, None]), dim=1).view_as(h)

    def side_by_side(self, *x: Tensor) -> Tensor:
        return torch.cat(x, dim=1)

    def mean_of(self, *x: Tensor) -> Tensor:
        return torch.stack(x).mean(dim=0)

    def as_large_as(self, x: Tensor, y: Tensor) -> Tensor:
        """x · rms(y) / rms(x) for each row."""
        size = y.square().mean(dim=-1, keepdim=True).sqrt()
        return x * size / x.square().mean(dim=-1, keepdim=True).clamp(min=1e-5).sqrt()

    def times(self, x: Tensor, *, weight: Tensor) -> Tensor:
        return x * weight

    def tanh(self, x: Tensor) -> Tensor:
        return x.float().tanh().to(x.dtype)

    def sparse_gates(self, x: Tensor, *, spec: DenseSpec, group: RankGroup | None) -> Tensor:
        """x [T, 2F] (gates, ups) with the gates of `DenseSpec.sparsity`, of which each rank of `group`
        has a part. Padding gates are 0 and do not count."""
        gates, ups = x.chunk(2, dim=1)
        normal = torch.distributions.Normal(0.0, 1.0)
        deviations = normal.icdf(torch.tensor(spec.sparsity)).item()
        if group is None or spec.of_size is None:
            mean, std = gates.mean(-1, keepdim=True), gates.std(-1, keepdim=True, unbiased=False)
        else:
            wide = gates.float()
            sums = group.all_reduce(torch.stack((wide.sum(1), wide.square().sum(1))))
            mean, squares = (total[:, None] / spec.of_size for total in sums)
            std = (squares - mean.square()).clamp(min=0).sqrt()
        least = (mean + std * deviations).to(x.dtype)
        return torch.cat((torch.relu(gates - least), ups), dim=1)

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Returns columns [start, stop) of x [T, N] as a tensor of their own."""
        return x[:, start:stop].contiguous()

    def resized_heads(self, x: Tensor, *, start: int, count: int, old: int, new: int) -> Tensor:
        """x [T, start + count · old] → [T, start + count · new]: each of the last `count` parts with zeros behind it, or
        without its end."""
        parts = x[:, start:].unflatten(1, (count, old))
        parts = torch.nn.functional.pad(parts, (0, new - old)).flatten(1)
        return torch.cat((x[:, :start], parts), 1) if start else parts

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x.float()).to(x.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """tanh(x / cap) · cap, in float32."""
        return (x.float() / cap).tanh().mul(cap).to(x.dtype)

    @abstractmethod
    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        """[T, (H + 2K) · D] → q [T, H, D]. k and v go to their slots of the cache.

        If `kv.latent`, or without `heads.has_values`, rows have no values: [T, (H + K) · D]. q and k
        of each head are RMS-normed first, then rotated by the row of `cos_sin` at `meta.positions`.
        Dimensions beyond rotary_dim pass. Computed in float32, and rounded to the cache's type after
        division by its scale.
        """

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, parts: PackedParts, *, scale: float
    ) -> Tensor:
        """Attention without a cache: q, k and v [T, H, D] → [T, H, D]."""
        out = torch.empty_like(q)
        for length, index in parts.by_length:
            own = (x if index is None else x[index] for x in (q, k, v))
            queries, keys, values = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in own)
            found = (
                F.scaled_dot_product_attention(queries, keys, values, scale=scale)
                .transpose(1, 2)
                .flatten(0, 1)
            )
            if index is None:
                return found
            out[index] = found
        return out

    def cache_kv(
        self, rows: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> None:
        """Writes keys and values [T, 2K · D], without queries, to their slots of the cache."""
        q = rows.new_zeros(len(rows), heads.num_heads * heads.head_dim)
        self.rope_and_cache(torch.cat((q, rows), dim=1), kv, meta, heads)

    @abstractmethod
    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """q [T, H, D] → [T, H, D] (as wide as the values): attention of each token over its own
        sequence's cache.

        1. Token j of a sequence with seq_len L and query length n is at position p = L − n + j. It
           sees cache positions max(0, p − window + 1) … p. Without `causal` (in an encoder, or over
           one) it sees all L of them, or those less than window away.
        2. alibi_slopes add slope · (key position − p) to the scores. distance_bias adds
           distance_bias[h, R + (key position − p clamped to −R … R)].
        3. sinks join the softmax as the scores (already scaled, never capped) of an extra key whose
           value is 0 (Xiao et al. 2023, arXiv:2309.17453, learned).
        4. Rows of padded sequences (seq_len 0) are unspecified but finite. Softmax is in float32.
        """

    def bidirectional_attention(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        heads: QKVLayout,
        params: AttentionParams,
    ) -> Tensor:
        """Runs `rope_and_cache` and `attention` in one for whole texts without a causal mask:
        [T, (H + 2K) · D] → [T, H, D].

        The cache's contents are unspecified afterwards. Tokens of no text (a graph's padding) give
        finite values.
        """
        return self.attention(self.rope_and_cache(qkv, kv, meta, heads), kv, meta, params)

    def disentangled_attention(
        self, qkv: Tensor, meta: AttentionMetadata, params: DisentangledParams
    ) -> Tensor:
        """Disentangled attention within each whole text: qkv [T, 3 · H · D] → [T, H · D].

        The score of query i and key j, whose distance has the bucket b, is (q_i · k_j + q_i · keys[b] + k_j · queries[b]) ·
        scale. Softmax is in float32.
        """
        p, out = params, torch.zeros_like(qkv[:, : qkv.shape[1] // 3])
        of_buckets = p.queries if p.keys is None else p.keys
        assert of_buckets is not None
        reach, starts = len(p.buckets) // 2, meta.query_start_loc.tolist()
        for begin, end in itertools.pairwise(starts):
            rows = qkv[begin:end].float().unflatten(1, (3, of_buckets.shape[0], -1))
            q, k, v = rows.permute(1, 2, 0, 3)  # [H, n, D]
            at = torch.arange(end - begin, device=qkv.device)
            away = (at[:, None] - at).clamp(-reach, reach) + reach
            bucket = p.buckets[away].long().expand(len(q), -1, -1)
            scores = q @ k.mT
            if p.keys is not None:
                scores += (q @ p.keys.float()).gather(2, bucket)
            if p.queries is not None:
                scores += (k @ p.queries.float()).gather(2, bucket.mT).mT
            found = (scores * p.scale).softmax(-1) @ v
            out[begin:end] = found.transpose(0, 1).flatten(1).to(out.dtype)
        return out

    def mean_of_texts(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """States [T, E], text i at starts[i] : starts[i + 1] (int32 or int64 [S + 1]) → each text's
        mean, float32 [S, E].

        The mean of a text without tokens is zeros.
        """
        num_texts = len(starts) - 1
        tokens = torch.arange(len(hidden), dtype=starts.dtype, device=starts.device)
        text = torch.bucketize(tokens, starts[1:], right=True)  # num_texts: of no text
        sums = hidden.new_zeros(num_texts + 1, hidden.shape[1], dtype=torch.float32).index_add_(
            0, text, hidden.float()
        )
        return sums[:num_texts] / starts.diff().clamp(min=1)[:, None]

    def states_at(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows of hidden [T, E] at index [S], float32 [S, E]. An index beyond the end (of a graph's
        padding) gives any row."""
        return hidden[index.long().clamp(max=len(hidden) - 1)].float()

    def mla_attention(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: MLAParams,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Latent attention of q [T, H, P + R] and row [T, C + R] → [T, H · V]: `mla_queries`, then
        `mla_paged_attention`, or an equivalent. `chosen` is from `choose_keys`; None: all keys.

        All rows are written to the cache before any is read, because a decode may share blocks with
        a prompt of this step.
        """
        queries = self.mla_queries(q, row, kv, meta, params)
        if chosen is None or meta.max_seq_len <= chosen.shape[1]:
            return self.mla_paged_attention(queries, kv, meta, params)
        return self.mla_sparse_attention(queries, chosen, kv, meta, params)

    def choose_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: IndexParams,
    ) -> Tensor:
        """Chooses the keys of sparse attention (`IndexSpec`): index queries q [T, H · D], index keys k [T, D] and
        weights [T, H] → positions of keys, int32 [T, top_k].

        The keys go into `kv.index`. A row is in any order, and −1 stands for no key. In a step without more keys than
        `top_k` the result is unspecified.
        """
        rows, index = torch.cat((q, k), dim=1), kv.of_index
        queries = self.rope_and_cache(rows, index, meta, params.heads)
        if meta.max_seq_len <= params.top_k:
            return torch.empty(len(q), params.top_k, dtype=torch.int32, device=q.device)
        return self.best_keys(queries, weights, index, meta, params.top_k)

    @abstractmethod
    def best_keys(
        self, q: Tensor, weights: Tensor, kv: LayerKV, meta: AttentionMetadata, top_k: int
    ) -> Tensor:
        """The keys of the cache with the highest scores for each token, as `choose_keys` returns them: q [T, H, D],
        weights [T, H]."""

    @abstractmethod
    def sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """`attention` over a cache of latents, of each token to its chosen keys alone: [T, H, R + C] → [T, H, C]."""

    def mla_sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        """`mla_paged_attention` over the chosen keys."""
        seen = self.sparse_attention(q, chosen, kv, meta, params.scale)
        return torch.bmm(seen.transpose(0, 1), params.values).transpose(0, 1).flatten(1)

    def mla_queries(
        self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        """Computes the queries of latent attention, and writes its rows to the cache.

        q [T, H, P + R] has the non-rotary and rotary elements of each head, row [T, C + R] the
        latent and the rotary key. The queries [T, H, R + C] are rotated, and their non-rotary part
        is multiplied into the latents' space by `params.keys`. The rotated key and the normed
        latent go into the cache.
        """
        (num_heads, nope_dim, rank), rotary = params.keys.shape, params.rotary_dim
        plain, turned = q.split((nope_dim, rotary), dim=2)
        latent, key = row.split((rank, rotary), dim=1)
        normed = self.norm(latent.contiguous(), params.norm)[0]
        assert isinstance(normed, Tensor)
        absorbed = torch.bmm(plain.transpose(0, 1), params.keys).transpose(0, 1)
        queries, cached = torch.cat((turned, absorbed), dim=2), torch.cat((key, normed), dim=1)
        rows = torch.cat((queries, cached[:, None]), dim=1).flatten(1)
        sizes = dict(num_heads=num_heads, num_kv_heads=1, head_dim=rank + rotary)
        return self.rope_and_cache(
            rows,
            kv,
            meta,
            QKVLayout(**sizes, cos_sin=params.cos_sin, interleaved=params.interleaved),
        )

    def mla_paged_attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        """Computes `attention` of `mla_queries`' q over a cache of latents.

        `params.values` maps its sums [T, H, C] to values [T, H · V].
        """
        seen = self.attention(q, kv, meta, AttentionParams(scale=params.scale))
        return torch.bmm(seen.transpose(0, 1), params.values).transpose(0, 1).flatten(1)

    def gated_delta(
        self,
        x: Tensor,
        gates: Tensor,
        state: LayerState,
        meta: AttentionMetadata,
        params: GatedDeltaParams,
        decay: Tensor | None = None,
        z: Tensor | None = None,
    ) -> Tensor:
        """The gated delta rule with its convolution and its gated norm (`GatedDeltaSpec`) → [T, H · V].

        `x` [T, C + H · V] has q, k and v before the convolution, and z; `gates` [T, 2 · H] has b and a. If `decay`
        [T, H · K] and `z` [T, H · V] are given, `x` is [T, C] and `gates` [T, H]. `meta.states` says which states are
        read and kept.
        """
        return recurrent.gated_delta(x, gates, state, meta, params, decay, z)

    def mamba2(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: Mamba2Params
    ) -> Tensor:
        """A Mamba-2 recurrence with its convolution, gate and norm: x [T, H · V + C + H] → [T, H · V]."""
        return recurrent.mamba2(x, state, meta, params)

    def short_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        """LFM2's gated convolution: x [T, 3 · C] of b, c and x → c · conv(b · x) [T, C]."""
        return recurrent.short_conv(x, state, meta, params)

    def causal_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        """Mamba-1's convolution of the first C columns of `x` [T, 2 · C] → [T, C]. It reads and keeps `state.conv`
        alone."""
        return recurrent.causal_conv(x, state, meta, params)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        xz: Tensor,
        state: LayerState,
        meta: AttentionMetadata,
        params: MambaParams,
    ) -> Tensor:
        """Mamba-1's recurrence and gate → [T, width].

        `x` [T, width] comes from the convolution, `dt` [T, width] has no bias yet, `b` and `c` are [T, K], and the last
        `width` columns of `xz` are the gate.
        """
        return recurrent.selective_scan(x, dt, b, c, xz, state, meta, params)

    @abstractmethod
    def activation(
        self,
        x: Tensor,
        activation: Activation,
        *,
        gated: bool = False,
        inputs: InputFormat | None = None,
    ) -> Activations:
        """[T, F] → [T, F], quantized if `inputs` is given.

        With `gated`, [T, 2F] → [T, F]: act(first half) · second half (or the activation's own
        formula).
        """

    def expert_load(self, counts: Tensor, kv: LayerKV, meta: AttentionMetadata) -> ExpertCounters:
        """Makes a step's `ExpertCounters` for `moe`."""
        return ExpertCounters(counts, meta.slot_mapping, kv.block_size)

    def own_expert_load(
        self, load: ExpertCounters, group: RankGroup, num_tokens: int
    ) -> ExpertCounters:
        """Returns `load` for a `moe` over the tokens of all ranks of `group`, `num_tokens` places
        each.

        Only this rank's tokens count here. The others' count as padding, and are counted by their
        own ranks.
        """
        slots = load.slots.new_zeros(group.size, num_tokens)
        slots[group.rank, : len(load.slots)] = load.slots
        return replace(load, slots=slots.flatten())

    @abstractmethod
    def route(
        self,
        router_logits: Tensor,
        spec: MoESpec,
        correction: Tensor | None = None,
        load: ExpertCounters | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Makes the choice of `moe`: (weights float32, experts of any integer type),
        [T, num_experts_per_token] each.

        With `spec.held` an implementation may renumber the experts.
        """

    @abstractmethod
    def moe_of_choice(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """Computes `moe` with a given choice: weights float32 and experts int32, [T, k] each.

        The local experts (`MoESpec.num_local_experts`) count from 0. A larger number means none,
        and has the weight 0.
        """

    @abstractmethod
    def moe(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None = None
    ) -> Tensor:
        """x [T, E], router_logits [T, X] → [T, E]: each token through its experts, summed with
        their weights in float32.

        With p the softmax (or logistic function) of a row of router_logits in float32, the experts
        are the num_experts_per_token with the largest p (+ `correction`), within spec.groups. Their
        weights are p, divided by their sum if spec.normalize, times spec.weight_scale and the expert's
        own `scales`, if any. `MoESpec` says what `nearness` and `scales_input` change. The chosen
        experts are added to `load`.
        """

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertCounters | None = None,
    ) -> Tensor:
        """Computes `moe` plus a shared expert of all tokens with the products `shared` and the same
        activation."""
        return self.moe(x, router_logits, experts, load) + self._always(x, experts, shared)

    def _always(self, x: Tensor, experts: Experts, shared: tuple[Linear, Linear]) -> Tensor:
        """Computes the shared expert of all tokens."""
        (up, down), expert = shared, experts.spec.expert
        inner = self.activation(
            self.linear(x, up), expert.activation, gated=expert.gated, inputs=down.inputs
        )
        return self.linear(inner, down)

    def gather_inputs(
        self, tokens: Tensor, block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gathers the tokens at (rows, positions), int32 or int64 [T] each, and returns (ids int32,
        positions int64, slots int64), [T] each.

        A sequence's tokens are a row of `tokens` int32 [R, L] and its blocks a row of `block_table`
        int32 [R, B]. `rows` and `positions` are contiguous.
        """
        rows, positions = rows.long(), positions.long()
        slots = (
            block_table[rows, positions // block_size].long() * block_size + positions % block_size
        )
        return tokens[rows, positions], positions, slots

    def write_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, new: Tensor) -> None:
        """Writes tokens[rows[i], positions[i]] = new[i]: int32 [R, L], int32 or int64 [N] twice,
        int64 [N].

        No place occurs twice except those of the null row, where any of its tokens may stay.
        """
        tokens[rows.long(), positions.long()] = new.int()

    def chain_places(
        self,
        tokens: Tensor,
        kept: Tensor,
        inputs: Tensor,
        *,
        num_drafts: int,
        size: int,
        num_again: int,
        first: int,
    ) -> ChainPlaces:
        """Computes the places of a chain of `num_drafts` drafts of `size` sequences.

        `inputs` int32 [4, room], where room is `size` padded to a multiple of 4, has for each
        sequence: its row, the position of its last known token, the number of drafts it wants, and
        the number of tokens drawn after the known ones. `kept` int32 [R, C] has the last drafts of
        the rows of `tokens` int32 [R, L], the last of which is the null row. The first pass
        computes `num_again` tokens of each sequence. A token's keys and values are `first`
        positions before it.
        """
        return chain_places(
            tokens, kept, inputs, num_drafts=num_drafts, size=size, num_again=num_again, first=first
        )

    @abstractmethod
    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """[S, V] logits (any float dtype) → int64 [S]. Order: logit bias, penalties, temperature,
        min_p, top_k, top_p, draw.

        `logits` may be overwritten. The draw inverts the cumulative distribution at one uniform
        number u = uniform(seed, history_len) per row (see `reference.uniform`), so it needs no
        state and is the same in any batch.
        """

    def best_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities of raw logits [N, V] and of a token for each row, int64 [N].

        Returns float32 (the token's log-probability [N], its rank int64 [N], the most likely tokens
        int64 [N, num_top], their log-probabilities [N, num_top]). The order of equal tokens is
        unspecified.
        """
        scores = logits.float()
        log_z = scores.logsumexp(dim=-1, keepdim=True)
        chosen = scores.gather(1, tokens.long()[:, None])
        rank = (scores > chosen).sum(dim=-1) + 1
        values, ids = scores.topk(num_top, dim=-1)
        return (chosen - log_z)[:, 0], rank, ids, values - log_z

    def packed_logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
        """Packs `best_logprobs` for one copy to the host: int32 [N, 2 + 2 · num_top].

        A row has the bits of the token's log-probability, its rank, the most likely tokens, and the
        bits of their log-probabilities (`logprobs.unpacked_logprobs`).
        """
        chosen, rank, ids, values = self.best_logprobs(logits, tokens, num_top)
        parts = chosen[:, None].view(torch.int32), rank[:, None].int(), ids.int()
        return torch.cat((*parts, values.contiguous().view(torch.int32)), dim=1)

    def argmax(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[S, V] → int64 [S]: the first maximum of each row. `token_ids` int64 [V] maps each column
        to a token."""
        best = logits.argmax(-1)
        return best if token_ids is None else token_ids[best]

    def mask_logits(
        self, logits: Tensor, rows: Tensor, bits: Tensor, which: Tensor | None = None
    ) -> None:
        """Writes −inf to the logits of tokens that are not allowed.

        Row `rows[i]` (int64 [M], without duplicates) of logits [S, V] keeps the tokens whose bits
        are set in bits[which[i]] (int32 [U, words], as in `TokenMask`; without `which`, bits[i]).
        Where which[i] is −1 it keeps all.
        Tokens beyond the last word are not allowed.
        """
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
        allowed = F.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
        own = allowed if which is None else allowed[which] | (which < 0)[:, None]
        logits[rows] = logits[rows].masked_fill(~own, float("-inf"))

    def block_rows(self, caches: Iterable[Tensor]) -> BlockTensors:
        """Prepares caches [B, …], which hold a part of every block each, for `copy_blocks`."""
        return BlockTensors.of(caches)

    @abstractmethod
    def copy_blocks(
        self, source: BlockTensors, target: BlockTensors, sources: Tensor, targets: Tensor
    ) -> None:
        """Copies whole blocks: target[targets[i]] = source[sources[i]] in all parts, for int64 [N]
        each.

        Both have the same parts and may be the same; then no target is also a source.
        """
