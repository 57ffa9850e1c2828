"""The op set for NVIDIA GPUs, in Triton. Products of many tokens use torch's libraries where those are faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata, ExpertLoad, LayerKV, SamplingTensors
from slipstream.kernels.ops import AttentionParams, Experts, OpSet, QKVLayout, TokenShape
from slipstream.kernels.quantize import round_linear
from slipstream.kernels.reference import apply_bias_and_penalties, uniform
from slipstream.kernels.triton import (
    bidirectional,
    int4_groupwise,
    linear,
    mla_prefill,
    moe,
    one_token,
    pointwise,
    sampling,
    sparse24,
    split_k,
)
from slipstream.kernels.triton import rows as step_rows
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.mla import mla_paged_attention, mla_queries
from slipstream.kernels.weights import Activations, GroupedLinear, Linear, Quantized, ScaledLinear, SplitLinear
from slipstream.spec.autotune_table import NO_TILES, TileTable
from slipstream.spec.model import Activation
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import InputFormat, Scheme


def attention_kind(kv: LayerKV) -> str:
    """The cache's number format, as tile tables name it."""
    if kv.k_scale is None:
        return str(kv.k.dtype).removeprefix("torch.")
    return "int8" if kv.k.dtype == torch.int8 else "fp8"


class TritonOps(OpSet):
    name = "triton"
    rounded_experts = frozenset(("fp8", "fp8-block", "int8", "int4"))
    rounded = rounded_experts | {"int8-split"}

    def __init__(self, tiles: TileTable = NO_TILES, *, deterministic: bool = False, dense_copies: bool = False) -> None:
        self.tiles = NO_TILES if deterministic else tiles
        self.deterministic = deterministic
        self.dense_copies = dense_copies
        self._scratch: dict[torch.device, split_k.Scratch] = {}

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 1

    def with_tiles(self, tiles: TileTable) -> TritonOps:
        """The same ops on the same weights, with other tiles."""
        other = TritonOps(tiles, deterministic=self.deterministic, dense_copies=self.dense_copies)
        other._scratch = self._scratch
        return other

    def quantize_weight(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None) -> Linear:
        if scheme is None:
            return self._sparse(Linear(weight=weight, bias=bias))
        return self.pack_weight(round_linear(weight, bias, scheme))

    def pack_weight(self, w: Linear) -> Linear:
        device = w.weight.device
        if device not in self._scratch:
            self._scratch[device] = split_k.Scratch(device)
        if isinstance(w, GroupedLinear) and self.dense_copies:
            return dataclasses.replace(w, dense=int4_groupwise.dequantize_int4(w, w.scales.dtype))
        return self._sparse(w) if isinstance(w, ScaledLinear) else w

    def _sparse(self, w: Linear) -> Linear:
        """`w` with a 2:4 copy if that is faster. It sums in another order, so `deterministic` has none."""
        return w if self.deterministic else sparse24.with_sparse_copy(w, self.tiles)

    def _linear(self, x: Activations, w: Linear) -> Tensor:
        return linear.linear(x, w, self._scratch.get(w.weight.device), self.tiles, self.deterministic)

    def quantize_experts(
        self, weight: Tensor, scheme: Scheme | None = None, bias: Tensor | None = None, *, num_experts: int
    ) -> Linear:
        return Linear(weight=weight, bias=bias) if scheme is None else round_linear(weight, bias, scheme)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(token_ids, table)
        # The scale is rounded to the table's type first, as in training.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype).item()

    def linear(self, x: Activations, w: Linear) -> Tensor:
        if isinstance(w, SplitLinear):
            assert isinstance(x, Tensor)
            return self.split_linear(x, w)
        if w.sparse is not None and (x if isinstance(x, Tensor) else x.values).shape[0] >= w.sparse.from_tokens:
            return sparse24.sparse24_linear(x, w)
        return self._linear(x, w)

    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        return pointwise.quantize(x, inputs)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        return pointwise.norm(x, weight, None, eps, residual, weight_offset, False, inputs)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        return pointwise.norm(x, weight, bias, eps, residual, 0.0, True, inputs)

    def rope_and_cache(self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> Tensor:
        return pointwise.rope_and_cache(qkv, kv, meta, heads)

    def attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams) -> Tensor:
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
            deterministic=self.deterministic,
        )

    def bidirectional_attention(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout, params: AttentionParams
    ) -> Tensor:
        if self.deterministic:
            return super().bidirectional_attention(qkv, kv, meta, heads, params)
        return bidirectional.bidirectional_attention(qkv, meta, heads, params)

    def mean_of_texts(self, hidden: Tensor, starts: Tensor) -> Tensor:
        return bidirectional.mean_of_texts(hidden, starts)

    def mla_attention(self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, **options: Any) -> Tensor:
        attend = mla_prefill.mla_attention if mla_prefill.covers(meta) else super().mla_attention
        return attend(q, row, kv, meta, **options)

    def mla_queries(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        keys: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> Tensor:
        return mla_queries(q, row, kv, meta, keys=keys, norm=norm, eps=eps, cos_sin=cos_sin, interleaved=interleaved)

    def mla_paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, values: Tensor, *, scale: float) -> Tensor:
        return mla_paged_attention(q, kv, meta, scale=scale, values=values)

    def gated_activation(
        self, gate_up: Tensor, activation: Activation, *, inputs: InputFormat | None = None
    ) -> Activations:
        return pointwise.activation(gate_up, activation, True, inputs)

    def activation(self, x: Tensor, activation: Activation, *, inputs: InputFormat | None = None) -> Activations:
        return pointwise.activation(x, activation, False, inputs)

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[Mapping[str, Tensor | None]],
        product: Linear,
        cos_sin: Tensor | None,
    ) -> one_token.OneTokenStep | Reason:
        if self.deterministic:
            return Reason("deterministic=True: the one-token kernel sums in another order than steps of several tokens")
        return one_token.one_token(shape, layers, product, cos_sin)

    def moe(self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertLoad | None = None) -> Tensor:
        return moe.moe(x, router_logits, experts, load)

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertLoad | None = None,
    ) -> Tensor:
        if moe.fuses_shared(x.shape[0], experts, shared):
            return moe.moe(x, router_logits, experts, load, shared)
        return moe.moe(x, router_logits, experts, load, added=self._always(x, experts, shared))

    def gather_inputs(
        self, tokens: Tensor, block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return step_rows.gather_inputs(tokens, block_table, rows, positions, block_size)

    def write_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, new: Tensor) -> None:
        step_rows.write_tokens(tokens, rows, positions, new)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        if params.changes_logits:
            logits = apply_bias_and_penalties(logits.float(), params)
        if params.all_greedy:
            return sampling.argmax(logits)
        return sampling.sample(logits, uniform(params.seeds, params.history_lens), params)

    def copy_blocks(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        pointwise.copy_blocks(kv, source, target)
