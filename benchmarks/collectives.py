"""Collectives of several GPUs of one host, for parallel.py (`--only collectives`) and nodes.py.

An all-reduce of bfloat16 rows of 4,096 inside a CUDA graph of 50 of them, over all GPUs that there are;
microseconds each, median of the replays. "with its norm": the residual's addition, the RMS norm and the rounding to FP8
too, by NCCL and the norm's kernel, by one kernel, or by copies in pieces and the norm's kernel ("copies", here with
nothing beside them; two GPUs). "one step", "two steps": the kernel's two ways, of which it takes one by size. "gather",
"scatter", "exchange": of results, or parts, of this size, by NCCL and by the kernel. "published": the best of SGLang
0.5.14, TensorRT-LLM 1.3.0rc20, vLLM 0.24.0 and NCCL 2.29.2 on H200s in the databases of aiconfigurator, and NCCL's for
what is no sum. Each way is checked before, in a replayed graph of many calls of different numbers. And greedy tokens of
1,024 rows of logits of which each GPU has a part: gathered, or by each GPU's best.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common

SIZES_KB = (8, 64, 512, 2048, 8192, 16384, 65536, 131072)
PUBLISHED_US: dict[
    str, dict[int, tuple[float, ...]]
] = {  # by ranks, of `SIZES_KB` without the last
    "sum": {
        2: (2.6, 3.1, 5.9, 16.6, 55.5, 136.0, 463.0),
        4: (2.9, 4.2, 10.4, 24.6, 83.6, 171.6, 609.0),
        8: (3.5, 6.4, 13.1, 28.4, 87.2, 165.9, 562.4),
    },
    "gather": {
        2: (6.1, 6.3, 11.3, 26.4, 54.1, 90.2, 288.5),
        4: (8.6, 9.0, 13.5, 35.9, 63.9, 105.1, 344.5),
        8: (12.3, 14.6, 17.0, 41.3, 66.9, 123.4, 379.9),
    },
    "scatter": {
        2: (6.0, 6.0, 10.4, 23.4, 50.6, 92.0, 305.0),
        4: (7.9, 8.2, 11.7, 32.8, 58.0, 102.2, 348.8),
        8: (13.3, 11.8, 14.4, 30.4, 69.5, 111.6, 375.6),
    },
    "exchange": {
        2: (7.8, 13.1, 13.5, 19.8, 51.8, 80.4, 251.5),
        4: (7.6, 11.9, 14.5, 23.0, 64.8, 107.0, 341.9),
        8: (7.3, 9.8, 16.2, 26.6, 73.4, 124.1, 403.9),
    },
}
ROW = 4096
NUM_REPLAYS, NUM_REDUCES = 30, 50


def collectives(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.multiprocessing as mp

    from slipstream.worker.ranks.children import NO_MULTICAST

    os.environ.update(NO_MULTICAST)
    context, size = mp.get_context("spawn"), torch.cuda.device_count()
    ports, answers = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=reduce_on_rank, args=(rank, size, ports, answers, args.largest_kb))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    found: dict[str, Any] = {"failed": "no answer in 150 s"}
    with contextlib.suppress(queue.Empty):
        found = answers.get(timeout=150)
    for rank in ranks:
        rank.join(10)
        rank.kill()
    for op, by_ranks in PUBLISHED_US.items():
        for kb, us in zip(SIZES_KB, by_ranks.get(size, ()), strict=False):
            found[f"{op}, published, {kb} KB"] = us
    for key, value in found.items():
        print(f"{key}: {value}", flush=True)
    return found


def timed(
    ways: dict[str, Any],
    norm_of: Callable[[Any, Any], Any],
    group: Any,
    platform: Any,
    largest_kb: int,
) -> dict[str, Any]:
    """Each way's microseconds, or that it is wrong, by name and size."""
    import torch

    recorder, device, ranks = platform.graphs(), platform.device, range(group.size)
    found: dict[str, Any] = {}
    for size in (size for size in SIZES_KB if size <= largest_kb):
        rows = size * 1024 // (2 * ROW)
        many = 20 if size <= 512 else 4

        def of_rank(rank: int, rows: int, i: int) -> torch.Tensor:
            at = torch.arange(rows * ROW, device=device).view(-1, ROW)
            return (at * (i + 1 + rank) % 61 - 30).to(torch.bfloat16)  # sums are exact

        for name, (op, covers, way) in ways.items():
            own = rows // group.size if op == "gather" else rows
            if not own or own % (1 if op in ("sum", "gather") else group.size):
                continue
            given = [of_rank(group.rank, own, i) for i in range(many)]
            if not covers(given[0]):
                continue
            every = [[of_rank(rank, own, i).float() for rank in ranks] for i in range(many)]
            zeros = torch.zeros_like(given[0])
            if op == "gather":
                wanted = [torch.stack(x) for x in every]
            elif op == "exchange":
                wanted = [
                    torch.stack([x.unflatten(0, (group.size, -1))[group.rank] for x in of_all])
                    for of_all in every
                ]
            else:
                wanted = [torch.stack(x).sum(0) for x in every]
            if op == "scatter":
                wanted = [x.unflatten(0, (group.size, -1))[group.rank] for x in wanted]
            if "norm" in name:
                wanted = [norm_of(x.to(torch.bfloat16), zeros.clone()).float() for x in wanted]
            expected = torch.stack(wanted)
            del every, wanted

            def check(way: Any = way, given: Any = given, zeros: Any = zeros) -> torch.Tensor:
                return torch.stack([way(x.clone(), zeros.clone()).float() for x in given])

            checked, output = recorder.capture(check)
            worst, exact = 0.0, True
            for _ in range(5):
                output.zero_()
                checked.replay()
                apart = (output - expected).abs() > 0.13 * expected.abs()
                worst = max(worst, float(apart.float().mean()))
                exact = exact and torch.equal(output, expected)
            key = f"{name}, {size} KB"
            if not group.least(worst <= 1e-4 and ("norm" in name or exact))[0]:
                found[key] = f"wrong: a share of {worst:.4f}"
                continue
            found[key] = microseconds(partial(way, given[0].clone(), zeros), group, platform)
    return found


def microseconds(work: Callable[[], Any], group: Any, platform: Any) -> float:
    """Microseconds of `work`, from a graph of many."""
    import torch

    def many() -> Any:
        for _ in range(NUM_REDUCES):
            work()
        return torch.empty(0)

    graph, _ = platform.graphs().capture(many)
    for _ in range(3):
        graph.replay()
    group.least(0)
    times = platform.timed_replays(graph, NUM_REPLAYS)
    return round(common.median(times) * 1000 / NUM_REDUCES, 2)


def reduce_on_rank(rank: int, size: int, ports: Any, answers: Any, largest_kb: int) -> None:
    import torch

    from slipstream.kernels.layouts import NormParams
    from slipstream.kernels.triton import TritonOps
    from slipstream.kernels.triton.peer_collectives import (
        MAX_BYTES,
        CudaPeerCollectives,
        try_peer_collectives,
    )
    from slipstream.platform import platform_of
    from slipstream.platform.collectives import Rendezvous
    from slipstream.platform.peer_copies import try_peer_copies

    device = torch.device("cuda", rank)
    platform = platform_of(device)
    platform.activate(1)
    meeting = Rendezvous(rank, size, 0 if rank == 0 else ports.get())
    if rank == 0:
        for _ in range(size - 1):
            ports.put(meeting.port)
    group = meeting.join(platform.collectives, device)
    begin = time.perf_counter()
    try_peer_collectives(group, 2 * ROW)
    found: dict[str, Any] = {
        "GPUs": size,
        "seconds of the start's test": time.perf_counter() - begin,
    }
    begin = time.perf_counter()
    try_peer_copies(group, platform, SIZES_KB[-1] * 1024 // (2 * ROW), ROW, torch.bfloat16)
    found["seconds of the copies' test"] = time.perf_counter() - begin
    ops, peer = TritonOps(), group.peer_collectives
    norm = NormParams(
        kind="rms", weight=torch.ones(ROW, dtype=torch.bfloat16, device=device), eps=1e-5, bias=None
    )

    def norm_of(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return ops.norm(x, norm, residual=residual, inputs="fp8")[0].values

    def normed_by_two(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return norm_of(group.library_sum(x), residual)

    places = itertools.cycle((0, 1))

    def normed_by_copies(x: torch.Tensor, residual: torch.Tensor) -> Any:
        place = next(places)
        sums = [
            ops.begin_sum(x[rows], group, place=place, index=i, rows=rows)
            for i, rows in enumerate(ops.pieces(x, group))
        ]
        return ops.norm_arriving(sums, norm, residual=residual, inputs="fp8")[0].values

    def always(x: torch.Tensor) -> bool:
        return True

    ways: dict[str, Any] = {
        "NCCL": ("sum", always, lambda x, _: group.library_sum(x)),
        "NCCL, with its norm": ("sum", always, normed_by_two),
        "NCCL, gather": ("gather", always, lambda x, _: group.library_gather(x)),
        "NCCL, scatter": ("scatter", always, lambda x, _: group.library_scatter(x)),
        "NCCL, exchange": ("exchange", always, lambda x, _: group.library_exchange(x)),
    }

    def by(peer: CudaPeerCollectives) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        return lambda x, residual: peer.normed(x, norm, residual, "fp8")[0].values

    if isinstance(peer, CudaPeerCollectives):
        found["one step up to, bytes"] = peer.one_step_rows * 2 * ROW
        ways |= {
            "one kernel": ("sum", peer.covers, lambda x, _: peer(x)),
            "one kernel, with its norm": ("sum", peer.covers, by(peer)),
            "one kernel, gather": (
                "gather",
                partial(peer.covers, op="gather"),
                lambda x, _: peer.gather(x),
            ),
            "one kernel, scatter": (
                "scatter",
                partial(peer.covers, op="scatter"),
                lambda x, _: peer.scatter(x),
            ),
            "one kernel, exchange": (
                "exchange",
                partial(peer.covers, op="exchange"),
                lambda x, _: peer.exchange(x),
            ),
        }
        forced = {"one step": 2**21, "two steps": 2 * ROW} if size > 2 else {}
        for name, one_step_bytes in forced.items():
            most = min(MAX_BYTES, one_step_bytes) if name == "one step" else MAX_BYTES
            other = CudaPeerCollectives(
                group, 2 * ROW, most_bytes=most, one_step_bytes=one_step_bytes
            )
            other.map_memory()
            ways[name] = ("sum", other.covers, lambda x, _, other=other: other(x))
            ways[f"{name}, with its norm"] = ("sum", other.covers, by(other))
    else:
        found["one kernel"] = "not on this machine: the log says why"
    if group.overlapped is not None:
        copied = group.overlapped
        ways["copies, with its norm"] = (
            "sum",
            lambda x: bool(copied.pieces(len(x))),
            normed_by_copies,
        )
    with torch.inference_mode():
        found |= timed(ways, norm_of, group, platform, largest_kb)
        own = torch.randn(1024, 128256 // size, dtype=torch.bfloat16, device=device)
        width = size * own.shape[1]
        found["greedy of gathered logits"] = microseconds(
            lambda: ops.argmax(ops.all_gather(own, group, width)), group, platform
        )
        found["greedy of each one's best"] = microseconds(
            lambda: ops.best_of_ranks(own, group, width), group, platform
        )
    if rank == 0:
        answers.put(found)
    group.least(0)
    group.leave()
