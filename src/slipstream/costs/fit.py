"""Checks before loading whether a model's weights fit a device, and suggests what would fit. No
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from slipstream.config import EngineConfig, native_products
from slipstream.config.forms import HostAndGpu, HostExperts, StreamedLayers, with_tensor_size
from slipstream.costs.estimate import host_expert_bytes, resident_weights_bytes
from slipstream.costs.hardware import host_memory
from slipstream.costs.offload import estimate_offload
from slipstream.errors import OutOfMemoryError
from slipstream.spec.description import ModelDescription
from slipstream.spec.host_experts import mixtures
from slipstream.spec.scheme import SCHEMES

SMALLER = ("fp8", "int8", "int4")
"""Schemes suggested as a remedy if the device's kernels support them, the most exact first."""

MAX_RANKS = 8

HOST_SHARE = 0.95
"""Maximum fraction of the host's free memory for layers. The process needs some too."""


def check_weights_fit(config: EngineConfig, description: ModelDescription) -> None:
    """Check a rank's weights. OutOfMemoryError if they need more than its device's free memory."""
    free, need = free_for_weights(config), resident_weights_bytes(config, description)
    if need <= free:
        check_host_fits(config, description)
        _check_experts_fit(config, description)
        return
    info, ranks = config.device.info, config.parallel.num_ranks
    each = (
        " besides the CPU's"
        if isinstance(config.parallel, HostAndGpu)
        else f" of each of {ranks} ranks"
        if ranks > 1
        else ""
    )
    raise OutOfMemoryError(
        f"the weights{each} take {_gib(need)}, and {_gib(free)} of {info.name} are free for them; "
        + _remedies(config, description),
        field="model",
    )


def check_host_fits(config: EngineConfig, description: ModelDescription) -> None:
    """Check the layers that are copied to a GPU in each step. OutOfMemoryError if they need more
    than the host's free memory."""
    plan = estimate_offload(config, description) if config.device.info.is_cuda else None
    if plan is None:
        return
    total, free = host_memory()
    # the cache's blocks are pinned, too
    free = max(0, int(HOST_SHARE * free) - (config.cache.host_bytes or 0))
    if plan.read_bytes <= free:
        return
    assert isinstance(config.model.offload, StreamedLayers)
    budget, more = config.model.offload.weights_bytes, plan.read_bytes - free
    found = [f"weights_bytes={budget + more}"] if budget + more <= free_for_weights(config) else []
    for name, smaller in _smaller(config, description):
        of_it = estimate_offload(smaller, description)
        if of_it is None or of_it.read_bytes <= free:
            found.append(f"quantization={name!r}")
    found.append("a CPU, which reads layers from a disk (device='cpu')")
    raise OutOfMemoryError(
        f"weights_bytes={budget} leaves {_gib(plan.read_bytes)} of weights for the host, and {_gib(free)} of the host's memory "
        f"({_gib(total)}) are free for them; what helps: {', '.join(found)}",
        field="weights_bytes",
    )


def _check_experts_fit(config: EngineConfig, description: ModelDescription) -> None:
    """Check the experts on the host. OutOfMemoryError if they need more than its free memory."""
    need = host_expert_bytes(config, description)
    if need and need > (free := host_memory()[1]):
        raise OutOfMemoryError(
            f"host_experts: the experts on the host take {_gib(need)}, and {_gib(free)} of its memory are free; lower "
            "host_experts (docs/offload.md), or take quantization='int4'",
            field="host_experts",
        )


def free_for_weights(config: EngineConfig) -> int:
    """Maximum bytes of a rank's weights, from the free memory when the device was queried.

    With `kv_cache_bytes` the cache is not bounded by `gpu_memory_utilization`, and neither are the
    weights.
    """
    info = config.device.info
    if not info.is_cuda:
        return info.free_bytes // config.parallel.num_ranks
    if config.cache.kv_cache_bytes is not None:
        return info.free_bytes
    taken = info.memory_bytes - info.free_bytes
    return max(0, int(info.memory_bytes * config.cache.gpu_memory_utilization) - taken)


def _remedies(config: EngineConfig, description: ModelDescription) -> str:
    """List the settings with which the model would fit, as text."""
    free, info, found = free_for_weights(config), config.device.info, list[str]()
    for name, smaller in _smaller(config, description):
        if (size := resident_weights_bytes(smaller, description)) <= free:
            found.append(f"quantization={name!r} ({_gib(size)})")
    if info.is_cuda:
        for ranks in (2, 4, MAX_RANKS):
            split = dataclasses.replace(config, parallel=with_tensor_size(config.parallel, ranks))
            if (
                ranks > config.parallel.num_ranks
                and resident_weights_bytes(split, description) <= free
            ):
                found.append(f"tensor_parallel_size={ranks}")
                break
    if (
        info.is_cuda
        and config.parallel.num_ranks == 1
        and mixtures(description.spec)
        and not isinstance(config.model.offload, HostExperts)
    ):
        found.append("host_experts='auto' (the host computes experts)")
    if (
        config.parallel.num_ranks == 1
        and description.spec.kind == "a decoder"
        and not isinstance(config.model.offload, StreamedLayers)
    ):
        how = "copied to the GPU" if info.is_cuda else "read"
        found.append(f"weights_bytes={free // 2} (layers are {how} in each step, which is slow)")
        if info.is_cuda and config.model.quantization not in ("fp8", "fp8-block"):
            found.append("cpu_layers='auto' (the host's CPU computes the layers that don't fit)")
    found.append("a smaller model, or a machine with more memory")
    return "what helps: " + ", ".join(found)


def _smaller(
    config: EngineConfig, description: ModelDescription
) -> Iterator[tuple[str, EngineConfig]]:
    """Yields the schemes that the weights could be quantized with, and the settings for each."""
    if (
        config.model.quantization is not None
        or description.quantization is not None
        or description.format == "gguf"
    ):
        return
    able = native_products(config.device.kernels, config.device.info)
    for name in SMALLER:
        if SCHEMES[name].name in able:
            yield (
                name,
                dataclasses.replace(
                    config, model=dataclasses.replace(config.model, quantization=name)
                ),
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
