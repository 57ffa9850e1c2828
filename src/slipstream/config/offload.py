"""Offloading: its form, chosen by the settings `weights_bytes` and `host_experts`.

ConfigError names a conflicting setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slipstream.config.forms import HostExperts, InMemory, Offload, StreamedLayers
from slipstream.config.settings import (
    GPU_MEMORY_SHARE,
    DeviceInfo,
    EngineArgs,
    num_ranks,
    split_setting,
)
from slipstream.errors import ConfigError
from slipstream.spec.host_experts import host_weights, mixtures
from slipstream.spec.model import ClampedSilu, MoESpec, OwnActivation
from slipstream.spec.scheme import NATIVE_PRODUCTS, SCHEMES
from slipstream.spec.stored.native_formats import native_weight_bytes

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription

CACHE_SHARE = 0.2
"""Fraction of a GPU's memory that "auto" leaves to the cache, activations and graphs, also for
`cpu_layers`."""

Refusal = tuple[bool, str]  # (whether it applies, reason)


def offload_section(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    dtype_bytes: int,
) -> Offload:
    """Form of offloading. ConfigError if the model, the device or other settings do not allow it."""
    hot, wanted = args.hot_expert_bytes, args.host_experts
    if hot is not None and (wanted is None or hot < 1):
        why = (
            "it has an effect only with host_experts"
            if wanted is None
            else "it must be a number of bytes above 0"
        )
        raise ConfigError(f"hot_expert_bytes: {why}", field="hot_expert_bytes")
    if wanted is not None:
        count = number_or_word("host_experts", wanted, ("all", "auto"))
        refuse("host_experts", _host_expert_refusals(args, model, device, quantization))
        most = len(mixtures(model.spec))
        if count == "auto":
            count = _least_mixtures(args, model, device, quantization, dtype_bytes)
        elif count == "all":
            count = most
        why = (
            f"the model has {most} layers with experts, fewer than {count}; lower it, or use 'all'"
        )
        refuse("host_experts", [(int(count) > most, why)])
        return HostExperts(int(count), hot or 0) if count else InMemory()
    if args.weights_bytes is not None:
        refuse("weights_bytes", _streaming_refusals(args, model, device))
        return StreamedLayers(args.weights_bytes)
    return InMemory()


def refuse(field: str, refusals: Iterable[Refusal]) -> None:
    """Raise ConfigError with the first of the given reasons that applies."""
    for applies, why in refusals:
        if applies:
            raise ConfigError(f"{field}: {why}", field=field)


def number_or_word(field: str, value: object, words: tuple[str, ...]) -> int | str:
    """Setting that is a number of layers or one of some words. ConfigError if it is neither."""
    if value in words:
        return str(value)
    if isinstance(value, bool) or not str(value).isdigit():
        *others, last = map(repr, words)
        named = ", ".join(["a number of layers", *others])
        raise ConfigError(f"{field}: it must be {named} or {last}, got {value!r}", field=field)
    return int(str(value))


def scheme_refusal(quantization: str | None) -> Refusal:
    """Error text for a scheme whose linear layers the CPU of a GPU's host can't compute."""
    scheme = SCHEMES.get(quantization or "")
    why = f"the host's kernels have no {quantization} products; use 'int8', 'int4' or 16 bits"
    return scheme is not None and scheme.name not in NATIVE_PRODUCTS["cpu"], why


def _streaming_refusals(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo
) -> list[Refusal]:
    on_cpu, given = not device.is_cuda, args.weights_bytes
    return [
        (given is None or given < 1, f"it must be a number of bytes above 0, got {given!r}"),
        (
            on_cpu and args.kernels not in ("auto", "cpu"),
            f"it needs the CPU's C++ kernels, not kernels={args.kernels!r}",
        ),
        (num_ranks(args) > 1, f"it is for one device; leave {split_setting(args)} at 1"),
        (model.spec.kind != "a decoder", f"it is for decoders, and this is {model.spec.kind}"),
        (args.enable_lora, "adapters need all weights in memory; leave out enable_lora"),
        (
            model.spec.media is not None and args.max_images != 0,
            "a model with an encoder of pictures or sounds needs all weights in memory; set max_images=0",
        ),
        (
            on_cpu and model.quantization is not None and model.quantization.rounds,
            "on a CPU it covers dense and GGUF checkpoints, and this one's weights are rounded in another way; convert it to "
            "GGUF",
        ),
        (
            args.dense_copies is True and device.is_cuda,
            "dense copies of 4-bit weights would be copied to the GPU in each step; leave out dense_copies",
        ),
    ]


def _host_expert_refusals(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> list[Refusal]:
    own = [x.mlp for x in model.spec.all_layers if isinstance(x.mlp, MoESpec)]
    return [
        (not own, "the model has no layers with experts; leave it out"),
        (not device.is_cuda, "it is for GPUs: on a CPU the host computes everything; leave it out"),
        (
            args.kernels not in ("auto", "triton"),
            f"the GPU's kernels go with it, not kernels={args.kernels!r}",
        ),
        (num_ranks(args) > 1, f"it is for one GPU; leave {split_setting(args)} at 1"),
        (args.weights_bytes is not None, "it does not go with weights_bytes; leave one out"),
        (model.spec.kind != "a decoder", f"it is for decoders, and this is {model.spec.kind}"),
        (args.enable_lora, "adapters were not tried with it; leave out enable_lora"),
        scheme_refusal(quantization),
        (
            any(isinstance(x.expert.activation, OwnActivation | ClampedSilu) for x in own),
            "the host's kernels don't have this model's activation; leave it out",
        ),
    ]


def _least_mixtures(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    dtype_bytes: int,
) -> int:
    """Smallest number of MoE layers on the host so that the rest of the model and `CACHE_SHARE` fit
    on the GPU."""
    sizes = weight_sizes(model, quantization, dtype_bytes)
    room = room_for_weights(args, device) - (args.hot_expert_bytes or 0)
    count = len(mixtures(model.spec))
    for number in range(count):
        there = host_weights(model.spec, number)
        if sum(size for name, size in sizes.items() if name not in there) <= room:
            return number
    return count


def weight_sizes(
    model: ModelDescription, quantization: str | None, dtype_bytes: int
) -> dict[str, int]:
    """Bytes of each parameter on a GPU, by name."""
    scheme = None if quantization is None else SCHEMES[quantization]
    formats = model.native_formats(NATIVE_PRODUCTS["triton"])
    return {
        name: native_weight_bytes(name, shape, scheme, formats, dtype_bytes)
        for name, shape in model.shapes.items()
    }


def room_for_weights(args: EngineArgs, device: DeviceInfo) -> int:
    """Bytes of a GPU's memory for weights, after `CACHE_SHARE` for the cache, activations and
    graphs."""
    share = args.gpu_memory_utilization or GPU_MEMORY_SHARE
    return int((share - CACHE_SHARE) * device.memory_bytes) - (
        device.memory_bytes - device.free_bytes
    )
