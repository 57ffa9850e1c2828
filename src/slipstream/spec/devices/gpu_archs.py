"""Features of GPU architectures, as data. Kernels and settings test for a feature here, never for a
version.

A GPU architecture that is not in the table gets the row of the newest older one. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuArch:
    """Features of a compute capability."""

    name: str
    bfloat16: bool = True
    fp8: bool = False  # tensor cores multiply float8 e4m3
    tma: bool = False  # the copy engine moves tiles (cp.async.bulk.tensor)
    # A kernel may start before the previous one has ended (programmatic dependent launch).
    pdl: bool = False
    # Warpgroup matrix instructions: the hand-scheduled prefill kernel needs them.
    wgmma: bool = False
    fp8_tile_library: bool = False  # torch._scaled_mm takes scales of 128 × 128 tiles
    one_token_kernel: bool = False  # a whole decode step of one sequence as one cooperative kernel


GPU_ARCHS: Mapping[tuple[int, int], GpuArch] = {
    (7, 0): GpuArch(name="Volta, Turing", bfloat16=False),
    (8, 0): GpuArch(name="Ampere"),
    (8, 9): GpuArch(name="Ada", fp8=True),
    (9, 0): GpuArch(
        name="Hopper",
        fp8=True,
        tma=True,
        pdl=True,
        wgmma=True,
        fp8_tile_library=True,
        one_token_kernel=True,
    ),
    (10, 0): GpuArch(name="Blackwell (data centre)", fp8=True, tma=True, pdl=True),
    (12, 0): GpuArch(name="Blackwell", fp8=True, tma=True, pdl=True),
}
"""Architectures by compute capability."""

INTERPRETER = GpuArch(name="Triton's interpreter", fp8=True, tma=True)
"""Architecture of Triton's interpreter, which runs kernels on a CPU for tests."""

HOPPER_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class DescribedGpu:
    """Sizes of a GPU for which kernels are compiled without it (`platform/meta.py`)."""

    capability: tuple[int, int]
    name: str
    multiprocessors: int
    shared_bytes: int
    memory_bytes: int


DESCRIBED_GPUS: Mapping[tuple[int, int], DescribedGpu] = {
    gpu.capability: gpu
    for gpu in (
        DescribedGpu((8, 0), "NVIDIA A100-SXM4-80GB", 108, 163 * 1024, 80 * 2**30),
        DescribedGpu((8, 9), "NVIDIA L40S", 142, 99 * 1024, 44 * 2**30),
        DescribedGpu((9, 0), "NVIDIA H200", 132, HOPPER_SHARED_BYTES, 139 * 2**30),
        DescribedGpu((10, 0), "NVIDIA B200", 148, HOPPER_SHARED_BYTES, 178 * 2**30),
    )
}
"""The largest common GPU of each compute capability: the limits of its engine include those of smaller ones."""


def gpu_arch(capability: tuple[int, int]) -> GpuArch:
    """Features of a compute capability, or of the newest older one in the table."""
    known = [c for c in GPU_ARCHS if c <= capability]
    return GPU_ARCHS[max(known) if known else min(GPU_ARCHS)]


def least_with_fp8() -> tuple[int, int]:
    """The lowest compute capability whose tensor cores multiply FP8."""
    return min(capability for capability, arch in GPU_ARCHS.items() if arch.fp8)
