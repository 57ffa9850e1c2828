"""Rates of known machines: measured ones, and others from data sheets. No torch.

`data/devices.json` has the rates that are reached, not theoretical peaks. Those of an H200 and of
the two-core CPU machine were measured (benchmarks/results/roofline_cpu.json, docs/performance.md).
The others are the data sheet's rates times the fractions that an H200 reaches of its own. They are
labelled *estimated*.
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
"""Fractions of its data sheet's rates that an H200 reaches."""

FALLBACKS = {
    "fp8": "bfloat16",
    "int6": "int8",
    "int8": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
}
"""Substitute for a dtype whose rate a machine lacks. int6 means weights of up to 6 bits with 8-bit
inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device: a GPU, or all threads of a CPU together. Rates are bytes and operations per
    second that are reached in practice.

    `op_s` is the minimum time of an operator in a captured step. `link_bytes_s` is a GPU's rate to
    other GPUs of its machine; None if the only link is through the host. `host_bytes_s` is its copy
    rate from host memory. `watts` is the power under load, `idle_watts` at rest.
    """

    name: str
    title: str
    is_gpu: bool
    memory_bytes: int
    read_bytes_s: float
    operations_s: dict[str, float]
    op_s: float
    attention_share: float = 0.6  # attention over prompts, as a fraction of the linear layers' rate
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
        """Seconds of a ring all-reduce: 2·(n − 1)/n of the bytes pass each link, plus the
        latency."""
        link = self.link_bytes_s or 2e10
        return self.link_latency_s + 2 * (num_gpus - 1) / num_gpus * num_bytes / link

    def device_info(self) -> DeviceInfo:
        """The device as an engine would find it with nothing else running."""
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
    """Returns the devices by name, in the file's order."""
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
    """Find a device by name, alias or words of its title, ignoring case.

    Only whole words match: A10 does not find an A100. ConfigError if none or several match.
    """
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
