"""`resolve`: from the user's settings to those that an engine runs with. Pure; one function for
each section of `EngineConfig`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

from slipstream.config.cache import cache_section, check_tiers
from slipstream.config.chosen import Chosen, Origins, positive
from slipstream.config.cpu_layers import with_cpu_layers
from slipstream.config.determinism import check_deterministic
from slipstream.config.formats import (
    auto_dtype,
    check_formats,
    has_formats,
    parameters_of_4_bits,
    parameters_of_8_bits,
    stored_scheme,
)
from slipstream.config.forms import HeadDrafts, MTPDrafts, Offload, ParallelConfig, StreamedLayers
from slipstream.config.handover import check_handover
from slipstream.config.offload import offload_section
from slipstream.config.parallel import parallel_section
from slipstream.config.routed_experts import check_routed_experts
from slipstream.config.scheduling import scheduling_section
from slipstream.config.sections import (
    DeviceConfig,
    EngineConfig,
    LoRASettings,
    MediaSettings,
    ModelConfig,
    Origin,
)
from slipstream.config.settings import DTYPE_BYTES, DeviceInfo, EngineArgs, num_ranks
from slipstream.config.speculative import check_drafts, speculation_section
from slipstream.errors import ConfigError
from slipstream.spec.drafts.heads import WITHOUT_EMBEDDINGS
from slipstream.spec.model import ModelSpec

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


DENSE_SHARE = 0.25
"""Maximum fraction of a GPU's memory for dense copies of 4-bit weights, unless the user sets it."""

FEW_SEQUENCES = 8
"""Maximum number of tokens in a step for which sparse weights are faster on a CPU."""

_logger = logging.getLogger("slipstream.config")


def resolve(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> EngineConfig:
    """Check `args` against the model and the device, and choose the open settings. ConfigError
    names a wrong setting."""
    stored = stored_scheme(args, model, device)
    num_ranks(args)
    speculation = speculation_section(args, model.spec)
    args = with_cpu_layers(args, model, device, stored.value)
    check_deterministic(args, model, device, stored.value)
    check_routed_experts(args, model)
    _refuse_without_effect(args, device)
    check_formats(args, model, device, args.quantization or stored.value)
    model_config, model_origins = _model_section(args, model, device, stored)
    embeds = (
        isinstance(speculation, HeadDrafts | MTPDrafts)
        and speculation.method not in WITHOUT_EMBEDDINGS
    )
    parallel = parallel_section(args, model, device, model_config.quantization, embeds=embeds)
    cache, cache_origins = cache_section(args, model, device, model_config.dtype)
    check_tiers(args, model.spec, device, parallel)
    check_handover(args, model.spec)
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
    if model.not_applied:
        _say_once(
            f"{model.name}: its generation config's {', '.join(model.not_applied)} are not applied: answers are drawn as a "
            "request says"
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
        media=_media_section(args, model.spec, device),
        parallel=parallel,
        origins={**given, **model_origins, **cache_origins, **scheduling_origins, **device_origins},
    )
    check_drafts(config, args)
    return config


def _model_section(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, stored: Origin
) -> tuple[ModelConfig, Origins]:
    chosen = Chosen(args)
    dtype_auto, dtype_why = auto_dtype(model.dtype, device)
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
    rounded = quantization or ("compressed-tensors" if has_formats(model) else None)
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
        routed_experts=args.enable_return_routed_experts,
    )
    return config, chosen.origins


def _device_section(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    offload: Offload,
    parallel: ParallelConfig,
) -> tuple[DeviceConfig, Origins]:
    chosen = Chosen(args)
    if args.num_threads is not None:
        positive("num_threads", args.num_threads)
    copied = (
        parameters_of_4_bits(args, model, device, quantization) if _has_tiles(args, device) else 0
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
    elif parameters := parameters_of_8_bits(args, model, device, quantization):
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


def _media_section(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> MediaSettings | None:
    if spec.media is None:
        for name, value in (
            ("max_images", args.max_images or None),
            ("image_cache_bytes", args.image_cache_bytes),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} has an effect only with a model that takes pictures or sounds; leave it out",
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
    alone = "max_images=0 serves the model without them"
    if args.deterministic:
        raise ConfigError(
            f"deterministic=True does not cover encoders of pictures or sounds; {alone}",
            field="deterministic",
        )
    size = (256 if device.is_cuda else 64) * 2**20
    return MediaSettings(
        max_inputs=args.max_images or 16,
        cache_bytes=size if args.image_cache_bytes is None else args.image_cache_bytes,
    )


def _has_graphs(args: EngineArgs, spec: ModelSpec) -> bool:
    """Whether steps can run in graphs.

    Generators can. Encoders can unless `deterministic`: their kernels' launches would not depend on
    the number of tokens alone. The reference can't: its attention reads lengths on the host.
    """
    if spec.reads_lengths:
        return False
    return args.kernels != "reference" and (
        spec.generates or (spec.is_encoder and not args.deterministic)
    )


def _has_tiles(args: EngineArgs, device: DeviceInfo) -> bool:
    return device.is_cuda and args.kernels in ("auto", "triton")


def _computes_on_host(args: EngineArgs, device: DeviceInfo) -> bool:
    return not device.is_cuda or args.host_experts is not None or args.cpu_layers is not None


@functools.cache
def _say_once(notice: str) -> None:
    """Log a notice to the user once per process, because settings are resolved several times."""
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
    ):
        if getattr(args, name) not in (None, "auto", False) and not applies:
            raise ConfigError(f"{name} has an effect only with {where}; leave it out", field=name)
