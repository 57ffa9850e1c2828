"""Chooses the op set for a device. Each is imported only when it is chosen."""

from __future__ import annotations

import torch

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native import has_cpu_kernels, without_tiles
from slipstream.kernels.ops import OpSet
from slipstream.platform import platform_of
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable


def select_ops(
    device: torch.device,
    implementation: str = "auto",
    tiles: TileTable = NO_TILES,
    *,
    num_threads: int = 1,
    isa: str | None = None,
    deterministic: bool = False,
    dense_copies: bool = False,
) -> OpSet:
    """Returns the op set for a device.

    `implementation` is auto, reference, cpu, torch or triton. ConfigError if it can't run there. On
    a CPU, auto is cpu, the C++ kernels with `num_threads` and the instruction set `isa` (None: the
    machine's best), or torch where they are not built (`slipstream doctor` says so). `tiles` and
    `deterministic` change triton; deterministic means that a token's result depends on nothing but
    the tokens before it, which holds of cpu without matrix tiles. With `dense_copies`, 4-bit weights
    (triton) and sparse ones (cpu) are kept dense as well.
    """
    is_gpu = platform_of(device).kind == "cuda"
    if implementation == "auto":
        implementation = "triton" if is_gpu else "cpu" if has_cpu_kernels() else "torch"
    if deterministic and implementation not in ("triton", "cpu"):
        raise ConfigError(
            "deterministic=True needs kernels of our own ('triton', 'cpu'); leave it out",
            field="deterministic",
        )
    if implementation == "reference":
        from slipstream.kernels.plain.reference import ReferenceOps

        return ReferenceOps()
    if implementation == "cpu" and device.type == "cpu":
        from slipstream.kernels.cpu.ops import NativeOps

        isa = without_tiles(isa) if deterministic else isa
        return NativeOps(num_threads, isa, dense_copies=dense_copies)
    if implementation == "torch" and device.type == "cpu":
        from slipstream.kernels.cpu.torch_ops import CpuOps

        return CpuOps()
    if implementation == "triton" and is_gpu:
        from slipstream.kernels.triton import TritonOps

        return TritonOps(tiles, deterministic=deterministic, dense_copies=dense_copies)
    raise ConfigError(
        f"kernels={implementation!r} cannot run on {device}; use 'auto', or 'reference' on any device",
        field="kernels",
    )
