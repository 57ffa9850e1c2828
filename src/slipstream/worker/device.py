"""Finds the device, once at the start, in the process that will use it.

On a CPU the first start measures which settings are fastest (`cpu_choice.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from slipstream.config import DeviceInfo
from slipstream.costs.hardware import available_cores, cpu_name, driver_sees_gpu, host_memory
from slipstream.errors import ConfigError, install_command
from slipstream.worker.start.cpu_choice import choose_cpu


def detect(
    requested: str,
    folder: Path,
    *,
    num_threads: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    measuring: Callable[[], None] = lambda: None,
) -> DeviceInfo:
    """Describe the device `requested`: auto (a GPU if there is one), cpu, cuda, or cuda:N.

    With several ranks, it is the device of `rank`. `folder` stores the measurements of this
    machine's CPU, and `measuring` is called if they are made now. `num_threads` is the user's
    choice; None means the fastest. ConfigError if there is no such device, not one for each rank,
    or fewer cores than threads.
    """
    kind, _, index = requested.partition(":")
    if kind == "meta" and index.isdigit():
        return _described(int(index))
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(
            f"device={requested!r} is not one of auto, cpu, cuda, cuda:N", field="device"
        )
    if kind == "cpu" or (kind == "auto" and not driver_sees_gpu()):
        return _cpu(folder, num_threads, measuring)
    try:
        # torch is not needed before
        from slipstream.platform import gpu_platform, has_gpu, num_gpus
        from slipstream.platform.cuda import hash_triton
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"a GPU needs torch: {install_command('gpu')}, or take device='cpu'"
        if not driver_sees_gpu():
            message = (
                f"device={requested!r}: there is no NVIDIA GPU that its driver shows, and no torch; use device='cpu', or, for "
                "a GPU, install its driver and the extra gpu (`slipstream doctor` says what is missing)"
            )
        raise ConfigError(message, field="device") from None
    if kind == "cuda" and not has_gpu():
        raise ConfigError(
            "device='cuda': torch sees no NVIDIA GPU; use device='cpu', or run `slipstream doctor` to see what is missing",
            field="device",
        )
    if kind == "cuda" or (kind == "auto" and has_gpu()):
        ordinal = int(index or 0) + rank
        if num_ranks > num_gpus():
            raise ConfigError(
                f"{num_ranks} ranks need a GPU each, and torch sees {num_gpus()}; lower tensor_parallel_size, or use "
                "device='cpu'",
                field="tensor_parallel_size",
            )
        names = {gpu_platform(i).name for i in range(num_ranks)} if num_ranks > 1 else set()
        if len(names) > 1:
            raise ConfigError(
                f"the ranks' GPUs differ ({', '.join(sorted(names))}), and a step takes as long as on the "
                "slowest; choose equal ones with CUDA_VISIBLE_DEVICES",
                field="tensor_parallel_size",
            )
        if ordinal >= num_gpus():
            raise ConfigError(
                f"device='cuda:{ordinal}': there are {num_gpus()} GPUs", field="device"
            )
        gpu = gpu_platform(ordinal)
        hash_triton()
        if gpu.held():
            # an unused engine of this process must not cause a refusal
            gc.collect()
            gpu.release_unused()
        free, total = gpu.memory()
        return DeviceInfo(
            device=f"cuda:{ordinal}",
            name=gpu.name,
            memory_bytes=total,
            free_bytes=free,
            best_dtype="bfloat16" if gpu.arch.bfloat16 else "float16",
            compute_capability=gpu.capability,
        )
    return _cpu(folder, num_threads, measuring)


def _described(capability: int) -> DeviceInfo:
    """Describe a GPU by its compute capability, such as 90 for 9.0. The machine need not have one
    (`platform/meta.py`)."""
    import torch

    from slipstream.platform import platform_of
    from slipstream.platform.meta import MetaPlatform
    from slipstream.spec.devices.gpu_archs import DESCRIBED_GPUS

    gpu = platform_of(torch.device("meta"))
    assert isinstance(gpu, MetaPlatform)
    if (found := divmod(capability, 10)) != getattr(gpu, "capability", None):
        if found not in DESCRIBED_GPUS:
            known = ", ".join(f"meta:{10 * a + b}" for a, b in DESCRIBED_GPUS)
            raise ConfigError(
                f"device='meta:{capability}' is no GPU that can be described; use one of {known}",
                field="device",
            )
        gpu.describe(DESCRIBED_GPUS[found])
    free, total = gpu.memory()
    return DeviceInfo(
        device="meta",
        name=gpu.name,
        memory_bytes=total,
        free_bytes=free,
        best_dtype="bfloat16",
        compute_capability=gpu.capability,
    )


def _cpu(folder: Path, num_threads: int | None, measuring: Callable[[], None]) -> DeviceInfo:
    if num_threads is not None and num_threads > (cores := available_cores()):
        raise ConfigError(
            f"num_threads={num_threads} is more than the {cores} cores of this process: threads that share a core wait "
            f"for each other in every operator. Use {cores} at most, or leave it out for the measured fastest number",
            field="num_threads",
        )
    choice = choose_cpu(folder, measuring=measuring)
    total, free = host_memory()
    return DeviceInfo(
        device="cpu",
        name=cpu_name(),
        memory_bytes=total,
        free_bytes=free,
        best_dtype=choice.dtype,
        num_threads=num_threads or choice.num_threads,
        dtype_reason=choice.reason,
        isa=choice.isa,
    )
