"""The split of a model over ranks: the form of `ParallelConfig` chosen by the settings. ConfigError
names what ranks can't divide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slipstream.config.forms import (
    ContextParallel,
    DealtRequests,
    HostAndGpu,
    OneDevice,
    ParallelConfig,
    Pipeline,
    TensorParallel,
)
from slipstream.config.settings import DeviceInfo, EngineArgs, num_ranks, split_setting
from slipstream.errors import ConfigError
from slipstream.spec.model import (
    AlibiSpec,
    AttentionSpec,
    BucketSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
)
from slipstream.spec.parallel import SplitUnits, check_split, even_stages
from slipstream.spec.scheme import NATIVE_PRODUCTS, SCHEMES

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription
    from slipstream.spec.model import ModelSpec


def parallel_section(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    *,
    embeds: bool = False,
) -> ParallelConfig:
    """Form in which ranks divide the model. `embeds`: see `Pipeline`. ConfigError names what they
    can't divide."""
    ranks, spec = num_ranks(args), model.spec
    tensor, experts = args.tensor_parallel_size, args.expert_parallel_size
    for name, refused, why in (
        (
            "pipeline_layers",
            args.pipeline_layers is not None and args.pipeline_parallel_size == 1,
            " has an effect only with pipeline_parallel_size; set that, or leave it out",
        ),
        (
            "sequence_parallel",
            args.sequence_parallel and tensor == 1,
            " has an effect only with tensor_parallel_size; set that, or leave it out",
        ),
        (
            "sequence_parallel",
            args.sequence_parallel and spec.encoder is not None,
            " does not cover encoder-decoders; leave it out",
        ),
        (
            "rank_address",
            (args.rank_address is None) != (args.local_ranks is None),
            " and local_ranks go together: set both, or none",
        ),
        (
            "local_ranks",
            args.local_ranks is not None and not 0 < args.local_ranks < ranks,
            f"={args.local_ranks} of {ranks} ranks: at least one must be here, and one on another host",
        ),
    ):
        if refused:
            raise ConfigError(name + why, field=name)
    if ranks == 1:
        return OneDevice()
    _check_ranks(args, device)
    if spec.encoder is not None and spec.encoder.audio is not None:
        field = split_setting(args)
        raise ConfigError(f"{field} does not cover encoders of audio; leave it at 1", field=field)
    if args.cpu_layers is not None and any(x.streams is not None for x in spec.layers):
        raise ConfigError(
            f"cpu_layers does not cover layers with several residuals ({spec.family}); leave it out",
            field="cpu_layers",
        )
    if args.cpu_layers is not None:
        return HostAndGpu(int(args.cpu_layers), spec.num_layers - int(args.cpu_layers))
    if args.context_parallel_size > 1:
        _check_context(args, spec, device)
        if tensor == 1:
            return ContextParallel(args.context_parallel_size)
    check_split(spec, tensor=tensor, experts=experts)
    form: OneDevice | TensorParallel | DealtRequests = OneDevice()
    if tensor > 1:
        units = _units(args, model, device, quantization)
        context = args.context_parallel_size
        form = TensorParallel(tensor, experts > 1, args.sequence_parallel, units, context)
    elif experts > 1:
        _check_dealt_requests(args, spec, device)
        form = DealtRequests(experts)
    stages = _stages(args, spec)
    return Pipeline(form, stages, embeds) if stages else form


def _check_ranks(args: EngineArgs, device: DeviceInfo) -> None:
    """Raise ConfigError for features that do not work with several ranks in any form."""
    ranks, field = num_ranks(args), split_setting(args)
    if args.device.startswith("cuda:"):
        raise ConfigError(
            f"device={args.device!r}: {ranks} ranks take the first {ranks} GPUs; use 'cuda'",
            field="device",
        )
    for refused, what in (
        (device.is_cuda, "several GPUs, on which no whole model has shown it yet"),
        (args.expert_parallel_size > 1, "experts on several ranks"),
        (args.context_parallel_size > 1, "sequences on several ranks"),
    ):
        if args.deterministic and refused:
            raise ConfigError(
                f"deterministic=True does not cover {what} ({field}); leave one out", field=field
            )


def _check_dealt_requests(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> None:
    """Raise ConfigError for features that do not work with separate requests on each rank: all
    ranks must run steps of the same size in the same way."""
    size, found = args.expert_parallel_size, list[tuple[str, str, str]]()
    if spec.encoder is not None or spec.is_encoder:
        found.append((spec.kind, "expert_parallel_size", "leave it at 1"))
    # one rank's graphs would include adapters, another's not
    if args.enable_lora and device.is_cuda:
        found.append(("adapters on GPUs", "enable_lora", "leave it out"))
    if spec.media is not None and args.pipeline_parallel_size > 1 and device.is_cuda:
        found.append(("pictures over stages on GPUs", "max_images", "set it to 0"))
    for what, field, remedy in found[:1]:
        other = (
            "" if field == "expert_parallel_size" else f", or set tensor_parallel_size={size}, too"
        )
        raise ConfigError(
            f"{field}: expert_parallel_size={size} without tensor_parallel_size distributes requests, which does not cover "
            f"{what}; {remedy}{other}",
            field=field,
        )


def _check_context(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> None:
    """Raise ConfigError for features that do not work with keys and values that are divided by tokens."""
    size, found = args.context_parallel_size, list[tuple[str, str, str]]()
    if spec.kind != "a decoder":
        found.append((spec.kind, "context_parallel_size", "leave it at 1"))
    for what, is_there in (
        ("recurrent layers alone, whose states have no tokens to share out", not spec.attentions),
        *_attention_refusals(spec, on_cpu=not device.is_cuda and args.kernels != "triton"),
    ):
        if is_there:
            remedy = "leave it at 1, or use tensor_parallel_size"
            found.append((f"{what} ({spec.family})", "context_parallel_size", remedy))
    if args.kv_cache_dtype == "int4":
        found.append(("a cache of 4 bits", "kv_cache_dtype", "use 'fp8' or 'int8'"))
    if (tensor := args.tensor_parallel_size) > 1 and not found:
        for a in spec.attentions:
            copies = tensor if isinstance(a, LatentAttentionSpec) else tensor // a.num_kv_heads
            if tensor % a.num_kv_heads or copies % size:
                raise ConfigError(
                    f"context_parallel_size={size}: tensor_parallel_size={tensor} holds each of {a.num_kv_heads} kv heads "
                    f"{max(1, copies)} times, and it must divide that; lower it, or leave out tensor_parallel_size",
                    field="context_parallel_size",
                )
    for what, field, remedy in found[:1]:
        raise ConfigError(
            f"{field}: context_parallel_size={size} does not cover {what}; {remedy}", field=field
        )


def _attention_refusals(spec: ModelSpec, *, on_cpu: bool) -> list[tuple[str, bool]]:
    """(kind of attention whose keys can't be divided among ranks by tokens, whether the model has
    it)."""
    kinds = [a for a in spec.attentions if isinstance(a, AttentionSpec)]
    latents = [a for a in spec.attentions if isinstance(a, LatentAttentionSpec)]
    return [
        ("attention windows on GPUs", not on_cpu and any(a.window is not None for a in kinds)),
        ("scores by distance", any(isinstance(a.position, AlibiSpec | BucketSpec) for a in kinds)),
        ("sparse attention", any(a.index is not None for a in latents)),
        ("sparse attention to blocks", any(a.index is not None for a in kinds)),
        ("compressed keys", any(isinstance(a, CompressedAttentionSpec) for a in latents)),
    ]


def _stages(args: EngineArgs, spec: ModelSpec) -> tuple[int, ...]:
    """Number of layers of each pipeline stage; empty without a pipeline."""
    size, given = args.pipeline_parallel_size, args.pipeline_layers
    if size == 1:
        return ()
    if spec.kind == "an encoder-decoder" or spec.is_encoder:
        raise ConfigError(
            f"pipeline_parallel_size={size}: {spec.kind} has no stages; use tensor_parallel_size",
            field="pipeline_parallel_size",
        )
    if spec.layer_inputs is not None or spec.owners != tuple(range(spec.num_layers)):
        raise ConfigError(
            f"pipeline_parallel_size={size}: layers of {spec.family} read the first stage's inputs, or the keys and values of "
            "an earlier layer, which another stage has not got; use tensor_parallel_size",
            field="pipeline_parallel_size",
        )
    if any(x.streams is not None for x in spec.layers):
        raise ConfigError(
            f"pipeline_parallel_size={size}: layers of {spec.family} have several residuals, which stages don't send; use "
            "tensor_parallel_size",
            field="pipeline_parallel_size",
        )
    if size > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={size} is more than the model's layers ({spec.num_layers}); lower it",
            field="pipeline_parallel_size",
        )
    media = spec.media
    stacked = 0 if media is None else media.num_added
    if given is None:
        return _with_stacked(even_stages(spec, size), stacked)
    counts = tuple(int(text) if text.strip().isdecimal() else 0 for text in given.split(","))
    if len(counts) != size or min(counts) < 1 or sum(counts) != spec.num_layers:
        raise ConfigError(
            f"pipeline_layers={given!r}: it must name {size} numbers above 0 that add up to the {spec.num_layers} layers",
            field="pipeline_layers",
        )
    return _with_stacked(counts, stacked)


def _with_stacked(counts: tuple[int, ...], stacked: int) -> tuple[int, ...]:
    """Check and return the number of layers of each stage. ConfigError unless the first stage has
    all layers that add an image encoder's outputs."""
    if counts[0] < stacked:
        raise ConfigError(
            f"pipeline_parallel_size={len(counts)}: the encoder's states are added behind the first {stacked} layers, and the "
            f"first stage has {counts[0]}; set pipeline_layers to give it as many, or max_images=0",
            field="pipeline_layers",
        )
    return counts


def _units(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> SplitUnits:
    """Number of consecutive inputs with a common scale in attention's output projection, and in an
    MLP's down projection."""
    attention, mlp = [1], [1]
    if quantization is not None:
        scheme = SCHEMES[quantization]
        mlp.append(scheme.multiple)
        attention += [] if scheme.experts_only else [scheme.multiple]
    for name, fmt in model.native_formats(native_products(args.kernels, device)).items():
        least = 16 if fmt.inputs is not None else 64
        unit = math.lcm(least, fmt.group_size or 1, fmt.block_rows)
        # a recurrent layer is split by heads like attention, or by channels like an MLP
        attention += [unit] if ".attention." in name or ".recurrent." in name else []
        mlp += [] if ".attention." in name else [unit]
    if model.gguf is not None and model.family.gguf is not None:
        for name, place in model.family.gguf.names(model.spec).items():
            if name in model.gguf.tensors and place.target.endswith(
                (".out.weight", ".down.weight")
            ):
                unit = model.gguf.tensors[name].quant.block_size
                of_heads = place.target.endswith(".out.weight")
                attention += [unit] if of_heads else []
                mlp += [unit] if not of_heads or ".recurrent." in place.target else []
    return SplitUnits(math.lcm(*attention), math.lcm(*mlp))


def native_products(kernels: str, device: DeviceInfo) -> frozenset[str]:
    """`OpSet.rounded` of the device's op set."""
    return NATIVE_PRODUCTS["triton" if device.is_cuda else "cpu" if kernels == "auto" else kernels]
