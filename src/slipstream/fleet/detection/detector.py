"""The detector: takes observations of replicas and gives findings, online and in bounded memory.

A finding has a beginning and an end. Series that change together are one finding (`causes.py`). For
its first `SETTLE_S` its cause may still change as more series change. `drain_findings` returns a
finding when it begins, when its cause changes, and when it ends. A finding ends when all its series
are normal again."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

from slipstream.fleet.detection.causes import CAUSES, Cause, find_cause
from slipstream.fleet.detection.observation import ExpectedSteps, Observation
from slipstream.fleet.detection.signals import (
    CALM,
    SIGNALS,
    Flag,
    SeriesWatch,
    new_flags,
    new_watch,
)

SETTLE_S = 120.0
RUNNING_MEMORY = 120
"""Number of observations over which the usual number of running sequences is averaged."""

MAX_REPLICAS = 4096
"""Maximum number of replicas stored. The one that was silent the longest is dropped first."""

MAX_ENDED = 256
"""Maximum number of ended findings stored."""

SILENT_S = 60.0
"""Seconds without an observation after which a replica counts as gone, and its findings end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault. `began`: time of detection. `ended`: None while it lasts. `evidence`: description
    of each series' value and usual value."""

    number: int
    replica: str
    cause: str
    title: str
    remedy: str
    severity: str
    signals: tuple[str, ...]
    evidence: tuple[str, ...]
    began: float
    ended: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class _WatchedReplica:
    def __init__(self) -> None:
        self.steps = ExpectedSteps()
        self.slowness = SeriesWatch(next(s for s in SIGNALS if s.name == "step_time"))
        others = (new_watch(signal) for signal in SIGNALS if signal.name != "step_time")
        watches: list[SeriesWatch | Flag] = [*new_flags(), self.slowness, *others]
        self.watches = {watch.name: watch for watch in watches}
        self.open: dict[int, Finding] = {}
        self.last_at = 0.0
        self.usual_running: float | None = None
        self._running: deque[float] = deque(maxlen=CALM)

    @property
    def running(self) -> float:
        """Recent number of running sequences divided by the usual number."""
        return (
            statistics.median(self._running) / self.usual_running
            if self._running and self.usual_running
            else 1.0
        )

    def see_running(self, number: float) -> None:
        self._running.append(number)
        if self.usual_running is None:
            self.usual_running = number
        elif not self.open:
            self.usual_running += (number - self.usual_running) / RUNNING_MEMORY


class Detector:
    """Detector for any number of replicas, which takes one observation at a time."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, _WatchedReplica] = OrderedDict()
        self._numbers = itertools.count(1)
        self._ended: deque[Finding] = deque(maxlen=MAX_ENDED)
        self._changed: deque[Finding] = deque(maxlen=2 * MAX_ENDED)

    @property
    def findings(self) -> list[Finding]:
        """Lasting findings, newest first; then ended ones, last ended first."""
        lasting = [f for replica in self._replicas.values() for f in replica.open.values()]
        return [*sorted(lasting, key=lambda f: -f.number), *reversed(self._ended)]

    def drain_findings(self) -> list[Finding]:
        """Findings that began, changed their cause or ended since the last call, in that order."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def observe(self, seen: Observation) -> None:
        replica = self._replicas.get(seen.replica)
        if replica is None:
            replica = self._replicas[seen.replica] = _WatchedReplica()
            if len(self._replicas) > MAX_REPLICAS:
                _, forgotten = self._replicas.popitem(last=False)
                self._end_all(forgotten, forgotten.last_at)
        self._replicas.move_to_end(seen.replica)
        replica.last_at = seen.at
        learned = seen.expected_step_s is None
        if seen.num_running is not None:
            replica.see_running(seen.num_running)
        if learned:
            seen = replace(seen, expected_step_s=replica.steps.expected(seen))
        for watch in replica.watches.values():
            was = watch.is_active
            watch.update(seen)
            if watch.is_active and not was:
                self._began(replica, watch.name, seen)
        if learned and not replica.open:
            replica.steps.learn(seen)
        for finding in list(replica.open.values()):
            if seen.at - finding.began <= SETTLE_S:
                cause = self._cause(replica, finding.signals, seen)
                if cause.name != finding.cause and set(finding.signals) <= cause.explains:
                    self._join(replica, finding, finding.signals[0], cause)
            if not any(replica.watches[name].is_active for name in finding.signals):
                self._end(replica, finding, seen.at)

    def forget_silent(self, now: float) -> None:
        """End the findings of replicas without an observation for `SILENT_S`, and forget these
        replicas."""
        for name in [n for n, r in self._replicas.items() if now - r.last_at > SILENT_S]:
            self._end_all(self._replicas.pop(name), now)

    def _began(self, replica: _WatchedReplica, name: str, seen: Observation) -> None:
        for finding in replica.open.values():  # the series may follow from a known cause
            young = seen.at - finding.began <= SETTLE_S
            cause = (
                self._cause(replica, (*finding.signals, name), seen)
                if young
                else CAUSES[finding.cause]
            )
            if name in CAUSES[finding.cause].explains or set(finding.signals) <= cause.explains:
                fits = {*finding.signals, name} <= cause.explains
                self._join(replica, finding, name, cause if fits else CAUSES[finding.cause])
                return
        cause = self._cause(replica, (name,), seen)
        finding = self._described(
            replica,
            Finding(
                number=next(self._numbers), replica=seen.replica, cause=cause.name, title=cause.title, remedy=cause.remedy,
                severity=cause.severity, signals=(name,), evidence=(), began=seen.at,
            ),
        )  # fmt: skip
        replica.open[finding.number] = finding
        self._changed.append(finding)

    def _join(self, replica: _WatchedReplica, finding: Finding, name: str, cause: Cause) -> None:
        signals = tuple(dict.fromkeys((*finding.signals, name)))
        changed = self._described(
            replica,
            replace(
                finding,
                cause=cause.name,
                title=cause.title,
                remedy=cause.remedy,
                severity=cause.severity,
                signals=signals,
            ),
        )
        replica.open[finding.number] = changed
        if changed.cause != finding.cause:
            self._changed.append(changed)

    @staticmethod
    def _cause(replica: _WatchedReplica, names: tuple[str, ...], seen: Observation) -> Cause:
        return find_cause(frozenset(names), list(replica.slowness.recent), seen, replica.running)

    @staticmethod
    def _described(replica: _WatchedReplica, finding: Finding) -> Finding:
        return replace(
            finding, evidence=tuple(replica.watches[name].describe() for name in finding.signals)
        )

    def _end(self, replica: _WatchedReplica, finding: Finding, at: float) -> None:
        del replica.open[finding.number]
        ended = replace(finding, ended=at)
        self._ended.append(ended)
        self._changed.append(ended)

    def _end_all(self, replica: _WatchedReplica, at: float) -> None:
        for finding in list(replica.open.values()):
            self._end(replica, finding, at)
