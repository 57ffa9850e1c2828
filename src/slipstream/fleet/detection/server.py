"""A server's own detector: observes its engine every few seconds, and sends alerts of findings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.fleet.detection.alerts import Alerts
from slipstream.fleet.detection.counters import Counters, of_server
from slipstream.fleet.detection.detector import SILENT_S, Detector, Finding
from slipstream.fleet.detection.observation import INTERVAL_S
from slipstream.server.operations.health import all_metrics, canary_ok, engine_stats
from slipstream.server.state import ServerState

logger = logging.getLogger("slipstream.fleet")


class ServerWatch:
    """Implements `Watcher` of `server/state.py`. `run` ends when it is cancelled. Its own errors
    are logged, and it continues with the next observation."""

    def __init__(
        self,
        alert_urls: Sequence[str] = (),
        *,
        source: str = "slipstream",
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._detector = Detector()
        self._alerts = Alerts(alert_urls, source)
        self._interval_s = interval_s
        self._before: dict[str, Counters] = {}  # by replica
        self._epoch = time.time() - time.monotonic()

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [finding.as_dict() for finding in self._detector.findings]

    async def run(self, state: ServerState) -> None:
        alerts = asyncio.create_task(self._alerts.run())
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                try:
                    await self._look(state)
                except Exception:  # an error of the detector must not end the server
                    logger.exception("the detector failed")
        finally:
            alerts.cancel()

    async def _look(self, state: ServerState) -> None:
        name = state.model_names[0]
        if state.engine.is_sleeping:
            self._before.pop(name, None)
            self.report(self.now())
            return
        stats, metrics = await engine_stats(state), await all_metrics(state)
        at, num_open = self.now(), state.engine.num_requests
        seen = of_server(stats, metrics, at=at, num_open=num_open, canary_ok=canary_ok(state))
        found = [kl for check in state.checks if (kl := check.take_kl()) is not None]
        self.see(name, replace(seen, canary_kl=max(found, default=None)))
        self.report(at)

    def now(self) -> float:
        """Seconds since 1970 by a clock that doesn't jump: the system time at the start plus a
        monotonic clock."""
        return self._epoch + time.monotonic()

    def see(self, replica: str, now: Counters) -> None:
        before, self._before[replica] = self._before.get(replica), now
        seen = None if before is None else now.since(before, replica)
        if seen is not None:
            self._detector.observe(seen)

    def report(self, at: float) -> None:
        """Log changed findings, and send alerts. Forget replicas that are gone."""
        self._detector.forget_silent(at)
        for replica in [
            name for name, counters in self._before.items() if at - counters.at > SILENT_S
        ]:
            del self._before[replica]
        findings = self._detector.drain_findings()
        for finding in findings:
            self._log(finding)
        self._alerts.send(findings)

    @staticmethod
    def _log(finding: Finding) -> None:
        if finding.ended is not None:
            logger.info(
                "over: %s on %s, after %.0f s",
                finding.cause,
                finding.replica,
                finding.ended - finding.began,
            )
        else:
            logger.warning(
                "%s on %s: %s. %s",
                finding.cause,
                finding.replica,
                "; ".join(finding.evidence),
                finding.remedy,
            )
