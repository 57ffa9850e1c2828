"""The op set for NVIDIA GPUs, in Triton. Products of many tokens use torch's libraries where those
are faster."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, ExpertCounters, LayerKV, SamplingTensors
from slipstream.kernels.ops import (
    AttentionParams,
    DisentangledParams,
    Experts,
    LayerTensors,
    MLAParams,
    NormParams,
    OpSet,
    QKVLayout,
    TokenShape,
)
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.states import GatedDeltaParams, LayerState, Mamba2Params, MambaParams
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton import (
    drawing,
    peer_collectives,
    penalties,
    pointwise,
    rows,
    sampling,
    weight_updates,
)
from slipstream.kernels.triton.attention import (
    bidirectional,
    context,
    disentangled,
    int4,
    int4_writing,
    invariant,
    mla,
    mla_invariant,
    mla_prefill,
    paged,
    sparse,
    split_keys,
)
from slipstream.kernels.triton.attention.mla import mla_paged_attention
from slipstream.kernels.triton.attention.paged import paged_attention
from slipstream.kernels.triton.experts import moe
from slipstream.kernels.triton.one_token import kernel as one_token_kernel
from slipstream.kernels.triton.products import dispatch as linear
from slipstream.kernels.triton.products import (
    float4,
    fp8_block,
    gguf,
    gguf_packing,
    lora,
    sparse24,
    split_k,
)
from slipstream.kernels.triton.products import invariant as invariant_products
from slipstream.kernels.triton.recurrent import conv, rules, scan
from slipstream.kernels.weights.adapters import TILES, LoRATokens, LoRAWeights
from slipstream.kernels.weights.forms import (
    Activations,
    BlockLinear,
    CodedLinear,
    JoinedLinear,
    Linear,
    Pair,
    ScaledLinear,
    SplitLinear,
)
from slipstream.kernels.weights.quantize import round_linear
from slipstream.platform import platform_of
from slipstream.platform.collectives import OverlappedSum, RankGroup
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable
from slipstream.spec.model import MoESpec, OwnNorm
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import NATIVE_PRODUCTS, InputFormat, Scheme

DECLARING = (
    float4, fp8_block, gguf, linear, mla, mla_prefill, moe, paged, pointwise, sampling, split_keys,
)  # fmt: skip
"""Kernel files that declare `THRESHOLDS`, because they choose kernels by the size of a step."""


def attention_kind(kv: LayerKV) -> str:
    """The cache's number format, as tile tables name it."""
    if kv.k_scale is None:
        return str(kv.k.dtype).removeprefix("torch.")
    return "int8" if kv.k.dtype == torch.int8 else "fp8"


class TritonOps(OpSet):
    name = "triton"
    takes_rows = True
    rounded = NATIVE_PRODUCTS["triton"]
    block_types = gguf.BLOCK_TYPES
    thresholds = Thresholds.union(module.THRESHOLDS for module in DECLARING)
    output_multiple = 16  # alignment of cuBLAS, which multiplies many tokens

    # Ops that are one function of a kernel file.
    quantize = staticmethod(pointwise.quantize)
    activation = staticmethod(pointwise.activation)
    copy_blocks = staticmethod(pointwise.copy_blocks)
    lora = staticmethod(lora.lora)
    argmax = staticmethod(sampling.argmax)
    word_sums = staticmethod(weight_updates.word_sums)
    best_logprobs = staticmethod(sampling.best_logprobs)
    packed_logprobs = staticmethod(sampling.packed_logprobs)
    mask_logits = staticmethod(sampling.mask_logits)
    mean_of_texts = staticmethod(bidirectional.mean_of_texts)
    merge_parts = staticmethod(context.merge_parts)
    gather_inputs = staticmethod(rows.gather_inputs)
    write_tokens = staticmethod(rows.write_tokens)
    chain_places = staticmethod(rows.chain_places)
    short_conv = staticmethod(conv.short_conv)
    causal_conv = staticmethod(conv.causal_conv)

    def __init__(
        self,
        tiles: TileTable = NO_TILES,
        *,
        deterministic: bool = False,
        dense_copies: bool = False,
    ) -> None:
        self.tiles = NO_TILES if deterministic else tiles
        self.deterministic, self.shares_prefixes = deterministic, not deterministic
        self.dense_copies = dense_copies
        self._scratch: dict[torch.device, split_k.ArrivalCounters] = {}
        self._libraries = invariant_products.Libraries()

    def eight_bits(self, device: torch.device) -> str | None:
        platform = platform_of(device)
        return "fp8" if platform.kind == "cuda" and platform.arch.fp8 else None

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 1

    def with_tiles(self, tiles: TileTable) -> TritonOps:
        """Returns a copy of this op set that uses other tiles. The weights are the same objects."""
        other = TritonOps(tiles, deterministic=self.deterministic, dense_copies=self.dense_copies)
        other._scratch = self._scratch
        return other

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        if not isinstance(table, BlockLinear):
            return table
        made = tied if isinstance(tied, CodedLinear | JoinedLinear) else gguf_packing.pack(table)
        return gguf.expand(made) if isinstance(made, JoinedLinear) else made

    def place_of(self, table: Tensor | Linear) -> tuple[torch.device, torch.dtype]:
        if isinstance(table, BlockLinear):
            return torch.device(table.device), table.weight.dtype
        return super().place_of(table)

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        if isinstance(w, JoinedLinear):  # its parts are products of their own here
            return [] if w.dense is None else [("dense copies", w.dense.nbytes)]
        found = super().forms_of(w)
        return [(w.type, found[0][1])] if isinstance(w, CodedLinear) else found

    def embed(self, token_ids: Tensor, table: Tensor | Linear, scale: float = 1.0) -> Tensor:
        if isinstance(table, CodedLinear):
            return gguf.embed(token_ids, table, scale)
        assert isinstance(table, Tensor)
        return (
            rows.embed(token_ids, table, scale)
            if table.is_contiguous()
            else super().embed(token_ids, table, scale)
        )

    def quantize_weight(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Linear:
        if scheme is None:
            self._prepare(weight.device)
            return self._sparse(Linear(weight=weight, bias=bias))
        if scheme.name == "fp8" and weight.is_cuda:
            return self.pack_weight(weight_updates.round_rows(weight, bias))
        return self.pack_weight(round_linear(weight, bias, scheme))

    def _prepare(self, device: torch.device) -> None:
        if device not in self._scratch:
            self._scratch[device] = split_k.ArrivalCounters(device)

    def pack_weight(self, w: Linear) -> Linear:
        made = linear.pack(w, dense_copies=self.dense_copies)
        self._prepare(made.weight.device)
        return self._sparse(made) if isinstance(made, ScaledLinear) else made

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        if isinstance(w, BlockLinear):
            return gguf_packing.pack_experts(w, num_experts)
        return linear.pack(w, dense_copies=False)

    def quantize_experts(
        self,
        weight: Tensor,
        scheme: Scheme | None = None,
        bias: Tensor | None = None,
        *,
        num_experts: int,
    ) -> Linear:
        made = super().quantize_experts(weight, scheme, bias, num_experts=num_experts)
        return self.pack_experts(made, num_experts=num_experts)

    def _sparse(self, w: Linear) -> Linear:
        """Adds a 2:4 sparse copy to `w` if products are faster with it. With `deterministic` there
        is none, because it sums in another order."""
        return w if self.deterministic else sparse24.with_sparse_copy(w, self.tiles)

    def linear(self, x: Activations, w: Linear) -> Tensor:
        if isinstance(w, SplitLinear):
            assert isinstance(x, Tensor)
            return self.split_linear(x, w)
        scratch = self._scratch.get(w.weight.device)
        if self.deterministic:
            return invariant_products.linear(x, w, scratch, self._libraries)
        return linear.linear(x, w, scratch, self.tiles)

    def linear_added(self, x: Activations, w: Linear, added: Tensor) -> Tensor:
        if isinstance(w, CodedLinear | JoinedLinear):
            return super().linear_added(x, w, added)
        if isinstance(x, Tensor) and w.inputs is not None:
            x = self.quantize(x, w.inputs)  # once, for whichever kernel runs
        y = None
        if not self.deterministic and w.sparse is None:
            y = linear.linear_added(x, w, added, self._scratch.get(w.weight.device))
        return super().linear_added(x, w, added) if y is None else y

    def adapted_linear(
        self, x: Activations, w: Linear, own: LoRAWeights, tokens: LoRATokens
    ) -> Tensor:
        inner = lora.room(x, own, tokens)
        if tokens.tile_tokens == TILES[0] and self._starts_next_behind_inputs(x, w):
            y = self.linear(x, w)
            return lora.expand(y, lora.shrink(inner, x, own, tokens, beside=True), own, tokens)
        lora.shrink(inner, x, own, tokens)  # runs while the preceding kernel leaves the memory idle
        return lora.expand(self.linear(x, w), inner, own, tokens)

    def _starts_next_behind_inputs(self, x: Activations, w: Linear) -> bool:
        return (
            not self.deterministic and w.sparse is None and linear.starts_next_behind_inputs(x, w)
        )

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
        return pointwise.norm(x, norm, residual, inputs)

    def joined(self, x: Tensor, y: Tensor) -> Pair:
        return Pair(x, y)

    def norm_pair(
        self,
        pair: Pair,
        norm: NormParams,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        if residual is None or isinstance(norm.kind, OwnNorm):
            return super().norm_pair(pair, norm, residual=residual, inputs=inputs)
        return pointwise.norm(pair.x, norm, residual, inputs, pair.y)

    def all_reduce_norm(
        self,
        x: Tensor,
        norm: NormParams,
        *,
        group: RankGroup,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        # a long step's norm is another kernel
        peer = None if self.deterministic else group.peer_collectives
        if isinstance(peer, peer_collectives.CudaPeerCollectives) and peer.covers_norm(
            x, norm, inputs
        ):
            return peer.normed(x, norm, residual, inputs)
        return super().all_reduce_norm(x, norm, group=group, residual=residual, inputs=inputs)

    def best_of_ranks(self, logits: Tensor, group: RankGroup, width: int) -> Tensor:
        peer = group.peer_collectives
        if not isinstance(peer, peer_collectives.CudaPeerCollectives) or width > sampling.EXACT:
            return super().best_of_ranks(logits, group, width)
        pairs = sampling.best_of_rank(logits, group.rank, group.size, width)
        if not peer.covers(pairs):
            return super().best_of_ranks(logits, group, width)
        return sampling.best_of_all(peer(pairs), group.size)

    def norm_arriving(
        self,
        sums: Sequence[OverlappedSum],
        norm: NormParams,
        *,
        residual: Tensor,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        if isinstance(norm.kind, OwnNorm):
            return super().norm_arriving(sums, norm, residual=residual, inputs=inputs)
        out, scales = pointwise.empty_rows(len(residual), residual.shape[1], residual, inputs)
        first = 0
        for s in sums:
            x, *others = s.parts()
            other = functools.reduce(torch.add, others) if others else None
            rows = slice(first, first + len(x))
            pointwise.norm_into(out[rows], scales[rows], x, norm, residual[rows], inputs, other)
            first = rows.stop
        return pointwise.as_activations(out, scales, inputs), residual

    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        if kv.fold is not None:
            return int4_writing.rope_and_cache(qkv, kv, meta, heads)
        return pointwise.rope_and_cache(qkv, kv, meta, heads, invariant=self.deterministic)

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if kv.fold is not None:
            return int4.attention(q, kv, meta, params, deterministic=self.deterministic)
        if self.deterministic:
            return invariant.attention(q, kv, meta, params)
        if kv.latent:
            return mla_paged_attention(q, kv, meta, scale=params.scale)
        kind, shape = attention_kind(kv), (*q.shape[1:2], kv.k.shape[1], q.shape[2], kv.block_size)
        return paged_attention(
            q,
            kv,
            meta,
            params,
            decode_tile=self.tiles.find("decode", kind, *shape, meta.num_decodes),
            prefill_tile=self.tiles.find("prefill", kind, *shape, meta.max_query_len),
        )

    def attention_part(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        assert meta.limits is not None
        assert kv.fold is None
        return self.attention(q, kv, meta, params)

    def bidirectional_attention(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        heads: QKVLayout,
        params: AttentionParams,
    ) -> Tensor:
        if self.deterministic:
            return super().bidirectional_attention(qkv, kv, meta, heads, params)
        return bidirectional.bidirectional_attention(qkv, meta, heads, params)

    def disentangled_attention(
        self, qkv: Tensor, meta: AttentionMetadata, params: DisentangledParams
    ) -> Tensor:
        if self.deterministic:
            return super().disentangled_attention(qkv, meta, params)
        return disentangled.disentangled_attention(qkv, meta, params)

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, parts: PackedParts, *, scale: float
    ) -> Tensor:
        if self.deterministic or not bidirectional.covers(parts):
            return super().packed_attention(q, k, v, parts, scale=scale)
        return bidirectional.attend(
            q, k, v, parts.positions, parts.ends, AttentionParams(scale=scale, causal=False)
        )

    def mla_attention(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: MLAParams,
        chosen: Tensor | None = None,
    ) -> Tensor:
        dense = chosen is None or meta.max_seq_len <= chosen.shape[1]
        if not self.deterministic and dense and mla_prefill.covers(meta):
            return mla_prefill.mla_attention(q, row, kv, meta, params)
        return super().mla_attention(q, row, kv, meta, params, chosen)

    def mla_queries(
        self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        if self.deterministic:
            return mla_invariant.mla_queries(q, row, kv, meta, params)
        return mla.mla_queries(q, row, kv, meta, params)

    def mla_values(self, seen: Tensor, params: MLAParams) -> Tensor:
        if self.deterministic:
            return mla_invariant.mla_values(seen, params)
        return super().mla_values(seen, params)

    def best_keys(
        self, q: Tensor, weights: Tensor, kv: LayerKV, meta: AttentionMetadata, top_k: int
    ) -> Tensor:
        return sparse.best_keys(q, weights, kv, meta, top_k)

    def sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, scale: float
    ) -> Tensor:
        return sparse.sparse_attention(q, chosen, kv, meta, scale)

    def mla_paged_attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        if self.deterministic:
            return super().mla_paged_attention(q, kv, meta, params)
        return mla_paged_attention(q, kv, meta, scale=params.scale, values=params.values)

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[LayerTensors],
        product: Linear,
        cos_sin: Tensor | None,
        group: RankGroup | None = None,
        experts: Linear | None = None,
    ) -> one_token_kernel.OneTokenStep | Reason:
        if self.deterministic:
            return Reason(
                "deterministic=True: the one-token kernel sums in another order than steps of several tokens"
            )
        return one_token_kernel.one_token(shape, layers, product, cos_sin, group, experts)

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
        inputs = x, gates, state, meta, params, decay, z
        return rules.gated_delta(*inputs, invariant=self.deterministic)

    def mamba2(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: Mamba2Params
    ) -> Tensor:
        return rules.mamba2(x, state, meta, params, invariant=self.deterministic)

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
        inputs = x, dt, b, c, xz, state, meta, params
        return scan.selective_scan(*inputs, invariant=self.deterministic)

    def route(
        self,
        router_logits: Tensor,
        spec: MoESpec,
        correction: Tensor | None = None,
        load: ExpertCounters | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        inputs = router_logits, spec, correction, load, scales
        return moe.route(*inputs, invariant=self.deterministic)

    def moe_of_choice(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        return moe.moe_of_choice(x, weights, chosen, experts, invariant=self.deterministic)

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None = None
    ) -> Tensor:
        return moe.moe(x, router_logits, experts, load, invariant=self.deterministic)

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertCounters | None = None,
    ) -> Tensor:
        if not self.deterministic and moe.fuses_shared(x.shape[0], experts, shared):
            return moe.moe(x, router_logits, experts, load, shared)
        always = self._always(x, experts, shared)
        return moe.moe(x, router_logits, experts, load, added=always, invariant=self.deterministic)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        if params.changes_logits:
            logits = logits.float()
            penalties.change_logits(logits, params)
        if params.all_greedy:
            return sampling.argmax(logits)
        return drawing.draw(logits, params)
