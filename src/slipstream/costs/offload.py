"""The cost of weights that are not all stored in device memory. `spec.offload` decides which are
read in each step. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.config.forms import StreamedLayers
from slipstream.costs.devices import find_device
from slipstream.costs.estimate import all_weights_bytes, bytes_by_part
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.offload import CHUNK, OffloadPlan, plan_offload

PROBE_BYTES = 256 * 2**20


def estimate_offload(config: EngineConfig, description: ModelDescription) -> OffloadPlan | None:
    """Estimate which layers an engine with `weights_bytes` reads in each step. Exact sizes are
    known only after layers are packed. None without that setting."""
    how, spec = config.model.offload, description.spec
    if not isinstance(how, StreamedLayers):
        return None
    total = all_weights_bytes(config, description)
    numbers = [layer.num_parameters(spec.hidden_size) for layer in spec.layers]
    if config.device.info.is_cuda:  # embeddings and head have another dtype than the layers
        parts = bytes_by_part(config, description)
        of_layers = sum(
            size
            for name, size in parts.items()
            if name not in ("embeddings", "layer inputs", "output head", "media encoder")
        )
        sizes = [of_layers * number // sum(numbers) for number in numbers]
    else:
        sizes = [total * number // spec.num_parameters for number in numbers]
    return plan_offload(sizes, total - sum(sizes), how.weights_bytes)


def copy_rate(name: str) -> float | None:
    """A GPU's copy rate from host memory in bytes per second, from the table of devices. None if it
    lacks the GPU."""
    try:
        return find_device(name).host_bytes_s
    except ConfigError:
        return None


def read_rate(path: Path) -> float | None:
    """Measures the read rate of a checkpoint's largest file in bytes per second, without the
    system's file cache.

    None if no file is large enough or the system can't drop its cache.
    """
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < 4 * CHUNK or not hasattr(os, "posix_fadvise"):
        return None
    descriptor = os.open(largest, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, done, begin = bytearray(CHUNK), 0, time.perf_counter()
        while done < PROBE_BYTES and (count := os.preadv(descriptor, [buffer], done)):
            done += count
        return done / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
