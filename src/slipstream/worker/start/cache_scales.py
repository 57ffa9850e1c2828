"""Measures the scales of an 8-bit KV cache on random text. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.config.sections import ModelConfig
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import FORMAT_MAX
from slipstream.worker.device_cache import DeviceCache
from slipstream.worker.forward.table import ForwardTable

CALIBRATION_TOKENS = 1024
"""Random tokens whose keys and values set the scales of an 8-bit cache."""


def calibrated_scales(
    forwards: ForwardTable, cache: DeviceCache, model: ModelConfig, spec: ModelSpec
) -> list[tuple[Any, Any]]:
    """Scales of the cache that `cache` makes: float32 [K] for each layer's keys and for its values.

    The largest magnitude of a head on random text, times a margin, maps to the end of the range. A
    float's precision does not depend on the scale, so fp8 has a wide margin.
    """
    num_tokens = min(CALIBRATION_TOKENS, model.max_model_len)
    block_size, platform = cache.config.block_size, cache.platform
    # NumPy's generator, so that all platforms find the same scales
    text = np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens, dtype=np.int32)
    kv = cache.of_each_layer(-(-num_tokens // block_size) + 1, model.dtype)
    meta = single_sequence(0, num_tokens, block_size=block_size, platform=platform)
    forwards.hidden(platform.upload(text), kv, meta)
    top = FORMAT_MAX[cache.config.dtype] / (2.0 if cache.config.dtype == "fp8" else 1.1)  # type: ignore[index]

    def scale(part: Any) -> Any:
        return platform.values.magnitudes(part).clip(min=1e-6) / top

    return [(scale(layer.k), scale(layer.v)) for layer in kv]
