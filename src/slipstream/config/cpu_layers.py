"""Layers that the host's CPU computes besides a GPU (`cpu_layers`): their number, and the settings
of the two stages.

    CPU   embedding, the first layers ──residual──> GPU   the other layers, output head, sampling

The two are a pipeline: while the GPU computes one step, the CPU computes the next one, for other
requests. ConfigError names settings that conflict with it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from slipstream.config.offload import (
    Refusal,
    number_or_word,
    refuse,
    room_for_weights,
    scheme_refusal,
    weight_sizes,
)
from slipstream.config.sections import EngineConfig
from slipstream.config.settings import DTYPE_BYTES, PARALLEL_SIZES, DeviceInfo, EngineArgs

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


def with_cpu_layers(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, stored: str | None
) -> EngineArgs:
    """The settings with at least one layer on the CPU, or None if "auto" finds that all layers fit
    on the GPU. `stored`: the scheme of the checkpoint's weights."""
    if args.cpu_layers is None:
        return args
    wanted, count = number_or_word("cpu_layers", args.cpu_layers, ("auto",)), model.spec.num_layers
    quantization = args.quantization or stored
    refuse("cpu_layers", _refusals(args, model, device, quantization))
    if args.dtype == "auto" and model.dtype == "float16":
        args = dataclasses.replace(args, dtype="bfloat16")  # a CPU has no fast float16
    if wanted == "auto":
        return dataclasses.replace(
            args, cpu_layers=_least(args, model, device, quantization) or None
        )
    why = f"got {wanted}, and the model has {count} layers: the CPU and the GPU need at least one each"
    refuse("cpu_layers", [(not 0 < int(wanted) < count, why)])
    return dataclasses.replace(args, cpu_layers=int(wanted))


def stage_args(
    args: EngineArgs, config: EngineConfig, num_threads: int
) -> tuple[EngineArgs, EngineArgs]:
    """Settings of the CPU's stage and of the GPU's stage, which form an ordinary pipeline of two
    stages.

    Common settings come from `config`, which was resolved for the GPU, because a CPU would choose
    others.
    """
    common = dataclasses.replace(
        args,
        cpu_layers=None,
        pipeline_parallel_size=2,
        pipeline_layers=",".join(map(str, config.parallel.stages)),
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.dtype,
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
        max_num_mixed_tokens=config.scheduling.max_num_mixed_tokens,
        num_threads=None,
    )
    # Graphs of this stage were not tried on a GPU.
    gpu = dataclasses.replace(common, device="cuda", enforce_eager=True)
    of_cpu = dict(
        gpu_memory_utilization=None, kv_cache_bytes=None, tile_table="auto", num_threads=num_threads
    )
    return dataclasses.replace(common, device="cpu", **of_cpu), gpu  # type: ignore[arg-type]


def _refusals(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> list[Refusal]:
    ranks = [getattr(args, name) for name in PARALLEL_SIZES]
    return [
        (not device.is_cuda, "it is for GPUs: without one the CPU has all layers; leave it out"),
        (
            args.device.startswith("cuda:"),
            "it takes the first GPU that CUDA_VISIBLE_DEVICES leaves; use device='cuda'",
        ),
        (
            args.kernels != "auto",
            f"a CPU and a GPU use different kernels; leave out kernels={args.kernels!r}",
        ),
        (max(ranks) > 1, "it is for one GPU; leave the parallel sizes at 1"),
        (
            model.spec.media is not None,
            "pictures and sounds were not tried with it; set max_images=0",
        ),
        (args.weights_bytes is not None, "it does not go with weights_bytes; leave one out"),
        (args.host_experts is not None, "it does not go with host_experts; leave one out"),
        (model.spec.kind != "a decoder", f"it is for decoders, and this is {model.spec.kind}"),
        (args.enable_lora, "adapters were not tried with it; leave out enable_lora"),
        (args.deterministic, "deterministic=True does not cover it; leave one out"),
        scheme_refusal(quantization),
        (
            args.kv_cache_dtype in ("fp8", "int4"),
            f"a CPU's cache can't be {args.kv_cache_dtype}; use kv_cache_dtype='int8', or leave it at 'auto'",
        ),
        (
            device.best_dtype == "float16",
            f"{device.name} has no bfloat16, and a CPU no fast float16",
        ),
        (args.dtype == "float16", "float16 is slow and imprecise on a CPU; use dtype='bfloat16'"),
    ]


def _least(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> int:
    """Smallest number of layers to put on the host so that the others and the cache fit on the GPU.
    A GPU computes a layer several times faster than the host, for any number of tokens."""
    on_gpu, of_layer = 0, [0] * model.spec.num_layers
    element = DTYPE_BYTES.get(args.dtype, DTYPE_BYTES[device.best_dtype])
    for name, size in weight_sizes(model, quantization, element).items():
        if name.startswith("layers."):
            of_layer[int(name.split(".")[1])] += size
        else:
            on_gpu += size
    room = room_for_weights(args, device)
    for number in range(model.spec.num_layers - 1):
        if on_gpu + sum(of_layer[number:]) <= room:
            return number
    return model.spec.num_layers - 1
