"""Measures a device's performance ceilings: memory reads, matrix products, operator latency, disk reads."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.platform import Platform, platform_of
from slipstream.worker.runner import Runner
from slipstream.worker.start.roofline import measure_ceilings

SIDE = 8192
"""Rows and columns of the matrices with which a GPU's rates are measured."""

READ_BYTES = 2**31
MAX_OF_FILE = 256 * 2**20
NUM_SMALL = 200
"""Number of operators in the graph that measures an operator's latency."""


def device_ceilings(runner: Runner) -> dict[str, float]:
    """Ceilings by name. Rates that can't be measured are left out.

    `read` is in bytes/s, matrix products are in operations/s by dtype, and a GPU also has `op_s` in
    seconds.
    """
    ops: object = runner.ops
    if isinstance(ops, NativeOps | HostOps):
        found = measure_ceilings(ops.pool)
        return {name: rate for name, rate in dataclasses.asdict(found).items() if rate > 0}
    return {} if runner.device.type == "cpu" else _gpu_ceilings(runner.device)


def _gpu_ceilings(device: torch.device) -> dict[str, float]:
    platform = platform_of(device)
    seconds = partial(_seconds, platform)
    data = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=device)
    found = {"read": READ_BYTES / seconds(data.sum)}
    del data
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(SIDE, SIDE, device=device, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * SIDE**3 / seconds(lambda a=a: a @ a)  # type: ignore[misc]
    if platform.arch.fp8:
        x = torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn)
        rows, columns = torch.ones(SIDE, 1, device=device), torch.ones(1, SIDE, device=device)

        def scaled() -> Tensor:
            return torch._scaled_mm(
                x, x.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        found["fp8"] = 2 * SIDE**3 / seconds(scaled)
    i = torch.randint(-9, 9, (SIDE, SIDE), device=device, dtype=torch.int8)
    found["int8"] = 2 * SIDE**3 / seconds(lambda: torch._int_mm(i, i.t()))
    small = torch.zeros(4096, device=device)

    def many() -> Tensor:
        for _ in range(NUM_SMALL):
            small.add_(1)
        return small

    graph, _ = platform.graphs().capture(many)
    found["op_s"] = seconds(graph.replay) / NUM_SMALL
    return found


def _seconds(platform: Platform, run: Callable[[], object], rounds: int = 5) -> float:
    """The shortest time of several rounds, because other processes can only add time."""
    run()
    platform.synchronize()
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(4):
            run()
        platform.synchronize()
        best = min(best, (time.perf_counter() - begin) / 4)
    return best


def disk_rate(path: Path) -> float | None:
    """Bytes per second read from the disk that holds the model.

    The largest file is first dropped from the system's page cache. None if the system can't drop
    it.
    """
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.is_file()]
    if not files or not hasattr(os, "posix_fadvise"):
        return None
    largest = max(files, key=lambda f: f.stat().st_size)
    with largest.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, done = time.perf_counter(), 0
        while done < MAX_OF_FILE and (piece := file.read(2**22)):
            done += len(piece)
        return done / (time.perf_counter() - begin) if done else None
