"""Energy, where the machine tells it: the CPU packages' counters (RAPL, through powercap) and NVIDIA's (NVML). No torch.

A figure is the difference of two readings of counters that run on, so nothing is sampled. What can't be read is None, never a
guess: virtual machines have no RAPL, and its counters are often the administrator's alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Counter:
    """Joules at some time. After `wraps_at` the counter begins again at 0 (None: it does not)."""

    joules: float
    wraps_at: float | None = None

    def until(self, later: Counter) -> float:
        if later.joules >= self.joules or self.wraps_at is None:
            return later.joules - self.joules
        return later.joules - self.joules + self.wraps_at


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters that could be read, by name."""

    counters: dict[str, Counter]

    def joules_until(self, later: Reading) -> float | None:
        """Of all counters together; None if there are none, or not the same."""
        if not self.counters or self.counters.keys() != later.counters.keys():
            return None
        return sum(first.until(later.counters[name]) for name, first in self.counters.items())


class EnergyMeter:
    """`sources` names what is read, such as "rapl package-0" and "nvml 0"; it is empty where nothing can be."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._zones = [zone for zone in sorted(powercap.glob("intel-rapl:?")) if _zone(zone) is not None]
        self._nvml, self._gpus = _open_nvml()
        self.sources = tuple(sorted(self.read().counters))

    def read(self) -> Reading:
        found = {}
        for zone in self._zones:
            if (counter := _zone(zone)) is not None:
                found[f"rapl {_text(zone / 'name') or zone.name}"] = counter
        for number, handle in self._gpus:
            millijoules = ctypes.c_ulonglong()
            if self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0:
                found[f"nvml {number}"] = Counter(millijoules.value / 1e3)
        return Reading(found)


def _zone(folder: Path) -> Counter | None:
    used, most = _text(folder / "energy_uj"), _text(folder / "max_energy_range_uj")
    if used is None or not used.isdecimal():
        return None
    return Counter(int(used) / 1e6, int(most) / 1e6 if most is not None and most.isdecimal() else None)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _open_nvml() -> tuple[Any, list[tuple[int, ctypes.c_void_p]]]:
    """The library and a handle of each GPU that has an energy counter (Volta and later)."""
    try:
        lib: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if lib.nvmlInit_v2() != 0 or lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return lib, []
    handles = []
    for number in range(count.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
            handles.append((number, handle))
    return lib, handles
