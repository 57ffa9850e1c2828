"""The cost of weights that are not all kept in memory (`spec.offload` decides which are read in each step). No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.costs.devices import find_device
from slipstream.costs.estimate import all_weights_bytes, bytes_by_part
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.offload import CHUNK, OffloadPlan, plan_offload

PROBE_BYTES = 256 * 2**20


def estimate_offload(config: EngineConfig, description: ModelDescription) -> OffloadPlan | None:
    """What an engine with `weights_bytes` would read, as far as it can be known before the layers are packed. None: nothing."""
    budget, spec = config.model.weights_bytes, description.spec
    if budget is None:
        return None
    total = all_weights_bytes(config, description)
    numbers = [layer.num_parameters(spec.hidden_size) for layer in spec.layers]
    if config.device.info.is_cuda:  # where embeddings and head are in another type than the layers
        parts = bytes_by_part(config, description)
        of_layers = sum(
            size
            for name, size in parts.items()
            if name not in ("embeddings", "output head", "image encoder")
        )
        sizes = [of_layers * number // sum(numbers) for number in numbers]
    else:
        sizes = [total * number // spec.num_parameters for number in numbers]
    return plan_offload(sizes, total - sum(sizes), budget)


def copy_rate(name: str) -> float | None:
    """Bytes a second that a GPU of this name copies from the host's memory, as the table of devices has it; None if it doesn't
    know the GPU."""
    try:
        return find_device(name).host_bytes_s
    except ConfigError:
        return None


def read_rate(path: Path) -> float | None:
    """Bytes a second of reading the largest file of a checkpoint from where it lies, without what the system keeps of it in
    memory, measured now. None: there is no file large enough, or it can't be told."""
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
