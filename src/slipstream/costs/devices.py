"""Ceilings of machines: measured ones, and others by their data sheets. No torch.

`data/devices.json` has the rates that are reached, not the peaks on paper: an H200's and the two-core CPU box's were measured
(benchmarks/results/roofline_cpu.json, docs/performance.md), the others are their data sheets times the shares that an H200
reaches of its own, and are *estimated*.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.config import DeviceInfo
from slipstream.costs.step_cost import Label
from slipstream.errors import ConfigError

DATA = Path(__file__).parent / "data"

REACHED = {
    "read": 0.927,
    "float32": 0.75,
    "bfloat16": 0.79,
    "float16": 0.79,
    "fp8": 0.73,
    "int8": 0.53,
}
"""Shares of its data sheet's rates that an H200 reached."""

FALLBACKS = {
    "fp8": "bfloat16",
    "int6": "int8",
    "int8": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
}
"""What multiplies instead where a machine has no products of a type. int6: weights of up to 6 bits by inputs of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device: a GPU, or all threads of a CPU together. Rates are bytes and operations a second that are reached.

    `op_s` is the least time of an operator in a captured step. `link_bytes_s` is what a GPU sends and receives to others of its
    machine; None where it has no link but the host's. `host_bytes_s` is what it copies from the host's memory. `watts` under
    load; `idle_watts` at rest.
    """

    name: str
    title: str
    is_gpu: bool
    memory_bytes: int
    read_bytes_s: float
    operations_s: dict[str, float]
    op_s: float
    attention_share: float = 0.6  # of the products' rate, that attention of prompts reaches
    link_bytes_s: float | None = None
    host_bytes_s: float | None = None
    link_latency_s: float = 8e-6
    disk_bytes_s: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    num_threads: int = 1
    host_step_s: float = 0.0
    host_sequence_s: float = 0.0
    host_request_s: float = 0.0
    label: Label = "estimated"
    aliases: tuple[str, ...] = field(default=())

    def rate(self, kind: str) -> float:
        while kind not in self.operations_s:
            kind = FALLBACKS[kind]
        return self.operations_s[kind]

    def all_reduce_s(self, num_bytes: float, num_gpus: int) -> float:
        """A ring's: 2·(n − 1)/n of the bytes pass each link; small ones take the latency."""
        link = self.link_bytes_s or 2e10
        return self.link_latency_s + 2 * (num_gpus - 1) / num_gpus * num_bytes / link

    def device_info(self) -> DeviceInfo:
        """As an engine on such a device would find it, with nothing else on it."""
        return DeviceInfo(
            device="cuda:0" if self.is_gpu else "cpu",
            name=self.title,
            memory_bytes=self.memory_bytes,
            free_bytes=self.memory_bytes,
            best_dtype="bfloat16",
            num_threads=self.num_threads,
            compute_capability=(9, 0) if self.is_gpu else None,
            isa=None if self.is_gpu else "avx512",
        )


@cache
def known_devices() -> dict[str, Hardware]:
    """By name, in the file's order."""
    found = {}
    for name, row in json.loads((DATA / "devices.json").read_text(encoding="utf-8"))[
        "devices"
    ].items():
        found[name] = _device(name, dict(row))
    return found


def _device(name: str, row: dict[str, Any]) -> Hardware:
    on_paper = row.pop("on_paper", None)
    if on_paper is not None:
        row["read_bytes_s"] = on_paper["read_bytes_s"] * REACHED["read"]
        row["operations_s"] = {
            kind: rate * REACHED[kind] for kind, rate in on_paper["operations_s"].items()
        }
    return Hardware(name=name, **{**row, "aliases": tuple(row.get("aliases", ()))})


def find_device(name: str) -> Hardware:
    """By its name, an alias, or words of its title; case counts for nothing. Whole words: an A10 is no A100."""
    wanted = _plain(name)
    devices = known_devices()
    for device in devices.values():
        if wanted in map(_plain, (device.name, *device.aliases)):
            return device
    inside = [d for d in devices.values() if wanted in _runs_of_words(d.title)]
    if len(inside) == 1:
        return inside[0]
    near = difflib.get_close_matches(name.lower(), list(devices), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"gpu={name!r} is not one of {', '.join(devices)}{hint}", field="gpu")


def _runs_of_words(title: str) -> set[str]:
    words = title.split()
    return {
        _plain("".join(words[i:j])) for i in range(len(words)) for j in range(i + 1, len(words) + 1)
    } - {""}


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum()).removeprefix("nvidia")
