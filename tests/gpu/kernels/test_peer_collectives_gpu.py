"""Sums and gathers of two to eight ranks, in one process over one GPU's memory: each rank's kernels on a stream of its own.

Run on any GPU: pytest -m gpu tests/gpu/kernels/test_peer_collectives_gpu.py.
A rank that does not hear from another gives up after 5 s.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.kernels.rank_memory import Rank, are_empty, call, check_norms, norm_of, wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROW = 8192  # bytes
RANKS = range(2, 9)
SIZES = (16, ROW, 3 * ROW + 16, 8 * ROW, 512 * 1024, 2 * 2**20, 16 * 2**20)  # bytes


class Ranks:
    """`size` ranks' `CudaPeerCollectives` over one GPU's memory."""

    def __init__(self, size, kernels, row_bytes=ROW, **how):
        from slipstream.kernels.triton import cuda, peer_collectives
        from slipstream.platform import platform_of

        class OnOneGpu(peer_collectives.CudaPeerCollectives):
            def _multiprocessors(self):
                """A number so small that launches of all ranks run at once."""
                return max(1, super()._multiprocessors() // (2 * size))

            def _overlaps(self):
                """False: launches that wait for their rank's earlier ones would take the places of
                other ranks' first ones, for which these wait."""
                return False

        memories = [None] * size
        self.every = [
            OnOneGpu(Rank(rank, memories, "cuda"), row_bytes, **how) for rank in range(size)
        ]
        text = "".join(source.read_text() for source in peer_collectives.SOURCES)
        sources = [
            cuda.CudaSource(text, "peer_collectives", tuple(sorted(r.definitions(*kernel).items())))
            for r in self.every
            for kernel in kernels
        ]
        capability = platform_of(torch.device("cuda")).capability
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: source.cubin(capability), sources))
        for r in self.every:  # before a rank waits for another: loading may wait for the device
            r.patience = peer_collectives.TEST_PATIENCE
            r.map_memory()
            for kernel in kernels:
                r._kernel(*kernel)
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def run(self, work, repeats=1):
        """Results of work(sums, rank), of the last of so many launches behind one another."""
        found = []
        torch.cuda.synchronize()
        for rank, (r, stream) in enumerate(zip(self.every, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    result = work(r, rank)
            found.append(result)
        torch.cuda.synchronize()
        return found

    def replay(self, work, repeats):
        """`run` from a graph a rank, replayed so often."""
        graphs, found = [], []
        torch.cuda.synchronize()
        for rank, (r, stream) in enumerate(zip(self.every, self.streams, strict=True)):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                found.append(work(r, rank))
        for _ in range(repeats):
            for graph, stream in zip(graphs, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        return found


def numbers(shape, dtype, seed):
    made = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    made.flatten()[::7] = -0.0  # two of them are what the kernel takes for nothing
    made.flatten()[14:16] = -0.0
    return made.to(dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.bfloat16) for size in RANKS),
        *((size, dtype) for size in (3, 8) for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_sums_of_any_size_equal_float32_sums_in_rank_order(size, dtype):
    """Sums in one step and in two have the same bits on all ranks, launched and replayed."""
    for one_step_bytes in (None, ROW):
        ranks = Ranks(size, [("sum", dtype, 1), ("sum", dtype, 2)], one_step_bytes=one_step_bytes)
        for i, num_bytes in enumerate(SIZES):
            shape = (num_bytes // dtype.itemsize,)
            given = [numbers(shape, dtype, 10 * i + rank) for rank in range(size)]
            expected = wanted("sum", given, 0)

            def work(sums, rank, given=given):
                return sums(given[rank])

            for found in (ranks.run(work, 3), ranks.replay(work, 4)):
                for own in found:
                    assert torch.equal(own, expected), (one_step_bytes, num_bytes)
        assert are_empty(ranks.every)


@pytest.mark.parametrize("size", RANKS)
def test_scatters_gathers_and_exchanges_in_any_order(size):
    ranks = Ranks(
        size,
        [*((op,) for op in ("sum", "scatter", "gather", "exchange")), ("sum", torch.bfloat16, 2)],
    )
    ops = [("gather", 3), ("sum", 300), ("exchange", 5 * size), ("scatter", 7 * size + 1)]
    ops += [("scatter", 1), ("sum", 1), ("exchange", 100 * size), ("gather", 200)]
    given = [
        [
            numbers((count, ROW // 2), torch.bfloat16, 10 * i + rank)
            for i, (_, count) in enumerate(ops)
        ]
        for rank in range(size)
    ]

    def work(sums, rank):
        return [call(sums, op)(x) for (op, _), x in zip(ops, given[rank], strict=True)]

    for found in (ranks.run(work, 3), ranks.replay(work, 4)):
        for rank, results in enumerate(found):
            for i, (op, count) in enumerate(ops):
                expected = wanted(op, [of_rank[i] for of_rank in given], rank)
                assert torch.equal(results[i], expected), (op, count, rank)
    assert are_empty(ranks.every)


@pytest.mark.parametrize(
    ("size", "inputs", "kind", "adds", "dtype"),
    [
        *((size, "fp8", "rms", True, torch.bfloat16) for size in RANKS),
        *((size, None, "rms", True, torch.bfloat16) for size in (2, 3, 8)),
        *((size, "fp8-block", "layer", True, torch.float32) for size in (2, 3, 8)),
        *((size, "int8", "layer", False, torch.float16) for size in (2, 3, 8)),
    ],
    ids=str,
)
def test_norms_and_codes_of_sums_equal_the_references(size, inputs, kind, adds, dtype):
    width = ROW // dtype.itemsize
    norm = norm_of(kind, width, dtype)
    on_gpu = replace(
        norm,
        weight=norm.weight.cuda(),
        bias=None if norm.bias is None else norm.bias.cuda(),
    )
    kernels = [("sum", dtype, steps, on_gpu, adds, inputs) for steps in (1, 2)]
    ranks = Ranks(size, kernels, one_step_bytes=40 * ROW)
    for num_rows in (1, 40, 41, 1500):
        given = [numbers((num_rows, width), dtype, 10 * num_rows + r) for r in range(size)]
        residual = numbers((num_rows, width), dtype, 7)
        residuals = [residual.clone() if adds else None for _ in range(size)]

        def work(sums, rank, given=given, residuals=residuals):
            return sums.normed(given[rank], on_gpu, residuals[rank], inputs)

        found = ranks.run(work)
        on_cpu = [
            (
                x.cpu()
                if inputs is None
                else replace(x, values=x.values.cpu(), scales=x.scales.cpu()),
                total.cpu(),
            )
            for x, total in found
        ]
        check_norms(
            on_cpu, [x.cpu() for x in given], norm, residual.cpu() if adds else None, inputs
        )
