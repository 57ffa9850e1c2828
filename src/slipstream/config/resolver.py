"""`resolve`: from the user's settings to those that an engine runs with. Pure; one function for
each section of `EngineConfig`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING, Any

from slipstream.config.chosen import Chosen, Origins, positive
from slipstream.config.cpu_layers import with_cpu_layers
from slipstream.config.forms import (
    DealtRequests,
    HostAndGpu,
    Offload,
    ParallelConfig,
    Pipeline,
    StreamedLayers,
)
from slipstream.config.handover import check_handover, handover_section
from slipstream.config.offload import offload_section
from slipstream.config.parallel import native_products, parallel_section
from slipstream.config.scheduling import scheduling_section
from slipstream.config.sections import (
    STATES_TO_FIT,
    CacheConfig,
    CacheEventSettings,
    DeviceConfig,
    EngineConfig,
    ImageSettings,
    LoRASettings,
    ModelConfig,
    Origin,
)
from slipstream.config.settings import (
    DTYPE_BYTES,
    GPU_MEMORY_SHARE,
    KV_BYTES,
    DeviceInfo,
    DType,
    EngineArgs,
    num_ranks,
    one_of,
)
from slipstream.config.speculative import check_drafts, speculation_section
from slipstream.errors import ConfigError
from slipstream.spec.cache import attention_depth, state_interval
from slipstream.spec.devices.gpu_archs import gpu_arch, least_with_fp8
from slipstream.spec.model import CompressedAttentionSpec, LatentAttentionSpec, ModelSpec, MoESpec
from slipstream.spec.scheme import NATIVE_PRODUCTS, SCHEMES
from slipstream.spec.stored.gguf_types import FORMS as GGUF_FORMS
from slipstream.spec.stored.native_formats import is_product

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription

CPU_SCHEMES = frozenset(
    name for name, scheme in SCHEMES.items() if scheme.name in NATIVE_PRODUCTS["cpu"]
)
FOUR_BITS = ("int4", "nvfp4", "mxfp4")
"""Products whose steps of many tokens are faster with a dense copy."""
DENSE_SHARE = 0.25
"""Largest share of a GPU's memory for dense copies of 4-bit weights, if the user says nothing."""

FEW_SEQUENCES = 8
"""Number of tokens of a step up to which a CPU's sparse weights are the faster form."""

_logger = logging.getLogger("slipstream.config")


def resolve(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> EngineConfig:
    """Check `args` against the model and the device, and choose the open settings. ConfigError
    names a wrong setting."""
    stored = _stored_scheme(args, model, device)
    num_ranks(args)
    speculation = speculation_section(args, model.spec)
    args = with_cpu_layers(args, model, device, stored.value)
    _refuse_without_effect(args, device)
    _check_formats(args, model, device, args.quantization or stored.value)
    model_config, model_origins = _model_section(args, model, device, stored)
    parallel = parallel_section(args, model, device, model_config.quantization)
    cache, cache_origins = _cache_section(args, model, device, model_config.dtype)
    _check_tiers(args, model.spec, device, parallel)
    check_handover(args, model.spec, device)
    scheduling, scheduling_origins = scheduling_section(
        args,
        model.spec,
        device,
        model_config.max_model_len,
        offload=model_config.offload,
        parallel=parallel,
        speculation=speculation,
    )
    device_config, device_origins = _device_section(
        args, model, device, model_config.quantization, model_config.offload, parallel
    )
    values = {f.name: (getattr(args, f.name), f.default) for f in dataclasses.fields(args)}
    given = {
        name: Origin(value, "default" if value == default else "user")
        for name, (value, default) in values.items()
    }
    config = EngineConfig(
        model=model_config,
        cache=cache,
        scheduling=scheduling,
        device=device_config,
        speculation=speculation,
        lora=_lora_section(args, model.spec),
        images=_image_section(args, model.spec, device),
        parallel=parallel,
        origins={**given, **model_origins, **cache_origins, **scheduling_origins, **device_origins},
    )
    check_drafts(config, args)
    return config


# --- The sections --------------------------------------------------------------------


def _model_section(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, stored: Origin
) -> tuple[ModelConfig, Origins]:
    chosen = Chosen(args)
    dtype_auto, dtype_why = _auto_dtype(model.dtype, device)
    dtype = chosen("dtype", dtype_auto, "device", dtype_why)
    if dtype == "float16" and not device.is_cuda:
        raise ConfigError(
            "dtype='float16' is slow and imprecise on a CPU; use 'bfloat16' or 'float32'",
            field="dtype",
        )
    quantization = chosen("quantization", stored.value, "model", stored.reason)
    if stored.value is not None and quantization != stored.value:
        raise ConfigError(
            f"quantization={quantization!r}, but the checkpoint's weights are {stored.value}; leave it out",
            field="quantization",
        )
    rounded = quantization or ("compressed-tensors" if _has_formats(model) else None)
    if (
        rounded is not None
        and dtype == "float32"
        and device.is_cuda
        and args.kernels != "reference"
    ):
        raise ConfigError(
            f"quantization={rounded!r} computes in 16 bits on a GPU; use dtype='bfloat16' or 'float16'",
            field="dtype",
        )
    spec = model.spec
    longest = spec.max_position
    if model.pooling.max_length is not None:
        longest = min(longest, model.pooling.max_length)
    max_model_len = chosen("max_model_len", longest, "model", "the context the model was made for")
    positive("max_model_len", max_model_len)
    if spec.generates and max_model_len < 2:
        message = f"max_model_len={max_model_len} is too short for a prompt and an answer of a token each; raise it"
        raise ConfigError(message, field="max_model_len")
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the {spec.max_position} tokens that the model was made for; lower it",
            field="max_model_len",
        )
    if args.canary == "refuse" and args.load_format == "dummy":
        raise ConfigError(
            "canary='refuse' can't hold for random weights (load_format='dummy'); leave it out",
            field="canary",
        )
    config = ModelConfig(
        model=args.model,
        path=model.path,
        tokenizer=args.tokenizer,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        load_format=args.load_format,
        weights_cache=args.weights_cache,
        seed=args.seed,
        skip_tokenizer_init=args.skip_tokenizer_init,
        offload=offload_section(args, model, device, quantization, DTYPE_BYTES[dtype]),
    )
    return config, chosen.origins


def _cache_section(
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
    prefixes = args.enable_prefix_caching
    if spec.needs_full_prompt:
        prefixes = chosen.needs_full_prompt("enable_prefix_caching", False)
    config = CacheConfig(
        dtype=kv_dtype,
        block_size=block_size,
        gpu_memory_utilization=share,
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=prefixes,
        groups=spec.cache_groups,
        host_bytes=args.kv_host_bytes,
        disk_bytes=args.kv_disk_bytes,
        disk_path=args.kv_disk_path,
        handover=handover_section(args),
        eviction=args.cache_eviction,
        state_slots=_state_slots(args, spec),
        state_interval=state_interval(spec, DTYPE_BYTES[dtype], KV_BYTES[kv_dtype]),
        attention_tokens=attention_depth(spec),
        events=_cache_events(args.kv_events_config, prefixes),
    )
    return config, chosen.origins


def _cache_events(given: dict[str, Any] | None, prefixes: bool | None) -> CacheEventSettings | None:
    """The settings of vLLM's kv_events_config that have an effect here. ConfigError names others."""
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
"""Sizes of heads that a Hadamard matrix and the kernels' tiles cover."""


def _check_int4_cache(args: EngineArgs, device: DeviceInfo, spec: ModelSpec) -> None:
    """Raise ConfigError if the model's attention, or the device, has no cache of 4 bits."""
    kinds = [layer.attention for layer in spec.layers if layer.attention is not None]
    sizes = sorted({a.head_dim for a in kinds if a.head_dim not in INT4_HEAD_DIMS})
    for wrong, why in (
        (
            _on_cpu(args, device) and args.kernels != "triton",
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


def _state_slots(args: EngineArgs, spec: ModelSpec) -> int:
    """Return the number of slots that was asked for, 0 for a model without recurrent layers."""
    if args.state_slots is None:
        return STATES_TO_FIT if spec.is_recurrent else 0
    if not spec.is_recurrent:
        raise ConfigError(
            "state_slots is for models with recurrent layers, and this one has none; leave it out",
            field="state_slots",
        )
    if args.state_slots < 4:
        raise ConfigError(f"state_slots={args.state_slots} must be at least 4", field="state_slots")
    return args.state_slots


def _check_tiers(
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
            not args.enable_prefix_caching,
            "its blocks are found as cached prefixes: leave enable_prefix_caching on",
        ),
        (
            given[0],
            spec.kind != "a decoder",
            f"the model is {spec.kind}, whose blocks are not kept; leave it out",
        ),
        (
            given[0],
            isinstance(parallel.stage, DealtRequests) or isinstance(parallel, HostAndGpu),
            "tiers are for ranks that have a part of each request's cache; leave it out, or set tensor_parallel_size",
        ),
        (
            given[0],
            args.rank_address is not None,
            "tiers are for the ranks of one host; leave it out",
        ),
        (
            "kv_host_bytes",
            "kv_host_bytes" in given and isinstance(parallel, Pipeline),
            "a pipeline's stages have caches of different sizes; leave it out, or use tensor_parallel_size",
        ),
    ):
        if refused:
            raise ConfigError(f"{name}={getattr(args, name)!r}: {why}", field=name)


def _device_section(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    offload: Offload,
    parallel: ParallelConfig,
) -> tuple[DeviceConfig, Origins]:
    chosen, layers = Chosen(args), model.spec.all_layers
    if args.deterministic and (
        model.spec.is_recurrent  # chunks of a prompt round otherwise than single tokens
        or any(
            isinstance(x.mlp, MoESpec) or isinstance(x.attention, LatentAttentionSpec)
            for x in layers
        )
    ):
        raise ConfigError(
            "deterministic=True does not cover recurrent layers, mixtures of experts and latent attention; leave it out",
            field="deterministic",
        )
    if args.num_threads is not None:
        positive("num_threads", args.num_threads)
    copied = (
        _parameters_of_4_bits(args, model, device, quantization) if _has_tiles(args, device) else 0
    )
    dense_copies = False
    if copied and isinstance(offload, StreamedLayers):
        dense_copies = chosen(
            "dense_copies", False, "default", "layers beyond weights_bytes are copied in each step"
        )
    elif copied:
        fits = 2 * copied <= DENSE_SHARE * device.memory_bytes
        share = f"{2 * copied / 2**30:.1f} GiB are {'at most' if fits else 'more than'} a quarter of the GPU's memory"
        dense_copies = chosen("dense_copies", fits, "device", share)
    elif parameters := _parameters_of_8_bits(args, model, device, quantization):
        several = args.max_num_seqs is None or args.max_num_seqs > FEW_SEQUENCES
        fits = parameters <= DENSE_SHARE * device.memory_bytes
        why = f"steps of more than {FEW_SEQUENCES} sequences may come, and a quarter of the memory holds them"
        dense_copies = chosen(
            "dense_copies",
            several and fits,
            "device",
            why if several and fits else f"not so: {why}",
        )
    elif args.dense_copies:
        raise ConfigError(
            "dense_copies has an effect only with 4-bit weights on a GPU and with int8 on a CPU; leave it out",
            field="dense_copies",
        )
    config = DeviceConfig(
        info=device,
        kernels=args.kernels,
        tile_table=args.tile_table
        if _has_tiles(args, device) and not args.deterministic
        else "none",
        enforce_eager=args.enforce_eager or not device.is_cuda or not _has_graphs(args, model.spec),
        deterministic=args.deterministic,
        dense_copies=dense_copies,
        num_threads=chosen(
            "num_threads",
            max(1, device.num_threads // parallel.num_ranks),
            "device",
            "the cores this process may use",
        ),
        fixed_threads=args.num_threads is not None,
    )
    return config, chosen.origins


def _lora_section(args: EngineArgs, spec: ModelSpec) -> LoRASettings | None:
    sizes = {name: getattr(args, name) for name in ("max_loras", "max_lora_rank", "max_cpu_loras")}
    if not args.enable_lora:
        for name, value in {**sizes, "lora_modules": args.lora_modules}.items():
            if value is not None:
                raise ConfigError(
                    f"{name} has an effect only with enable_lora; set that, or leave it out",
                    field=name,
                )
        return None
    for name, value in sizes.items():
        if value is not None:
            positive(name, value)
    if spec.is_encoder or spec.encoder is not None or not spec.generates:
        message = (
            f"enable_lora: adapters are for decoders that generate text, and this is {spec.kind}"
        )
        raise ConfigError(message, field="enable_lora")
    if args.deterministic:
        raise ConfigError(
            "enable_lora: deterministic=True does not cover adapters; leave one out",
            field="enable_lora",
        )
    num, rank = sizes["max_loras"] or 8, sizes["max_lora_rank"] or 16
    on_host = sizes["max_cpu_loras"] or 4 * num
    if rank > 512:
        raise ConfigError(f"max_lora_rank={rank}: at most 512", field="max_lora_rank")
    if on_host < num:
        raise ConfigError(
            f"max_cpu_loras={on_host} is below max_loras={num}, all of which are kept on the host too; raise it",
            field="max_cpu_loras",
        )
    modules = tuple((args.lora_modules or {}).items())
    if not all(isinstance(part, str) and part for pair in modules for part in pair):
        raise ConfigError(
            "lora_modules: it has a folder for each name, both texts that are not empty",
            field="lora_modules",
        )
    if len(modules) > on_host:
        raise ConfigError(
            f"lora_modules has {len(modules)} adapters; raise max_cpu_loras={on_host}",
            field="max_cpu_loras",
        )
    return LoRASettings(max_loras=num, max_lora_rank=rank, max_cpu_loras=on_host, modules=modules)


def _image_section(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> ImageSettings | None:
    if spec.vision is None:
        for name, value in (
            ("max_images", args.max_images or None),
            ("image_cache_bytes", args.image_cache_bytes),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} has an effect only with a model that takes pictures; leave it out",
                    field=name,
                )
        return None
    most = args.max_images
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise ConfigError(
            f"max_images must be a whole number (0: only text), got {most!r}", field="max_images"
        )
    if args.image_cache_bytes is not None and args.image_cache_bytes < 0:
        raise ConfigError(
            f"image_cache_bytes={args.image_cache_bytes} must not be negative",
            field="image_cache_bytes",
        )
    alone = "max_images=0 serves the model without pictures"
    if args.deterministic:
        raise ConfigError(
            f"deterministic=True does not cover image encoders; {alone}", field="deterministic"
        )
    size = (256 if device.is_cuda else 64) * 2**20
    return ImageSettings(
        max_images=args.max_images or 16,
        cache_bytes=size if args.image_cache_bytes is None else args.image_cache_bytes,
    )


# --- Choices -------------------------------------------------------------------------


def _stored_scheme(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> Origin:
    """The scheme in which the checkpoint's weights are used; None if they have several formats, or
    are expanded."""
    if not _has_formats(model):
        return Origin(model.scheme, "model", "what the checkpoint holds")
    if args.quantization not in (None, model.scheme):
        raise ConfigError(
            f"quantization={args.quantization!r}, but the checkpoint's weights are rounded already; leave it out",
            field="quantization",
        )
    if _on_cpu(args, device) and (model.scheme not in CPU_SCHEMES or args.kernels == "torch"):
        why = "the checkpoint's rounded weights are expanded: a CPU's kernels have no product with them"
        return Origin(None, "model", why)
    return Origin(model.scheme, "model", "what the checkpoint holds")


def _auto_dtype(trained: str, device: DeviceInfo) -> tuple[DType, str]:
    if not device.is_cuda:
        return device.best_dtype, device.dtype_reason or "the faster one on this CPU"
    if trained == "float16":
        return "float16", "the checkpoint's own"
    if device.compute_capability is not None and not gpu_arch(device.compute_capability).bfloat16:
        return "float16", "this GPU has no bfloat16"
    return "bfloat16", "the GPU's fast type, with float32's range"


def _parameters_of_4_bits(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> int:
    """The number of 4-bit parameters, without experts. Dense copies of them make steps of many
    tokens faster."""
    held = model.native_formats(native_products(args.kernels, device))
    if held:
        sizes = {name: math.prod(shape) for name, shape in model.shapes.items()}
        return sum(
            sizes[name]
            for name, fmt in held.items()
            if fmt.product in FOUR_BITS and ".experts." not in name
        )
    scheme = None if quantization is None else SCHEMES[quantization]
    if scheme is None and model.gguf_type in GGUF_FORMS:
        own = (n for n in model.shapes if is_product(n) and ".experts." not in n)
        return sum(math.prod(model.shapes[name]) for name in own)
    if scheme is None or scheme.experts_only or scheme.name not in FOUR_BITS:
        return 0
    spec = model.spec
    return sum(
        p.rows * p.inner
        for x in spec.all_layers
        for p in x.weight_shapes(spec.hidden_size)
        if p.copies == 1
    )


def _parameters_of_8_bits(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> int:
    """The number of int8 parameters, without experts, that a CPU's kernels may hold sparse."""
    if device.is_cuda or args.kernels not in ("auto", "cpu"):
        return 0
    sizes = {
        name: math.prod(shape) for name, shape in model.shapes.items() if ".experts." not in name
    }
    if held := model.native_formats(native_products(args.kernels, device)):
        return sum(
            sizes[name] for name, fmt in held.items() if name in sizes and fmt.product == "int8"
        )
    if quantization is None or SCHEMES[quantization].name != "int8":
        return 0
    spec = model.spec
    return sum(
        p.rows * p.inner
        for x in spec.all_layers
        for p in x.weight_shapes(spec.hidden_size)
        if p.copies == 1
    )


def _has_formats(model: ModelDescription) -> bool:
    """Whether the checkpoint has a separate format for each weight."""
    return model.quantization is not None and model.quantization.formats is not None


def _has_graphs(args: EngineArgs, spec: ModelSpec) -> bool:
    """Whether steps can run in graphs.

    Generators can. Encoders can unless `deterministic`: their kernels' launches would not depend on
    the number of tokens alone. The reference can't: its attention reads lengths on the host.
    """
    if any(isinstance(a, CompressedAttentionSpec) for a in spec.attentions):
        return False  # it reads lengths on the host, too
    return args.kernels != "reference" and (
        spec.generates or (spec.is_encoder and not args.deterministic)
    )


def _has_tiles(args: EngineArgs, device: DeviceInfo) -> bool:
    return device.is_cuda and args.kernels in ("auto", "triton")


def _on_cpu(args: EngineArgs, device: DeviceInfo) -> bool:
    """Whether the kernels made for a CPU run, not the reference's or a GPU's."""
    return not device.is_cuda and args.kernels != "reference"


# --- Refusals ------------------------------------------------------------------------


def _computes_on_host(args: EngineArgs, device: DeviceInfo) -> bool:
    return not device.is_cuda or args.host_experts is not None or args.cpu_layers is not None


@functools.cache
def _say_once(notice: str) -> None:
    """Log a notice to the user, once in a process: settings are resolved several times."""
    _logger.warning("%s", notice)


def _refuse_without_effect(args: EngineArgs, device: DeviceInfo) -> None:
    if args.gpu_memory_utilization is not None and not device.is_cuda:
        _say_once(
            "gpu_memory_utilization has no effect on a CPU, where kv_cache_bytes sizes the cache"
        )
    for name, applies, where in (
        (
            "num_threads",
            _computes_on_host(args, device),
            "a CPU, or a GPU with host_experts or cpu_layers",
        ),
        ("batch_window_s", args.scheduling_policy == "dynamic", "scheduling_policy='dynamic'"),
        (
            "tile_table",
            _has_tiles(args, device) and not args.deterministic,
            "the GPU's kernels, and without deterministic",
        ),
        ("deterministic", _has_tiles(args, device), "the GPU's kernels"),
    ):
        if getattr(args, name) not in (None, "auto", False) and not applies:
            raise ConfigError(f"{name} has an effect only with {where}; leave it out", field=name)


def _check_formats(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> None:
    """Raise ConfigError if the device's kernels lack the format of weights or cache, the user's or
    the checkpoint's."""
    if quantization is not None:
        one_of("quantization", quantization, tuple(SCHEMES))
    kv_dtype = args.kv_cache_dtype if args.kv_cache_dtype != "auto" else model.kv_cache
    if kv_dtype is not None:
        one_of(
            "kv_cache_dtype", kv_dtype, ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
        )
    kv_off = (
        "leave it at 'auto'"
        if model.kv_cache is None
        else "set it to the model's type, such as 'bfloat16'"
    )
    named = ", ".join(repr(name) for name in SCHEMES if name in CPU_SCHEMES)
    weights = f"{named}, and GGUF's blocks as they are: take one"
    for name, given, here, off in (
        ("quantization", quantization, weights, "leave it at None"),
        ("kv_cache_dtype", kv_dtype, "'int8': take that", kv_off),
    ):
        if _on_cpu(args, device) and given not in (
            None,
            *CPU_SCHEMES,
            "float32",
            "bfloat16",
            "float16",
        ):
            raise ConfigError(
                f"{name}={given!r} needs a GPU; a CPU's kernels have {here}, or {off} (or take kernels='reference', which is "
                "exact and slow)",
                field=name,
            )
    capability = device.compute_capability
    if capability is None or gpu_arch(capability).fp8:
        return
    has, needed = (
        f"{device.name} has {capability[0]}.{capability[1]}",
        "{}.{}".format(*least_with_fp8()),
    )
    if quantization is not None and SCHEMES[quantization].inputs in ("fp8", "fp8-block"):
        raise ConfigError(
            f"quantization={quantization!r} needs a GPU of compute capability {needed} or more; {has}: use 'int8' or 'int4'",
            field="quantization",
        )
    held = model.native_formats(native_products(args.kernels, device))
    if eight := [name for name, fmt in held.items() if fmt.kind == "float" and fmt.bits == 8]:
        raise ConfigError(
            f"{len(eight)} of the checkpoint's weights ({eight[0]} first) are FP8, whose products need a GPU of compute "
            f"capability {needed} or more; {has}: take a checkpoint in int8, int4 or 16 bits",
            field="model",
        )
