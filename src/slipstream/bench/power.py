"""Energy counters of the machine: the CPU packages' (RAPL, through powercap) and NVIDIA's (NVML).
No torch.

A value is the difference of two readings of running counters, so nothing is sampled. A counter that
can't be read gives None, never a guess: virtual machines have no RAPL, and often only the
administrator may read it.

The energy of a run on GPUs is that of those GPUs; the CPU packages' energy is reported separately.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.costs.hardware import driver_sees_gpu
from slipstream.errors import ConfigError

POWERCAP = Path("/sys/class/powercap")
PACKAGE_OF = "/sys/devices/system/cpu/cpu{}/topology/physical_package_id"
CPU, GPU = "rapl", "nvml"
"""Prefixes of the counters' names."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A reading in joules. `wraps_at`: value at which the counter restarts at 0 (None: it does
    not)."""

    joules: float
    wraps_at: float | None = None

    def until(self, later: Counter) -> float:
        if later.joules >= self.joules or self.wraps_at is None:
            return later.joules - self.joules
        return later.joules - self.joules + self.wraps_at


@dataclass(frozen=True, slots=True)
class PowerReading:
    """All counters that could be read, by name."""

    counters: dict[str, Counter]

    def joules_until(self, later: PowerReading) -> float | None:
        """Joules of all counters together; None if there are none, or if they are not the same
        ones."""
        if not self.counters or self.counters.keys() != later.counters.keys():
            return None
        return sum(first.until(later.counters[name]) for name, first in self.counters.items())

    def of(self, kind: str) -> PowerReading:
        """The counters of kind `CPU` or `GPU`; "" selects all."""
        return PowerReading(
            {name: counter for name, counter in self.counters.items() if name.startswith(kind)}
        )


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of a run from the devices' counters, including the work of other programs on them.

    `cpu_watts`: power of the CPU packages in a run on GPUs. None if it can't be read, or is in
    `watts`."""

    joules: float
    watts: float
    joules_per_output_token: float | None
    sources: tuple[str, ...]
    cpu_watts: float | None = None


class EnergyMeter:
    """Reads the counters of `devices`, named as in torch: "cuda:1", "cpu" or "auto". None: unknown,
    as with a server, so that all of this machine's counters are added. `sources` names the
    counters, such as "rapl package-0" and "nvml 0"; it is empty if nothing can be read."""

    def __init__(self, powercap: Path = POWERCAP, *, devices: Sequence[str] | None = None) -> None:
        numbers = (
            None if devices is None else [n for n in map(_gpu_number, devices) if n is not None]
        )
        self.counted = "" if numbers is None else GPU if numbers else CPU
        found = (
            zone for zone in sorted(powercap.glob("intel-rapl:?*")) if zone.name.count(":") == 1
        )
        self._zones = [zone for zone in found if _zone(zone) is not None and _is_package(zone)]
        packages = None if numbers is None else packages_in_use()
        if packages is not None:
            self._zones = [zone for zone in self._zones if _text(zone / "name") in packages]
        self._nvml: Any
        self._nvml, self._gpus = _open_nvml([] if self.counted == CPU else numbers)
        self.sources = tuple(sorted(self.read().of(self.counted).counters))

    @classmethod
    def required(cls, devices: Sequence[str] | None = None) -> EnergyMeter:
        """A meter; ConfigError if nothing can be read."""
        meter = cls(devices=devices)
        if not meter.sources:
            raise ConfigError(
                "no energy counter: there is no NVIDIA GPU with one (NVML, Volta and later), and the "
                f"CPU's counters under {POWERCAP} are missing or unreadable for this user; measure without --energy",
                field="energy",
            )
        return meter

    def energy(
        self, before: PowerReading, after: PowerReading, seconds: float, num_output_tokens: int
    ) -> Energy | None:
        """Energy between two readings; None if a counter could no longer be read."""
        joules = before.of(self.counted).joules_until(after.of(self.counted))
        if joules is None or seconds <= 0:
            return None
        each = joules / num_output_tokens if num_output_tokens else None
        beside = before.of(CPU).joules_until(after.of(CPU)) if self.counted == GPU else None
        return Energy(
            joules,
            joules / seconds,
            each,
            self.sources,
            None if beside is None else beside / seconds,
        )

    def read(self) -> PowerReading:
        found = {}
        for zone in self._zones:
            if (counter := _zone(zone)) is not None:
                found[f"rapl {_text(zone / 'name') or zone.name}"] = counter
        for number, handle in self._gpus:
            millijoules = ctypes.c_ulonglong()
            if (
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
                == 0
            ):
                found[f"nvml {number}"] = Counter(millijoules.value / 1e3)
        return PowerReading(found)


def _zone(folder: Path) -> Counter | None:
    used, most = _text(folder / "energy_uj"), _text(folder / "max_energy_range_uj")
    if used is None or not used.isdecimal():
        return None
    return Counter(
        int(used) / 1e6, int(most) / 1e6 if most is not None and most.isdecimal() else None
    )


def _is_package(zone: Path) -> bool:
    """True for a CPU package's RAPL zone. The `psys` zone is skipped: it includes the packages."""
    return (_text(zone / "name") or "package").startswith("package")


def packages_in_use() -> set[str] | None:
    """Names of the CPU packages that this process may run on; None if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    found = {_text(Path(PACKAGE_OF.format(cpu))) for cpu in os.sched_getaffinity(0)}
    return None if None in found else {f"package-{number}" for number in found}


def _gpu_number(device: str) -> int | None:
    """GPU number in CUDA's order; None for a CPU."""
    if device == "auto":
        return 0 if driver_sees_gpu() else None
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _open_nvml(numbers: Sequence[int] | None) -> tuple[Any, list[tuple[int, ctypes.c_void_p]]]:
    """The library and a handle for each GPU of CUDA's `numbers`; None: all, in NVML's order."""
    try:
        lib: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if lib.nvmlInit_v2() != 0 or lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return lib, []
    handles = []
    if numbers is not None:  # CUDA's order may differ, and it may not see all GPUs
        for number in dict.fromkeys(numbers):
            handle, name = ctypes.c_void_p(), _cuda_uuid(number)
            if (
                name is not None
                and lib.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0
            ):
                handles.append((number, handle))
        return lib, handles
    for number in range(count.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
            handles.append((number, handle))
    return lib, handles


def _cuda_uuid(number: int) -> str | None:
    """NVML's name of the GPU that is `cuda:NUMBER` to this process."""
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), number)
        or cuda.cuDeviceGetUuid_v2(found, device)
    ):
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"
