"""Estimates an engine's settings and memory ledger on a device before it starts. No torch."""

from __future__ import annotations

import dataclasses
import math

from slipstream.config import (
    DTYPE_BYTES,
    KV_BYTES,
    DeviceInfo,
    EngineArgs,
    EngineConfig,
    native_products,
    resolve,
)
from slipstream.config.forms import (
    ContextParallel,
    HostAndGpu,
    HostExperts,
    ModelDrafts,
    MTPDrafts,
    OneDevice,
    StreamedLayers,
    one_or_tensor,
)
from slipstream.costs.graph_sizes import graph_bytes, model_chain_bytes
from slipstream.costs.hardware import available_cores, cpu_name, gpus, host_memory
from slipstream.costs.memory import (
    MemoryLedger,
    adapter_bytes,
    block_bytes,
    native_weights_bytes,
    peer_copy_bytes,
    size_cache,
    weights_bytes,
)
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts.heads import HeadDescription, LayeredSpec
from slipstream.spec.drafts.models import check_draft_model
from slipstream.spec.drafts.mtp import read_mtp
from slipstream.spec.host_experts import host_weights
from slipstream.spec.parallel import Shard, split_shapes, split_spec
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.native_formats import native_weight_bytes


def bytes_by_part(
    config: EngineConfig, description: ModelDescription, shard: Shard | None = None
) -> dict[str, int]:
    """Bytes of the weights by part, in the format of an engine with these settings.

    With several ranks they are those of `shard`, by default `largest_shard`.
    """
    shard = shard or largest_shard(config, description)
    spec, size, by_cpu = (
        split_spec(description.spec, shard),
        DTYPE_BYTES[config.model.dtype],
        by_cpu_kernels(config),
    )
    shapes = split_shapes(description.spec, shard) if config.parallel.num_ranks > 1 else None
    formats = description.native_formats(native_products(config.device.kernels, config.device.info))
    if formats:
        return native_weights_bytes(spec, size, formats, on_cpu=by_cpu, shapes=shapes)
    scheme = SCHEMES[config.model.quantization] if config.model.quantization else None
    if scheme is not None and scheme.experts_only and config.device.kernels == "torch":
        scheme = None  # expanded
    return weights_bytes(spec, size, scheme, on_cpu=by_cpu, shapes=shapes)


def largest_shard(config: EngineConfig, description: ModelDescription) -> Shard:
    """Shard of the rank with the most parameters. If one rank is the host's CPU, it is the
    GPU's."""
    how = config.parallel
    if isinstance(how, HostAndGpu):
        return how.shard(1)
    shards = [how.shard(first) for first in range(0, how.num_ranks, how.stage.size)]
    return max(
        shards,
        key=lambda shard: sum(map(math.prod, split_shapes(description.spec, shard).values())),
    )


def by_cpu_kernels(config: EngineConfig) -> bool:
    return not config.device.info.is_cuda and config.device.kernels in ("auto", "cpu")


def this_device(device: str) -> DeviceInfo:
    """Describes the local device that the setting `device` means, from the operating system alone.

    The dtype is bfloat16 even for a CPU, where an engine measures at its start which is faster.
    """
    gpu = None if device == "cpu" else next(iter(gpus()), None)
    if gpu is not None:
        return DeviceInfo(
            device="cuda:0",
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            free_bytes=gpu.free_bytes,
            best_dtype="bfloat16",
        )
    if device in ("auto", "cpu"):
        total, free = host_memory()
        return DeviceInfo(
            device="cpu",
            name=cpu_name(),
            memory_bytes=total,
            free_bytes=free,
            best_dtype="bfloat16",
            num_threads=available_cores(),
        )
    raise ConfigError(f"device={device!r}: nvidia-smi shows no GPU; use 'cpu'", field="device")


def estimate(
    args: EngineArgs,
    description: ModelDescription,
    info: DeviceInfo | None = None,
    *,
    with_steps: bool = False,
    draft: ModelDescription | None = None,
    num_gpus: int = 1,
) -> tuple[EngineConfig, MemoryLedger]:
    """Estimate the settings and memory ledger of an engine on a device, as far as they are known
    before it starts.

    `info` is the device, by default this machine's. With several ranks the result is rank 0's.
    `with_steps` adds an estimate of a GPU's activations, graphs and rows, which an engine measures.
    `draft` is the draft model, whose weights and KV blocks count too. With `num_gpus`, `info`
    describes that many GPUs together, which share the model; each has the whole draft model.
    ConfigError if the settings can't work.
    """
    info = info or this_device(args.device)
    config = resolve(args, description, info)
    spec = split_spec(description.spec, largest_shard(config, description))
    block = block_bytes(spec, config.cache.rank_block_size, KV_BYTES[config.cache.dtype])
    weights = resident_weights_bytes(config, description)
    if num_gpus > 1 and isinstance(config.parallel, ContextParallel):
        weights, block = num_gpus * weights, num_gpus * block
    if draft is not None:
        check_draft_model(draft.spec, spec, config.model.max_model_len)
        own = config_of_draft(config)
        weights += num_gpus * resident_weights_bytes(own, draft)
        block += num_gpus * block_bytes(draft.spec, own.cache.block_size, KV_BYTES[own.cache.dtype])
    elif isinstance(config.speculation, MTPDrafts):
        own_weights, own_block = head_bytes(config, read_mtp(description))
        weights, block = weights + num_gpus * own_weights, block + num_gpus * own_block
    activations, graphs, rows = (
        _of_steps(config, description) if with_steps and info.is_cuda else (0, 0, 0)
    )
    if draft is not None and graphs:
        graphs += model_chain_bytes(config, draft.spec, DTYPE_BYTES[config.model.dtype])
    sharing = config
    if num_gpus > 1 and isinstance(config.parallel, OneDevice):
        sharing = dataclasses.replace(config, parallel=one_or_tensor(num_gpus))
    adapters = num_gpus * adapter_bytes(config, description, largest_shard(sharing, description))
    copies = num_gpus * peer_copy_bytes(sharing, description.spec)
    _, ledger = size_cache(
        config.of_rank,
        spec,
        block,
        total_bytes=info.memory_bytes,
        free_bytes=info.free_bytes,
        weights_bytes=weights,
        activation_bytes=activations,
        graph_bytes=graphs,
        rows_bytes=rows,
        # A host's free memory changes by the minute, so a model is described even if it does not
        # fit right now.
        taken_bytes=weights + activations + graphs + rows + adapters + copies
        if info.is_cuda
        else 0,
        adapter_bytes=adapters,
        peer_copy_bytes=copies,
    )
    config = config.with_memory_limits(ledger.num_blocks - 1, block, ledger.num_slots)
    return config, dataclasses.replace(
        ledger, host_expert_bytes=host_expert_bytes(config, description)
    )


def head_bytes(config: EngineConfig, head: HeadDescription) -> tuple[int, int]:
    """(bytes of the weights, bytes of a KV block) of a model's draft layers. A block includes the
    hidden states that they read."""
    part, size = head.source, DTYPE_BYTES[config.model.dtype]
    assert part is not None
    assert isinstance(head.spec, LayeredSpec)
    formats = part.native_formats(native_products(config.device.kernels, config.device.info))
    assert isinstance(config.speculation, MTPDrafts)
    stored, name = part.quantization, config.speculation.quantization
    if stored is not None and stored.rounds:
        name = stored.scheme if stored.formats is None else None
    scheme = SCHEMES.get(name or "none")
    weights = sum(
        native_weight_bytes(
            name, shape, scheme, formats, size, on_cpu=not config.device.info.is_cuda
        )
        for name, shape in part.shapes.items()
    )
    cached = sum(layer.self_attention.cached_size for layer in head.spec.layers)
    return weights, (cached + head.spec.hidden_size) * size * config.cache.block_size


def config_of_draft(config: EngineConfig) -> EngineConfig:
    """Settings under which the draft model is stored: the model's dtype and blocks, and no split
    over ranks."""
    assert isinstance(config.speculation, ModelDrafts)
    model = dataclasses.replace(config.model, quantization=config.speculation.quantization)
    cache = dataclasses.replace(config.cache, dtype=config.model.dtype)
    return dataclasses.replace(config, model=model, cache=cache, parallel=OneDevice())


def resident_weights_bytes(
    config: EngineConfig, description: ModelDescription, shard: Shard | None = None
) -> int:
    """Bytes of the weights in memory, in the format of an engine with these settings.

    With several ranks they are one rank's (`bytes_by_part`).
    """
    total = all_weights_bytes(config, description, shard)
    match config.model.offload:
        case StreamedLayers(weights_bytes):
            return min(total, weights_bytes)
        case HostExperts(hot_bytes=hot_bytes):
            return total - host_expert_bytes(config, description, on_cpu=False) + hot_bytes
        case _:
            return total


def host_expert_bytes(
    config: EngineConfig, description: ModelDescription, *, on_cpu: bool = True
) -> int:
    """Bytes of the experts on the host, in the host's format; without `on_cpu`, in the GPU's."""
    if not isinstance(config.model.offload, HostExperts):
        return 0
    size, mixtures = DTYPE_BYTES[config.model.dtype], config.model.offload.mixtures
    formats = description.native_formats(native_products(config.device.kernels, config.device.info))
    scheme = None if config.model.quantization is None else SCHEMES[config.model.quantization]
    total = 0
    for name in host_weights(description.spec, mixtures):
        total += native_weight_bytes(
            name, description.shapes[name], scheme, formats, size, on_cpu=on_cpu
        )
    return total


def all_weights_bytes(
    config: EngineConfig, description: ModelDescription, shard: Shard | None = None
) -> int:
    """Bytes of `resident_weights_bytes` plus those of layers that are read in each step."""
    spec, info, shares = description.spec, config.device.info, config.parallel.num_shares
    held = description.native_formats(native_products(config.device.kernels, info))
    scheme = None if config.model.quantization is None else SCHEMES[config.model.quantization]
    own_types = None
    if by_cpu_kernels(config) or (
        info.is_cuda and not isinstance(config.model.offload, HostExperts)
    ):
        size = DTYPE_BYTES[config.model.dtype]
        own_types = description.gguf_bytes(size, scheme, on_cpu=not info.is_cuda)
    if own_types is not None and not held:
        return own_types // shares
    weights = sum(bytes_by_part(config, description, shard).values())
    if not info.is_cuda and spec.tied_embeddings and config.device.kernels != "reference":
        # A tied head is stored a second time, in its kernel's layout, if the table can't be used.
        weights += spec.vocab_size * spec.embed_width * DTYPE_BYTES[config.model.dtype] // shares
    return weights


def _of_steps(config: EngineConfig, description: ModelDescription) -> tuple[int, int, int]:
    """Bytes of (activations, graphs, rows).

    A step holds its widest activations, eight hidden states, and the logits of all sequences in the
    model's dtype and in float32.
    """
    spec, element, scheduling = description.spec, DTYPE_BYTES[config.model.dtype], config.scheduling
    widest = max(0 if x.mlp is None else x.mlp.width for x in spec.layers)
    activations = scheduling.max_num_batched_tokens * (widest + 8 * spec.hidden_size) * element
    activations += scheduling.seqs_of_rank * spec.vocab_size * (element + 4)
    tables = len(config.cache.groups) * config.max_blocks_per_seq
    rows = (scheduling.seqs_of_rank + 1) * 4 * (config.model.max_model_len + 1 + tables)
    graphs = (
        0
        if config.device.enforce_eager or spec.is_encoder
        else graph_bytes(config.of_rank, spec, element)
    )
    return activations, graphs, rows
