"""What the device is: found once at start, in the process that will use it. On a CPU what is fastest is measured, the first
time (`cpu_choice.py`)."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import DeviceInfo
from slipstream.errors import ConfigError
from slipstream.plan.hardware import cpu_name, host_memory
from slipstream.platform import gpu_platform, has_gpu, num_gpus
from slipstream.worker.cpu_choice import choose_cpu


def detect(requested: str, folder: Path, *, num_threads: int | None = None) -> DeviceInfo:
    """Facts about `requested`: auto (a GPU if there is one), cpu, cuda, or cuda:N. `folder` keeps what was measured of this
    machine's CPU; `num_threads` is what the user wants, None for what is fastest."""
    kind, _, index = requested.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device={requested!r} is not one of auto, cpu, cuda, cuda:N", field="device")
    if kind == "cuda" and not has_gpu():
        raise ConfigError(
            "device='cuda': torch sees no NVIDIA GPU; use device='cpu', or run `slipstream doctor` to see what is missing",
            field="device",
        )
    if kind == "cuda" or (kind == "auto" and has_gpu()):
        ordinal = int(index or 0)
        if ordinal >= num_gpus():
            raise ConfigError(f"device='cuda:{ordinal}': there are {num_gpus()} GPUs", field="device")
        gpu = gpu_platform(ordinal)
        free, total = gpu.memory()
        return DeviceInfo(
            device=f"cuda:{ordinal}",
            name=gpu.name,
            memory_bytes=total,
            free_bytes=free,
            best_dtype="bfloat16" if gpu.arch.bfloat16 else "float16",
            compute_capability=gpu.capability,
        )
    choice = choose_cpu(folder)
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
