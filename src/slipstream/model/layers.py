"""The parts of a layer, each written once. The plain loop, the C++ program and the one-token kernel
are all made from them.

1. Nothing here imports torch. All maths goes through an `OpSet` or is `+`, `*`, `flatten` or
   `unflatten` of values. So the same code runs on tensors and on the symbolic values of
   `kernels.tracing.recording`.
2. The residual is passed next to the activations, so that each addition is fused with the norm
   after it. `pending` is a result that is not yet added to the residual.

Shapes: T tokens in the step, E hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.kernels.layouts import (
    AttentionParams,
    CompressedParams,
    DisentangledParams,
    Experts,
    HyperParams,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.kernels.weights.forms import Pair
from slipstream.model.recurrent import Recurrent
from slipstream.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    DenseSpec,
    HyperSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoESpec,
    OwnInputSpec,
    ParallelBlock,
    PostNormBlock,
    StreamsSpec,
    TwinBlock,
)
from slipstream.spec.parallel import Shard
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations, Linear
    from slipstream.platform.collectives import OverlappedSum, Pipe, RankGroup

    Pending: TypeAlias = "Tensor | PartialSum | PendingSum | Pair"
    """A result still to be added to the residual, before the next norm."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of a layer.

    `q_norm` and `k_norm` norm whole rows, or each head: with a weight of its own, or as layer
    norms. An RMS norm's weight that all heads share is in `heads`.
    """

    spec: AttentionSpec
    qkv: Linear
    out: Linear
    heads: QKVLayout
    params: AttentionParams
    q_norm: Tensor | NormParams | None = None
    k_norm: Tensor | NormParams | None = None
    query_scale: Tensor | None = None  # float32 [positions]
    group: RankGroup | None = None  # the ranks that have the other heads
    disentangled: DisentangledParams | None = None
    spread: Linear | None = None
    """Zeros and ones [H · D, H], which give a head's gate to its numbers."""

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        return ops.linear(self.mixed(ops, x, kv, meta), self.out)

    def attend(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """Attention over the queries, keys and values [T, (H + 2K) · D] of the QKV product →
        [T, E]."""
        return ops.linear(self._mixed(ops, qkv, kv, meta), self.out)

    def mixed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → the heads' results [T, H · D], the input of `out`."""
        return self._mixed(ops, ops.linear(x, self.qkv), kv, meta)

    def _mixed(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s = self.spec
        if s.gated:
            gate = ops.columns(qkv, start=0, stop=s.gate_size)
            gate = gate if self.spread is None else ops.linear(gate, self.spread)
            rows = ops.columns(qkv, start=s.gate_size, stop=s.gate_size + s.q_size + 2 * s.kv_size)
            found = self._attended(ops, rows, kv, meta)
            return found * (ops.softplus(gate) if s.gate == "softplus" else ops.sigmoid(gate))
        return self._attended(ops, qkv, kv, meta)

    def _attended(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s = self.spec
        if s.clip_qkv is not None:
            qkv = ops.clip(qkv, limit=s.clip_qkv)
        if self.q_norm is not None and self.k_norm is not None:
            over_row = s.qk_norm is not None and s.qk_norm.over == "row"
            if self.group is not None and over_row:
                qkv = ops.norm_qk_part(qkv, s, self.q_norm, self.k_norm, self.group)
            else:
                qkv = ops.norm_qk(qkv, s, self.q_norm, self.k_norm)
        if self.query_scale is not None:
            qkv = ops.scale_queries(qkv, meta=meta, table=self.query_scale, size=s.q_size)
        if self.disentangled is not None:
            return ops.disentangled_attention(qkv, meta=meta, params=self.disentangled)
        if not s.causal:
            return ops.bidirectional_attention(qkv, kv, meta, self.heads, self.params).flatten(1)
        q = ops.rope_and_cache(self._filled(ops, qkv), kv, meta, self.heads)
        found = ops.attention(q, kv, meta, self.params).flatten(1)
        if s.value_dim is None:
            return found
        return ops.resized_heads(found, start=0, count=s.num_heads, old=s.head_dim, new=s.value_dim)

    def _filled(self, ops: OpSet, qkv: Tensor) -> Tensor:
        """The rows with values as wide as keys."""
        s = self.spec
        if s.value_dim is None:
            return qkv
        sizes = {"start": s.q_size + s.kv_size, "count": s.num_kv_heads}
        return ops.resized_heads(qkv, **sizes, old=s.value_dim, new=s.head_dim)

    def remember(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Writes the keys and values of rows [T, E] to their slots. The only norm applied is the
        one by heads, if any."""
        ops.rope_and_cache(self._filled(ops, ops.linear(x, self.qkv)), kv, meta, self.heads)

    @property
    def inputs(self) -> InputFormat | None:
        """Format of the rows that it reads."""
        return self.qkv.inputs


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a layer's sparse attention (`IndexSpec`)."""

    q: Linear
    k: Linear
    weights: Linear
    norm: NormParams
    params: IndexParams

    def __call__(
        self, ops: OpSet, x: Any, rows: Any, kv: LayerKV, meta: AttentionMetadata
    ) -> Tensor:
        """Rows of the layer [T, E] and the queries' latents → the chosen keys, int32 [T, top_k]."""
        key = normed(ops, self.norm, ops.linear(x, self.k))
        q, weights = ops.linear(rows, self.q), ops.linear(x, self.weights)
        return ops.choose_keys(q, key, weights, kv, meta, self.params)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over the latents themselves (MLA).

    The weights that expand latents to keys and values multiply the queries and results instead
    (DeepSeek-V2, section 2.1.3). So all heads read one cached row per token.

    With an `index` a token attends to the keys that it chooses. The choice is kept in the step's metadata for the layers
    after it that attend to the same keys.
    """

    spec: LatentAttentionSpec
    q_latent: Linear | None
    q: Linear
    latent: Linear
    out: Linear
    q_norm: NormParams | None
    params: MLAParams
    query_scale: Tensor | None = None  # float32 [positions]
    index: Index | None = None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        return ops.linear(self.mixed(ops, x, kv, meta), self.out)

    def mixed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → the heads' results [T, H · D], the input of `out`."""
        rows = x
        if self.q_latent is not None:
            assert self.q_norm is not None
            inputs = self.q.inputs if self.index is None else None
            rows = ops.norm(ops.linear(x, self.q_latent), self.q_norm, inputs=inputs)[0]
        if self.index is not None:
            meta.derived["chosen keys"] = self.index(ops, x, rows, kv, meta)
        q = ops.linear(rows, self.q)
        if self.query_scale is not None:
            q = ops.scale_queries(q, meta=meta, table=self.query_scale, size=self.spec.q_size)
        q = q.unflatten(1, (self.spec.num_heads, -1))
        row = ops.linear(x, self.latent)
        if self.spec.index is None:
            return ops.mla_attention(q, row, kv, meta, self.params)
        return ops.mla_attention(q, row, kv, meta, self.params, meta.derived["chosen keys"])

    @property
    def inputs(self) -> InputFormat | None:
        return self.latent.inputs if self.index is None else None  # the index is not quantised


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention to near keys and to compressed ones (`CompressedAttentionSpec`)."""

    spec: CompressedAttentionSpec
    q_latent: Linear
    q: Linear
    latent: Linear
    out_parts: Tensor
    out: Linear
    q_norm: NormParams
    params: CompressedParams
    compress: Linear | None = None
    index: tuple[Linear, Linear] | None = None  # the products of its queries and of their weights

    inputs: InputFormat | None = None  # compressed keys are never rounded

    def __call__(self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        return ops.linear(self.mixed(ops, x, kv, meta), self.out)

    def mixed(self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, G · R], the input of `out`."""
        rows = normed(ops, self.q_norm, ops.linear(x, self.q_latent))
        q, key = ops.linear(rows, self.q), ops.linear(x, self.latent)
        sources = None if self.compress is None else ops.linear(x, self.compress)
        index = None
        if self.index is not None:
            index = ops.linear(rows, self.index[0]), ops.linear(x, self.index[1])
        found = ops.compressed_attention(q, key, sources, index, kv, meta, self.params)
        return ops.grouped_linear(found, weight=self.out_parts)


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of a decoder's tokens to an encoder's states. `kv` is the weight that makes keys
    and values from the states."""

    spec: AttentionSpec
    q: Linear
    kv: Linear
    out: Linear
    heads: QKVLayout
    params: AttentionParams

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]. `meta` has the block tables of the encoder's keys and values."""
        q = ops.linear(x, self.q).unflatten(1, (self.spec.num_heads, self.spec.head_dim))
        return ops.linear(ops.attention(q, kv, meta, self.params).flatten(1), self.out)

    def remember(self, ops: OpSet, states: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Writes the keys and values of the encoder's states [T, E] to their slots in this layer's
        cache."""
        ops.cache_kv(ops.linear(states, self.kv), kv, meta, self.heads)


@dataclass(frozen=True, slots=True)
class MLP:
    spec: DenseSpec
    up: Linear
    down: Linear
    group: RankGroup | None = None  # the ranks that have the other gates, if `spec.sparsity`

    def __call__(self, ops: OpSet, x: Activations) -> Tensor:
        """[T, E] → [T, E]."""
        s, up = self.spec, ops.linear(x, self.up)
        if s.sparsity:
            up = ops.sparse_gates(up, spec=s, group=self.group)
        return ops.linear(
            ops.activation(up, s.activation, gated=s.gated, inputs=self.down.inputs), self.down
        )

    @property
    def inputs(self) -> InputFormat | None:
        """Format of the rows that it reads."""
        return self.up.inputs


@dataclass(frozen=True, slots=True)
class MoE:
    spec: MoESpec
    router: Linear
    experts: Experts
    shared: MLP | None
    shared_weight: Linear | None
    latent: tuple[Linear, Linear] | None = None  # to `spec.latent` numbers, and back
    table: Tensor | None = None  # float32 [V, k]: the experts of each token, if `spec.hashed`

    def __call__(self, ops: OpSet, x: Any, load: Any = None, step: Any = None) -> Tensor:
        """[T, E] → [T, E]. `load` is from `OpSet.expert_load`, if tokens are counted. `step` is needed with a `table`."""
        logits = ops.linear(x, self.router)
        if self.table is not None:
            logits = ops.hashed_logits(logits, meta=step, table=self.table)
        if self.shared is None or self.latent is not None:
            return self._with_shared(ops, x, self._chosen(ops, x, logits, load))
        expert, always = self.spec.expert, self.shared.spec
        if self.shared_weight is None and (expert.activation, expert.gated) == (
            always.activation,
            always.gated,
        ):
            return ops.moe_and_shared(
                x, logits, self.experts, (self.shared.up, self.shared.down), load
            )
        return self._with_shared(ops, x, ops.moe(x, logits, self.experts, load))

    def over_ranks(
        self,
        ops: OpSet,
        x: Tensor,
        ranks: RankGroup,
        num_tokens: int,
        load: Any = None,
        step: Any = None,
    ) -> Tensor:
        """Computes a mixture whose experts are split over `ranks`, each with its own tokens, at
        most `num_tokens`.

        1. The experts of this rank see the tokens of all ranks.
        2. The results are summed over the ranks, and each rank takes the sums of its own tokens.

        `load` counts this rank's own tokens. Shared experts see only these.
        """
        return self._with_shared(ops, x, self.routed(ops, x, x, ranks, num_tokens, load, step))

    def routed(
        self,
        ops: OpSet,
        x: Tensor,
        by: Tensor,
        ranks: RankGroup,
        num_tokens: int,
        load: Any,
        step: Any = None,
    ) -> Tensor:
        """Computes `over_ranks` without shared experts. The router reads `by`, which are other rows
        than x or the same."""
        rows = ops.gather_tokens(ops.filled_up(x, num_tokens), ranks, ranks.size * num_tokens)
        is_own = by is not x or self.table is not None  # logits of this rank's tokens alone
        logits = ops.linear(by if is_own else rows, self.router)
        if self.table is not None:
            logits = ops.hashed_logits(logits, meta=step, table=self.table)
        if is_own:
            every = ranks.size * num_tokens
            logits = ops.gather_tokens(ops.filled_up(logits, num_tokens), ranks, every)
        load = None if load is None else ops.own_expert_load(load, ranks, num_tokens)
        return ops.scatter_tokens(self._chosen(ops, rows, logits, load), ranks)[: len(x)]

    def _chosen(self, ops: OpSet, x: Any, logits: Tensor, load: Any) -> Tensor:
        if self.latent is None:
            return ops.moe(x, logits, self.experts, load)
        into, back = self.latent
        return ops.linear(ops.moe(ops.linear(x, into), logits, self.experts, load), back)

    def _with_shared(self, ops: OpSet, x: Any, routed: Tensor) -> Tensor:
        if self.shared is None:
            return routed
        added = self.shared(ops, x)
        return routed + (
            added
            if self.shared_weight is None
            else added * ops.sigmoid(ops.linear(x, self.shared_weight))
        )

    @property
    def up(self) -> Linear:
        return self.experts.up

    @property
    def down(self) -> Linear:
        return self.experts.down

    @property
    def inputs(self) -> InputFormat | None:
        return None  # the router reads rows of the model's type


@dataclass(frozen=True, slots=True)
class OwnInput:
    """The addition from a layer's own input (`OwnInputSpec`). `step.layer_inputs` has those of all
    layers."""

    spec: OwnInputSpec
    gate: Linear
    project: Linear
    norm: NormParams

    def __call__(self, ops: OpSet, h: Tensor, step: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        s, inputs = self.spec, step.layer_inputs
        assert inputs is not None
        rows = ops.gated_by(ops.linear(h, self.gate), inputs, s.activation, column=s.first)
        return normed(ops, self.norm, ops.linear(rows, self.project))


@dataclass(frozen=True, slots=True)
class Streams:
    """The parts of a layer with several residuals (`StreamsSpec`)."""

    spec: StreamsSpec
    router: Linear
    predict: Linear
    correct: Linear
    norm: NormParams
    narrow: Linear
    wide: Linear
    low_rank_norm: NormParams
    scale: Tensor
    opening: Sequence[Linear] = ()
    closing: Sequence[Linear] = ()

    def opened(self, ops: OpSet, h: Tensor) -> Tensor:
        """Embeddings [T, E] → streams [T, N · E], each as large as the first."""
        made = (ops.as_large_as(ops.linear(h, w), h) for w in self.opening)
        return ops.side_by_side(h, *made)

    def closed(self, ops: OpSet, h: Tensor, width: int) -> Tensor:
        """Streams [T, N · E] → their mean [T, E], each as large as the first."""
        first, *others = (self.part(ops, h, i, width) for i in range(self.spec.count))
        made = (
            ops.as_large_as(ops.linear(x, w), first)
            for x, w in zip(others, self.closing, strict=True)
        )
        return ops.mean_of(first, *made)

    def part(self, ops: OpSet, h: Tensor, i: int, width: int) -> Tensor:
        return ops.columns(h, start=i * width, stop=(i + 1) * width)

    def coefficients(self, ops: OpSet, x: Tensor, product: Linear) -> Tensor:
        return ops.linear(ops.tanh(ops.linear(normed(ops, self.norm, x), self.router)), product)

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[[Any], Pending],
        feed: Callable[[Any], Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """[T, N · E] → [T, N · E]; [T, E] before the first layer and after the last."""
        s, n = self.spec, layer.norms
        width = n["pre_attention"].weight.shape[0]
        h = self.opened(ops, h) if self.opening else h
        now = self.part(ops, h, s.active, width)
        h = ops.mixed_streams(h, self.coefficients(ops, now, self.predict))
        now = self.part(ops, h, s.active, width)
        rows = normed(ops, n["pre_attention"], now)
        low = normed(ops, self.low_rank_norm, ops.linear(ops.linear(rows, self.narrow), self.wide))
        attended = normed(ops, n["post_attention"], whole(ops, attend(rows)))
        now = ops.added(now + attended, rows + low, 2**-0.5)
        fed = normed(ops, n["post_mlp"], whole(ops, feed(normed(ops, n["pre_mlp"], now))))
        now = now + fed
        h = ops.corrected_streams(
            h, now, self.coefficients(ops, now, self.correct), active=s.active
        )
        now = self.part(ops, h, s.active, width)
        now = ops.times(now, weight=self.scale) if s.scaled else now
        assert layer.own_input is not None
        h = ops.widened(h, layer.own_input(ops, now, step))
        return self.closed(ops, h, width) if self.closing else h


@dataclass(frozen=True, slots=True)
class HyperStreams:
    """The coefficients of a layer with hyper-connections (`HyperSpec`): for attention, for the MLP, and behind the last
    layer."""

    spec: HyperSpec
    attention: HyperParams
    mlp: HyperParams
    last: HyperParams | None = None

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[[Any], Pending],
        feed: Callable[[Any], Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """[T, N · E] → [T, N · E]; [T, E] before the first layer and after the last."""
        n = self.spec.count
        h = ops.side_by_side(*[h] * n) if self.spec.opens else h
        for params, norm, branch in (
            (self.attention, "pre_attention", attend),
            (self.mlp, "pre_mlp", feed),
        ):
            factors = ops.stream_coefficients(h, params=params)
            rows = normed(ops, layer.norms[norm], ops.collapsed_streams(h, factors, count=n))
            h = ops.merged_streams(h, whole(ops, branch(rows)), factors, count=n)
        if self.last is None:
            return h
        return ops.collapsed_streams(h, ops.stream_coefficients(h, params=self.last), count=n)


SEQUENCE_TOKENS = 64
"""Minimum tokens of a step with sequence parallelism. In a smaller step one kernel for the
all-reduce beats two."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranks that compute the layers together, and this rank's part.

    `pipe` connects the pipeline stages before and after this one. `every` has all ranks, if they
    are more than `group`.
    """

    shard: Shard
    group: RankGroup
    pipe: Pipe | None = None
    every: RankGroup | None = None
    sequence: bool = False
    """Sequence parallelism for long steps (Korthikanti et al. 2022, arXiv:2205.05198).

    In steps of at least `SEQUENCE_TOKENS` tokens, the residual and its norms are split by tokens. A
    sum leaves each rank its own tokens, and the next products gather them. That moves as many bytes
    as an all-reduce, and each rank norms 1/n of the tokens.
    """

    def shares_tokens(self, num_tokens: int) -> bool:
        """Tells whether a step of `num_tokens` tokens is split by tokens."""
        return self.sequence and num_tokens >= max(SEQUENCE_TOKENS, self.group.size)

    @property
    def all_ranks(self) -> RankGroup:
        return self.every or self.group


@dataclass(frozen=True, slots=True)
class PartialSum:
    """This rank's part of a sum over `group`. The sum and the next norm are one op."""

    x: Tensor
    group: RankGroup


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A sum over ranks of the step's tokens, whose pieces are still being transferred."""

    sums: Sequence[OverlappedSum]
    pieces: Sequence[slice]


SUMS = (PartialSum, PendingSum, Pair)
"""Pending results that consist of several tensors or need a sum."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: attention or a recurrent part, optional cross attention, and MLP with their norms.

    With attention and a recurrent part both read the same rows, and their results are added.

    With `attention_ranks` or `mlp_ranks`, the result of attention or MLP is a part of a sum over
    these ranks. With `expert_ranks`, only a mixture's experts see tokens of other ranks.
    """

    spec: LayerSpec
    attention: Attention | LatentAttention | CompressedAttention | None
    mlp: MLP | MoE | None
    norms: Mapping[str, NormParams]
    cross: CrossAttention | None = None
    recurrent: Recurrent | None = None
    own_input: OwnInput | None = None
    scalar: Tensor | None = None  # [1], multiplies the residual after the layer
    streams: Streams | HyperStreams | None = None
    expert_counts: Tensor | None = None  # int64 [X]: tokens by expert, if counted
    group: int = 0  # `ModelSpec.group_of_layer`
    cross_group: int = 0
    attention_ranks: RankGroup | None = None
    mlp_ranks: RankGroup | None = None
    expert_ranks: RankGroup | None = None  # ranks with other experts and other requests
    shares_tokens: bool = False  # sequence parallelism in long steps

    def __call__(
        self,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
    ) -> tuple[Pending, Tensor | None]:
        """Runs the layer and returns (pending, the residual). `meta` is the whole step's; the layer
        takes its group's.

        If the input has fewer rows than the step has tokens, they are this rank's
        (`Partition.sequence`), as are those of norms and residual. Products read all tokens. Their
        result is a part of a sum, of which each rank takes its own tokens.
        """
        step, meta = meta, meta.of_group(self.group)
        if pieces := self._pieces(ops, pending):
            return self._in_pieces(ops, pending, residual, kv, meta, pieces)
        shared = (
            self.shares_tokens
            and not isinstance(pending, SUMS)
            and len(pending) < len(meta.positions)
        )
        n, scale = self.norms, self.spec.residual_scale
        # All products of a layer have the same scheme, except a router. Rows are gathered before
        # they are quantized.
        to_attention, to_mlp = (None, None) if shared else self.inputs

        def summed(branch: Callable[[Any], Tensor], x: Any, ranks: RankGroup | None) -> Pending:
            if not shared:
                return _of_ranks(branch(x), ranks)
            assert ranks is not None
            return ops.scatter_tokens(
                branch(ops.gather_tokens(x, ranks, len(meta.positions))), ranks
            )

        def attend(x: Any) -> Pending:
            return summed(
                lambda rows: self._mixed(ops, rows, kv, meta, step), x, self.attention_ranks
            )

        def feed(x: Any) -> Pending:
            return summed(lambda rows: self._fed(ops, rows, kv, meta, step), x, self.mlp_ranks)

        if self.streams is not None:
            return self.streams.run(ops, whole(ops, pending), self, attend, feed, step), None
        if isinstance(self.spec.block, PostNormBlock):
            x = _sum(ops, pending, residual)
            x = normed(ops, n["attention_norm"], _scaled(ops, attend(x), scale), x)
            return normed(ops, n["mlp_norm"], _scaled(ops, feed(x), scale), x), None
        if isinstance(
            self.spec.block, ParallelBlock
        ):  # the branches share a norm, or each has its own
            rows, residual = self._before(
                "norm", ops, pending, residual, to_attention if "mlp_norm" in n else to_mlp
            )
            for_mlp = (
                ops.norm(residual, n["mlp_norm"], inputs=to_mlp)[0] if "mlp_norm" in n else rows
            )
            if self.attention_ranks is self.mlp_ranks and not shared:  # one sum for both
                attended, fed = (
                    self._mixed(ops, rows, kv, meta, step),
                    self._fed(ops, for_mlp, kv, meta, step),
                )
                both = (
                    ops.joined(attended, fed)
                    if self.mlp_ranks is None
                    else PartialSum(attended + fed, self.mlp_ranks)
                )
                return _scaled(ops, both, scale), residual
            return _scaled(
                ops, whole(ops, attend(rows)) + whole(ops, feed(for_mlp)), scale
            ), residual
        rows, residual = self._before("pre_attention", ops, pending, residual, to_attention)
        h = self._after("post_attention", ops, attend(rows))
        if self.cross is not None:
            rows, residual = self._before("pre_cross", ops, h, residual, self.cross.q.inputs)
            h = _of_ranks(
                self.cross(ops, rows, kv, step.of_group(self.cross_group)), self.attention_ranks
            )
        if self.mlp is None:
            return _scaled(ops, h, scale), residual
        twin = isinstance(self.spec.block, TwinBlock)
        rows, residual = self._before(
            "pre_mlp", ops, _scaled(ops, h, scale), residual, None if twin else to_mlp
        )
        if twin:
            made: Pending = self._twins(ops, rows, residual, kv, meta, step, summed)
        else:
            made = self._after("post_mlp", ops, feed(rows))
        return self._ended(ops, _scaled(ops, made, scale), residual, step)

    def _ended(
        self, ops: OpSet, h: Pending, residual: Tensor, step: AttentionMetadata
    ) -> tuple[Pending, Tensor | None]:
        """Adds what comes from the layer's own input, and scales the residual, if the layer does."""
        if self.own_input is not None:
            residual = ops.added(whole(ops, h), residual)
            h = self.own_input(ops, residual, step)
        if self.scalar is None:
            return h, residual
        return ops.added(whole(ops, h), residual, self.scalar), None

    def _twins(
        self,
        ops: OpSet,
        rows: Any,
        h: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        step: AttentionMetadata,
        summed: Callable[..., Pending],
    ) -> Tensor:
        """Runs the shared expert on `rows` and the mixture on norms of the residual `h`, and norms
        their sum."""
        n, mlp = self.norms, self.mlp
        assert isinstance(mlp, MoE)
        assert mlp.shared is not None
        load = None if self.expert_counts is None else ops.expert_load(self.expert_counts, kv, meta)

        def mixture(x: Tensor) -> Tensor:
            by, rows = normed(ops, n["pre_router"], x), normed(ops, n["pre_experts"], x)
            if self.expert_ranks is None:
                return ops.moe(rows, ops.linear(by, mlp.router), mlp.experts, load)
            most = len(x) if step.most_tokens is None else step.most_tokens
            return mlp.routed(ops, rows, by, self.expert_ranks, most, load)

        always = summed(partial(mlp.shared, ops), rows, self.mlp_ranks)
        chosen = summed(mixture, h, self.mlp_ranks)
        always, chosen = (
            normed(ops, n["post_shared"], always),
            normed(ops, n["post_experts"], chosen),
        )
        return normed(ops, n["post_mlp"], always, chosen)

    @property
    def inputs(self) -> tuple[InputFormat | None, InputFormat | None]:
        """Formats of the rows that attention, or the recurrent part, and the MLP read."""
        attention, recurrent = self.attention, self.recurrent
        first = None if attention is None else attention.inputs
        if recurrent is not None:
            own = recurrent.inputs
            first = own if attention is None or own == first else None
        return first, None if self.mlp is None else self.mlp.inputs

    def _mixed(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """Returns this rank's part of attention's result, of the recurrent part's, or of both."""
        if self.recurrent is None:
            assert self.attention is not None
            return self.attention(ops, x, kv, meta)
        mixed = self.recurrent(ops, x, kv, step)
        return mixed if self.attention is None else mixed + self.attention(ops, x, kv, meta)

    def _pieces(self, ops: OpSet, pending: Pending) -> Sequence[slice]:
        """Returns the pieces for `_in_pieces`; empty if the layer is not suitable or the step is
        too short."""
        ranks = self.attention_ranks
        if (
            ranks is None
            or ranks is not self.mlp_ranks
            or self.shares_tokens
            or isinstance(pending, PartialSum | Pair)
        ):
            return ()
        pieces = pending.pieces if isinstance(pending, PendingSum) else ops.pieces(pending, ranks)
        return pieces if pieces and self.spec.is_plain else ()

    def _in_pieces(
        self,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
        pieces: Sequence[slice],
    ) -> tuple[Pending, Tensor]:
        """Overlaps sums over ranks with products. While the sum of some tokens is transferred, the
        next tokens are multiplied.

        Attention waits for all tokens.
        """
        assert self.attention_ranks is not None
        assert self.attention is not None
        assert self.mlp is not None
        begin = partial(ops.begin_sum, group=self.attention_ranks)
        x, residual = self._before("pre_attention", ops, pending, residual, self.attention.inputs)
        mixed, sums = self.attention.mixed(ops, x, kv, meta), []
        for i, rows in enumerate(pieces):
            sums.append(
                begin(ops.linear(mixed[rows], self.attention.out), place=0, index=i, rows=rows)
            )
        for i, rows in enumerate(pieces):
            part = residual[rows]
            x, _ = ops.norm_arriving(
                sums[i : i + 1], self.norms["pre_mlp"], residual=part, inputs=self.mlp.inputs
            )
            # At the place of attention's sum, whose memory is freed.
            sums[i] = begin(
                self._fed(ops, x, kv, meta.of_tokens(rows), meta), place=1, index=i, rows=rows
            )
        return PendingSum(sums, pieces), residual

    def _fed(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """Returns this rank's part of the MLP's result. `meta` belongs to the tokens `x` in this
        layer's group."""
        assert self.mlp is not None
        if not isinstance(self.mlp, MoE):
            return self.mlp(ops, x)
        load = None if self.expert_counts is None else ops.expert_load(self.expert_counts, kv, meta)
        if self.expert_ranks is None:
            return self.mlp(ops, x, load, step)
        most_tokens = len(x) if step.most_tokens is None else step.most_tokens
        return self.mlp.over_ranks(ops, x, self.expert_ranks, most_tokens, load, step)

    def _before(
        self,
        name: str,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        inputs: InputFormat | None,
    ) -> tuple[Activations, Tensor]:
        """Returns (the input of attention or MLP, the residual). The input is normed if there is a
        norm."""
        if name in self.norms:
            return _norm(ops, self.norms[name], pending, residual, inputs)
        total = _sum(ops, pending, residual)
        return total, total

    def _after(self, name: str, ops: OpSet, h: Pending) -> Pending:
        return normed(ops, self.norms[name], h) if name in self.norms else h


def run_layers(
    ops: OpSet,
    layers: Sequence[Layer],
    h: Tensor,
    caches: Iterable[LayerKV],
    meta: AttentionMetadata,
    before: Callable[[int, Pending, Tensor | None], None] = lambda *_: None,
) -> tuple[Pending, Tensor | None]:
    """Runs the layers and returns (pending, the residual) after the last. `caches` has one per
    layer.

    `before(i, pending, residual)` is called before layer i, and at the end with i = the number of
    layers.
    """
    pending: Pending = h
    residual: Tensor | None = None
    for i, (layer, kv) in enumerate(zip(layers, caches, strict=True)):
        before(i, pending, residual)
        pending, residual = layer(ops, pending, residual, kv, meta)
    before(len(layers), pending, residual)
    return pending, residual


def one_of_each_kind(layers: Sequence[Layer]) -> list[int]:
    """Returns the index of the first layer of each kind. Layers of a kind run the same kernels on
    different numbers."""
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(_kind_of(layer), i)
    return list(kinds.values())


def one_of_each_passage(layers: Sequence[Layer]) -> set[int]:
    """Returns the indices of layers that together run every kernel: of each pair of kinds that follow
    each other one pair, the first layer and the last."""
    kinds = [_kind_of(layer) for layer in layers]
    kept, passages = {0, len(layers) - 1}, set[Any]()
    for i, passage in enumerate(itertools.pairwise(kinds)):
        if passage not in passages:
            passages.add(passage)
            kept |= {i, i + 1}
    return kept


def _kind_of(part: Any) -> Any:
    """Returns a key of a part: its structure, with the shapes and types of its tensors.

    What the host holds, such as experts that it computes, is a kind of its own.
    """
    if hasattr(part, "dtype") and hasattr(part, "stride"):
        return tuple(part.shape), part.stride(), part.dtype
    if dataclasses.is_dataclass(part):
        return type(part), *(_kind_of(getattr(part, f.name)) for f in dataclasses.fields(part))
    if isinstance(part, Mapping):
        return tuple((name, _kind_of(x)) for name, x in part.items())
    if isinstance(part, list | tuple):
        return tuple(map(_kind_of, part))
    return part if part is None or isinstance(part, str | int | float | Enum) else id(part)


@dataclass(frozen=True, slots=True)
class Tap:
    """Collects the states between layers that a draft head reads.

    The result is the sum of `products[i]` of the state before layer i. That equals one product of
    these states side by side. `norms[i]` norms the state before layer i, if present.
    """

    products: Mapping[int, Linear]
    norms: Mapping[int, NormParams] = field(default_factory=dict)

    def add(
        self,
        ops: OpSet,
        taken: Tensor | None,
        layer: int,
        pending: Pending,
        residual: Tensor | None,
    ) -> Tensor | None:
        """Returns `taken` plus this layer's product."""
        if layer not in self.products:
            return taken
        state, w = _state(ops, pending, residual), self.products[layer]
        rows = (
            ops.norm(state, self.norms[layer], inputs=w.inputs)[0] if layer in self.norms else state
        )
        part = ops.linear(rows, w)
        return part if taken is None else taken + part


@dataclass(frozen=True, slots=True)
class JoinedTap:
    """Collects the states before `layers` (ascending) side by side, with an optional norm and
    product of the whole."""

    layers: tuple[int, ...]
    norm: NormParams | None = None
    product: Linear | None = None

    def add(
        self,
        ops: OpSet,
        taken: Tensor | None,
        layer: int,
        pending: Pending,
        residual: Tensor | None,
    ) -> Tensor | None:
        """Returns `taken` with this layer's state in its place. At the last of the layers it
        returns the result."""
        if layer not in self.layers:
            return taken
        state = _state(ops, pending, residual)
        size, count = state.shape[-1], len(self.layers)
        rows: Any = ops.place(
            state, taken, column=self.layers.index(layer) * size, width=count * size
        )
        if layer != self.layers[-1]:
            return rows  # type: ignore[no-any-return]
        if self.norm is not None:
            rows = ops.norm(
                rows, self.norm, inputs=None if self.product is None else self.product.inputs
            )[0]
        return rows if self.product is None else ops.linear(rows, self.product)


AnyTap: TypeAlias = Tap | JoinedTap
"""A collector of the states that a draft head reads between layers."""


def normed(ops: OpSet, norm: NormParams, h: Pending, residual: Tensor | None = None) -> Tensor:
    """Returns norm(h + residual), in the model's type."""
    return _norm(ops, norm, h, residual)[0]  # type: ignore[return-value]


def finished(ops: OpSet, norm: NormParams | None, h: Pending, residual: Tensor | None) -> Tensor:
    """The last layer's output → the hidden states [T, E]."""
    return _sum(ops, h, residual) if norm is None else normed(ops, norm, h, residual)


def _norm(
    ops: OpSet,
    norm: NormParams,
    pending: Pending,
    residual: Tensor | None,
    inputs: InputFormat | None = None,
) -> tuple[Activations, Tensor]:
    """Applies `OpSet.norm` to a pending result of any kind."""
    if isinstance(pending, PendingSum):
        assert residual is not None
        return ops.norm_arriving(pending.sums, norm, residual=residual, inputs=inputs)
    if isinstance(pending, PartialSum):
        return ops.all_reduce_norm(
            pending.x, norm, group=pending.group, residual=residual, inputs=inputs
        )
    if isinstance(pending, Pair):
        return ops.norm_pair(pending, norm, residual=residual, inputs=inputs)
    return ops.norm(pending, norm, residual=residual, inputs=inputs)


def _sum(ops: OpSet, pending: Pending, residual: Tensor | None) -> Tensor:
    h = whole(ops, pending)
    return h if residual is None else h + residual


def _state(ops: OpSet, pending: Pending, residual: Tensor | None) -> Tensor:
    """Returns `_sum` for an extra reader. The layer after it still reads `pending`."""
    assert not isinstance(
        pending, PendingSum
    )  # read only once; with a head that reads states, no sums overlap with products
    h = (
        ops.sum_of_parts(pending.x, group=pending.group)
        if isinstance(pending, PartialSum)
        else whole(ops, pending)
    )
    return h if residual is None else h + residual


def _of_ranks(h: Tensor, ranks: RankGroup | None) -> Pending:
    return h if ranks is None else PartialSum(h, ranks)


def whole(ops: OpSet, h: Pending) -> Tensor:
    """Returns the complete tensor: the sum over ranks or of two branches, or `h` itself."""
    if isinstance(h, PendingSum):
        return ops.sum_arriving(h.sums)
    if isinstance(h, Pair):
        return h.x + h.y
    return ops.all_reduce(h.x, group=h.group) if isinstance(h, PartialSum) else h


def _scaled(ops: OpSet, x: Pending, scale: float) -> Pending:
    return x if scale == 1.0 else whole(ops, x) * scale
