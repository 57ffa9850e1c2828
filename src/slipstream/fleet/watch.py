"""Feeds the fleet's detector: every few seconds one observation of each replica, from its reports
to the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.fleet.detection.counters import Counters, of_server
from slipstream.fleet.detection.server import ServerWatch
from slipstream.fleet.gateway.members import Members, Replica
from slipstream.server.operations.metrics import Metrics
from slipstream.server.state import ServerState


class FleetWatch(ServerWatch):
    def __init__(
        self, members: Members, alert_urls: Sequence[str] = (), *, source: str = "fleet"
    ) -> None:
        super().__init__(alert_urls, source=source)
        self._members = members

    async def _look(self, state: ServerState) -> None:
        at = self.now()
        for replica in self._members.all_replicas():
            if replica.counts is not None and not replica.draining:
                self.see(replica.id, _counters(replica, at))
        self.report(at)


def _counters(replica: Replica, at: float) -> Counters:
    """Counters of a replica's last report. A replica without reports counts as down."""
    metrics, load = Metrics(replica.spec.model), replica.load
    assert replica.counts is not None
    metrics.add(replica.counts)
    if load is None or not (replica.heard and replica.is_up):
        return of_server(None, metrics, at=at)
    return of_server(load.stats, metrics, at=at, num_open=load.num_open, canary_ok=load.canary_ok)
