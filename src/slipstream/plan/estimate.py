"""What an engine would have on a device: its settings and its memory ledger, before one is started. No torch."""

from __future__ import annotations

from slipstream.config import DTYPE_BYTES, DeviceInfo, EngineArgs, EngineConfig, held_products, resolve
from slipstream.errors import ConfigError
from slipstream.plan.graph_sizes import graph_bytes
from slipstream.plan.hardware import available_cores, cpu_name, gpus, host_memory
from slipstream.plan.memory import (
    MemoryLedger,
    block_bytes,
    held_bytes,
    kv_budget,
    plan_kv,
    scratch_blocks,
    weights_bytes,
)
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import SCHEMES


def bytes_by_part(config: EngineConfig, description: ModelDescription) -> dict[str, int]:
    """The weights' as an engine with these settings holds them."""
    spec, size, by_cpu = description.spec, DTYPE_BYTES[config.model.dtype], by_cpu_kernels(config)
    formats = description.held_formats(held_products(config.device.kernels, config.device.info))
    if formats:
        return held_bytes(spec, size, formats, on_cpu=by_cpu)
    scheme = SCHEMES[config.model.quantization] if config.model.quantization else None
    if scheme is not None and scheme.experts_only and config.device.kernels == "torch":
        scheme = None  # expanded
    return weights_bytes(spec, size, scheme, on_cpu=by_cpu)


def by_cpu_kernels(config: EngineConfig) -> bool:
    return not config.device.info.is_cuda and config.device.kernels in ("auto", "cpu")


def this_device(device: str) -> DeviceInfo:
    """What `device` of the settings is here, by the operating system alone.

    Which type is faster on a CPU is measured at an engine's start; here it is bfloat16.
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
    args: EngineArgs, description: ModelDescription, info: DeviceInfo | None = None, *, with_steps: bool = False
) -> tuple[EngineConfig, MemoryLedger]:
    """Settings and ledger that an engine would have on a device, by default this machine's, as far as they can be known without
    starting one. `with_steps`: with an estimate of what a GPU's activations, graphs and rows take, which an engine measures."""
    info = info or this_device(args.device)
    config = resolve(args, description, info)
    spec, element, block_size = description.spec, DTYPE_BYTES[config.cache.dtype], config.cache.block_size
    one_block = block_bytes(spec, block_size, element)
    weights = sum(bytes_by_part(config, description).values())
    held = description.held_formats(held_products(config.device.kernels, info))
    scheme = None if config.model.quantization is None else SCHEMES[config.model.quantization]
    own_types = description.bytes_on_cpu(DTYPE_BYTES[config.model.dtype], scheme) if by_cpu_kernels(config) else None
    if own_types is not None and not held:
        weights = own_types
    elif not info.is_cuda and spec.tied_embeddings and config.device.kernels != "reference":
        # A tied head is held a second time, in the order in which its product reads it, if the table can't be read from there.
        weights += spec.vocab_size * spec.embed_width * DTYPE_BYTES[config.model.dtype]
    total, free = info.memory_bytes, info.free_bytes
    # What a host has free changes by the minute: there a model is described also where it would not fit just now.
    activations, graphs, rows = _of_steps(config, description) if with_steps and info.is_cuda else (0, 0, 0)
    taken = weights + activations + graphs + rows if info.is_cuda else 0
    allowed, budget = kv_budget(config, one_block, total_bytes=total, free_bytes=free, taken_bytes=taken)
    num_blocks = plan_kv(budget_bytes=budget, block_bytes=one_block)
    if spec.is_encoder:
        num_blocks = min(num_blocks, scratch_blocks(config))
    config = config.with_memory_limits(num_blocks - 1, one_block)
    return config, MemoryLedger(
        device=info.name,
        total_bytes=total,
        allowed_bytes=allowed,
        weights_bytes=weights,
        activation_bytes=activations,
        graph_bytes=graphs,
        kv_bytes=num_blocks * one_block,
        other_bytes=rows,
        block_bytes=one_block,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=config.model.max_model_len,
        groups=config.cache.groups,
        max_step_tokens=config.scheduling.max_num_batched_tokens,
    )


def _of_steps(config: EngineConfig, description: ModelDescription) -> tuple[int, int, int]:
    """Bytes of activations, graphs and rows. A step's widest activations are alive beside some of the hidden size, and the
    logits of all sequences in the model's type and in float32."""
    spec, element, scheduling = description.spec, DTYPE_BYTES[config.model.dtype], config.scheduling
    widest = max(layer.mlp.width for layer in spec.layers)
    activations = scheduling.max_num_batched_tokens * (widest + 8 * spec.hidden_size) * element
    activations += scheduling.max_num_seqs * spec.vocab_size * (element + 4)
    tables = len(config.cache.groups) * config.max_blocks_per_seq
    rows = (scheduling.max_num_seqs + 1) * 4 * (config.model.max_model_len + 1 + tables)
    graphs = 0 if config.device.enforce_eager or spec.is_encoder else graph_bytes(config, spec, element)
    return activations, graphs, rows
