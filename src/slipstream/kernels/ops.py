"""The op set: the ops that a model is computed with. `OpSet` has every op's signature, shapes and
meaning.

1. Implementations are `plain/reference.py` (the oracle), `cpu/ops.py` (C++), `cpu/torch_ops.py`
   (torch's fast ops, where the C++ kernels are not built) and `triton/` (GPUs). The decoder gets an
   `OpSet` and does not know which.
2. An op that few models need has a default in plain torch.
3. `attention_ops.py` and `row_ops.py` have ops by subject, `weights/weight_ops.py` how weights are
   laid out at a load, `rank_ops.py` what ranks send each other.
4. `weights/forms.py` has the weights of products, `layouts.py` the parameters of layers,
   `metadata.py` those of a step.
5. A step's keys and values are written to the cache, and then attention reads the cache. So
   prefill, chunked prefill and decode are one op.

Shapes: T tokens in the step, S sequences, H query heads, K kv heads, D head dim, B blocks, V
vocabulary, E hidden size, F feed-forward size.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.attention_ops import AttentionOps
from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.chains import chain_places
from slipstream.kernels.context_ops import ContextOps
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
from slipstream.kernels.plain import recurrent
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.rank_ops import RankOps
from slipstream.kernels.row_ops import RowOps
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.weights.adapters import LoRATokens, LoRAWeights
from slipstream.kernels.weights.forms import Activations, Linear, Pair, Quantized, SplitLinear
from slipstream.kernels.weights.quantize import numbers
from slipstream.kernels.weights.weight_ops import WeightOps
from slipstream.kernels.weights.word_sums import word_sums
from slipstream.platform.collectives import OverlappedSum, RankGroup
from slipstream.spec.model import Activation, AttentionSpec, Mamba2Spec, MoESpec, OwnNorm
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import InputFormat


class OpSet(WeightOps, AttentionOps, ContextOps, RowOps, RankOps):
    """The ops of a decoder and sampler. Implementations have no state except tuned choices."""

    thresholds = Thresholds()
    """Sizes of steps at which the launched kernels change."""

    has_host_experts = False
    """True if the host computes experts next to another device (`host_experts.HostExpertOps`)."""

    shares_prefixes = False
    """True if `attention` reads shared prefixes once (`AttentionMetadata.shared`)."""

    takes_rows = False
    """True if `sample` finds parameters by `SamplingTensors.rows`."""

    # Ops whose default is one function, which has the contract.
    word_sums = staticmethod(word_sums)
    chain_places = staticmethod(chain_places)
    gated_delta = staticmethod(recurrent.gated_delta)
    mamba2 = staticmethod(recurrent.mamba2)
    short_conv = staticmethod(recurrent.short_conv)
    causal_conv = staticmethod(recurrent.causal_conv)
    selective_scan = staticmethod(recurrent.selective_scan)

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        """Tells whether values of a cache of type `dtype` have the layout `by_dim`. Otherwise they
        have the keys' layout."""
        return False

    def position_tables(self, max_model_len: int, device: torch.device) -> PositionTables:
        return PositionTables(max_model_len, device)

    def new_counts(self, num_experts: int, device: torch.device) -> Tensor:
        """Makes counters of a layer's tokens by expert: int64 [X] zeros."""
        return torch.zeros(num_experts, dtype=torch.int64, device=device)

    def new_routed_experts(self, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        """Makes room for the experts of a step's tokens: int16 [layers, T, k]."""
        return torch.full(shape, -1, dtype=torch.int16, device=device)

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[LayerTensors],
        product: Linear,
        cos_sin: Tensor | None,
        group: RankGroup | None = None,
        experts: Linear | None = None,
    ) -> Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor] | Reason:
        """Makes a function that computes all layers for a step of one token: x [1, E] → the
        residual after the last layer [1, E]. Returns a `Reason` if this op set can't. `layers` are
        each layer's tensors by name; a layer with a "router" has experts. `product` is any of the
        products, as all have the same format. `experts`, if given, is any of the experts', which
        have another format. With a `group` this rank has a part of each layer, and all ranks must
        make this call and those of the function.
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
        """Returns the index of each row's first maximum, where every rank has W columns of the row:
        [N, W] → int64 [N].

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
        """Looks up learned position embeddings: the rows of `table` at each token's position +
        offset, [T, E]."""
        return self.embed(meta.positions + offset, table)

    def embed_token_types(self, meta: AttentionMetadata, table: Tensor) -> Tensor:
        """Looks up the embedding of each token's type in `table`, [T, E]. If all tokens have the
        first type, the result is its row [E]."""
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
        """Returns the sum of a layer's two branches for the norm that follows. It is an uncomputed
        `Pair` if `norm_pair` is faster than adding first."""
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
        """Computes (norm(projected) + scale · row) · factor, [T, L · P], where `row` is the token's
        row of `table`. The norm is over groups of P elements, P being the size of its weight.
        `projected` may be overwritten. Tokens from `limit` on have the table's first row.
        """
        if limit is not None:
            token_ids = token_ids.masked_fill(token_ids >= limit, 0)
        parts, _ = self.norm(projected.reshape(-1, norm.weight.shape[0]), norm)
        assert isinstance(parts, Tensor)
        rows = self.embed(token_ids, table, scale)
        return self.added(parts.view_as(projected), rows, factor)

    def gated_by(self, x: Tensor, inputs: Tensor, activation: Activation, *, column: int) -> Tensor:
        """Computes act(x) · inputs[:, column : column + P] for x [T, P]."""
        gates = self.activation(x, activation)
        assert isinstance(gates, Tensor)
        return gates * inputs[:, column : column + x.shape[1]]

    def hashed_logits(self, logits: Tensor, meta: AttentionMetadata, table: Tensor) -> Tensor:
        """Keeps the logits [T, X] of the k experts that `table` [V, k] lists for a token's id, and
        sets others to −∞."""
        assert meta.token_ids is not None
        hidden = torch.ones_like(logits, dtype=torch.bool)
        chosen = table[meta.token_ids.long()].long()
        return logits.masked_fill(hidden.scatter_(1, chosen, False), -math.inf)

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
        """Returns the `load` to pass to `moe` when it computes the tokens of all ranks of `group`,
        which have `num_tokens` places each.

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
        """Chooses each token's experts as `moe` does. Returns (weights float32, experts of any
        integer type), [T, num_experts_per_token] each.

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
        """Compute `moe` plus a shared expert for all tokens, with the linear layers `shared` and
        the same activation."""
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
