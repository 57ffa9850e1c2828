"""Attention of each kind, from a layer's input to its output before the sum over ranks.

Shapes: T tokens in the step, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.kernels.layouts import (
    AttentionParams,
    BlockIndexParams,
    CompressedParams,
    DisentangledParams,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.model.layers.residual import normed
from slipstream.spec.model import AttentionSpec, CompressedAttentionSpec, LatentAttentionSpec
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.context_ops import Own
    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations, Linear
    from slipstream.platform.collectives import RankGroup


def _own(rows: Tensor, meta: AttentionMetadata, group: RankGroup | None) -> Own:
    """The rows that this rank alone computes in context parallelism. `group`: the ranks that have
    the other heads."""
    if group is not None:
        return "heads"
    return "tokens" if len(rows) < len(meta.positions) else None


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of a layer.

    `q_norm` and `k_norm`: norms over whole rows, norms with a weight per head, or layer norms. The
    weight of an RMS norm that all heads share is in `heads`.
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
    context: RankGroup | None = None
    """The ranks that have other tokens' keys and, in long steps without `group`, those tokens' rows."""
    spread: Linear | None = None
    """Matrix of zeros and ones [H · D, H] that copies a head's gate to its elements."""
    out_norm: NormParams | None = None
    lambdas: tuple[Tensor, ...] = ()  # `LAMBDAS` [D], if `spec.differential`

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        return ops.linear(self.mixed(ops, x, kv, meta), self.out)

    def attend(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """Attention over the queries, keys and values [T, (H + 2K) · D] of the QKV product →
        [T, E]."""
        return ops.linear(self._mixed(ops, qkv, kv, meta), self.out)

    def mixed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → the heads' outputs [T, H · D], the input of `out`."""
        return self._mixed(ops, ops.linear(x, self.qkv), kv, meta)

    def _mixed(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        found = self._gated(ops, qkv, kv, meta)
        return found if self.out_norm is None else normed(ops, self.out_norm, found)

    def _gated(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s = self.spec
        if s.gated:
            gate = ops.columns(qkv, start=0, stop=s.gate_size)
            gate = gate if self.spread is None else ops.linear(gate, self.spread)
            rows = ops.columns(qkv, start=s.gate_size, stop=s.gate_size + s.q_size + 2 * s.kv_size)
            found = self._attended(ops, rows, kv, meta)
            return found * (ops.softplus(gate) if s.gate == "softplus" else ops.sigmoid(gate))
        return self._attended(ops, qkv, kv, meta)

    def _attended(self, ops: OpSet, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s, context, own = self.spec, self.context, None
        if context is not None:
            own = _own(qkv, meta, self.group)
            if own == "tokens":
                qkv = ops.gather_tokens(qkv, context, len(meta.positions))
            meta = ops.own_keys(meta, kv.block_size, context, s.window)
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
        if context is None:
            found = ops.attention(q, kv, meta, self.params).flatten(1)
        else:
            found = ops.attention_over_ranks(q, kv, meta, self.params, context, own=own).flatten(1)
        if s.differential is not None:
            return ops.head_differences(found, spec=s, lambdas=self.lambdas)
        if s.value_dim is None:
            return found
        return ops.resized_heads(found, start=0, count=s.num_heads, old=s.head_dim, new=s.value_dim)

    def _filled(self, ops: OpSet, qkv: Tensor) -> Tensor:
        """The rows with values padded to the width of keys, or with each head repeated."""
        s = self.spec
        if s.differential is not None:
            return ops.paired_heads(qkv, spec=s)
        if s.value_dim is None:
            return qkv
        sizes = {"start": s.q_size + s.kv_size, "count": s.num_kv_heads}
        return ops.resized_heads(qkv, **sizes, old=s.value_dim, new=s.head_dim)

    def remember(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Writes the keys and values of rows [T, E] to their cache slots. Only a per-head norm is
        applied, if there is one."""
        ops.rope_and_cache(self._filled(ops, ops.linear(x, self.qkv)), kv, meta, self.heads)

    @property
    def inputs(self) -> InputFormat | None:
        """Format of its input rows."""
        return self.qkv.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttention(Attention):
    """Attention to the blocks of keys that an index chooses (`BlockIndexSpec`)."""

    index: Linear
    chosen: BlockIndexParams

    def mixed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → the heads' outputs [T, H · D], the input of `out`."""
        q = ops.rope_and_cache(ops.linear(x, self.qkv), kv, meta, self.heads)
        rows = ops.linear(x, self.index)
        found = ops.block_sparse_attention(q, rows, kv, meta, self.params, self.chosen)
        return found.flatten(1)

    @property
    def inputs(self) -> InputFormat | None:
        """None, since the index is not quantized."""
        return None


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
        """The layer's input [T, E] and the queries' latents → indices of the chosen keys, int32 [T, top_k]."""
        key = normed(ops, self.norm, ops.linear(x, self.k))
        q, weights = ops.linear(rows, self.q), ops.linear(x, self.weights)
        return ops.choose_keys(q, key, weights, kv, meta, self.params)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over the latents themselves (MLA).

    The weights that would expand latents to keys and values are applied to the queries and outputs
    instead (DeepSeek-V2, section 2.1.3). So all heads read one cached row per token.

    With an `index` a token attends to the keys that the index chooses. The choice is stored in the
    step's metadata for later layers that attend to the same keys.
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
    group: RankGroup | None = None  # as in `Attention`
    context: RankGroup | None = None
    gate: Linear | None = None
    spread: Linear | None = None  # as in `Attention`

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        return ops.linear(self.mixed(ops, x, kv, meta), self.out)

    def mixed(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → the heads' outputs [T, H · D], the input of `out`."""
        found, gate = self._mixed(ops, x, kv, meta)
        if self.gate is not None and self.spread is not None:
            gate = ops.linear(ops.linear(x, self.gate), self.spread)
        return found if gate is None else found * ops.sigmoid(gate)

    def _mixed(
        self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """(the heads' outputs, the gate of each element if `q` computes them)."""
        rows: Any = x
        s, gate = self.spec, None
        if self.q_latent is not None:
            assert self.q_norm is not None
            inputs = self.q.inputs if self.index is None and not s.both_latents else None
            q_latent = ops.linear(x, self.q_latent)
            rows = ops.norm(q_latent, self.q_norm, inputs=inputs)[0]
        if self.index is not None:
            meta.derived["chosen keys"] = self.index(ops, x, rows, kv, meta)
        if s.both_latents:
            rows = ops.side_by_side(rows, q_latent)
        q, row = ops.linear(rows, self.q), ops.linear(x, self.latent)
        if s.gate_size:
            gate = ops.columns(q, start=0, stop=s.gate_size)
            q = ops.columns(q, start=s.gate_size, stop=s.gate_size + s.q_size)
        if self.context is not None:
            return self._over_ranks(ops, q, row, kv, meta, self.context), gate
        if self.query_scale is not None:
            q = ops.scale_queries(q, meta=meta, table=self.query_scale, size=s.q_size)
        q = q.unflatten(1, (s.num_heads, -1))
        chosen = () if s.index is None else (meta.derived["chosen keys"],)
        return ops.mla_attention(q, row, kv, meta, self.params, *chosen), gate

    def _over_ranks(
        self,
        ops: OpSet,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        context: RankGroup,
    ) -> Tensor:
        """`mixed` from the projected q and rows, over keys that are distributed over ranks."""
        num_tokens, own = len(meta.positions), _own(q, meta, self.group)
        meta = ops.own_keys(meta, kv.block_size, context)
        if own == "tokens":
            q, row = (ops.gather_tokens(x, context, num_tokens) for x in (q, row))
        if self.query_scale is not None:
            q = ops.scale_queries(q, meta=meta, table=self.query_scale, size=self.spec.q_size)
        q = ops.mla_queries(q.unflatten(1, (self.spec.num_heads, -1)), row, kv, meta, self.params)
        params = AttentionParams(scale=self.params.scale)
        seen = ops.attention_over_ranks(q, kv, meta, params, context, own=own)
        return ops.mla_values(seen, self.params)

    @property
    def inputs(self) -> InputFormat | None:
        # these linear layers are not quantized
        plain = self.index is not None or self.gate is not None
        return None if plain else self.latent.inputs


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention to recent keys and to compressed ones (`CompressedAttentionSpec`)."""

    spec: CompressedAttentionSpec
    q_latent: Linear
    q: Linear
    latent: Linear
    out_parts: Tensor
    out: Linear
    q_norm: NormParams
    params: CompressedParams
    compress: Linear | None = None
    # the linear layers for its queries and for their weights
    index: tuple[Linear, Linear] | None = None

    inputs: InputFormat | None = None  # compressed keys are never quantized

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
    """Attention of a decoder's tokens to an encoder's states. `kv` is the weight that projects
    states to keys and values."""

    spec: AttentionSpec
    q: Linear
    kv: Linear
    out: Linear
    heads: QKVLayout
    params: AttentionParams

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]. `meta` has the block tables with the encoder's keys and values."""
        q = ops.linear(x, self.q).unflatten(1, (self.spec.num_heads, self.spec.head_dim))
        return ops.linear(ops.attention(q, kv, meta, self.params).flatten(1), self.out)

    def remember(self, ops: OpSet, states: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Writes the keys and values of the encoder's states [T, E] to this layer's cache."""
        ops.cache_kv(ops.linear(states, self.kv), kv, meta, self.heads)
