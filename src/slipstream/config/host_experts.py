"""Checks the setting `host_experts`: the number of mixtures whose experts are on the host.

ConfigError names a setting that conflicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.config.settings import (
    GPU_MEMORY_SHARE,
    DeviceInfo,
    EngineArgs,
    num_ranks,
    split_setting,
)
from slipstream.errors import ConfigError
from slipstream.spec.host_experts import host_weights, mixtures
from slipstream.spec.model import MoESpec, OwnActivation
from slipstream.spec.native_formats import native_weight_bytes
from slipstream.spec.scheme import NATIVE_PRODUCTS, SCHEMES

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription

CACHE_SHARE = 0.2
"""Share of a GPU's memory that "auto" leaves to the cache, activations and graphs, also for
`cpu_layers`."""


def host_experts(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    dtype_bytes: int,
) -> int:
    """The number of mixtures, counted from the first, whose experts are on the host."""
    wanted = args.host_experts
    if args.hot_expert_bytes is not None and (wanted is None or args.hot_expert_bytes < 1):
        why = (
            "it must be a number of bytes above 0"
            if wanted is not None
            else "it has an effect only with host_experts"
        )
        raise ConfigError(f"hot_expert_bytes: {why}", field="hot_expert_bytes")
    if wanted is None:
        return 0
    count = len(mixtures(model.spec))
    if wanted not in ("all", "auto") and not (
        str(wanted).isdigit() and not isinstance(wanted, bool)
    ):
        raise _refused(f"it must be a number of layers, 'all' or 'auto', got {wanted!r}")
    _check(args, model, device, quantization)
    if wanted == "all":
        return count
    if wanted == "auto":
        return _least(args, model, device, quantization, dtype_bytes)
    if int(wanted) > count:
        raise _refused(
            f"the model has {count} layers with experts, fewer than {wanted}; lower it, or use 'all'"
        )
    return int(wanted)


def _check(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> None:
    drafts = args.speculative_config is not None or args.speculative_model not in (
        None,
        "ngram",
        "suffix",
    )
    scheme = None if quantization is None else SCHEMES[quantization]
    own = [x.mlp for x in model.spec.all_layers if isinstance(x.mlp, MoESpec)]
    for applies, why in (
        (not own, "the model has no layers with experts; leave it out"),
        (not device.is_cuda, "it is for GPUs: on a CPU the host computes everything; leave it out"),
        (
            args.kernels not in ("auto", "triton"),
            f"the GPU's kernels go with it, not kernels={args.kernels!r}",
        ),
        (num_ranks(args) > 1, f"it is for one GPU; leave {split_setting(args)} at 1"),
        (model.spec.kind != "a decoder", f"it is for decoders, and this is {model.spec.kind}"),
        (args.weights_bytes is not None, "it does not go with weights_bytes; leave one out"),
        (args.enable_lora, "adapters were not tried with it; leave out enable_lora"),
        (
            drafts,
            "drafts of a model were not tried with it; use speculative_model='ngram' or 'suffix'",
        ),
        (
            scheme is not None and scheme.name not in (*NATIVE_PRODUCTS["cpu"], "mxfp4"),
            f"the host's kernels have no {quantization} products; use 'int8', 'int4' or 16 bits",
        ),
        (
            any(isinstance(x.expert.activation, OwnActivation) for x in own),
            "the host's kernels don't have this model's activation; leave it out",
        ),
    ):
        if applies:
            raise _refused(why)


def _least(
    args: EngineArgs,
    model: ModelDescription,
    device: DeviceInfo,
    quantization: str | None,
    dtype_bytes: int,
) -> int:
    """The fewest mixtures on the host so that the rest of the model and `CACHE_SHARE` fit on the
    GPU."""
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
    """Bytes of each parameter on a GPU."""
    scheme, formats = (
        None if quantization is None else SCHEMES[quantization],
        model.native_formats(NATIVE_PRODUCTS["triton"]),
    )
    return {
        name: native_weight_bytes(name, shape, scheme, formats, dtype_bytes)
        for name, shape in model.shapes.items()
    }


def room_for_weights(args: EngineArgs, device: DeviceInfo) -> int:
    """Bytes of a GPU's memory for weights, if `CACHE_SHARE` is left to the cache, activations and
    graphs."""
    share = args.gpu_memory_utilization or GPU_MEMORY_SHARE
    return int((share - CACHE_SHARE) * device.memory_bytes) - (
        device.memory_bytes - device.free_bytes
    )


def _refused(why: str) -> ConfigError:
    return ConfigError(f"host_experts: {why}", field="host_experts")
