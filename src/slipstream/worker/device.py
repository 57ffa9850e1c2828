"""What the device is: found once at start, in the process that will use it.

On a CPU the faster of float32 and bfloat16 is measured, not looked up: hosts hide or emulate instructions, and only the
clock tells. The measurement takes about 0.1 s.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from slipstream.config import DeviceFacts, DType
from slipstream.errors import ConfigError


def detect(requested: str, num_threads: int | None = None) -> DeviceFacts:
    """Facts about `requested`: auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    kind, _, index = requested.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device={requested!r} is not one of auto, cpu, cuda, cuda:N", field="device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda': torch sees no NVIDIA GPU; use device='cpu', or run `slipstream doctor` to see what is missing",
            field="device",
        )
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        ordinal = int(index or 0)
        if ordinal >= torch.cuda.device_count():
            raise ConfigError(f"device='cuda:{ordinal}': there are {torch.cuda.device_count()} GPUs", field="device")
        properties = torch.cuda.get_device_properties(ordinal)
        free, total = torch.cuda.mem_get_info(ordinal)
        return DeviceFacts(
            device=f"cuda:{ordinal}",
            name=properties.name,
            memory_bytes=total,
            free_bytes=free,
            best_dtype="bfloat16",
            compute_capability=(properties.major, properties.minor),
        )
    threads = num_threads or available_cores()
    dtype, reason = _fastest_cpu_dtype(threads)
    total, free = host_memory()
    return DeviceFacts(
        device="cpu",
        name=cpu_name(),
        memory_bytes=total,
        free_bytes=free,
        best_dtype=dtype,
        num_threads=threads,
        dtype_reason=reason,
    )


def available_cores() -> int:
    """Cores this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group, or one that sets no quota
    return cores


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of host memory, within the control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: the physical size stands
    return total, available


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    import platform

    return platform.processor() or platform.machine()


def _fastest_cpu_dtype(threads: int) -> tuple[DType, str]:
    """Time the two shapes that decide: a matrix-vector product (decode) and a small matrix product (prefill)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds: dict[DType, float] = {}
        for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            w = torch.ones(2048, 1024, dtype=torch_dtype)
            total = 0.0
            for rows in (1, 64):
                x = torch.ones(rows, 1024, dtype=torch_dtype)
                times = []
                for _ in range(5):
                    begin = time.perf_counter()
                    torch.nn.functional.linear(x, w)
                    times.append(time.perf_counter() - begin)
                total += sorted(times)[1]
            seconds[dtype] = total  # type: ignore[index]
    finally:
        torch.set_num_threads(before)
    best: DType = "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"
    reason = (
        f"measured at start: bfloat16 {seconds['bfloat16'] * 1e6:.0f} µs, float32 {seconds['float32'] * 1e6:.0f} µs"
    )
    return best, reason
