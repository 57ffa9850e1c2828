"""Finds a likely cause and a remedy for time series that changed.

A cause explains a set of series. A series that the cause of an open finding explains joins that
finding instead of starting a new one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.fleet.detection.observation import Observation

Severity = Literal["warning", "critical"]

UNSTEADY = 0.08
"""Standard deviation of the log of step slowness beyond which the cause is another program on the
machine: its load varies. A low clock makes all steps slower by the same factor."""

FULL = 0.9
"""Cache usage at which prefixes are evicted for lack of blocks."""

FEWER = 0.75
"""Fraction of the usual number of running sequences that indicates a cache shortage: at most this
many run while the cache is full and requests wait, so the cache holds fewer sequences than before.
Under mere overload the usual number would run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    name: str
    title: str
    remedy: str
    explains: frozenset[str]
    severity: Severity = "warning"


def _cause(
    name: str, title: str, remedy: str, explains: str, severity: Severity = "warning"
) -> Cause:
    return Cause(
        name=name,
        title=title,
        remedy=remedy,
        explains=frozenset(explains.split()),
        severity=severity,
    )


_TABLE = (
    _cause(
        "stuck_engine",
        "no step ends while requests wait",
        "take the replica out and restart it; its log has the last step; on a GPU look for Xid errors in the kernel's log",
        "step_age queue orphans step_time errors answer_length ends write_stall preemptions",
        "critical",
    ),
    _cause(
        "engine_down",
        "the engine's process does not answer",
        "its log says why it ended; it is started again by itself, and a replica that does not come back is to be taken out",
        "down step_age queue orphans errors",
        "critical",
    ),
    _cause(
        "throttled_clock",
        "steps are slower by a steady factor, as with a clock that was lowered",
        "look at the device's clock, power limit and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK), at cooling, and at the "
        "host's CPU frequency; lower the replica's weight until it is over",
        "clock step_time queue preemptions",
    ),
    _cause(
        "noisy_neighbour",
        "steps are slower now and then, as beside another program",
        "look for other programs on the host (CPU, memory bandwidth, PCIe) or the device; pin cores, or move one of the two",
        "step_time queue preemptions",
    ),
    _cause(
        "cache_thrash",
        "the KV cache is too small for what is in it: blocks are given up and computed again",
        "fewer sequences at once (--max-num-seqs), an 8-bit cache (--kv-cache-dtype fp8), more memory or another replica",
        "preemptions hit_rate step_time queue",
    ),
    _cause(
        "prompt_drift",
        "prompts changed: less of them is in the cache, or they are longer",
        "compare the prompts' templates with last week's: what changes from request to request (a date, an id) belongs behind "
        "what stays; then plan again with the new lengths (slipstream plan)",
        "hit_rate prompt_length step_time queue preemptions",
    ),
    _cause(
        "leaking_queue",
        "the engine holds sequences that nobody waits for",
        "restart the replica when it is idle, and report it with the log: a request that ended was not taken out",
        "orphans queue step_time preemptions hit_rate answer_length ends",
        "critical",
    ),
    _cause(
        "slow_client",
        "clients do not read their answers as fast as they are written",
        "find the client in the request log (long e2e_s, small answers); a proxy that buffers, or a client that hangs",
        "write_stall queue",
    ),
    _cause(
        "quality_drift",
        "the canary's answers differ from those that were stored with the checkpoint",
        "take the replica out: compare kernels, driver and weights with a replica that is well (slipstream check-model)",
        "canary canary_failed",
        "critical",
    ),
    _cause(
        "failing_requests",
        "requests end with errors of the server",
        "the log names each error under the request's id",
        "errors",
        "critical",
    ),
    _cause(
        "runaway_answers",
        "answers are longer than before: they may no longer end by themselves",
        "look at the share of finish_reason length; check the chat template and the stop tokens of what was deployed last; "
        "bound max_tokens",
        "answer_length ends queue preemptions hit_rate step_time",
    ),
    _cause(
        "overload",
        "more requests come than the replica keeps up with",
        "another replica (docs/scaling.md), or admission control (--max-queue)",
        "queue preemptions",
    ),
)
CAUSES: Mapping[str, Cause] = {cause.name: cause for cause in _TABLE}

_BY_SIGNAL = {
    "down": "engine_down",
    "step_age": "stuck_engine",
    "clock": "throttled_clock",
    "preemptions": "cache_thrash",
    "prompt_length": "prompt_drift",
    "orphans": "leaking_queue",
    "write_stall": "slow_client",
    "canary": "quality_drift",
    "canary_failed": "quality_drift",
    "errors": "failing_requests",
    "answer_length": "runaway_answers",
    "ends": "runaway_answers",
}
"""Causes that one series shows alone, the most certain first. `find_cause` decides the others."""


def find_cause(
    active: frozenset[str], slowness: Sequence[float], last: Observation, running: float = 1.0
) -> Cause:
    """Cause of the changed series; there is at least one. `slowness`: values of `step_time` since
    it changed. `last`: the latest observation. `running`: recent number of running sequences
    divided by the usual one."""
    is_full = (last.kv_cache_usage or 0.0) >= FULL
    if "hit_rate" in active and not active & {
        "preemptions",
        "prompt_length",
        "step_age",
        "orphans",
        "down",
    }:
        return CAUSES["cache_thrash" if is_full else "prompt_drift"]
    for signal, cause in _BY_SIGNAL.items():
        if signal in active:
            return CAUSES[cause]
    if "step_time" in active:
        is_unsteady = len(slowness) > 2 and statistics.pstdev(slowness) > UNSTEADY
        return CAUSES["noisy_neighbour" if is_unsteady else "throttled_clock"]
    return CAUSES["cache_thrash" if is_full and running <= FEWER else "overload"]
