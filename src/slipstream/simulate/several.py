"""Plans several models on one device: the memory of each, which of them fit together, and how long
a swap takes. The estimates are the server's own (`server.many.models`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.estimate import estimate
from slipstream.errors import ConfigError
from slipstream.server.many.models import ServedModels
from slipstream.server.many.slot import needed_bytes

READ_BYTES_S = 2.8e9
"""Rate in bytes/s at which packed weights are read from files in the page cache
(benchmarks/results/start_kept.json: 2,403 MiB in 0.85 s)."""

MAX_SETS = 12
"""Maximum number of models, because all subsets of them are examined."""


def plan_models(
    models: Mapping[str, str], settings: EngineArgs, gpu: str | None, memory_bytes: int | None
) -> dict[str, Any]:
    """Plan several models; returns data. ConfigError if a model does not fit even alone. `models`
    maps names to paths or known names; `memory_bytes` is the limit for all together (None: most of
    the free memory)."""
    if len(models) > MAX_SETS:
        message = f"a plan is of at most {MAX_SETS} models together, got {len(models)}"
        raise ConfigError(message, field="models")
    link = READ_BYTES_S
    if gpu is None:
        how = ServedModels.on_device(settings, memory_bytes)
    else:
        hardware = find_device(gpu)
        device, share = hardware.device_info(), settings.gpu_memory_utilization or 0.9
        memory = int(share * device.memory_bytes) if memory_bytes is None else memory_bytes
        if memory > device.memory_bytes:
            message = f"models_memory is above the {device.memory_bytes} bytes of {device.name}"
            raise ConfigError(message, field="models_memory")
        how = ServedModels(args=settings, device=device, memory_bytes=memory)
        link = min(link, hardware.host_bytes_s or link)
    rows: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    for name, model in models.items():
        served = how.serve(name, model)
        sizes[name] = served.num_bytes
        _, ledger = estimate(served.args, served.description, how.device, with_steps=True)
        rows.append(
            {
                "model": name,
                "weights_bytes": ledger.weights_bytes,
                "kv_bytes": ledger.kv_bytes,
                "rest_bytes": needed_bytes(ledger, is_cuda=how.device.is_cuda)
                - ledger.weights_bytes
                - ledger.kv_bytes,
                "total_bytes": served.num_bytes,
                "max_model_len": served.max_model_len,
                "swap_s": ledger.weights_bytes / link,
            }
        )
    return {
        "device": how.device.name,
        "memory_bytes": how.memory_bytes,
        "models": rows,
        "all_fit": sum(sizes.values()) <= how.memory_bytes,
        "together": largest_sets(sizes, how.memory_bytes),
        "label": "estimated",
    }


def largest_sets(sizes: Mapping[str, int], memory_bytes: int) -> list[list[str]]:
    """Sets of models that fit in the memory together and leave no room for another model, largest
    sets first."""
    names, found = list(sizes), list[frozenset[str]]()
    for count in range(len(names), 0, -1):
        for chosen in map(frozenset, itertools.combinations(names, count)):
            fits = sum(sizes[name] for name in chosen) <= memory_bytes
            if fits and not any(chosen < larger for larger in found):
                found.append(chosen)
    return [[name for name in names if name in chosen] for chosen in found]
