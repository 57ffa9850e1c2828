"""What the device is: found once at start, in the process that will use it.

On a CPU the faster of float32 and bfloat16 is measured, not looked up: hosts hide or emulate instructions, and only the
clock tells. The measurement takes about 0.1 s.
"""

from __future__ import annotations

import time

import torch

from slipstream.config import DeviceFacts, DType
from slipstream.errors import ConfigError
from slipstream.plan.hardware import available_cores, cpu_name, host_memory


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


def _fastest_cpu_dtype(threads: int) -> tuple[DType, str]:
    """Time the two shapes that decide: a matrix-vector product (decode) and a small matrix product (prefill)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        types: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        operands = {
            name: (torch.ones(2048, 1024, dtype=dtype), [torch.ones(rows, 1024, dtype=dtype) for rows in (1, 64)])
            for name, dtype in types.items()
        }
        # The types take turns and the best of each counts: a busy neighbour must not decide.
        times: dict[tuple[DType, int], float] = {}
        for _ in range(8):
            for name, (weight, inputs) in operands.items():
                for shape, x in enumerate(inputs):
                    begin = time.perf_counter()
                    torch.nn.functional.linear(x, weight)
                    taken = time.perf_counter() - begin
                    times[name, shape] = min(taken, times.get((name, shape), taken))
        seconds = {name: times[name, 0] + times[name, 1] for name in types}
    finally:
        torch.set_num_threads(before)
    best: DType = "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"
    reason = (
        f"measured at start: bfloat16 {seconds['bfloat16'] * 1e6:.0f} µs, float32 {seconds['float32'] * 1e6:.0f} µs"
    )
    return best, reason
