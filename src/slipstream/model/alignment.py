"""Cross-attention weights of some heads over a window of audio, from which word times are computed.

The whole text is computed again without the engine's cache: each layer gets its own, which is
dropped afterwards. Attention weights are computed in plain torch on every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.cache.tensors import cache_tensors
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import OpSet
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.kernels.weights.forms import Activations
from slipstream.model.decoder import Decoder
from slipstream.model.layers.attention import CrossAttention
from slipstream.model.layers.layer import Layer, run_layers
from slipstream.platform import platform_of


@dataclass(frozen=True, slots=True)
class WatchedCross(CrossAttention):
    """Cross attention that appends the attention weights of the `watched` heads to `found`, float32 [N, S] each."""

    keys: Tensor  # [S, K, D]
    watched: tuple[int, ...]
    found: dict[int, Tensor]

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s = self.spec
        q = ops.linear(x, self.q).unflatten(1, (s.num_heads, s.head_dim)).float()
        for head in self.watched:
            keys = self.keys[:, head * s.num_kv_heads // s.num_heads].float()
            self.found[head] = (q[:, head] @ keys.T * s.scale).softmax(-1)
        return CrossAttention.__call__(self, ops, x, kv, meta)


def cross_weights(
    decoder: Decoder,
    frames: Tensor,
    token_ids: Sequence[int],
    heads: Sequence[tuple[int, int]],
    block_size: int,
) -> Tensor:
    """Attention weights of each (layer, head) from N tokens to the S states of a window, float32 [heads, N, S].

    `frames`: see `AudioInput`.
    """
    assert decoder.encoder is not None
    assert decoder.encoder.audio is not None
    num_states, ops = decoder.encoder.audio.spec.num_states, decoder.ops
    made = partial(single_sequence, block_size=block_size, platform=platform_of(decoder.device))
    meta, read = made(0, len(token_ids)), made(0, num_states)
    num_blocks = meta.block_table.shape[1]
    read = dataclasses.replace(
        read,
        block_table=read.block_table + num_blocks,
        slot_mapping=read.slot_mapping + num_blocks * block_size,
        num_decodes=0,
    )
    meta = dataclasses.replace(meta, num_decodes=0)
    cross = dataclasses.replace(
        meta,
        block_table=read.block_table,
        seq_lens=read.seq_lens,
        max_seq_len=read.max_seq_len,
        from_start=False,
    )
    meta = meta.with_groups(cross)
    new = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
    by_dim = ops.values_by_dim(decoder.dtype)
    total = 1 + num_blocks + read.block_table.shape[1]

    def cache(layer: Layer) -> LayerKV:
        own = layer.spec.attention
        return LayerKV(*cache_tensors(own, total, block_size, new, values_by_dim=by_dim))

    states = decoder.encoder(
        ops, decoder.encoder_input(frames, read), cache(decoder.layers[0]), read
    )
    found: list[dict[int, Tensor]] = [{} for _ in decoder.layers]

    def watched(index: int, layer: Layer) -> Layer:
        own = tuple(head for at, head in heads if at == index)
        if not own:
            return layer
        inner = layer.cross
        assert inner is not None
        s = inner.spec
        keys = ops.linear(states, inner.kv)[:, : s.kv_size].unflatten(1, (-1, s.head_dim))
        fields = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)}
        new = WatchedCross(**fields, keys=keys, watched=own, found=found[index])
        return dataclasses.replace(layer, cross=new)

    def caches() -> Iterator[LayerKV]:
        for layer in decoder.layers:
            assert layer.cross is not None
            own = cache(layer)
            layer.cross.remember(ops, states, own, read)
            yield own

    layers = [watched(i, layer) for i, layer in enumerate(decoder.layers)]
    ids = torch.tensor(list(token_ids), dtype=torch.int32, device=decoder.device)
    run_layers(ops, layers, decoder.embedded(ids, meta), caches(), meta)
    return torch.stack([found[layer][head] for layer, head in heads])


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Weights [heads, N, S] → [N, S]: standardized over tokens, median-filtered over `width` states, averaged over heads."""
    std = weights.std(dim=-2, keepdim=True, unbiased=False)
    weights = (weights - weights.mean(dim=-2, keepdim=True)) / std
    # a state with the same weight from all tokens carries no information
    weights = weights.where(std > 0, 0.0)
    half = width // 2
    if half and weights.shape[-1] > half:
        padded = torch.nn.functional.pad(weights, (half, half), mode="reflect")
        weights = padded.unfold(-1, width, 1).sort()[0][..., half]
    return weights.mean(dim=0)
