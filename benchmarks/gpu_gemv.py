"""The dense product for one token at Llama-3-8B shapes: our GEMV against the library's GEMM, and both against bandwidth.

    python benchmarks/gpu_gemv.py OUT.json

Times are medians over CUDA-graph replays that rotate among enough weights to miss the cache.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import triton

from slipstream.kernels.triton.gemv import gemv

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


def time_us(run, copies: int) -> float:
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[len(times) // 2]


def main() -> None:
    results = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
        "rows": [],
    }
    big: torch.Tensor = torch.zeros(2**28, device="cuda")
    other = torch.empty_like(big)
    # By a kernel: a captured copy_ would go to the slower copy engine.
    copy_us = time_us(lambda i: torch.add(big, 1.0, out=other), 4)
    bandwidth = 8 * big.numel() / copy_us * 1e6
    results["copy_bytes_per_s"] = bandwidth
    for name, (n, k) in SHAPES.items():
        copies = max(3, min(12, int(2e9 / (n * k * 2))))
        ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        floor = n * k * 2 / bandwidth * 1e6
        for m in (1,):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            lib = time_us(lambda i: torch.nn.functional.linear(x, ws[i]), copies)
            want = x.double() @ ws[0].double().T
            best = None
            for bn, bk, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (2, 4, 8)):
                if not 1024 <= bn * bk <= 16384 or bn * bk // (warps * 32) > 64 or bn * bk // (warps * 32) < 8:
                    continue
                got = gemv(x, ws[0], None, block_n=bn, block_k=bk, num_warps=warps)
                err = ((got.double() - want).norm() / want.norm()).item()
                assert err < 5e-3, (name, m, bn, bk, warps, err)
                us = time_us(lambda i: gemv(x, ws[i], None, block_n=bn, block_k=bk, num_warps=warps), copies)
                row = {"shape": name, "m": m, "block_n": bn, "block_k": bk, "warps": warps, "us": us, "err": err}
                results["rows"].append(row)
                best = row if best is None or us < best["us"] else best
            results["rows"].append({"shape": name, "m": m, "library_us": lib, "floor_us": floor, "best": best})
            tile = f"{best['block_n']}x{best['block_k']} w{best['warps']}"
            print(f"{name:8} floor {floor:6.1f} library {lib:6.1f} best {best['us']:6.1f} ({tile})", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
