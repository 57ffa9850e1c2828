"""Memory, open files and processor time of a server's processes under load, read from /proc.

Memory of a process is *flat* if the straight line through its resident memory, over the requests that its server has ended,
rises by no more than `most_growth` of what the process holds, or by 2 MiB, from the end of the warm-up to the end of the run.
The warm-up is the first third of the run. Only a process that lived through the whole run is judged: one that was killed has
begun anew. A run of R requests after the warm-up sees leaks from 2 MiB / R on: `resolution_bytes_per_request` beside each line.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
NOISE_BYTES = 2 * MIB
"""An allocator's next arena, or a table that doubles."""
SAMPLES = 40
"""Samples of each process in a record. The line is fitted to all of them."""


@dataclass
class Process:
    pid: int
    name: str
    born_s: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, requests that its server has ended, resident bytes)"""
    cpu_s: float = 0.0
    died_s: float | None = None

    def summary(self, end_s: float, most_growth: float) -> dict[str, Any]:
        """MiB at the start, after the warm-up, at the end and at most; the line, and whether it is flat."""
        held = [size for _, _, size in self.samples]
        made: dict[str, Any] = {
            "process": self.name,
            "lived_s": [
                round(self.born_s, 1),
                None if self.died_s is None else round(self.died_s, 1),
            ],
            "start_mib": round(held[0] / MIB, 1),
            "end_mib": round(held[-1] / MIB, 1),
            "most_mib": round(max(held) / MIB, 1),
            "cpu_s": round(self.cpu_s, 1),
            "flat": None,
        }
        after = [sample for sample in self.samples if sample[0] >= end_s / 3]
        if (
            self.died_s is None
            and self.born_s < 2
            and len(after) > 5
            and after[-1][1] > after[0][1]
        ):
            requests = after[-1][1] - after[0][1]
            slope = statistics.linear_regression(
                [n for _, n, _ in after], [size for _, _, size in after]
            ).slope
            allowed = max(NOISE_BYTES, most_growth * after[0][2])
            made |= {
                "after_warmup_mib": round(after[0][2] / MIB, 1),
                "requests_after_warmup": requests,
                "slope_bytes_per_request": round(slope, 2),
                "resolution_bytes_per_request": round(NOISE_BYTES / requests, 2),
                "risen_mib": round(slope * requests / MIB, 3),
                "allowed_mib": round(allowed / MIB, 1),
                "flat": slope * requests <= allowed,
            }
        step = -(-len(self.samples) // SAMPLES)
        made["seconds"] = [round(seconds, 1) for seconds, _, _ in self.samples[::step]]
        made["mib"] = [round(size / MIB, 1) for _, _, size in self.samples[::step]]
        return made


class Watch:
    """The processes of one server, from the time this is made on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.processes: dict[int, Process] = {}
        self.look(0.0, 0)
        self._before = {process.pid: process.cpu_s for process in self.processes.values()}
        self.files_at_start = self.files()

    def look(self, seconds: float, requests: int) -> dict[str, float]:
        """Take a sample of each; the MiB that each holds."""
        parents = parent_of_each()
        alive = descendants(self._pid, parents)
        for process in self.processes.values():
            if process.pid not in alive and process.died_s is None:
                process.died_s = seconds
        found: dict[str, float] = {}
        for pid in alive:
            process = self.processes.get(pid)
            if process is None:
                kind = kind_of(pid)
                if kind is None:  # between fork and exec, or gone
                    continue
                taken = {p.name for p in self.processes.values() if p.died_s is None}
                number = next(n for n in range(10**6) if f"{kind} {n}" not in taken)
                process = self.processes[pid] = Process(pid, f"{kind} {number}", seconds)
            size, cpu = resident_bytes(pid), cpu_of(pid)
            if size:
                process.samples.append((seconds, requests, size))
                process.cpu_s = cpu
                found[process.name] = round(size / MIB, 1)
        return found

    def engines(self) -> list[int]:
        return [pid for pid in descendants(self._pid, parent_of_each()) if kind_of(pid) == "engine"]

    def files(self) -> dict[str, int]:
        """Open files of each process that lives."""
        found = {}
        for process in self.processes.values():
            if process.died_s is None:
                with suppress(OSError):
                    found[process.name] = len(os.listdir(f"/proc/{process.pid}/fd"))
        return found

    def cpu_seconds(self) -> Counter[str]:
        """CPU seconds by kind of process since the start; those of a dead process as of the last
        look."""
        found: Counter[str] = Counter()
        for process in self.processes.values():
            found[process.name.rpartition(" ")[0]] += process.cpu_s - self._before.get(
                process.pid, 0.0
            )  # type: ignore[assignment]
        return found

    def summaries(self, end_s: float, most_growth: float) -> list[dict[str, Any]]:
        return [p.summary(end_s, most_growth) for p in self.processes.values() if p.samples]


def parent_of_each() -> dict[int, int]:
    found = {}
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            with suppress(OSError, ValueError, IndexError):
                found[int(folder)] = int(
                    Path(f"/proc/{folder}/stat").read_text().rpartition(")")[2].split()[1]
                )
    return found


def descendants(pid: int, parents: dict[int, int]) -> list[int]:
    """`pid` first, then its children in the order of their ids, each before its own."""
    found = [pid] if pid in parents else []
    for child in sorted(child for child, parent in parents.items() if parent == pid):
        found += descendants(child, parents)
    return found


def kind_of(pid: int) -> str | None:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"core_process" in words:
            return "engine"
        if b"frontend.process" in words:
            return "front end"
        if b"serve" in words.split(b"\0"):
            return "supervisor"
        return "helper" if words else None
    return None


def resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def cpu_of(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0
