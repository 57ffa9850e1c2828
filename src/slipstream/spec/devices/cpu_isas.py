"""Features of CPU instruction sets, as data. A kernel tests for a feature here, never for a
name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuIsa:
    """An instruction set for which the C++ kernels are compiled (`csrc/cpu/isa/isa_*.cpp`)."""

    expands_bytes: bool = False  # places bytes at a mask's set bits in one instruction (vpexpandb)
    # for a set with matrix tiles (AMX): the name of the same set without them
    without_tiles: str | None = None
    # simulates another machine's registers for tests; never chosen automatically
    emulated: bool = False


CPU_ISAS: Mapping[str, CpuIsa] = {
    **dict.fromkeys(
        ("portable", "avx2", "avx2-vnni", "avx512", "avx512-vnni", "neon", "neon-i8mm"), CpuIsa()
    ),
    **dict.fromkeys(("avx512-vbmi2", "avx512-bf16"), CpuIsa(expands_bytes=True)),
    "amx": CpuIsa(expands_bytes=True, without_tiles="avx512-bf16"),
    "portable-amx": CpuIsa(emulated=True, without_tiles="portable"),
}
"""Instruction sets by their names in `kernels.cpu.native.instruction_sets()`."""
