"""Sends findings as JSON by HTTP POST, only to addresses that the operator configured.

    {"event": "began" | "changed" | "ended", "finding": {…}, "source": "…"}

If an address does not answer 2xx, the alert is sent again up to `RETRIES` times, with growing
pauses. Then it is dropped and logged. At most `MAX_WAITING` alerts wait for an address; further
ones displace the oldest. Redirects and the environment's proxies are ignored. Addresses do not wait
for each other."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.fleet.detection.detector import Finding

logger = logging.getLogger("slipstream.fleet")

RETRIES = 4
FIRST_WAIT_S = 1.0
"""Pause after the first failure. Each further failure waits four times as long."""

TIMEOUT_S = 10.0
MAX_WAITING = 100


class Webhook:
    """Sender to one address."""

    def __init__(self, url: str, source: str) -> None:
        self.url, self._source = checked(url), source
        self._waiting: deque[dict[str, object]] = deque()
        self._news = asyncio.Event()
        self.num_lost = 0

    def enqueue(self, event: str, finding: Finding) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._lost("too many wait")
        self._waiting.append({"event": event, "finding": finding.as_dict(), "source": self._source})
        self._news.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S, follow_redirects=False, trust_env=False
        ) as client:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    await self._deliver(client, self._waiting.popleft())

    async def _deliver(self, client: httpx.AsyncClient, alert: dict[str, object]) -> None:
        wait_s, why = FIRST_WAIT_S, ""
        for attempt in range(1 + RETRIES):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s *= 4
            try:
                answer = await client.post(self.url, json=alert)
            except Exception as error:  # later alerts and other addresses continue in any case
                why = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                return
            why = f"it says {answer.status_code}"
        self._lost(why)

    def _lost(self, why: str) -> None:
        self.num_lost += 1
        where = urlsplit(self.url)
        # a path may contain a secret
        logger.error("an alert to %s://%s was given up: %s", where.scheme, where.hostname, why)


class Alerts:
    """Senders to all addresses. `send` takes changed findings. The event is `began` for a finding
    that was not sent before."""

    def __init__(self, urls: Sequence[str], source: str) -> None:
        self.hooks = [Webhook(url, source) for url in urls]
        self._begun: set[int] = set()

    def send(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.ended is not None:
                event = "ended"
                self._begun.discard(finding.number)
            else:
                event = "changed" if finding.number in self._begun else "began"
                self._begun.add(finding.number)
            for hook in self.hooks:
                hook.enqueue(event, finding)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for hook in self.hooks:
                group.create_task(hook.run())


def checked(url: str, *, field: str = "alert_url") -> str:
    """Check that a URL is HTTP or HTTPS. ConfigError names `field`."""
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"{url!r} is not an http:// or https:// address", field=field)
    return url
