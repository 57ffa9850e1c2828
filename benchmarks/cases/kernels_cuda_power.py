"""Clock and power of a GPU under products that go on for a second and more: what bounds a long run.

    python benchmarks/kernels.py --device cuda --op power [--seconds 1.5]

An 8B Llama's products, one shape alone and all four in turn, in bfloat16 and in FP8 with a scale a row, replayed from graphs.
Of each: milliseconds at first and in the second half, TFLOP/s, and the medians of what NVML says meanwhile. Its reasons for
a lower clock: 0x4 is the power cap.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}


class Nvml:
    """The first GPU's clock (MHz), power (W), reasons for its clock, and temperature (°C)."""

    def __init__(self) -> None:
        self.lib, self.handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.lib.nvmlInit_v2()
        self.lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))

    def read(self) -> tuple[int, float, int, int]:
        clock, power, reasons, celsius = (
            ctypes.c_uint(),
            ctypes.c_uint(),
            ctypes.c_ulonglong(),
            ctypes.c_uint(),
        )
        self.lib.nvmlDeviceGetClockInfo(
            self.handle, 1, ctypes.byref(clock)
        )  # of the multiprocessors
        self.lib.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(power))
        self.lib.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle, ctypes.byref(reasons))
        self.lib.nvmlDeviceGetTemperature(self.handle, 0, ctypes.byref(celsius))
        return clock.value, power.value / 1e3, reasons.value, celsius.value


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def watched(nvml: Nvml, run: Callable[[], object], flops: int, seconds: float) -> dict[str, object]:
    graph, rows, times = captured(run), [], []
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    count = max(1, int(0.1 / (time.perf_counter() - begin)))
    done, begin = threading.Event(), time.perf_counter()

    def watch() -> None:
        while not done.wait(0.01):
            rows.append((time.perf_counter() - begin, *nvml.read()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    while time.perf_counter() - begin < seconds:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / count)
    done.set()
    watcher.join()
    late = [row[1:] for row in rows if row[0] > seconds / 2]
    clock, watts, _, celsius = (
        sorted(column)[len(late) // 2] for column in zip(*late, strict=True)
    )
    ms = sorted(times[len(times) // 2 :])[len(times) // 4]
    found = {
        "first_ms": times[0],
        "ms": ms,
        "tflops": flops / ms / 1e9,
        "mhz": clock,
        "watts": watts,
    }
    return {**found, "reasons": sorted({hex(row[2]) for row in late}), "celsius": celsius}


def products(
    num_tokens: int, names: Sequence[str], fp8: bool, uniform: bool
) -> tuple[Callable[[], object], int]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(1, keepdim=True) / 448
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    weights = {n: normal(*SHAPES[n]) * 0.02 for n in names}
    if uniform:
        weights = {n: torch.empty_like(w).uniform_(-1e-3, 1e-3) for n, w in weights.items()}
    inputs = {size: normal(num_tokens, size) for size in {SHAPES[n][1] for n in names}}
    flops = sum(2 * num_tokens * SHAPES[n][0] * SHAPES[n][1] for n in names)
    if not fp8:
        return lambda: [F.linear(inputs[SHAPES[n][1]], w) for n, w in weights.items()], flops
    rounded, given = (
        {n: codes(w) for n, w in weights.items()},
        {size: codes(x) for size, x in inputs.items()},
    )

    def run() -> list[Tensor]:
        made = []
        for name, (w, scale) in rounded.items():
            x, of_x = given[SHAPES[name][1]]
            scales = {"scale_a": of_x, "scale_b": scale.T}
            made.append(
                torch._scaled_mm(x, w.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
            )
        return made

    return run, flops


RECORD = "power"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.5, help="of each case (default: 1.5)")


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    nvml, found = Nvml(), {}
    cases = [
        ((name,), tokens, False, False)
        for tokens in (16384, 8192, 1024)
        for name in ("up", "down", "qkv")
    ]
    cases += [
        (tuple(SHAPES), tokens, fp8, False)
        for fp8 in (False, True)
        for tokens in (16384, 8192, 2048, 1024)
    ]
    cases += [(tuple(SHAPES), 16384, fp8, True) for fp8 in (False, True)]
    for names, tokens, fp8, uniform in cases:
        kind = f"{'fp8' if fp8 else 'bf16'} {names[0] if len(names) == 1 else 'all'} {tokens}{' uniform' * uniform}"
        found[kind] = watched(nvml, *products(tokens, names, fp8, uniform), args.seconds)
        print(kind, json.dumps(found[kind]), flush=True)
        save(products=found)
        torch.cuda.empty_cache()
