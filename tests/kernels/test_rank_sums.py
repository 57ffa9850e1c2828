"""Sums over ranks in one kernel: its source compiled for the CPU with `instructions_on_cpu.h`, where the thread blocks of all
ranks run together. On GPUs a start tests it against NCCL (`rank_sums.agrees`)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps, rank_sums
from slipstream.kernels.weights import Quantized

CPU = torch.device("cpu")
RUN = """
extern "C" int run(int programs, int threads, unsigned seed, void** of_ranks) {
    return on_cpu(programs * RANKS, threads, seed, [of_ranks] {
        void** a = of_ranks + THIS_RANK * 9;
        const int* n = (const int*)a[8];
        rank_sums((uint4*)a[0], (uint4*)a[1], (u64*)a[2], (u32*)a[3], (uint4*)a[4], (uint4*)a[5], (u8*)a[6], (float*)a[7],
                  n[0], n[1], n[2], n[3]);
    });
}
"""


class Rank:
    """A group as a rank sees it, whose ranks make their calls one after another."""

    device = CPU

    def __init__(self, rank, memories):
        self.rank, self.size, self.memories = rank, len(memories), memories

    def share(self, num_bytes):
        for i, held in enumerate(self.memories):
            if held is None:
                self.memories[i] = torch.zeros(num_bytes, dtype=torch.uint8)
        return tuple(self.memories)

    def least(self, *numbers):
        return list(numbers)


class OnCpu(rank_sums.RankSums):
    """A launch is kept until all ranks have made theirs; the last one's runs the programs of all."""

    programs, seed = 3, 0

    def __init__(self, group, row_bytes, launches, folder, **how):
        self.launches, self.folder = launches, folder
        super().__init__(group, row_bytes, **how)
        self.map_memory()

    def _multiprocessors(self):
        return self.programs

    def _overlaps(self):
        return True

    def compiled(self, definitions):
        text = Path(__file__).with_name("instructions_on_cpu.h").read_text() + rank_sums.SOURCES[1].read_text() + RUN
        given = {k: v for k, v in definitions.items() if k != "THIS_RANK"} | {"CTAS": "programs_of_rank", "SHARED": 256}
        names = [f"-D{k}={v}f" if isinstance(v, float) else f"-D{k}={v if isinstance(v, str) else int(v)}" for k, v in given.items()]
        text = "static int programs_of_rank;\n" + text.replace("    return on_cpu(", "    programs_of_rank = programs;\n    return on_cpu(")
        options = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", *names]
        library = self.folder / (hashlib.sha256(repr((text, options)).encode()).hexdigest() + ".so")
        if not library.exists():
            subprocess.run([shutil.which("g++"), *options, "-x", "c++", "-", "-o", library], check=True, input=text, text=True)
        run = ctypes.CDLL(str(library)).run

        def launch(programs, threads, arguments):
            *tensors, a, b, c, d = arguments
            numbers = (ctypes.c_int * 4)(a, b, c, d)
            pointers = [*(t.data_ptr() for t in tensors), ctypes.addressof(numbers)]
            self.launches.append((pointers, numbers, tensors))
            if len(self.launches) == self.group.size:
                every = [pointer for pointers, *_ in self.launches for pointer in pointers]
                stuck = run(programs, threads, self.seed, (ctypes.c_void_p * len(every))(*every))
                self.launches.clear()
                assert not stuck, "its programs wait for good"

        return launch


def ranks_of(folder, row_bytes, size=2, **how):
    memories, launches = [None] * size, []
    return [OnCpu(Rank(rank, memories), row_bytes, launches, folder, **how) for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rank_sums")


def numbers(shape, dtype, seed):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made[..., ::7] = -0.0  # the kernel's sign of what is not there yet
    return made.to(dtype)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float16), (2, torch.float32)], ids=str)
def test_sums_one_after_another(folder, size, dtype, seed):
    """Of one row, of several for a thread block, and of a part of a row, in places that others have used; the same bits on
    every rank."""
    ranks = ranks_of(folder, 640, size, most_bytes=640 * 20)
    for r in ranks:
        r.seed = seed
    width = 640 // dtype.itemsize
    for i, shape in enumerate([(1, width), (20, width), (7, width), (width // 4,), (1, width), (20, width), (1, width)]):
        given = [numbers(shape, dtype, 10 * i + rank) for rank in range(size)]
        found = [r(x) for r, x in zip(ranks, given, strict=True)]
        wanted = given[0].float()
        for x in given[1:]:
            wanted = wanted + x.float()
        for own in found:
            assert torch.equal(own, wanted.to(dtype)), (i, shape)
    for r in ranks:  # all places are empty again
        assert (r._peers[r.group.rank].view(torch.int32) == rank_sums.EMPTY).all()


@pytest.mark.parametrize("inputs", [None, "fp8", "int8", "fp8-block"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("adds", [True, False])
def test_norms_of_sums(folder, inputs, kind, adds):
    size, rows, dtype = 1280, 5, torch.bfloat16
    ranks = ranks_of(folder, size * 2)
    bias = numbers((size,), dtype, 3) if kind == "layer" else None
    norm = NormParams(kind=kind, weight=numbers((size,), dtype, 4), eps=1e-5, bias=bias, offset=0.5 if kind == "rms" else 0.0)
    for i in range(3):
        given = [numbers((rows, size), dtype, 5 + i * 10 + rank) for rank in range(2)]
        residual = numbers((rows, size), dtype, 7 + i) if adds else None
        assert all(r.covers_norm(x, norm, inputs) for r, x in zip(ranks, given, strict=True))
        found = [
            r.normed(x, norm, None if residual is None else residual.clone(), inputs)
            for r, x in zip(ranks, given, strict=True)
        ]
        summed = (given[0].float() + given[1].float()).to(dtype)
        wanted, total = ReferenceOps().norm(summed, norm, residual=None if residual is None else residual.clone(), inputs=inputs)
        for normed, own in found:
            assert torch.equal(own, total)
            if inputs is None:
                torch.testing.assert_close(normed, wanted, rtol=1e-2, atol=1e-2)
                continue
            assert isinstance(normed, Quantized)
            torch.testing.assert_close(normed.scales.flatten(), wanted.scales.flatten(), rtol=1e-2, atol=0)
            by = wanted.scales.repeat_interleave(128, 1) if inputs == "fp8-block" else wanted.scales
            ours, theirs = normed.values.float() * by, wanted.values.float() * by
            step = by * (1.01 if inputs == "int8" else 32.0)
            assert ((ours - theirs).abs() <= step).all()
            assert (ours != theirs).float().mean() < 0.02
        first, second = found
        parts = [(a, b) for a, b in zip((first[0],), (second[0],), strict=True)]
        for a, b in parts:
            same = torch.equal(a, b) if inputs is None else torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
            assert same
