"""What encoders add to the decoder's pieces: attention to another text's states, a classifier, and pooling.

An encoder's layers are the decoder's with attention that is not causal. Nothing of it is kept: its layers write keys and
values into one cache in turn and read them back in the same step (on a GPU they are read where the product leaves them), so
texts are whole and a step holds all of each.

In an encoder-decoder (T5) the decoder's layers attend to the encoder's last states. Their keys and values are made once a
request and stand in blocks of the layers' own caches, found by a table of their own (`CacheGroup`'s `cross`). The encoder
itself borrows those blocks of the first layer's cache while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, OpSet, QKVLayout
from slipstream.kernels.weights import Activations, Linear
from slipstream.spec.model import AttentionSpec, ClassifierSpec

if TYPE_CHECKING:
    from slipstream.model.decoder import Layer, Norm

PoolingKind: TypeAlias = Literal["mean", "cls", "last"]
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu}


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Queries of a decoder's tokens over an encoder's states. `kv` makes keys and values of those states."""

    spec: AttentionSpec
    q: Linear
    kv: Linear
    out: Linear
    heads: QKVLayout
    params: AttentionParams

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]; `meta` says where the encoder's keys and values of each sequence stand."""
        q = ops.linear(x, self.q).unflatten(1, (self.spec.num_heads, self.spec.head_dim))
        return ops.linear(ops.attention(q, kv, meta, self.params).flatten(1), self.out)

    def remember(self, ops: OpSet, states: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Keys and values of the encoder's states [T, E] go to their slots of this layer's cache."""
        rows = torch.cat((states.new_zeros(len(states), self.spec.q_size), ops.linear(states, self.kv)), dim=1)
        ops.rope_and_cache(rows, kv, meta, self.heads)


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder-decoder's encoder. Its input are the decoder's embeddings."""

    layers: Sequence[Layer]
    final_norm: Norm

    def __call__(self, ops: OpSet, h: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """Embedded whole texts [T, E] → their states [T, E]. `kv` is where keys and values stand for the time of a layer."""
        residual: Tensor | None = None
        for layer in self.layers:
            h, residual = layer(ops, h, residual, kv, meta)
        return self.final_norm(ops, h, residual)[0]


@dataclass(frozen=True, slots=True)
class Classifier:
    spec: ClassifierSpec
    dense: Linear | None
    norm: Norm | None
    out: Linear

    def __call__(self, ops: OpSet, hidden: Tensor, starts: Tensor) -> Tensor:
        """States [T, E] of whole texts, text i at starts[i] : starts[i + 1] → scores [S, labels]"""
        h = pool(ops, hidden, starts, self.spec.pooling).to(hidden.dtype)
        if self.dense is not None and self.spec.activation is not None:
            h = ACTIVATIONS[self.spec.activation](ops.linear(h, self.dense))
        return ops.linear(h if self.norm is None else self.norm(ops, h)[0], self.out)


def pool(ops: OpSet, hidden: Tensor, starts: Tensor, kind: PoolingKind) -> Tensor:
    """States [T, E] of whole texts, text i at starts[i] : starts[i + 1] → float32 [S, E]: their mean, the first or the last. Of
    a text without tokens (a graph's padding) it is anything."""
    if kind == "mean":
        return ops.mean_of_texts(hidden, starts)
    index = starts[:-1] if kind == "cls" else starts[1:] - 1
    return hidden[index.long().clamp(max=len(hidden) - 1)].float()


def normalized(vectors: Tensor) -> Tensor:
    """[S, E] → each of length 1 (a vector of zeros stays one)."""
    return F.normalize(vectors, dim=-1)
