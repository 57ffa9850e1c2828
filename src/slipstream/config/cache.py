"""Settings of the KV cache: its dtype, its tiers, its events, and the slots of recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.config.chosen import Chosen, Origins, positive
from slipstream.config.formats import on_cpu
from slipstream.config.forms import HostAndGpu, ParallelConfig, Pipeline
from slipstream.config.handover import handover_section
from slipstream.config.sections import SLOTS_TO_FIT, CacheConfig, CacheEventSettings
from slipstream.config.settings import (
    DTYPE_BYTES,
    GPU_MEMORY_SHARE,
    KV_BYTES,
    DeviceInfo,
    DType,
    EngineArgs,
    one_of,
)
from slipstream.errors import ConfigError
from slipstream.spec.cache import SLOT_KINDS, SlotKind, attention_depth, state_interval
from slipstream.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
)

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


def cache_section(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, dtype: DType
) -> tuple[CacheConfig, Origins]:
    chosen, spec = Chosen(args), model.spec
    why = (
        "the model's type"
        if model.kv_cache is None
        else "the checkpoint has scales for it (kv_cache_scheme)"
    )
    kv_dtype = chosen("kv_cache_dtype", model.kv_cache or dtype, "model", why)
    if kv_dtype != dtype and any(
        isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers
    ):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} does not cover latent attention, whose cache is small already; leave it out",
            field="kv_cache_dtype",
        )
    if kv_dtype != dtype and any(
        isinstance(a, AttentionSpec) and a.index is not None for a in spec.attentions
    ):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} does not cover attention to the blocks of keys that an index chooses; leave it out",
            field="kv_cache_dtype",
        )
    if model.kv_cache is not None and kv_dtype not in (dtype, model.kv_cache):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}, but the checkpoint's scales are for {model.kv_cache} (kv_cache_scheme); leave it "
            f"out, or use the model's type, {dtype!r}",
            field="kv_cache_dtype",
        )
    one_of(
        "kv_cache_dtype",
        kv_dtype,
        (dtype,) if spec.needs_full_prompt else (dtype, "fp8", "int8", "int4"),
    )
    if kv_dtype == "int4":
        _check_int4_cache(args, device, spec)
    block_size = chosen("block_size", 16, "default", "16 tokens: little waste, long enough reads")
    positive("block_size", block_size)
    for a in spec.attentions:
        if isinstance(a, CompressedAttentionSpec) and a.rate and block_size % a.entry_rows:
            raise ConfigError(
                f"block_size={block_size}: compressed keys take a multiple of {a.entry_rows}",
                field="block_size",
            )
    if device.is_cuda and block_size not in (16, 32, 64, 128):
        raise ConfigError(
            f"block_size={block_size}: the GPU kernels take 16, 32, 64 or 128", field="block_size"
        )
    share = chosen(
        "gpu_memory_utilization",
        GPU_MEMORY_SHARE,
        "default",
        "leaves room for what the engine does not count",
    )
    if not 0 < share <= 1:
        raise ConfigError(
            "gpu_memory_utilization must be above 0 and at most 1", field="gpu_memory_utilization"
        )
    if args.kv_cache_bytes is not None:
        positive("kv_cache_bytes", args.kv_cache_bytes)
        if args.kv_cache_bytes > device.memory_bytes:
            raise ConfigError(
                f"kv_cache_bytes={args.kv_cache_bytes} is more than the {device.memory_bytes} bytes of {device.name}; lower it",
                field="kv_cache_bytes",
            )
    prefixes = args.enable_prefix_caching is not False
    if spec.needs_full_prompt:
        prefixes = chosen.needs_full_prompt("enable_prefix_caching", False)
    config = CacheConfig(
        dtype=kv_dtype,
        block_size=block_size * args.context_parallel_size,
        context_ranks=args.context_parallel_size,
        gpu_memory_utilization=share,
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=prefixes,
        groups=spec.cache_groups,
        host_bytes=args.kv_host_bytes,
        disk_bytes=args.kv_disk_bytes,
        disk_path=args.kv_disk_path,
        handover=handover_section(args),
        eviction=args.cache_eviction,
        slots=tuple(_slots(args, spec, kind) for kind in SLOT_KINDS),
        state_interval=state_interval(spec, DTYPE_BYTES[dtype], KV_BYTES[kv_dtype]),
        attention_tokens=attention_depth(spec),
        events=_cache_events(args.kv_events_config, prefixes),
    )
    return config, chosen.origins


def _cache_events(given: dict[str, Any] | None, prefixes: bool | None) -> CacheEventSettings | None:
    """Settings from vLLM's kv_events_config that have an effect here. ConfigError names others."""
    if given is None:
        return None
    fields = {"enable_kv_cache_events": False, "publisher": "zmq", "endpoint": "", "topic": ""}
    for name, value in given.items():
        wrong = type(value) is not type(fields[name]) if name in fields else value is not None
        if wrong or (name == "publisher" and value not in ("zmq", "null")):
            known = 'enable_kv_cache_events (true or false), publisher ("zmq" or "null"), endpoint and topic (texts)'
            raise ConfigError(
                f"kv_events_config: {name}={value!r} has no effect here; it takes {known}",
                field="kv_events_config",
            )
    found = fields | {k: v for k, v in given.items() if k in fields}
    if not found["enable_kv_cache_events"] or found["publisher"] == "null":
        return None
    if not prefixes:
        message = "kv_events_config tells of the prefix cache; it needs enable_prefix_caching"
        raise ConfigError(message, field="kv_events_config")
    return CacheEventSettings(**{k: str(found[k]) for k in ("endpoint", "topic") if found[k]})


INT4_HEAD_DIMS = (32, 64, 128, 256, 512)
"""Head sizes that an int4 cache supports: those that have a Hadamard matrix and fit the kernels'
tiles."""


def _check_int4_cache(args: EngineArgs, device: DeviceInfo, spec: ModelSpec) -> None:
    """Raise ConfigError if the model's attention, or the device, does not support a 4-bit cache."""
    kinds = [layer.attention for layer in spec.layers if layer.attention is not None]
    sizes = sorted({a.head_dim for a in kinds if a.head_dim not in INT4_HEAD_DIMS})
    for wrong, why in (
        (
            on_cpu(args, device) and args.kernels != "triton",
            "needs a GPU (or kernels='reference', which is exact and slow)",
        ),
        (not kinds, "the model has no attention"),
        (bool(sizes), f"the model's heads have {sizes} numbers, and it takes {INT4_HEAD_DIMS}"),
        (
            any(group.kind == "cross" for group in spec.cache_groups),
            "attention to what an encoder read has none",
        ),
        (
            spec.mixed_layout is not None,
            "layers with other sizes of keys share tensors, which 4 bits don't divide",
        ),
    ):
        if wrong:
            raise ConfigError(
                f"kv_cache_dtype='int4': {why}; take 'int8', or leave it at 'auto'",
                field="kv_cache_dtype",
            )


def _slots(args: EngineArgs, spec: ModelSpec, kind: SlotKind) -> int:
    """Number of slots of a kind that the user set; 0 for a model without layers of that kind."""
    name, is_used = kind.setting, kind.is_used(spec)
    asked: int | None = None if name is None else getattr(args, name)
    if asked is None:
        return SLOTS_TO_FIT if is_used else 0
    if not is_used:
        raise ConfigError(
            f"{name} is for models with {kind.layers}, and this one has none; leave it out",
            field=name,
        )
    if asked < 4:
        raise ConfigError(f"{name}={asked} must be at least 4", field=name)
    return asked


def check_tiers(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, parallel: ParallelConfig
) -> None:
    """Raise ConfigError if the tiers below the device's cache can't be used."""
    given = [
        n
        for n in ("kv_host_bytes", "kv_disk_bytes", "kv_disk_path")
        if getattr(args, n) is not None
    ]
    if not given:
        return
    for name in given:
        if name != "kv_disk_path":
            positive(name, getattr(args, name))
    for name, refused, why in (
        (
            "kv_disk_bytes",
            "kv_disk_bytes" in given and not args.kv_disk_path,
            "it needs a folder: set kv_disk_path",
        ),
        (
            "kv_disk_path",
            "kv_disk_path" in given and args.kv_disk_bytes is None,
            "it needs a bound: set kv_disk_bytes",
        ),
        (
            "kv_host_bytes",
            "kv_host_bytes" in given and not device.is_cuda,
            "a CPU's cache is the host's memory already: raise kv_cache_bytes, or keep blocks on a disk (kv_disk_bytes)",
        ),
        (
            "kv_disk_bytes",
            device.is_cuda and args.kv_disk_bytes is not None and args.kv_host_bytes is None,
            "a GPU's blocks go to the disk by way of the host's memory: set kv_host_bytes too",
        ),
        (
            given[0],
            args.enable_prefix_caching is False,
            "its blocks are found as cached prefixes: leave enable_prefix_caching on",
        ),
        (
            given[0],
            spec.kind != "a decoder",
            f"the model is {spec.kind}, whose blocks are not kept; leave it out",
        ),
        (
            given[0],
            isinstance(parallel, HostAndGpu),
            "tiers are for ranks on devices of one kind; leave it out",
        ),
        (
            given[0],
            args.rank_address is not None,
            "tiers are for the ranks of one host; leave it out",
        ),
        (
            "kv_host_bytes",
            "kv_host_bytes" in given and isinstance(parallel, Pipeline) and spec.is_recurrent,
            "a stage of recurrent layers may have no blocks or no states; leave it out, or use tensor_parallel_size",
        ),
    ):
        if refused:
            raise ConfigError(f"{name}={getattr(args, name)!r}: {why}", field=name)
