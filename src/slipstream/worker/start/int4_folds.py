"""Measures the factors and means with which an int4 KV cache transforms its keys, on the same
random text as for an 8-bit cache's scales."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from torch import Tensor

from slipstream.config.sections import ModelConfig
from slipstream.kernels.cache.int4 import fold_of
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import OpSet, QKVLayout
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.worker.device_cache import DeviceCache
from slipstream.worker.forward.forwards import Forwards
from slipstream.worker.start.cache_scales import CALIBRATION_TOKENS


class QueryWatchingOps:
    """Wrapper of the op set `ops` that also records the mean squares of the queries to each cache,
    float32 [K, D]."""

    def __init__(self, ops: OpSet) -> None:
        self._ops = ops
        self.squares: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        q = self._ops.rope_and_cache(qkv, kv, meta, heads)
        own = q.float().square().unflatten(1, (kv.k.shape[1], -1)).mean((0, 2))
        self.squares[id(kv)] = own + self.squares.get(id(kv), 0.0)
        return q


def calibrated_folds(
    forwards: Forwards, cache: DeviceCache, model: ModelConfig
) -> list[tuple[Any, ...]]:
    """Measures `LayerKV.fold` for each layer of the cache that `cache` makes; None for a layer
    without attention."""
    num_tokens = min(CALIBRATION_TOKENS, model.max_model_len)
    block_size, platform, spec = cache.config.block_size, cache.platform, cache.spec
    text = np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens, dtype=np.int32)
    kv = cache.of_each_layer(-(-num_tokens // block_size) + 1, model.dtype)
    meta = single_sequence(0, num_tokens, block_size=block_size, platform=platform)
    ops = QueryWatchingOps(forwards.decoder.ops)
    decoder = forwards.decoder.with_ops(cast("OpSet", ops))
    forwards.hidden(platform.upload(text), kv, meta, decoder)

    def fold(own: LayerKV, layer: int) -> Tensor | None:
        attention: Any = spec.layers[layer].attention
        if attention is None:
            return None
        keys = own.k[1:].transpose(1, 2).flatten(0, 1)[:num_tokens]
        shifts = attention.softcap is None and not attention.sinks
        return fold_of(ops.squares[id(own)], keys, shifts=shifts)

    return [(fold(own, i),) for own, i in zip(kv, spec.local_layers, strict=True)]
